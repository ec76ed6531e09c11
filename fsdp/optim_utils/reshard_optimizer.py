"""Handing over an optimizer that was made before the model was wrapped.

It holds original parameters, which nobody trains any more. Each is replaced by what stands for it now, its *heir*: the
flat parameter that took it, with others, or this rank's piece of it. What the optimizer has learned about it, whole and
the same on every rank, is cut as the parameter itself was.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fsdp.engine.flat_param import FlatParameter
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.managed_params import is_ours, taken_over
from fsdp.engine.unit import Unit, units_in

# 0-d state of torch's optimizers that is about a parameter as a whole, for optimizers of 0-d parameters only: as soon
# as they have another, its state tells.
_OF_THE_WHOLE = frozenset({"step", "eta", "mu", "mu_product"})

_ANEW = "Make the optimizer after wrapping, from the wrapped model's parameters()."


@torch.no_grad()
def reshard_optimizer(root: Unit, optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> None:
    """Replace original parameters in an optimizer, and cut their state.

    Args:
        root: the units in it took the parameters over.
        optimizer: is changed in place, and not at all if anything is wrong.
        names: of the parameters that optimizers are to see, for those that keep names.

    Raises:
        TypeError: if it is no optimizer of torch's.
        ValueError: if it cannot go on as it was.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"reshard_optimizer takes a torch.optim.Optimizer, got a {type(optimizer).__name__}")
    heirs = _heirs(root, optimizer)
    states = [heir.cut_state() for heir in heirs]  # there may be no room: nothing is changed before
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for heir, state in zip(heirs, states, strict=True):
        for original in heir.originals:
            optimizer.state.pop(original.param, None)
            replaced[original.param] = heir.param
        if state:
            optimizer.state[heir.param] = state
    for group in optimizer.param_groups:
        _replace(group, replaced, names)


def _replace(group: dict[str, Any], replaced: Mapping[nn.Parameter, nn.Parameter], names: Any) -> None:
    now = [replaced.get(param, param) for param in group["params"]]
    if "param_names" in group:
        pairs = zip(group["params"], now, group["param_names"], strict=True)
        named = {param: names.get(param, name) if param is not before else name for before, param, name in pairs}
        group["param_names"] = list(named.values())
    group["params"][:] = dict.fromkeys(now)  # in place: some optimizers keep the list itself


class Original(NamedTuple):
    """A parameter of the optimizer that a unit took over."""

    param: nn.Parameter
    name: str
    slot: int  # in the flat parameter
    group: int  # of the optimizer
    state: dict[str, Any]


