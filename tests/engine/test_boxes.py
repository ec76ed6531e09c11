"""A range of a row-major tensor as boxes, for any shapes and ranges."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from fsdp.engine.boxes import Box, boxes_of
from tests.engine.test_layout import for_any

# With a range in it: two of the borders between its elements.
SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)
RANGES = SHAPES.flatmap(
    lambda shape: st.tuples(
        st.just(shape), st.lists(st.integers(0, torch.Size(shape).numel()), min_size=2, max_size=2).map(sorted)
    )
)

Range = tuple[tuple[int, ...], list[int]]


def numbered(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape)


def inside(box: Box, tensor: Tensor) -> Tensor:
    return tensor[tuple(slice(begin, begin + size) for begin, size in zip(box.offsets, box.sizes, strict=True))]


@for_any(drawn=RANGES)
def test_the_boxes_one_after_the_other_are_the_range(drawn: Range) -> None:
    shape, (start, stop) = drawn
    found = [element for box in boxes_of(shape, start, stop) for element in inside(box, numbered(shape)).flatten()]
    assert found == list(range(start, stop))


@for_any(drawn=RANGES)
def test_each_box_is_in_its_shape_a_view_of_the_range(drawn: Range) -> None:
    shape, (start, stop) = drawn
    kept, done = numbered(shape).flatten()[start:stop], 0
    for box in boxes_of(shape, start, stop):
        assert torch.equal(kept[done : done + box.numel].view(box.sizes), inside(box, numbered(shape)))
        done += box.numel


@for_any(drawn=RANGES)
def test_there_are_as_few_boxes_as_a_range_can_need(drawn: Range) -> None:
    shape, (start, stop) = drawn
    count = len(list(boxes_of(shape, start, stop)))
    assert count <= max(1, 2 * len(shape) - 1)
    assert (count == 0) == (start == stop)


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4), (2, 1, 3, 2)])
def test_whole_rows_are_one_box(shape: tuple[int, ...]) -> None:
    row = torch.Size(shape[1:]).numel()
    inner = (0,) * (len(shape) - 1)
    assert list(boxes_of(shape, row, shape[0] * row)) == [Box((1, *inner), (shape[0] - 1, *shape[1:]))]


def test_a_range_that_begins_and_ends_within_rows() -> None:
    assert list(boxes_of((4, 5), 3, 17)) == [Box((0, 3), (1, 2)), Box((1, 0), (2, 5)), Box((3, 0), (1, 2))]


def test_a_number_is_one_box_without_dimensions() -> None:
    assert list(boxes_of((), 0, 1)) == [Box((), ())]


def test_nothing_is_no_box() -> None:
    assert [list(boxes_of(shape, 0, 0)) for shape in [(), (3,), (0,), (2, 0, 3)]] == [[], [], [], []]


def test_a_box_of_a_block_is_found_in_the_whole() -> None:
    assert Box((1, 0), (1, 2)).moved((3, 4)) == Box((4, 4), (1, 2))
