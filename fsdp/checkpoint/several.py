"""Several optimizers of one model, each with parameters of its own, as the one that a checkpoint holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn


class Several:
    """What saving and loading ask of an optimizer, for several: their groups and states, one after the other.

    Raises:
        TypeError: for what is no optimizer.
        ValueError: if there are none, or two step the same parameter.
    """

    def __init__(self, optimizers: Sequence[Any]) -> None:
        if not optimizers:
            raise ValueError("an empty list of optimizers: give None to leave out what there is of one")
        self._optimizers = optimizers
        self._by_param: dict[nn.Parameter, Any] = {}
        for number, optimizer in enumerate(optimizers):
            if not hasattr(optimizer, "param_groups"):
                raise TypeError(f"number {number} in the list of optimizers is none: {optimizer!r}")
            for param in (param for group in optimizer.param_groups for param in group["params"]):
                if self._by_param.setdefault(param, optimizer) is not optimizer:
                    raise ValueError(
                        f"a parameter of shape {list(param.shape)} is in two of the optimizers, the second one number "
                        f"{number}: a checkpoint holds one state for each"
                    )

    @property
    def kind(self) -> str:
        """Their classes' names."""
        return ", ".join(type(optimizer).__name__ for optimizer in self._optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """All groups, as `torch.optim.Optimizer` has them."""
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> Mapping[nn.Parameter, dict[str, Any]]:
        """By parameter, as `torch.optim.Optimizer` has it."""
        return _States(self._by_param)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give each its groups, and the states of what is in them."""
        groups = iter(state["param_groups"])
        for optimizer in self._optimizers:
            own = [next(groups) for _ in optimizer.param_groups]
            numbers = [number for group in own for number in group["params"]]
            states = {number: state["state"][number] for number in numbers if number in state["state"]}
            optimizer.load_state_dict({"state": states, "param_groups": own})


class _States(Mapping[nn.Parameter, dict[str, Any]]):
    """The states of several optimizers, by whose the parameter is."""

    def __init__(self, by_param: Mapping[nn.Parameter, Any]) -> None:
        self._by_param = by_param

    def __getitem__(self, param: nn.Parameter) -> dict[str, Any]:
        states: Mapping[nn.Parameter, dict[str, Any]] = self._by_param[param].state
        if param not in states:
            raise KeyError(param)  # of an optimizer, asking makes one
        return states[param]

    def __iter__(self) -> Iterator[nn.Parameter]:
        return (param for param, optimizer in self._by_param.items() if param in optimizer.state)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def as_one(optimizer: Any) -> Any:
    """An optimizer, or a list or tuple of several, as one."""
    return Several(optimizer) if isinstance(optimizer, (list, tuple)) else optimizer


def kind_of(optimizer: Any) -> str:
    """The name of its class, or of theirs."""
    return optimizer.kind if isinstance(optimizer, Several) else type(optimizer).__name__
