"""Merge what a module's own forward has written to its parameters, as an embedding with ``max_norm`` does.

Each rank's forward writes to its unsharded parameters, from its own part of the batch. An element is then what the
ranks that wrote it made of it, whether others did or not: what a forward over all ranks' batches would have made of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fsdp.distributed.communicator import Communicator
from fsdp.distributed.dtensor import local_part
from fsdp.engine.handle import FlatParamHandle


def merge_written(handle: FlatParamHandle) -> None:
    """Collective. Store in the shards what a forward has written to the parameters of a handle.

    All ranks raise RuntimeError if some made different values of one element.
    """
    unsharded, layout, comm, replicas = handle.unsharded, handle.layout, handle.comm, handle.replicas
    slots, parts = unsharded.written(), handle.values.local_shards
    made = {slot: local_part(unsharded.new_value(slot)).detach() for slot in slots}
    own = [parts[slot].data for slot in slots]  # `.data`: it is not the user who changes it between two passes
    before = None if unsharded.is_shard else [part.to(handle.storage.device, handle.dtype) for part in own]
    dealt = [[layout.local_shard_of(slot, made[slot], rank) for slot in slots] for rank in range(comm.world_size)]
    values = [value.contiguous() for value in dealt[comm.rank]]
    clashing = torch.zeros(len(values), dtype=torch.uint8, device=values[0].device)
    what = f"values that the forward of {handle.unit_name} wrote to its parameters"
    for ranks, sent, tag in (
        (comm, dealt, handle.tags.gather),
        (replicas, [values] * replicas.world_size, handle.tags.replica),  # as merged among the shards
    ):
        for made_there in _exchanged(ranks, sent, what, tag):
            for number, theirs in enumerate(made_there):
                was = None if before is None else before[number]
                values[number], clashes = _merged(values[number], theirs, was)
                clashing[number] |= clashes
    for ranks in (comm, replicas):
        clashing = ranks.all_reduce(clashing, "max").wait()
    for ranks in (comm, replicas):
        ranks.settle()  # what was sent of the shards, and of these values, has arrived
    if clashing.any():
        names = ", ".join(layout.slots[slots[number]].name for number in clashing.nonzero().flatten().tolist())
        raise RuntimeError(
            f"{handle.unit_name}: its forward wrote to {names}, and other values on other ranks, from their own "
            "part of the batch: there is no right one to keep. Let all ranks write the same (sum over the ranks "
            "what it is computed from), keep it in a buffer, or change it between steps inside "
            "`with model.summon_full_params():`."
        )
    if before is not None:
        for part, value, was in zip(own, values, before, strict=True):
            part.copy_(torch.where(differs(value, was).to(part.device), value.to(part.device, part.dtype), part))
    handle.values.note_written(slots)
    handle.storage.release()
    handle.forget_written()


def _exchanged(comm: Communicator, parts: Sequence[Sequence[Tensor]], what: str, tag: int) -> Iterator[list[Tensor]]:
    """Collective. Send every rank what is made of its shards (`parts`), and yield what other ranks made of these."""
    peers = [rank for rank in range(comm.world_size) if rank != comm.rank]
    outgoing = {peer: [part.contiguous() for part in parts[peer] if part.numel()] for peer in peers}
    made = {peer: [torch.empty_like(part).contiguous() for part in parts[comm.rank]] for peer in peers}
    incoming = {peer: [value for value in values if value.numel()] for peer, values in made.items()}
    comm.exchange(incoming, outgoing, what, tag).wait()
    yield from made.values()


def _merged(ours: Tensor, theirs: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return a shard with what two ranks wrote to it, and whether they wrote different values to an element.

    If the values `before` are unknown, both ranks must have written the same.
    """
    clashing = differs(theirs, ours)
    if before is None:
        return ours, clashing.any()
    is_new = differs(theirs, before)
    return torch.where(is_new, theirs, ours), (clashing & is_new & differs(ours, before)).any()


def differs(one: Tensor, other: Tensor) -> Tensor:
    """Return for each element whether it is another; NaN is the same as NaN."""
    return (one != other) & ~(one.isnan() & other.isnan())
