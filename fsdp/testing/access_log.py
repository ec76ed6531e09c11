"""A log of reads and writes of memory, which checks their order.

A `Timeline` is a sequence of operations: the host, a stream, the stream of a backend's collectives, or a message. Each
timeline has a clock that counts its operations, and records the clocks of other timelines at its last wait for them,
directly or indirectly (a *vector clock*). An access precedes the current operation of a timeline if the timeline
waited for it. If at least one of two accesses to the same bytes is a write, one access must precede the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

Span = tuple[int, int]  # the first byte, and the first byte after the span
Moment = Mapping["Timeline", int]

_MANY_RUNS = 1024


class Timeline:
    """A sequence of operations, with the clocks of other timelines at its last wait for them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._seen: dict[Timeline, int] = {self: 0}

    def tick(self) -> int:
        self._seen[self] += 1
        return self._seen[self]

    def moment(self) -> Moment:
        """Return the current vector clock, for other timelines to wait for."""
        return dict(self._seen)

    def wait(self, moment: Moment) -> None:
        """Make later operations follow a moment of other timelines."""
        for timeline, time in moment.items():
            self._seen[timeline] = max(time, self._seen.get(timeline, 0))

    def is_after(self, access: Access) -> bool:
        """Return whether the current operation follows an access."""
        return self._seen.get(access.timeline, -1) >= access.time


@dataclass(eq=False)
class Access:
    """An operator that reads or writes memory.

    Attributes:
        operator: the name of the operator.
        timeline: the timeline of the access. The accesses of an awaited message belong to the host's timeline.
        time: the time on the timeline.
        places: the source locations of the call, innermost first.
    """

    operator: str
    timeline: Timeline
    time: int
    places: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.happened_on = self.timeline.name


@dataclass(frozen=True)
class _Entry:
    start: int
    stop: int
    access: Access
    writes: bool

    def without(self, span: Span) -> Iterator[_Entry]:
        if self.start < span[0]:
            yield _Entry(self.start, min(self.stop, span[0]), self.access, self.writes)
        if self.stop > span[1]:
            yield _Entry(max(self.start, span[1]), self.stop, self.access, self.writes)


class Memory:
    """A block of memory, from its allocation until its release.

    Args:
        owner: the timeline that can reuse the memory immediately after the release; None if reuse is always safe.
        nbytes: the size of the block.
    """

    def __init__(self, owner: Timeline | None, nbytes: int) -> None:
        self.owner, self.nbytes = owner, nbytes
        self.kept_for: set[Timeline] = set()  # the memory is not reused before the accesses of these timelines end
        self._entries: list[_Entry] = []

    def note(self, access: Access, span: Span, writes: bool) -> tuple[Access, bool] | None:
        """Record an access of bytes.

        Returns:
            An earlier access without an order to this access, and whether the earlier access writes; None if none.
        """
        found, kept = None, []
        for entry in self._entries:
            if entry.start >= span[1] or entry.stop <= span[0]:
                kept.append(entry)
                continue
            is_before = access.timeline.is_after(entry.access)
            if not is_before and (writes or entry.writes):
                found = found or (entry.access, entry.writes)
            # An access after a write is also after all predecessors of the write, so the predecessors are deleted.
            if writes or (is_before and not entry.writes):
                kept += entry.without(span)
            else:
                kept.append(entry)
        self._entries = [*kept, _Entry(*span, access, writes)]
        return found

    def not_before(self, timeline: Timeline) -> Iterator[Access]:
        """Yield the accesses for which a timeline must wait before it can reuse this memory."""
        for entry in self._entries:
            if entry.access.timeline not in self.kept_for and not timeline.is_after(entry.access):
                yield entry.access


def spans_of(tensor: Tensor) -> Iterable[Span]:
    """Return the spans of a tensor in its storage: one per contiguous run, or a single span if there are many runs."""
    size = tensor.element_size()
    start = int(tensor.storage_offset()) * size
    dims = sorted((int(step), int(length)) for step, length in zip(tensor.stride(), tensor.shape, strict=True))
    if any(length == 0 for _, length in dims):
        return []
    run = 1
    while dims and dims[0][0] <= run:
        stride, length = dims.pop(0)
        run += stride * (length - 1)
    if math.prod(length for _, length in dims) > _MANY_RUNS:
        return [(start, start + size * (run + sum(stride * (length - 1) for stride, length in dims)))]
    firsts = [0]
    for stride, length in dims:
        firsts = [first + stride * number for first in firsts for number in range(length)]
    return [(start + size * first, start + size * (first + run)) for first in firsts]
