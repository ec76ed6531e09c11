"""Unsharded parameters outside computation: assembled from all ranks' shards, and distributed to them again.

If the backend can send intervals, they are received directly in the returned tensors, or in the shard. So no buffer
for the unsharded flat parameter is required, and ranks that only send need no memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fsdp.engine.handle import FlatParamHandle


def is_first(handle: FlatParamHandle) -> bool:
    """Return True on the first rank of the handle: rank 0 of its process group, in the first replica."""
    return handle.comm.rank == 0 and handle.replicas.rank == 0


def make_readable(handle: FlatParamHandle, what: str) -> None:
    """Store values that users have assigned in the shard, and raise an error if the shard cannot be read."""
    handle.storage.check_readable(handle.name)
    handle.absorb()
    handle.follow_shard()
    handle.presentation.refuse_lent(what, handle.unit_name)


def assembled(handle: FlatParamHandle, at_first: bool) -> list[Tensor]:
    """Collective. Return copies of the parameters in the form that modules list, in the shard's dtype.

    Peers may still be receiving from the shard: call `handle.settle` before writing to it. If only the first rank
    needs the parameters (`at_first`), the other ranks get tensors on the meta device.
    """
    make_readable(handle, "put whole parameters together")
    is_at_hand = handle.dtype == handle.flat_param.dtype and handle.is_unsharded  # the same on all ranks
    is_at_hand &= not any(handle.flat_param.packings)  # classes are not required to support copies
    is_at_hand &= handle.unsharded.is_exact
    if at_first and not is_first(handle):
        if not is_at_hand and handle.replicas.rank == 0:
            _send_intervals(handle, [], [0])
        return as_modules_see(handle, blanks(handle, torch.device("meta")))
    if is_at_hand:
        return [leaf.detach().clone() for leaf in handle.unsharded.leaves]
    if at_first or handle.comm.sends_pieces or not handle.is_sharded:
        copies = blanks(handle, handle.storage.device)
        _send_intervals(handle, copies, [] if at_first else range(handle.comm.world_size))
    else:
        copies = [view.clone() for view in handle.layout.unpack(handle.gathered())]
    return as_modules_see(handle, copies)


def blanks(handle: FlatParamHandle, device: torch.device) -> list[Tensor]:
    """Return uninitialized tensors for the parameters, or for the local parts of `DTensor`s, in the shard's dtype."""
    return [torch.empty(slot.shape, dtype=handle.flat_param.dtype, device=device) for slot in handle.layout.slots]


def as_modules_see(handle: FlatParamHandle, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the parameters in the form that modules list: `DTensor`s around local parts, and bytes unpacked."""
    flat = handle.flat_param
    seen = [part.dtensor(tensor) if part else tensor for tensor, part in zip(tensors, flat.parts, strict=True)]
    return [
        packing.unpack(tensor, is_view=False) if packing else tensor
        for tensor, packing in zip(seen, flat.packings, strict=True)
    ]


def _send_intervals(handle: FlatParamHandle, copies: Sequence[Tensor], receivers: Sequence[int]) -> None:
    """Send this rank's shard to the receivers, and fill `copies`, if any, from the shards of all ranks."""
    layout, comm = handle.layout, handle.comm
    shard = handle.storage.brought(handle.flat_param, handle.flat_param.dtype)
    flat = [copy.view(-1) for copy in copies]

    def places_of(rank: int) -> list[Tensor]:
        return [flat[i.slot][i.start : i.stop] for i in layout.intervals(rank)]

    own = [shard[i.offset : i.offset + i.numel] for i in layout.intervals(comm.rank)]
    peers = [rank for rank in range(comm.world_size) if rank != comm.rank]
    incoming = {peer: places_of(peer) for peer in peers} if copies else {}
    comm.settle()  # earlier messages: a rank is at most one flat parameter ahead of its receivers
    outgoing = {peer: own for peer in peers if peer in receivers}
    pending = comm.exchange(incoming, outgoing, f"gather of {handle.name}", ("whole", handle.tags.gather))
    if copies:
        for place, values in zip(places_of(comm.rank), own, strict=True):
            place.copy_(values)
    pending.wait()
    handle.storage.release()


def deal(handle: FlatParamHandle, slots: Sequence[int], given: Mapping[int, Tensor]) -> None:
    """Collective. Send every rank its shard of the new unsharded values that the first rank has already stored.

    On the first rank, `given` contains the values of the parameters `slots` (local parts of `DTensor`s), of any dtype
    and device.
    """
    if handle.layout.numel == 0:
        return
    comm, layout, device = handle.comm, handle.layout, handle.storage.device
    shard = handle.flat_param.vector
    mine = layout.local_shards(shard, comm.rank)
    own = {slot: mine[slot].to(device) for slot in slots if mine[slot].numel()}
    incoming, outgoing = {}, {}
    if is_first(handle):
        flat = {slot: given[slot].detach().reshape(-1) for slot in slots}
        for peer in range(1, comm.world_size):
            ranges = [flat[i.slot][i.start : i.stop] for i in layout.intervals(peer) if i.slot in flat]
            outgoing[peer] = [values.to(device, shard.dtype) for values in ranges]
    elif handle.replicas.rank == 0:
        incoming[0] = list(own.values())
    comm.exchange(incoming, outgoing, f"values of {handle.name}", ("values", handle.tags.gather)).wait()
    for each in own.values():
        if handle.is_replicated:
            handle.replicas.broadcast(each.view(torch.uint8)).wait()
    if not is_first(handle):
        for slot in slots:
            handle.values.fill_local(own.get(slot, mine[slot]), slot)
        handle.values.touch()
    handle.settle()
    handle.storage.release()
