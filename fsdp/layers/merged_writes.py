"""Merges writes of a module's forward to its own parameters, for example by an embedding with ``max_norm``.

Each rank's forward writes to the unsharded parameters, using the rank's part of the batch. The merged value of an
element is the value from the ranks that wrote the element, as in a forward over all ranks' batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fsdp.distributed.communicator import Communicator
from fsdp.distributed.dtensor import local_part
from fsdp.engine.handle import FlatParamHandle


def merge_written(handle: FlatParamHandle) -> None:
    """Collective. Store in the shards the values written to a handle's parameters by a forward.

    All ranks raise RuntimeError if ranks wrote different values to an element.
    """
    unsharded, layout, comm, replicas = handle.unsharded, handle.layout, handle.comm, handle.replicas
    slots, parts = unsharded.written(), handle.values.local_shards
    made = {slot: local_part(unsharded.new_value(slot)).detach() for slot in slots}
    own = [parts[slot].data for slot in slots]  # `.data`, because this must not count as a write by the user
    before = None if unsharded.is_shard else [part.to(handle.storage.device, handle.dtype) for part in own]
    dealt = [[layout.local_shard_of(slot, made[slot], rank) for slot in slots] for rank in range(comm.world_size)]
    values = [value.contiguous() for value in dealt[comm.rank]]
    clashing = torch.zeros(len(values), dtype=torch.uint8, device=values[0].device)
    what = f"values that the forward of {handle.unit_name} wrote to its parameters"
    for ranks, sent, tag in (
        (comm, dealt, handle.tags.gather),
        (replicas, [values] * replicas.world_size, handle.tags.replica),  # the values after the first exchange
    ):
        for made_there in _exchanged(ranks, sent, what, tag):
            for number, theirs in enumerate(made_there):
                was = None if before is None else before[number]
                values[number], clashes = _merged(values[number], theirs, was)
                clashing[number] |= clashes
    for ranks in (comm, replicas):
        clashing = ranks.all_reduce(clashing, "max").wait()
    for ranks in (comm, replicas):
        ranks.settle()  # messages with shards and with these values have arrived
    if clashing.any():
        names = ", ".join(layout.slots[slots[number]].name for number in clashing.nonzero().flatten().tolist())
        raise RuntimeError(
            f"{handle.unit_name}: its forward wrote to {names}, and the ranks' values conflict, because each rank "
            "computed them from its part of the batch. Write the same values on all ranks (all-reduce the data that "
            "they are computed from), use a buffer, or change them between steps inside `with "
            "model.summon_full_params():`."
        )
    if before is not None:
        for part, value, was in zip(own, values, before, strict=True):
            part.copy_(torch.where(differs(value, was).to(part.device), value.to(part.device, part.dtype), part))
    handle.values.note_written(slots)
    handle.storage.release()
    handle.forget_written()


def _exchanged(comm: Communicator, parts: Sequence[Sequence[Tensor]], what: str, tag: int) -> Iterator[list[Tensor]]:
    """Collective. Send all ranks this rank's values of their shards (`parts`); yield their values of this shard."""
    peers = [rank for rank in range(comm.world_size) if rank != comm.rank]
    outgoing = {peer: [part.contiguous() for part in parts[peer] if part.numel()] for peer in peers}
    made = {peer: [torch.empty_like(part).contiguous() for part in parts[comm.rank]] for peer in peers}
    incoming = {peer: [value for value in values if value.numel()] for peer, values in made.items()}
    comm.exchange(incoming, outgoing, what, tag).wait()
    yield from made.values()


def _merged(ours: Tensor, theirs: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return a shard with the writes of two ranks, and whether they wrote different values to an element.

    If the values `before` are unknown, both ranks must have written the same values.
    """
    clashing = differs(theirs, ours)
    if before is None:
        return ours, clashing.any()
    is_new = differs(theirs, before)
    return torch.where(is_new, theirs, ours), (clashing & is_new & differs(ours, before)).any()


def differs(one: Tensor, other: Tensor) -> Tensor:
    """Return for each element whether the values differ; NaN is equal to NaN."""
    return (one != other) & ~(one.isnan() & other.isnan())
