"""`TreeSum` adds up tensors in an order that depends on their numbers alone, whoever has brought them."""

from __future__ import annotations

from torch import Tensor


class TreeSum:
    """A `TreeSum` adds up tensors that come in the order of their numbers, along a binary tree over the numbers.

    As a binary counter: it holds sums of 1, 2, 4, ... tensors in a row, at most one of each, and two of the same length
    become one of twice the length. So it takes the memory of ``log2(count) + 1`` tensors.

    Attributes:
        count: so many have come.
    """

    def __init__(self) -> None:
        self.count = 0
        self._parts: list[Tensor] = []  # the longest first

    def add(self, leaf: Tensor) -> None:
        """Add the next one, whose memory may be kept and overwritten."""
        longer = self.count
        while longer & 1:
            leaf = self._parts.pop().add_(leaf)
            longer >>= 1
        self._parts.append(leaf)
        self.count += 1

    def total(self) -> Tensor:
        """Return the sum of all that have come, and begin anew."""
        total = self._parts.pop()
        while self._parts:
            total = self._parts.pop().add_(total)
        self.count = 0
        return total