class Heir:
    """What stands for one or several originals now.

    Args:
        param: the parameter that optimizers are to see.
        handle: whose shard it is, or is a piece of.
        prefix: of the names in it.
        optimizer: to be handed over.
    """

    def __init__(
        self, param: nn.Parameter, handle: FlatParamHandle, prefix: str, optimizer: torch.optim.Optimizer
    ) -> None:
        self.param = param
        self.originals: list[Original] = []
        self._handle, self._prefix, self._optimizer = handle, prefix, optimizer
        self._per_element: dict[str, bool] = {}  # by key of the state

    def stand_for(self, param: nn.Parameter, slot: int, group: int) -> None:
        """Take another original in."""
        name = self._prefix + self._handle.layout.slots[slot].name
        self.originals.append(Original(param, name, slot, group, self._optimizer.state.get(param, {})))

    # --- whether it can be done ---------------------------------------------------------------------------------

    def check(self, has_elements: Mapping[str, bool]) -> None:
        """Raise ValueError if it cannot stand for its originals, with their state.

        Args:
            has_elements: by key of the state, whether it is a tensor for parameters that are not 0-d.
        """
        if self._handle.pieces is None:
            self._check_complete()
        kinds = [self._kinds(original, has_elements) for original in self.originals]
        for other, kind in zip(self.originals[1:], kinds[1:], strict=True):
            self._check_alike(self.originals[0], other, kinds[0], kind)
        self._per_element = kinds[0]

    def _check_complete(self) -> None:
        first = self.originals[0]
        found = {original.slot for original in self.originals}
        for slot, wanted in enumerate(self._handle.layout.slots):
            if slot not in found:
                raise self._apart(f"it holds {first.name} and not {self._prefix}{wanted.name}")
        for other in self.originals:
            if other.group != first.group:
                raise self._apart(
                    f"{first.name} is in its parameter group {first.group} and {other.name} in group {other.group}, "
                    f"with {self._differences(first.group, other.group)}"
                )

    def _differences(self, one: int, other: int) -> str:
        options, others = (self._optimizer.param_groups[number] for number in (one, other))
        names = [name for name in options if name not in ("params", "param_names")]
        different = [name for name in names if not _same(options[name], others.get(name))]
        return ", ".join(f"{name} {options[name]} and {others.get(name)}" for name in different) or "the same options"

    def _kinds(self, original: Original, has_elements: Mapping[str, bool]) -> dict[str, bool]:
        shape = self._handle.layout.slots[original.slot].shape
        kinds = {}
        for key, value in original.state.items():
            if value is None or isinstance(value, (int, float, complex)):
                kinds[key] = False
            elif type(value) is Tensor and value.shape == shape:
                kinds[key] = len(shape) > 0 or has_elements.get(key, key not in _OF_THE_WHOLE)
            elif type(value) is Tensor and value.dim() == 0:
                kinds[key] = False
            else:
                found = f"of shape {tuple(value.shape)}" if type(value) is Tensor else f"a {type(value).__name__}"
                raise ValueError(
                    f"{_cannot(self._optimizer)}: its state '{key}' of {original.name} is {found}. What is neither of "
                    f"the parameter's shape, here {tuple(shape)}, nor a number cannot be cut. {_ANEW}"
                )
        return kinds

    def _check_alike(self, one: Original, other: Original, kinds: dict[str, bool], others: dict[str, bool]) -> None:
        if kinds.keys() != others.keys():
            has = [", ".join(sorted(original.state)) or "none" for original in (one, other)]
            raise self._apart(f"of {one.name} it has the state {has[0]}, and of {other.name} {has[1]}")
        for key in kinds:
            values = one.state[key], other.state[key]
            is_alike = values[0].dtype == values[1].dtype if kinds[key] and others[key] else _same(*values)
            if not is_alike:
                found = [_described(value) for value in values]
                raise self._apart(f"its state '{key}' of {one.name} is {found[0]}, and of {other.name} {found[1]}")

    def _apart(self, what: str) -> ValueError:
        return ValueError(
            f"{_cannot(self._optimizer)}: {what}; the two are in one flat parameter. Wrap with use_orig_params=True, "
            "with which optimizers have each parameter by itself."
        )

    # --- state --------------------------------------------------------------------------------------------------

    def cut_state(self) -> dict[str, Any]:
        """This rank's part of the originals' state, where the shard lives."""
        first = self.originals[0]
        return {
            key: self._cut(key) if per_element else self._kept(first.state[key])
            for key, per_element in self._per_element.items()
        }

    def _cut(self, key: str) -> Tensor:
        layout, rank = self._handle.layout, self._handle.comm.rank
        # In the parameter's likeness, as optimizers make it: so it is on disk where the parameter is.
        made = torch.zeros_like(self.param, dtype=self.originals[0].state[key].dtype)
        for original in self.originals:
            if self._handle.pieces is None:
                layout.shard_of(original.slot, original.state[key], made.view(-1), rank)
            else:
                made.copy_(layout.part_of(original.slot, original.state[key], rank))
        return made

    def _kept(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        options = self._optimizer.param_groups[self.originals[0].group]
        # Counts live on the host, but for steps that run on the device as a whole: those want them with the parameter.
        follows = options.get("fused") or options.get("capturable") or not value.is_cpu
        return value.to(self.param.device) if follows else value


def _heirs(root: Unit, optimizer: torch.optim.Optimizer) -> list[Heir]:
    """What stands for the optimizer's original parameters, checked."""
    units = units_in(root)
    handles = {handle.flat_param: handle for _, unit in units for handle in unit.handles}
    prefixes = {handle: "" if unit is root else f"{name}." for name, unit in units for handle in unit.handles}
    _refuse_strangers(optimizer, handles)
    heirs: dict[nn.Parameter, Heir] = {}
    for number, group in enumerate(optimizer.param_groups):
        for param in dict.fromkeys(group["params"]):
            flat_param, slot = _taken_by(param)
            if flat_param is not None:
                handle = handles[flat_param]
                now = flat_param if handle.pieces is None else handle.pieces.params[slot]
                heirs.setdefault(now, Heir(now, handle, prefixes[handle], optimizer)).stand_for(param, slot, number)
    has_elements, present = _has_elements(optimizer), set(_params(optimizer))
    for heir in heirs.values():
        if heir.param in present:
            name = heir.originals[0].name
            raise ValueError(f"{_cannot(optimizer)}: it holds {name} both as it was before wrapping and as it is now")
        heir.check(has_elements)
    return list(heirs.values())


def _params(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _taken_by(param: nn.Parameter) -> tuple[FlatParameter | None, int]:
    """The flat parameter that took an original, if there still is one, and the original's number in it."""
    taken = taken_over(param)
    if taken is None or taken.flat_param is None:
        return None, 0
    return taken.flat_param(), taken.slot


def _refuse_strangers(optimizer: torch.optim.Optimizer, ours: Mapping[FlatParameter, FlatParamHandle]) -> None:
    summoned, strangers = [], []
    for param in _params(optimizer):
        taken = taken_over(param)
        if taken is not None and taken.flat_param is None:
            summoned.append(taken.description)
        elif taken is not None and _taken_by(param)[0] not in ours:
            strangers.append(taken.description)
        elif is_ours(param) and param.owner._is_managed and param.owner not in ours:
            strangers.append(f"the shard with {param.owner._names[0]}")
    if summoned:
        raise ValueError(
            f"{_cannot(optimizer)}: it was made inside summon_full_params() and holds copies that are not trained: "
            f"{_listed(summoned)}. {_ANEW}"
        )
    if strangers:
        raise ValueError(
            f"{_cannot(optimizer)}: it holds parameters of another wrapped model, or of units around this one: "
            f"{_listed(strangers)}. Call reshard_optimizer of the outermost FullyShardedDataParallel that they are all "
            "in; models that are wrapped apart need an optimizer each."
        )


def _has_elements(optimizer: torch.optim.Optimizer) -> dict[str, bool]:
    found: dict[str, bool] = {}
    for param, state in optimizer.state.items():
        if isinstance(param, Tensor) and param.dim() > 0:
            for key, value in state.items():
                found[key] = found.get(key, False) or (isinstance(value, Tensor) and value.dim() > 0)
    return found


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())
    return type(one) is type(other) and bool(one == other)


def _cannot(optimizer: torch.optim.Optimizer) -> str:
    return f"this {type(optimizer).__name__} cannot be handed over"


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _described(value: Any) -> str:
    if isinstance(value, Tensor) and value.dim() > 0:
        return f"a tensor of {value.dtype}"
    return str(value.item() if isinstance(value, Tensor) else value)
