"""The state dict of a wrapped module: whole, in tensors of its own, under the names that it has unwrapped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from fsdp.distributed.dtensor import is_dtensor, local_part, whole
from fsdp.engine.agreement import agree, agree_on_values
from fsdp.engine.managed_params import is_ours
from fsdp.engine.shared_params import exported_around, keys_of, settle_shares
from fsdp.engine.state_requests import Saving
from fsdp.engine.unit import TrainingState, Unit, units_in
from fsdp.state_dict.exposure import shown


def ensure_agreed(root: Unit) -> None:
    """Collective the first time. The ranks compare what they have before they trust each other's shards."""
    named_units = units_in(root)
    if not all(unit.is_agreed for _, unit in named_units):
        settle_shares(root, named_units, all_inside=False)
        agree(root.everyone, named_units)


def ensure_same_values(root: Unit) -> None:
    """Collective the first time. As `ensure_agreed`, of what the shards were cut from; for who is about to read it."""
    if root.state is not TrainingState.SUMMON_FULL_PARAMS:
        agree_on_values(units_in(root))


def whole_state(unit: Unit, destination: Any, prefix: str, keep_vars: bool, form: Saving) -> Any:
    """Collective. The `state_dict` of the unit's module with its parameters whole, in tensors of its own.

    Args:
        unit: whose state.
        destination, prefix, keep_vars: as for `nn.Module.state_dict`.
        form: on ranks that are not to have it, tensors are on the meta device.
    """
    summoned = unit.state is TrainingState.SUMMON_FULL_PARAMS
    # Exposed parameters belong to nobody else; buffers do, and so do parameters that are ignored or were summoned.
    others = [param for param in unit.module.parameters() if not is_ours(param)]
    with nullcontext() if summoned else shown(unit, form.is_at_first(unit)):
        with _exporting(unit):
            state = unit.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        if not form.is_here:
            _forget(state, prefix)
        elif not keep_vars:
            live = {local_part(tensor).data_ptr() for tensor in (*others, *unit.module.buffers())}
            _make_whole(state, unit, prefix)
            params = {prefix + key for key in keys_of(unit)}
            left = exported_around(unit)
            moved: dict[Any, Tensor] = {}  # tied tensors stay tied
            for key, value in state.items():
                if key.startswith(prefix) and isinstance(value, Tensor) and value.data_ptr() not in left:
                    wanted = form.dtype if key in params and value.is_floating_point() else None
                    place = (value.data_ptr(), value.shape, value.stride(), value.dtype, wanted)
                    if place not in moved or value.numel() == 0:
                        moved[place] = _own(value, live, form.device, wanted)
                    state[key] = moved[place]
    return state


def _forget(state: dict[str, Any], prefix: str) -> None:
    """Have nothing but shapes under the prefix."""
    for key, value in state.items():
        if key.startswith(prefix) and isinstance(value, Tensor):
            state[key] = torch.empty(value.shape, dtype=value.dtype, device="meta")


def _make_whole(state: dict[str, Any], unit: Unit, prefix: str) -> None:
    """Collective over their meshes. Whole tensors in the place of `DTensor`s, tied ones once."""
    for handle in unit.handles:
        for places in handle.places:
            names = [prefix + place.fqn for place in places if is_dtensor(state.get(prefix + place.fqn))]
            if names:
                state.update(dict.fromkeys(names, whole(state[names[0]])))
    for key, value in state.items():
        if key.startswith(prefix) and is_dtensor(value):
            state[key] = whole(value)


@contextmanager
def _exporting(unit: Unit) -> Iterator[None]:
    unit.access.is_exporting = True
    try:
        yield
    finally:
        unit.access.is_exporting = False


def _own(value: Tensor, live: set[int], device: torch.device | None, dtype: torch.dtype | None) -> Tensor:
    moved = value.to(device=device, dtype=dtype) if device or dtype else value
    return moved.clone() if moved.data_ptr() in live else moved
