"""`TreeSum` adds tensors in an order that depends on their numbers alone, not on the ranks that computed them."""

from __future__ import annotations

from torch import Tensor


class TreeSum:
    """A `TreeSum` adds tensors, passed in the order of their numbers, along a binary tree over the numbers.

    The method resembles a binary counter. The object holds sums of 1, 2, 4, ... consecutive tensors, at most a single
    sum of each length, and adds two sums of the same length to a sum of twice the length. So the sum requires the
    memory of ``log2(count) + 1`` tensors.

    Attributes:
        count: the number of tensors added.
    """

    def __init__(self) -> None:
        self.count = 0
        self._parts: list[Tensor] = []  # the longest first

    def add(self, leaf: Tensor) -> None:
        """Add the next tensor; its memory may be kept and overwritten."""
        longer = self.count
        while longer & 1:
            leaf = self._parts.pop().add_(leaf)
            longer >>= 1
        self._parts.append(leaf)
        self.count += 1

    def total(self) -> Tensor:
        """Return the sum of all added tensors, and start again."""
        total = self._parts.pop()
        while self._parts:
            total = self._parts.pop().add_(total)
        self.count = 0
        return total
