"""One parameter of several in a flat parameter gets a flat parameter of its own, before its unit is used.

Under `fully_shard` a module may be tied to one that was sharded before it. What they share has to be a handle by
itself (`fsdp.engine.shared_params`), which the unit around both can run.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import nn

from fsdp.engine.dtensor_params import RowPieces
from fsdp.engine.flat_param import FlatParameter
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.managed_params import follow_flat_param, taken_over
from fsdp.engine.unit import Unit


def split_off(param: nn.Parameter, owner: Unit | None) -> None:
    """Have an original parameter that `owner` took in a flat parameter with nothing else; no rank needs another.

    Raises:
        RuntimeError: if the owner was used already.
    """
    taken = taken_over(param)
    shard = None if taken is None or taken.flat_param is None else taken.flat_param()
    handle = next((one for one in owner.owned_handles if one.flat_param is shard), None) if owner is not None else None
    if taken is None or owner is None or handle is None or len(handle.places) == 1:
        return
    if owner.runtime is not None:
        raise RuntimeError(
            f"{taken.description} is tied to a parameter of a module that is sharded now, after its own was used "
            "already. Call fully_shard on all modules before the first forward."
        )
    handle.absorb()
    rest = [slot for slot in range(len(handle.places)) if slot != taken.slot]
    parts = [_cut_out(owner, handle, slots) for slots in ([taken.slot], rest)]
    handle.registry.leave()
    for kept in (owner.owned_handles, owner.handles):
        at = kept.index(handle)
        kept[at : at + 1] = parts
    for part in parts:
        part.registry.enter()
        part.fill_places()


def _cut_out(owner: Unit, handle: FlatParamHandle, slots: Sequence[int]) -> FlatParamHandle:
    """A handle for some of the parameters of another one, with a copy of their part of the shard."""
    old, pieces = handle.flat_param, handle.pieces
    if not isinstance(pieces, RowPieces):
        raise TypeError(f"{handle.name} is not in rows")
    flat_param = FlatParameter.part_of_shard(old, slots, handle.comm.rank, handle.comm.world_size)
    flat_param.fingerprints = handle.fingerprints and handle.fingerprints.only(slots)
    made = FlatParamHandle(
        flat_param,
        [handle.places[slot] for slot in slots],
        handle.comm,
        handle.reduce_comm,
        handle.replicas,
        [],
        handle.precision,
        owner.on_gradient,
        partial(RowPieces, mesh=pieces.mesh, params=[pieces.params[slot] for slot in slots]),
    )
    follow_flat_param(old, {slot: (flat_param, number) for number, slot in enumerate(slots)})
    return made
