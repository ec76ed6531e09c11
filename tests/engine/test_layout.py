"""What every rank keeps of every parameter, for any shapes and any number of ranks; no process group is needed.

Shapes are drawn so that parameters without elements, 0-d ones, fewer elements than ranks and no parameters at all are
frequent. The examples are the same in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import FrozenInstanceError

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fsdp.engine.layout import ContiguousLayout, Layout, Slot
from fsdp.engine.rows_layout import RowsLayout

KINDS: list[type[Layout]] = [ContiguousLayout, RowsLayout]
both_kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)

Shapes = list[tuple[int, ...]]
SHAPES = st.lists(st.lists(st.integers(0, 6), max_size=3).map(tuple), max_size=6)
WORLD_SIZES = st.integers(1, 9)


def for_any(**values: st.SearchStrategy) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return lambda test: settings(derandomize=True, deadline=None, max_examples=80)(given(**values)(test))


def pack(kind: type[Layout], shapes: Sequence[Sequence[int]], world_size: int) -> Layout:
    return kind.of(((f"p{number}", shape) for number, shape in enumerate(shapes)), world_size)


def values_of(layout: Layout) -> list[Tensor]:
    """A value for every parameter; all elements differ, and none is zero, which is what padding is here."""
    return [torch.arange(slot.start, slot.stop).add(1).double().view(slot.shape) for slot in layout.slots]


def cut(layout: Layout, values: Sequence[Tensor]) -> list[Tensor]:
    """Every rank's shard."""
    shards = [torch.zeros(layout.shard_numel, dtype=torch.float64) for _ in range(layout.world_size)]
    for rank, shard in enumerate(shards):
        for slot, value in enumerate(values):
            layout.shard_of(slot, value, shard, rank)
    return shards


# What every layout promises


@both_kinds
@for_any(shapes=SHAPES, world_size=WORLD_SIZES)
def test_the_ranks_keep_every_element_exactly_once(kind: type[Layout], shapes: Shapes, world_size: int) -> None:
    layout = pack(kind, shapes, world_size)
    for number, slot in enumerate(layout.slots):
        place = 0
        for kept in filter(None, (layout.interval(number, rank) for rank in range(world_size))):
            assert kept.start == place < kept.stop, "a gap, an overlap or nothing kept"
            place = kept.stop
        assert place == slot.numel


@for_any(shapes=SHAPES, world_size=WORLD_SIZES, align=st.sampled_from([1, 8]), block=st.integers(1, 12))
def test_no_block_of_a_parameter_is_divided_between_ranks(
    shapes: Shapes, world_size: int, align: int, block: int
) -> None:
    named = [(f"p{number}", shape) for number, shape in enumerate(shapes)]
    layout = ContiguousLayout.of(named, world_size, align, block=block)
    values = [torch.arange(1, slot.numel + 1).double().view(slot.shape) for slot in layout.slots]
    assert all(map(torch.equal, layout.unpack(torch.cat(cut(layout, values))), values))
    for rank in range(world_size):
        for kept in layout.intervals(rank):
            assert kept.start % block == 0
            assert kept.stop % block == 0 or kept.stop == layout.slots[kept.slot].numel


@both_kinds
@for_any(shapes=SHAPES, world_size=WORLD_SIZES)
def test_a_shard_is_its_intervals_in_order_and_padding(kind: type[Layout], shapes: Shapes, world_size: int) -> None:
    layout = pack(kind, shapes, world_size)
    for rank in range(world_size):
        free, last_slot = 0, -1
        for kept in layout.intervals(rank):
            assert kept.offset >= free
            assert kept.slot > last_slot, "one interval per parameter, in the order of parameters"
            free, last_slot = kept.offset + kept.numel, kept.slot
        assert free <= layout.shard_numel
        assert sum(kept.numel for kept in layout.intervals(rank)) + layout.padding(rank) == layout.shard_numel
        paddings = layout.paddings(rank)
        assert len(paddings) == len(layout.slots)
        assert min(paddings, default=0) >= 0
        ends = [*(kept.offset for kept in layout.intervals(rank)[1:]), layout.shard_numel]
        for kept, end in zip(layout.intervals(rank), ends, strict=False):
            assert kept.offset + kept.numel + paddings[kept.slot] <= end
    assert layout.padded_numel == world_size * layout.shard_numel
    assert sum(layout.padding(rank) for rank in range(world_size)) == layout.padded_numel - layout.numel


