"""`SumByMicroBatch` is a communicator that sums gradients in the order of micro-batches, for any number of ranks.

A reduce-scatter adds the gradients of W ranks, and accumulation adds the results of multiple reduce-scatters. The
order of additions, and therefore the bits, depend on W. With this communicator, ranks exchange the pieces unchanged.
Rank r computes its k-th gradient of a step with micro-batch ``k * W + r``. The pieces of consecutive reductions, each
in rank order, are therefore in the order of micro-batches for any W. A `TreeSum` adds them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fsdp.distributed.communicator import Communicator, Pending, Tag, words_of
from fsdp.distributed.custom_collectives import InFront
from fsdp.distributed.tree_sum import TreeSum


class MicroBatchSums:
    """The sums of a step's gradients over the micro-batches that were reduced so far.

    Args:
        micro_batches: the number of micro-batches in a step.

    Attributes:
        step: an object that identifies the current step; None between steps.
    """

    def __init__(self, micro_batches: int) -> None:
        self._micro_batches = micro_batches
        self.step: object | None = None
        self._sums: dict[Tag, TreeSum] = {}
        self._added: dict[Tag, int] = {}

    def begin(self) -> None:
        """Begin a step, and delete the sums of an aborted step."""
        self.end()
        self.step = object()

    def end(self) -> None:
        """End or abort the step."""
        self.step = None
        self._sums.clear()
        self._added.clear()

    @property
    def added(self) -> set[int]:
        """The numbers of micro-batches added to each gradient: a single number if all are equal."""
        return set(self._added.values())

    def require_step(self, what: str) -> object:
        """Return the current step; raise RuntimeError for a reduction between steps."""
        if self.step is None:
            raise RuntimeError(
                f"{what}: this backward belongs to no micro-batch. With fsdp.SameBits, run each backward inside `for "
                "number in bits.step(...)`."
            )
        return self.step

    def add(self, step: object, tag: Tag, pieces: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Add this rank's piece ``[n]`` of every rank's gradient, in rank order, to the sum of `tag`.

        Returns:
            The mean ``[n]`` over all micro-batches of the step in `dtype` after the last micro-batch, and zeros
            before. The caller adds up the results of all calls.
        """
        zeros = pieces[0].new_zeros(pieces[0].shape, dtype=dtype)
        if step is not self.step:
            return zeros  # the pieces are from an aborted step
        wide = torch.promote_types(torch.promote_types(pieces[0].dtype, dtype), torch.float32)
        total = self._sums.setdefault(tag, TreeSum())
        for piece in pieces:
            total.add(piece.to(wide))
        self._added[tag] = self._added.get(tag, 0) + len(pieces)
        if total.count < self._micro_batches:
            return zeros
        del self._sums[tag]
        # Added to zeros, as after an earlier reduction, where the addition changes negative zeros to positive zeros.
        return zeros.add_(total.total().div_(self._micro_batches).to(dtype))


class SumByMicroBatch(InFront):
    """A communicator that sums gradients in the order of micro-batches."""

    def __init__(self, behind: Communicator, collective: MicroBatchSums) -> None:
        super().__init__(behind, collective)
        self.sends_pieces = True  # otherwise, `summed` would use an all-reduce for replicas

    def serves(self, sums: MicroBatchSums) -> bool:
        """Return whether this communicator adds to `sums`."""
        return self._collective is sums

    def reduce_scatter(self, full: Tensor, what: str, tag: Tag, dtype: torch.dtype | None = None) -> Pending:
        sums: MicroBatchSums = self._collective
        step = sums.require_step(what)
        pieces, kind = list(full.view(self.world_size, -1)), dtype or full.dtype

        def added(received: list[Tensor]) -> Tensor:
            if self.world_size > 1:
                received[self.rank] = received[self.rank].clone()  # otherwise this piece would keep all of `full` alive
            return sums.add(step, tag, received, kind)

        return self._behind.swap(pieces, what, ("micro-batch", *words_of(tag)), added)
