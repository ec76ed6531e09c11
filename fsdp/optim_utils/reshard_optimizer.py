"""`reshard_optimizer` hands over an optimizer that was made before the model was wrapped.

It holds original parameters, which nobody trains any more. Each is replaced by the `OptimParam` that it is in now. What
the optimizer has learned about it, unsharded and the same on every rank, is sharded as the parameter itself was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fsdp.engine.flat_param import FlatParameter
from fsdp.engine.managed_params import is_ours, taken_over
from fsdp.engine.unit import Unit, units_in
from fsdp.optim_utils.state import (
    APART,
    Elements,
    Kinds,
    OptimParam,
    Original,
    common_kinds,
    is_same,
    keys_with_elements,
    kinds_of,
    options_of,
    params_of,
)

_ANEW = "Make the optimizer after wrapping, from the wrapped model's parameters()."


@torch.no_grad()
def reshard_optimizer(root: Unit, optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> None:
    """Replace original parameters in an optimizer, and shard their state.

    Args:
        root: the units in it took the parameters over.
        optimizer: is changed in place, and not at all if anything is wrong.
        names: of the parameters that optimizers are to see, for those that keep names.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"reshard_optimizer takes a torch.optim.Optimizer, got a {type(optimizer).__name__}")
    try:
        found = _held_originals(root, optimizer)
        kinds = _checked_kinds(optimizer, found)
    except ValueError as error:
        raise ValueError(f"this {type(optimizer).__name__} cannot be handed over: {error}") from None
    # There may be no room for the shards: nothing is changed before they are made.
    states = {one: _sharded(optimizer, one, held, kinds[one]) for one, held in found.items()}
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for one, state in states.items():
        for held in found[one].values():
            optimizer.state.pop(held.param, None)
            replaced[held.param] = one.param
        if state:
            optimizer.state[one.param] = state
    for group in optimizer.param_groups:
        _replace(group, replaced, names)


def _replace(group: dict[str, Any], replaced: Mapping[nn.Parameter, nn.Parameter], names: Any) -> None:
    now = [replaced.get(param, param) for param in group["params"]]
    if "param_names" in group:
        pairs = zip(group["params"], now, group["param_names"], strict=True)
        named = {param: names.get(param, name) if param is not before else name for before, param, name in pairs}
        group["param_names"] = list(named.values())
    group["params"][:] = dict.fromkeys(now)  # in place: some optimizers keep the list itself


# --- what it holds --------------------------------------------------------------------------------------------------


class Held(NamedTuple):
    """A `Held` is an original parameter as the optimizer holds it."""

    param: nn.Parameter
    group: int
    state: Mapping[str, Any]


HeldIn = dict[OptimParam, dict[Original, Held]]


def _held_originals(root: Unit, optimizer: torch.optim.Optimizer) -> HeldIn:
    """Return the original parameters in an optimizer by what they are in now, which must not be there as well."""
    places: dict[tuple[FlatParameter, int], tuple[OptimParam, Original]] = {}
    for name, unit in units_in(root):
        for handle in unit.handles:
            for one in params_of(handle, "" if unit is root else f"{name}."):
                places |= {(handle.flat_param, original.slot): (one, original) for original in one.originals}
    _refuse_strangers(optimizer, {flat_param for flat_param, _ in places})
    found: HeldIn = {}
    for number, group in enumerate(optimizer.param_groups):
        for param in dict.fromkeys(group["params"]):
            taken = taken_over(param)
            if taken is not None and taken.flat_param is not None:
                one, original = places[taken.flat_param(), taken.slot]  # type: ignore[index]
                found.setdefault(one, {})[original] = Held(param, number, optimizer.state.get(param, {}))
    present = set(_params(optimizer))
    for one, held in found.items():
        if one.param in present:
            raise ValueError(f"it holds {next(iter(held)).name} both as it was before wrapping and as it is now")
    return found


