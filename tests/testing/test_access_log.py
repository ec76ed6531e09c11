"""Vector clocks and byte ranges, against what is plain to see."""

from __future__ import annotations

from itertools import product

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp.testing.access_log import Access, Memory, Timeline, spans_of

BYTES, TIMELINES = 6, 3
# What a timeline does: reads or writes bytes, or waits for all that another one has done.
uses = st.tuples(st.integers(0, TIMELINES - 1), st.booleans(), st.integers(0, BYTES - 1), st.integers(1, BYTES))
waits = st.tuples(st.integers(0, TIMELINES - 1), st.integers(0, TIMELINES - 1))


@given(st.lists(st.one_of(uses, waits), max_size=24))
@settings(max_examples=150, deadline=None)
def test_an_access_is_reported_where_an_earlier_one_is_in_no_order_with_it(steps: list[tuple[int, ...]]) -> None:
    timelines = [Timeline(str(number)) for number in range(TIMELINES)]
    memory = Memory(None, BYTES)
    before: list[set[int]] = [set() for _ in range(TIMELINES)]  # for each, the numbers of accesses that lie before it
    noted: list[tuple[range, bool]] = []
    spoiled: set[int] = set()  # bytes with a report, of which the log keeps only the latest
    for step in steps:
        if len(step) == 2:
            waiting, awaited = step
            timelines[waiting].wait(timelines[awaited].moment())
            before[waiting] |= before[awaited]
            continue
        number, writes, start, length = step
        span = range(start, min(BYTES, start + length))
        late = {
            byte
            for other, (others, wrote) in enumerate(noted)
            for byte in set(span) & set(others)
            if (writes or wrote) and other not in before[number]
        }
        timeline = timelines[number]
        found = memory.note(Access("use", timeline, timeline.tick()), (span.start, span.stop), bool(writes))
        if not spoiled & set(span):
            assert (found is not None) == bool(late)
        spoiled |= late
        before[number].add(len(noted))
        noted.append((span, bool(writes)))


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), max_size=4),
    st.integers(0, 5),
    st.sampled_from([torch.uint8, torch.float32]),
)
@settings(max_examples=150, deadline=None)
def test_the_bytes_of_a_view_are_those_of_its_elements(
    dims: list[tuple[int, int]], start: int, dtype: torch.dtype
) -> None:
    shape, stride = [length for length, _ in dims], [step for _, step in dims]
    view = torch.zeros(200, dtype=dtype).as_strided(shape, stride, start)
    size = view.element_size()
    elements = {
        start + sum(index * step for index, step in zip(place, stride, strict=True))
        for place in product(*map(range, shape))
    }
    expected = {size * element + byte for element in elements for byte in range(size)}
    assert {byte for first, stop in spans_of(view) for byte in range(first, stop)} == expected


def test_a_view_without_elements_has_no_bytes() -> None:
    assert list(spans_of(torch.zeros(3, 0))) == []


def test_many_runs_are_taken_together() -> None:
    column = torch.zeros(5000, 2, dtype=torch.uint8)[:, 0]
    assert list(spans_of(column)) == [(0, 9999)]


def test_freed_memory_waits_for_those_who_use_it() -> None:
    owner, other, recorded = Timeline("owner"), Timeline("other"), Timeline("recorded")
    memory = Memory(owner, 4)
    for timeline in (owner, other, recorded):
        memory.note(Access("use", timeline, timeline.tick()), (0, 4), False)
    memory.kept_for.add(recorded)
    assert [late.timeline for late in memory.not_before(owner)] == [other]
    owner.wait(other.moment())
    assert not list(memory.not_before(owner))
