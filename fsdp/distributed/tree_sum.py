"""`TreeSum` adds tensors in an order that only depends on their numbers, not on the ranks that computed them."""

from __future__ import annotations

from torch import Tensor


class TreeSum:
    """A `TreeSum` adds tensors, passed in the order of their numbers, along a binary tree over the numbers.

    The method resembles a binary counter. The object holds sums of 1, 2, 4, ... consecutive tensors, at most one of
    each length. Two sums of the same length are added to a sum of twice the length. At most ``log2(count) + 1`` tensors
    are held.

    Attributes:
        count: the number of tensors added.
    """

    def __init__(self) -> None:
        self.count = 0
        self._parts: list[Tensor] = []  # the sums, the longest first

    def add(self, leaf: Tensor) -> None:
        """Add the next tensor, whose memory may be kept and overwritten."""
        longer = self.count
        while longer & 1:
            leaf = self._parts.pop().add_(leaf)
            longer >>= 1
        self._parts.append(leaf)
        self.count += 1

    def total(self) -> Tensor:
        """Return the sum of all added tensors, and reset this object."""
        total = self._parts.pop()
        while self._parts:
            total = self._parts.pop().add_(total)
        self.count = 0
        return total