def _params(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _refuse_strangers(optimizer: torch.optim.Optimizer, ours: set[FlatParameter]) -> None:
    summoned, strangers = [], []
    for param in _params(optimizer):
        taken = taken_over(param)
        if taken is not None and taken.flat_param is None:
            summoned.append(taken.description)
        elif taken is not None and taken.flat_param is not None and taken.flat_param() not in ours:
            strangers.append(taken.description)
        elif is_ours(param) and param.owner._is_managed and param.owner not in ours:
            strangers.append(f"the shard with {param.owner._names[0]}")
    if summoned:
        raise ValueError(
            "it was made inside summon_full_params() and holds copies that are not trained: "
            f"{_listed(summoned)}. {_ANEW}"
        )
    if strangers:
        raise ValueError(
            "it holds parameters of another wrapped model, or of units around this one: "
            f"{_listed(strangers)}. Call reshard_optimizer of the outermost FullyShardedDataParallel that they are all "
            "in; models that are wrapped apart need an optimizer each."
        )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


# --- its state ------------------------------------------------------------------------------------------------------


def _checked_kinds(optimizer: torch.optim.Optimizer, found: HeldIn) -> dict[OptimParam, Kinds]:
    """Return the state of each parameter that the optimizer is to see; those in one flat parameter must be alike."""
    states = optimizer.state.items()
    has_elements = keys_with_elements((param.shape, state) for param, state in states if isinstance(param, Tensor))
    kinds: dict[OptimParam, Kinds] = {}
    for one, held in found.items():
        _check_groups(optimizer, one, held)
        kinds[one] = common_kinds(
            {original: _kinds(one, original, each.state, has_elements) for original, each in held.items()}
        )
    return kinds


def _check_groups(optimizer: torch.optim.Optimizer, one: OptimParam, held: Mapping[Original, Held]) -> None:
    first, group = next((original.name, each.group) for original, each in held.items())
    for original in one.originals:
        if original not in held:
            raise ValueError(f"it holds {first} and not {original.name}; the two are in one flat parameter. {APART}")
    for original, each in held.items():
        if each.group != group:
            options, others = (options_of(optimizer.param_groups[number]) for number in (group, each.group))
            different = [name for name in options if not is_same(options[name], others.get(name))]
            shown = ", ".join(f"{name} {options[name]} and {others.get(name)}" for name in different)
            raise ValueError(
                f"{first} is in its parameter group {group} and {original.name} in group {each.group}, with "
                f"{shown or 'the same options'}; the two are in one flat parameter. {APART}"
            )


def _kinds(one: OptimParam, original: Original, state: Mapping[str, Any], has_elements: Mapping[str, bool]) -> Kinds:
    for key, value in state.items():
        if type(value) is not Tensor and not (value is None or isinstance(value, (int, float, complex))):
            raise ValueError(
                f"the optimizer's state '{key}' of {original.name} is a {type(value).__name__}: what is neither a "
                f"plain tensor nor a number cannot be sharded. {_ANEW}"
            )
    return kinds_of(original.name, state, one.local_shape(original), has_elements=has_elements, remedy=_ANEW)


def _sharded(
    optimizer: torch.optim.Optimizer, one: OptimParam, held: Mapping[Original, Held], kinds: Kinds
) -> dict[str, Any]:
    """Return this rank's shard of the originals' state, beside the shard of the parameters."""
    first = next(iter(held.values()))
    state = {}
    for key, kind in kinds.items():
        if isinstance(kind, Elements):
            state[key] = one.zeros(kind.dtype)
            for original, each in held.items():
                one.shard(original, each.state[key].reshape(-1), state[key])
        else:
            state[key] = _kept(first.state[key], one.param.device, optimizer.param_groups[first.group])
    return state


def _kept(value: Any, device: torch.device, options: Mapping[str, Any]) -> Any:
    if not isinstance(value, Tensor):
        return value
    # Counts live on the host, but for steps that run on the device as a whole: those want them with the parameter.
    follows = options.get("fused") or options.get("capturable") or not value.is_cpu
    return value.to(device) if follows else value
