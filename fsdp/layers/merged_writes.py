"""Merge what a module's own forward has written to its parameters, as an embedding with ``max_norm`` does.

Each rank's forward writes to its unsharded parameters, from its own part of the batch. An element is then what the
ranks that wrote it made of it, whether others did or not: what a forward over all ranks' batches would have made of it.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    merged = Merged(before, dealt[comm.rank])
    what = f"values that the forward of {handle.unit_name} wrote to its parameters"
    merged.exchange(comm, dealt, what, handle.tag)
    merged.exchange(replicas, [merged.values] * replicas.world_size, what, handle.replica_tag)
    clashes = merged.clashes((comm, replicas))
    for ranks in (comm, replicas):
        ranks.settle()  # what was sent of the shards, and of these values, has arrived
    if clashes:
        names = ", ".join(layout.slots[slots[number]].name for number in clashes)
        raise RuntimeError(
            f"{handle.unit_name}: its forward wrote to {names}, and other values on other ranks, from their own "
            "part of the batch: there is no right one to keep. Let all ranks write the same (sum over the ranks "
            "what it is computed from), keep it in a buffer, or change it between steps inside "
            "`with model.summon_full_params():`."
        )
    if before is not None:
        for part, value, was in zip(own, merged.values, before, strict=True):
            part.copy_(torch.where(differs(value, was).to(part.device), value.to(part.device, part.dtype), part))
    handle.values.note_written(slots)
    handle.storage.release()
    handle.forget_written()


class Merged:
    """This rank's shards of parameters that every rank has a copy of, and may have written to.

    They had the values `before`; None if these are unknown, so that all ranks must have written the same.
    """

    def __init__(self, before: Sequence[Tensor] | None, values: Sequence[Tensor]) -> None:
        self._before = before
        self.values = [value.contiguous() for value in values]
        self._clashes = torch.zeros(len(values), dtype=torch.uint8, device=values[0].device)

    def exchange(self, comm: Communicator, parts: Sequence[Sequence[Tensor]], what: str, tag: int) -> None:
        """Collective. Send every rank what is made of its shards (`parts`), and add what others made of these."""
        peers = [rank for rank in range(comm.world_size) if rank != comm.rank]
        outgoing = {peer: [part.contiguous() for part in parts[peer] if part.numel()] for peer in peers}
        made = {peer: [torch.empty_like(value) for value in self.values] for peer in peers}
        incoming = {peer: [value for value in values if value.numel()] for peer, values in made.items()}
        comm.exchange(incoming, outgoing, what, tag).wait()
        for peer in peers:
            for number, value in enumerate(made[peer]):
                self._add(number, value)

    def _add(self, number: int, theirs: Tensor) -> None:
        ours = self.values[number]
        clashing = differs(theirs, ours)
        if self._before is not None:
            before = self._before[number]
            is_new = differs(theirs, before)
            clashing &= is_new & differs(ours, before)
            self.values[number] = torch.where(is_new, theirs, ours)
        self._clashes[number] |= clashing.any()

    def clashes(self, comms: Sequence[Communicator]) -> list[int]:
        """Collective. Return the numbers of the parameters of which any ranks made different values."""
        found = self._clashes
        for comm in comms:
            found = comm.all_reduce(found, "max").wait()
        return found.nonzero().flatten().tolist()


def differs(one: Tensor, other: Tensor) -> Tensor:
    """Return for each element whether it is another; NaN is the same as NaN."""
    return (one != other) & ~(one.isnan() & other.isnan())
