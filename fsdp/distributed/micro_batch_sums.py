"""Gradients summed in the order of micro-batches: `SumByMicroBatch` is a communicator that takes the place of a sum.

A reduce-scatter adds the gradients of W ranks, and an accumulation adds the results of several reduce-scatters. The
order of additions, and so the bits, differ for each W. With this communicator, ranks exchange the pieces unchanged.
Rank r computes its k-th gradient of a step with micro-batch ``k * W + r``. So the pieces of consecutive reductions,
each in the order of ranks, are in the order of micro-batches for each W, and a `TreeSum` adds them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fsdp.distributed.communicator import Communicator, Pending, Tag, words_of
from fsdp.distributed.custom_collectives import InFront
from fsdp.distributed.tree_sum import TreeSum


class MicroBatchSums:
    """`MicroBatchSums` are the sums of a step's gradients, each of as many micro-batches as were reduced so far.

    Args:
        micro_batches: so many has a step.

    Attributes:
        step: stands for the step that is being computed; None between steps.
    """

    def __init__(self, micro_batches: int) -> None:
        self._micro_batches = micro_batches
        self.step: object | None = None
        self._sums: dict[Tag, TreeSum] = {}
        self._added: dict[Tag, int] = {}

    def begin(self) -> None:
        """Begin a step; delete the remains of an abandoned step."""
        self.end()
        self.step = object()

    def end(self) -> None:
        """The step has ended, or is given up."""
        self.step = None
        self._sums.clear()
        self._added.clear()

    @property
    def added(self) -> set[int]:
        """Return the numbers of micro-batches of all gradients: a single number, if all are equal."""
        return set(self._added.values())

    def require_step(self, what: str) -> object:
        """Return the step; raise an error for a reduction between steps."""
        if self.step is None:
            raise RuntimeError(
                f"{what}: this backward is of no micro-batch. With fsdp.SameBits, each is inside of `for number in "
                "bits.step(...)`."
            )
        return self.step

    def add(self, step: object, tag: Tag, pieces: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Take this rank's piece ``[n]`` of each rank's gradient, in the order of ranks, as it was sent in a step.

        Returns:
            The mean ``[n]`` over all micro-batches of the step, of this dtype, if these were the last ones, and zeros
            before: the two are to be added up.
        """
        zeros = pieces[0].new_zeros(pieces[0].shape, dtype=dtype)
        if step is not self.step:
            return zeros  # of a backward that was given up
        wide = torch.promote_types(torch.promote_types(pieces[0].dtype, dtype), torch.float32)
        total = self._sums.setdefault(tag, TreeSum())
        for piece in pieces:
            total.add(piece.to(wide))
        self._added[tag] = self._added.get(tag, 0) + len(pieces)
        if total.count < self._micro_batches:
            return zeros
        del self._sums[tag]
        # Added to zeros, as it is where there was an earlier reduction: a negative zero would be a positive one there.
        return zeros.add_(total.total().div_(self._micro_batches).to(dtype))


class SumByMicroBatch(InFront):
    """A communicator in which gradients are summed in the order of micro-batches."""

    def __init__(self, behind: Communicator, collective: MicroBatchSums) -> None:
        super().__init__(behind, collective)
        self.sends_pieces = True  # or what is replicated would be summed by an all-reduce

    def serves(self, sums: MicroBatchSums) -> bool:
        """Return whether it adds to these."""
        return self._collective is sums

    def reduce_scatter(self, full: Tensor, what: str, tag: Tag, dtype: torch.dtype | None = None) -> Pending:
        sums: MicroBatchSums = self._collective
        step = sums.require_step(what)
        pieces, kind = list(full.view(self.world_size, -1)), dtype or full.dtype

        def added(received: list[Tensor]) -> Tensor:
            if self.world_size > 1:
                received[self.rank] = received[self.rank].clone()  # or all of `full` would live as long as a part of it
            return sums.add(step, tag, received, kind)

        return self._behind.swap(pieces, what, ("micro-batch", *words_of(tag)), added)
