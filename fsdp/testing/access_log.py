"""A log of who has read and written which bytes of memory, and of what is in order.

A `Timeline` is whatever does one thing after the other: the host, a stream, the stream of a backend's collectives, one
message. Each has a clock that counts what it does, and knows how far the others were when it last waited for them, in
person or through somebody who had (a *vector clock*). An access lies before what a timeline does now if the timeline
has waited for it; two accesses to the same bytes, one of which writes, must lie one before the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

Span = tuple[int, int]  # the first byte, and the first one behind
Moment = Mapping["Timeline", int]

_MANY_RUNS = 1024


class Timeline:
    """A `Timeline` is what happens one after the other, and knows of others how far they were when it waited."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._seen: dict[Timeline, int] = {self: 0}

    def tick(self) -> int:
        """Go on by one, and return the time that it is now."""
        self._seen[self] += 1
        return self._seen[self]

    def moment(self) -> Moment:
        """Return what it knows now, for others to wait for."""
        return dict(self._seen)

    def wait(self, moment: Moment) -> None:
        """Let what it does from now on come after a moment of others."""
        for timeline, time in moment.items():
            self._seen[timeline] = max(time, self._seen.get(timeline, 0))

    def is_after(self, access: Access) -> bool:
        """Return whether what it does now comes after an access."""
        return self._seen.get(access.timeline, -1) >= access.time


@dataclass(eq=False)
class Access:
    """One operator that reads or writes memory.

    Attributes:
        operator: its name.
        timeline: on which it happens; what a timeline has done is another's, once that has waited for all of it.
        time: there.
        places: where in the source it was called, innermost first.
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
    """One block of memory, from when it is allocated until it is freed.

    Args:
        owner: the timeline that gets its memory when it is freed; None if nobody is given it too early.
        nbytes: of the block.
    """

    def __init__(self, owner: Timeline | None, nbytes: int) -> None:
        self.owner, self.nbytes = owner, nbytes
        self.kept_for: set[Timeline] = set()  # its memory is nobody's until what they have done is over
        self._entries: list[_Entry] = []

    def note(self, access: Access, span: Span, writes: bool) -> tuple[Access, bool] | None:
        """Note an access of bytes.

        Returns:
            One before it that is in no order with it, and whether that one writes.
        """
        found, kept = None, []
        for entry in self._entries:
            if entry.start >= span[1] or entry.stop <= span[0]:
                kept.append(entry)
                continue
            is_before = access.timeline.is_after(entry.access)
            if not is_before and (writes or entry.writes):
                found = found or (entry.access, entry.writes)
            # What comes after a write comes after all that the write came after, so these need not be kept.
            if writes or (is_before and not entry.writes):
                kept += entry.without(span)
            else:
                kept.append(entry)
        self._entries = [*kept, _Entry(*span, access, writes)]
        return found

    def not_before(self, timeline: Timeline) -> Iterator[Access]:
        """Yield what a timeline has to wait for before it gets this memory."""
        for entry in self._entries:
            if entry.access.timeline not in self.kept_for and not timeline.is_after(entry.access):
                yield entry.access


def spans_of(tensor: Tensor) -> Iterable[Span]:
    """Return the bytes of a tensor's storage that it looks at: of each run, or from first to last if there are many."""
    size = tensor.element_size()
    start = int(tensor.storage_offset()) * size
    dims = sorted((int(step), int(length)) for step, length in zip(tensor.stride(), tensor.shape, strict=True))
    if any(length == 0 for _, length in dims):
        return []
    run = 1
    while dims and dims[0][0] <= run:
        stride, length = dims.pop(0)
        run += stride * (length - 1)
    count = 1
    for _, length in dims:
        count *= length
    if count > _MANY_RUNS:
        return [(start, start + size * (run + sum(stride * (length - 1) for stride, length in dims)))]
    firsts = [0]
    for stride, length in dims:
        firsts = [first + stride * number for first in firsts for number in range(length)]
    return [(start + size * first, start + size * (first + run)) for first in firsts]