@both_kinds
@for_any(shapes=SHAPES, world_size=WORLD_SIZES)
def test_local_shards_are_views_of_what_a_rank_keeps(kind: type[Layout], shapes: Shapes, world_size: int) -> None:
    layout = pack(kind, shapes, world_size)
    values = values_of(layout)
    for rank, shard in enumerate(cut(layout, values)):
        local_shards = layout.local_shards(shard, rank)
        kept_slots = {kept.slot for kept in layout.intervals(rank)}
        assert [each.numel() > 0 for each in local_shards] == [slot in kept_slots for slot in range(len(values))]
        for kept in layout.intervals(rank):
            expected = values[kept.slot].flatten()[kept.start : kept.stop]
            assert torch.equal(local_shards[kept.slot], expected)
            assert torch.equal(local_shards[kept.slot].zero_(), shard[kept.offset : kept.offset + kept.numel])


@both_kinds
@for_any(shapes=SHAPES, world_size=WORLD_SIZES, align=st.sampled_from([1, 4]))
def test_what_is_divided_fills_its_places_and_nothing_else(
    kind: type[Layout], shapes: Shapes, world_size: int, align: int
) -> None:
    _assert_filled(kind.of(((f"p{number}", shape) for number, shape in enumerate(shapes)), world_size, align))


@both_kinds
@pytest.mark.parametrize("world_size", [2, 4, 5, 9])
def test_every_number_of_rows_leaves_zeros_where_there_are_none(kind: type[Layout], world_size: int) -> None:
    for rows in range(30):  # 5 on 4 ranks are 2, 2, 1 and none
        _assert_filled(pack(kind, [(rows, 3), (29 - rows,)], world_size))


@for_any(shape=st.lists(st.integers(0, 5), min_size=1, max_size=4), dim=st.integers(0, 3), world_size=WORLD_SIZES)
def test_along_any_dimension_local_tensors_are_torchs_chunks_in_a_row(
    shape: list[int], dim: int, world_size: int
) -> None:
    dim %= len(shape)
    layout = RowsLayout.of([("before", (3,)), ("p", shape)], world_size, dims=[0, dim])
    values = values_of(layout)
    shards = cut(layout, values)
    chunks = list(values[1].chunk(world_size, dim))
    for rank in range(world_size):
        chunk = chunks[rank] if rank < len(chunks) else values[1].narrow(dim, 0, 0)
        assert layout.local_shape(1, rank) == chunk.shape
        assert torch.equal(layout.local_shards(shards[rank], rank)[1].view(chunk.shape), chunk)
    full = torch.cat(shards)
    found = layout.unpack(full)[1]
    assert torch.equal(found, values[1])
    assert found.is_contiguous()
    _assert_filled(layout)


def _assert_filled(layout: Layout) -> None:
    values = values_of(layout)
    full = torch.full((layout.padded_numel,), torch.nan, dtype=torch.float64)
    for slot, places in enumerate(layout.places(full)):
        for place, part in zip(places, layout.divided(slot, values[slot]), strict=True):
            place.copy_(part)
    layout.clear_gaps(full)
    assert torch.equal(full, torch.cat(cut(layout, values))), "gaps are zero, and all else is where shards have it"


