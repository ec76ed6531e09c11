"""The state dict of a wrapper: its hooks, its inner wrappers, and what the outermost one was asked for."""

from __future__ import annotations

from typing import Any

from torch import nn

from fsdp.engine.deferred_init import require_values_everywhere
from fsdp.engine.state_requests import Saving, saving
from fsdp.engine.unit import Unit, units_in
from fsdp.state_dict.full import ensure_agreed, ensure_same_values, whole_state


def save_whole(wrapper: nn.Module, unit: Unit, asked: Saving, destination: Any, prefix: str, keep_vars: bool) -> Any:
    """Collective. Return the unsharded state of a wrapper, or of one inside of the wrapper whose state is taken.

    Args:
        wrapper: whose hooks are called.
        unit: its own.
        asked: counts if it is the outermost one.
        destination, prefix, keep_vars: as for `nn.Module.state_dict`.
    """
    if unit.access.shows_parts:  # nothing is to be gathered
        _run_pre_hooks(wrapper, prefix, keep_vars)
        state = unit.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        return _run_hooks(wrapper, state, prefix)
    unit.require_idle("take a state dict")
    if unit.access.summoned is not None and unit.access.summoned.rank0_only:
        raise RuntimeError(
            "state_dict(): inside summon_full_params(rank0_only=True) the other ranks' modules are sharded. Take "
            "it outside, with state_dict(rank0_only=True)."
        )
    is_outermost = unit.access.saving is None
    with saving(unit, asked) as form:
        _run_pre_hooks(wrapper, prefix, keep_vars)
        ensure_agreed(unit)
        require_values_everywhere(unit, "take a state dict")
        ensure_same_values(unit)
        state = _run_hooks(wrapper, whole_state(unit, destination, prefix, keep_vars, form), prefix)
    if is_outermost:
        for _, each in units_in(unit):
            each.settle()
        if not form.is_here:
            for key in [key for key in state if key.startswith(prefix)]:
                del state[key]
    return state


def _run_pre_hooks(wrapper: nn.Module, prefix: str, keep_vars: bool) -> None:
    for before in wrapper._state_dict_pre_hooks.values():
        before(wrapper, prefix, keep_vars)


def _run_hooks(wrapper: nn.Module, state: Any, prefix: str) -> Any:
    for after in wrapper._state_dict_hooks.values():
        changed = after(wrapper, state, prefix, state._metadata.get(prefix[:-1], {}))
        state = state if changed is None else changed
    return state
