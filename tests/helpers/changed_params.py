"""A model wrapped and the same model plain, in step, while users change their parameters in the middle of training.

In float64, so that nothing is hidden by rounding. A new value that is assigned to the wrapped model is copied into the
plain one: there, assigning would leave the optimizer with the old parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.engine.names import clean_name
from fsdp.engine.phase import Phase
from tests.helpers.equality import assert_close_state
from tests.helpers.models import Wrap, keep, nested_mlp
from tests.helpers.parity import fully_sharded
from tests.helpers.twins import Twins, batch, score

# What optimizers see: one vector per unit, this rank's piece of each parameter, a vector per parameter.
LAYOUTS: dict[str, dict[str, Any]] = {
    "flat": {},
    "pieces": {"use_orig_params": True},
    "unflattened": {"flatten_parameters": False},
}


def momentum(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in params if p.requires_grad], lr=0.1, momentum=0.9)


def adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in params if p.requires_grad], lr=1e-2, weight_decay=0.1)


def find(model: nn.Module, path: str) -> Any:
    """The user's module of this plain name."""
    return {clean_name(name): module for name, module in model.named_modules()}[path]


class ChangedTwins(Twins):
    """Twins whose parameters are changed in the middle of training."""

    def __init__(
        self,
        layout: str = "flat",
        make: Callable[[Wrap], nn.Module] = nested_mlp,
        make_optimizer: Callable[[Any], torch.optim.Optimizer] = momentum,
        *,
        dtype: torch.dtype = torch.float64,
        **options: Any,
    ) -> None:
        torch.set_default_dtype(dtype)
        super().__init__(make(fully_sharded(**LAYOUTS[layout], **options)), make(keep))
        self.tolerance = {} if dtype is torch.float64 else {"rtol": 1e-5, "atol": 1e-5}
        self.new_optimizers(make_optimizer)

    def new_optimizers(self, make_optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
        self.optimizers = [make_optimizer(model.parameters()) for model in self.models]

    def loss(self, model: nn.Module, rank: int) -> Tensor:
        return score(model(batch(self.number, rank).to(next(self.plain.parameters()).dtype)))

    def train(self, change: Callable[[], Any], *, whole: bool = False) -> None:
        """Collective. Steps, the change, more steps; `whole` makes it while units wait with whole parameters."""
        self.step()
        self.step()
        if whole:
            self.backward(sync=False)
            phases = {handle.phase for unit in self.sharded._units() for handle in unit.handles}  # type: ignore[operator]
            assert phases == {Phase.UNSHARDED}
        change()
        for _ in range(2):
            self.step()
        self.assert_close()

    def assign(self, path: str, value: Tensor, requires_grad: bool = True) -> None:
        """Replace a parameter of the wrapped model, and copy the value into the plain one."""
        module, _, name = path.rpartition(".")
        setattr(find(self.sharded, module), name, nn.Parameter(value.clone(), requires_grad))
        with torch.no_grad():
            self.plain.get_parameter(path).copy_(value)

    def assert_close(self) -> None:
        """Collective. Names, dtypes and values of the unsharded states agree."""
        assert_close_state(self.sharded.state_dict(), self.plain.state_dict(), **self.tolerance)


def in_place(param: nn.Parameter) -> None:
    with torch.no_grad():
        param.mul_(0.5)


def by_data(param: nn.Parameter) -> None:
    param.data = param.data * 0.5