@both_kinds
@for_any(shapes=SHAPES, world_size=WORLD_SIZES, align=st.sampled_from([1, 4]))
def test_a_whole_buffer_shows_every_parameter_at_an_aligned_place(
    kind: type[Layout], shapes: Shapes, world_size: int, align: int
) -> None:
    layout = kind.of(((f"p{number}", shape) for number, shape in enumerate(shapes)), world_size, align)
    whole = torch.zeros(layout.unsharded_numel)
    views = layout.views(whole)
    assert [view.shape for view in views] == [torch.Size(shape) for shape in shapes]
    assert all(view.storage_offset() % align == 0 for view in views if view.numel())
    for view in views:
        view.add_(1)
    assert int(whole.sum()) == sum(slot.numel for slot in layout.slots), "views do not overlap"
    if layout.gathers_in_order:
        full = torch.arange(layout.padded_numel)
        assert all(map(torch.equal, layout.views(full), layout.unpack(full)))


@both_kinds
def test_parameters_are_packed_in_the_given_order(kind: type[Layout]) -> None:
    layout = kind.of([("weight", (2, 3)), ("nothing", (0, 4)), ("scale", ())], world_size=2)
    assert layout.slots == (
        Slot("weight", torch.Size((2, 3)), 0),
        Slot("nothing", torch.Size((0, 4)), 6),
        Slot("scale", torch.Size(()), 6),
    )
    assert [(slot.numel, slot.stop) for slot in layout.slots] == [(6, 6), (0, 6), (1, 7)]
    assert layout.numel == 7


@both_kinds
def test_values_of_any_dtype_and_memory_format_can_be_kept(kind: type[Layout]) -> None:
    layout = pack(kind, [(3, 4)], 2)
    value = torch.arange(12.0, dtype=torch.float64).view(4, 3).T.requires_grad_()
    shards = [torch.zeros(layout.shard_numel, dtype=torch.bfloat16) for _ in range(2)]
    for rank, shard in enumerate(shards):
        layout.shard_of(0, value, shard, rank)
        assert not shard.requires_grad
    assert torch.equal(layout.unpack(torch.cat(shards))[0], value.detach().bfloat16())


@both_kinds
def test_a_layout_is_a_value(kind: type[Layout]) -> None:
    layout = pack(kind, [(3,), ()], 2)
    assert layout.shard_numel > 0
    assert layout is pack(kind, [[3], []], 2), "units with the same parameters share it"
    assert hash(layout) == hash(pack(kind, [(3,), ()], 2))
    assert layout != pack(kind, [(3,), ()], 3)
    with pytest.raises(FrozenInstanceError):
        layout.world_size = 3  # type: ignore[misc]


# Contiguous: FairScale's shards


@for_any(shapes=SHAPES, world_size=WORLD_SIZES)
def test_contiguous_shards_are_torchs_chunks_of_the_flat_vector(shapes: Shapes, world_size: int) -> None:
    layout = pack(ContiguousLayout, shapes, world_size)
    values = values_of(layout)
    flat = torch.cat([value.flatten() for value in values]) if values else torch.empty(0, dtype=torch.float64)
    chunks = list(flat.chunk(world_size))
    largest = chunks[0].numel()
    chunks += [flat.new_empty(0)] * (world_size - len(chunks))  # torch leaves the last ones out if they are empty
    for shard, chunk in zip(cut(layout, values), chunks, strict=True):
        assert shard.numel() == largest
        assert torch.equal(shard[: chunk.numel()], chunk)
        assert not shard[chunk.numel() :].any(), "only the end is padded"


@for_any(shapes=SHAPES, world_size=WORLD_SIZES, align=st.integers(1, 9))
def test_aligned_parameters_start_at_multiples(shapes: Shapes, world_size: int, align: int) -> None:
    named = [(f"p{number}", shape) for number, shape in enumerate(shapes)]
    layout = ContiguousLayout.of(named, world_size, align)
    dense = ContiguousLayout.of(named, world_size)
    assert all(slot.start % align == 0 for slot in layout.slots)
    assert 0 <= layout.numel - dense.numel <= len(shapes) * (align - 1)
    values = values_of(layout)
    full = torch.cat(cut(layout, values))
    for value, gathered in zip(values, layout.unpack(full), strict=True):
        assert torch.equal(value, gathered)
    assert layout.padded_numel == sum(slot.numel for slot in layout.slots) + sum(layout.gaps)


