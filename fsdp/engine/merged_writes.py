"""Values that several ranks may have written, each some of them, made one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fsdp.distributed.communicator import Communicator


class Merged:
    """This rank's parts of parameters that every rank has a copy of, and may have written to.

    Args:
        before: what they were; None if nobody knows, so that all ranks must have written the same.
        values: what this rank made of them.
    """

    def __init__(self, before: Sequence[Tensor] | None, values: Sequence[Tensor]) -> None:
        self._before = before
        self.values = [value.contiguous() for value in values]
        self._clashes = torch.zeros(len(values), dtype=torch.uint8, device=values[0].device)

    def exchange(self, comm: Communicator, parts: Sequence[Sequence[Tensor]], what: str, tag: int) -> None:
        """Collective. Send every rank what is made of its parts, and add what others made of these.

        Args:
            comm: the ranks.
            parts: for each of them.
            what: it is, for messages.
            tag: of a handle.
        """
        peers = [rank for rank in range(comm.world_size) if rank != comm.rank]
        outgoing = {peer: [part.contiguous() for part in parts[peer] if part.numel()] for peer in peers}
        made = {peer: [torch.empty_like(value) for value in self.values] for peer in peers}
        incoming = {peer: [value for value in values if value.numel()] for peer, values in made.items()}
        comm.exchange(incoming, outgoing, what, tag).wait()
        comm.settle()
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
        """Collective. The numbers of those of which any ranks made different values."""
        found = self._clashes
        for comm in comms:
            found = comm.all_reduce(found, "max").wait()
        return found.nonzero().flatten().tolist()


def differs(one: Tensor, other: Tensor) -> Tensor:
    """Which elements are not the same; NaN is the same as NaN."""
    return (one != other) & ~(one.isnan() & other.isnan())
