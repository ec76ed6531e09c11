"""Arithmetic of intervals of time: their union, and how much of one set lies beside another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]  # start, stop; contains nothing if stop <= start


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the points of all intervals as disjoint intervals in order, which do not touch."""
    found: list[Interval] = []
    for start, stop in sorted(interval for interval in intervals if interval[0] < interval[1]):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return found


def length(intervals: Iterable[Interval]) -> float:
    """Return the length of the union."""
    return sum(stop - start for start, stop in union(intervals))


def common(one: Iterable[Interval], other: Iterable[Interval]) -> list[Interval]:
    """Return the points that are in both unions, as disjoint intervals in order."""
    first, second = union(one), union(other)
    found: list[Interval] = []
    i = j = 0
    while i < len(first) and j < len(second):
        start, stop = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < stop:
            found.append((start, stop))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return found


def overlap(communication: Sequence[Interval], computation: Sequence[Interval]) -> float | None:
    """Return the part of the communication's time that lies beside computation, 0 to 1; None without communication."""
    whole = length(communication)
    return length(common(communication, computation)) / whole if whole else None