@for_any(shapes=SHAPES, world_size=WORLD_SIZES, align=st.integers(1, 9))
def test_rows_are_aligned_where_that_leaves_no_gaps(shapes: Shapes, world_size: int, align: int) -> None:
    named = [(f"p{number}", shape) for number, shape in enumerate(shapes)]
    layout, dense = RowsLayout.of(named, world_size, align), RowsLayout.of(named, world_size)
    for kept in layout.intervals(0):  # the first rank's are complete
        assert kept.offset % align == 0 or kept.numel % align > 0
    values = values_of(layout)
    assert all(map(torch.equal, layout.unpack(torch.cat(cut(layout, values))), values))
    assert world_size == 1 or layout.shard_numel == dense.shard_numel, "gaps would be sent"


# Rows: DTensor's Shard(0)


@both_kinds
@for_any(shapes=SHAPES, world_size=WORLD_SIZES, left_out=st.sets(st.integers(0, 5)))
def test_what_is_left_out_takes_no_room_and_the_others_keep_theirs(
    kind: type[Layout], shapes: Shapes, world_size: int, left_out: set[int]
) -> None:
    layout = pack(kind, shapes, world_size)
    smaller = layout.leaving_out(left_out)
    values = [layout.slots[slot].numel * (slot not in left_out) for slot in range(len(shapes))]
    assert smaller.shard_numel <= layout.shard_numel
    for rank in range(world_size if smaller is not layout else 0):
        kept = [part.numel() for part in smaller.local_shards(torch.zeros(smaller.shard_numel), rank)]
        whole = [part.numel() for part in layout.local_shards(torch.zeros(layout.shard_numel), rank)]
        assert kept == [numel * (slot not in left_out) for slot, numel in enumerate(whole)]
    if kind is RowsLayout:
        assert smaller.shard_numel == 0 or any(values)
    else:
        assert smaller is layout  # all of one vector is sent


# Errors


@both_kinds
@pytest.mark.parametrize("world_size", [0, -1])
def test_a_world_has_at_least_one_rank(kind: type[Layout], world_size: int) -> None:
    with pytest.raises(ValueError, match=f"world_size must be at least 1, got {world_size}"):
        pack(kind, [(3,)], world_size)


@both_kinds
@pytest.mark.parametrize("shape", [(5,), (7,), (2, 3)])
def test_a_buffer_of_another_shape_is_refused(kind: type[Layout], shape: tuple[int, ...]) -> None:
    layout = pack(kind, [(4,), (2,)], 2)
    with pytest.raises(ValueError, match=r"a gathered buffer of this layout has shape \[6\], got \["):
        layout.unpack(torch.zeros(shape))


@both_kinds
@pytest.mark.parametrize("shape", [(2,), (6,), (1, 3)])
def test_a_shard_of_another_shape_is_refused(kind: type[Layout], shape: tuple[int, ...]) -> None:
    layout = pack(kind, [(4,), (2,)], 2)
    for use in (
        lambda shard: layout.local_shards(shard, 0),
        lambda shard: layout.shard_of(0, torch.zeros(4), shard, 0),
    ):
        with pytest.raises(ValueError, match=r"a shard of this layout has shape \[3\], got \["):
            use(torch.zeros(shape))


@both_kinds
def test_a_value_of_another_shape_is_refused_by_name(kind: type[Layout]) -> None:
    layout = kind.of([("a.weight", (2, 3))], 2)
    for shape in [(3, 2), (6,), (2, 4)]:
        with pytest.raises(ValueError, match=r"a\.weight: expected shape \(2, 3\), got"):
            layout.shard_of(0, torch.zeros(shape), torch.zeros(layout.shard_numel), 0)
