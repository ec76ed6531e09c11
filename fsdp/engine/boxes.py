"""Boxes of elements, and conversions between boxes and ranges: other libraries' checkpoint files contain boxes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import mul


@dataclass(frozen=True)
class Box:
    """Elements ``offsets[d]:offsets[d] + sizes[d]`` along every dimension d of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return a box of all elements of a tensor with this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @classmethod
    def rows(cls, first: int, last: int, shape: Sequence[int]) -> Box:
        """Return the rows ``first:last`` of a tensor of this shape."""
        return cls((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def moved(self, by: Sequence[int]) -> Box:
        """Return the same box in a larger tensor, in which the box's tensor begins at `by`."""
        return Box(tuple(begin + more for begin, more in zip(self.offsets, by, strict=True)), self.sizes)

    def ranges(self, shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges of elements ``start:stop`` of the row-major box in an enclosing row-major tensor.

        There is a single range if the box is a part of the first dimension, otherwise a range for each row before the
        last divided dimension.
        """
        parts = [dim for dim, size in enumerate(self.sizes) if size != shape[dim]]
        last = parts[-1] if parts else 0
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        first, run = sum(map(mul, self.offsets, strides)), math.prod(self.sizes[last:])
        while start < stop:
            row, place = divmod(start, run)
            end = min(stop, start + run - place)
            begin = first + place
            for dim in reversed(range(last)):
                row, index = divmod(row, self.sizes[dim])
                begin += index * strides[dim]
            yield begin, begin + end - start
            start = end


def boxes_of(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Return elements ``start:stop`` of a row-major tensor as boxes, each of which is a contiguous part of the range.

    The boxes are in the order of the range: the end of a row, complete rows, and the beginning of a row, and so on for
    each incomplete row. There are at most ``2 * len(shape) - 1`` boxes, and none for an empty range.
    """
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    row, inner = math.prod(shape[1:]), shape[1:]
    first, last = -(-start // row), stop // row  # the complete rows
    if first > last:  # within one row
        yield from _in_row(inner, last, start - last * row, stop - last * row)
        return
    yield from _in_row(inner, first - 1, start - (first - 1) * row, row if start < first * row else 0)
    if first < last:
        yield Box.rows(first, last, shape)
    yield from _in_row(inner, last, 0, stop - last * row)


def _in_row(inner: Sequence[int], row: int, start: int, stop: int) -> Iterator[Box]:
    for box in boxes_of(inner, start, stop):
        yield Box((row, *box.offsets), (1, *box.sizes))


def overlap(one: Box, other: Box) -> Box | None:
    """Return the intersection of two boxes; None if it is empty."""
    begins = tuple(map(max, one.offsets, other.offsets))
    ends = (
        min(first + size, second + more)
        for first, size, second, more in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    )
    sizes = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
    return Box(begins, sizes) if all(size > 0 for size in sizes) else None
