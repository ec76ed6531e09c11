"""`RowsLayout` divides every parameter along a dimension, like a `DTensor` with ``Shard``."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fsdp.engine.layout import Interval, Layout

if TYPE_CHECKING:
    from fsdp.engine.boxes import Box


@dataclass(frozen=True)
class Chunk:
    """A rank's maximum number of rows of a parameter in the rows layout.

    Rows are slices along `dim`. The rows of a rank are consecutive, in the order of the contiguous local tensor.
    """

    shape: torch.Size  # of the parameter; for a scalar, the shape of a single row
    dim: int  # the divided dimension
    rows: int  # of the chunk; the last ranks' chunks may be short or empty
    offset: int  # in the shard

    @cached_property
    def total(self) -> int:
        """The number of rows of the parameter."""
        return self.shape[self.dim]

    def of_rows(self, rows: int) -> torch.Size:
        """Return the shape of a local tensor with this number of rows."""
        return torch.Size([*self.shape[: self.dim], rows, *self.shape[self.dim + 1 :]])

    @cached_property
    def row_numel(self) -> int:
        return self.of_rows(1).numel()

    @cached_property
    def split(self) -> torch.Size:
        """The shape of all full chunks, with `dim` split into a dimension of ranks and a dimension of rows."""
        return torch.Size([*self.shape[: self.dim], self.full_ranks, self.rows, *self.shape[self.dim + 1 :]])

    @cached_property
    def numel(self) -> int:
        return self.rows * self.row_numel

    @cached_property
    def stop(self) -> int:
        return self.offset + self.numel

    @cached_property
    def full_ranks(self) -> int:
        """The number of ranks with a full chunk."""
        return self.total // self.rows if self.rows and self.row_numel else 0

    @cached_property
    def rest(self) -> int:
        """The number of rows of the rank after the ranks with full chunks."""
        return self.total - self.full_ranks * self.rows if self.row_numel else 0


class RowsLayout(Layout):
    """Divides every parameter along its `dim` into `world_size` chunks of equally many rows: ``Shard`` of DTensor.

    Short or empty chunks are padded, so all shards are of the same size. A scalar counts as a single row. In
    the gathered buffer the chunks of a parameter are ``shard_numel`` apart, so `unpack` copies.

    Chunks with a multiple of `align` elements begin at such a multiple and precede all other chunks, without gaps.
    """

    @cached_property
    def _chunks(self) -> tuple[Chunk, ...]:
        """The chunks of each parameter."""
        chunks = []
        for slot in self.slots:
            shape = slot.shape or torch.Size([1])
            chunks.append(Chunk(shape, slot.dim, -(-shape[slot.dim] // self.world_size), slot.start))
        if not self.gathers_in_order:
            # Gaps would be sent: chunks that would misalign the next chunk are therefore last.
            offset = 0
            for number in sorted(range(len(chunks)), key=lambda number: chunks[number].numel % self.align > 0):
                chunks[number] = replace(chunks[number], offset=offset)
                offset = chunks[number].stop
        return tuple(chunks)

    def __post_init__(self) -> None:
        super().__post_init__()
        for slot, chunk in zip(self.slots, self._chunks, strict=True):
            if chunk.rows < chunk.total and chunk.numel % self.block:
                raise ValueError(
                    f"{slot.name}: {chunk.rows} rows of {chunk.row_numel} elements on each of {self.world_size} ranks "
                    f"are not a multiple of the block of {self.block} elements. Shard it along another dimension "
                    "(shard_placement_fn), or use FullyShardedDataParallel, which pads, or ignored_params"
                )

    @cached_property
    def shard_numel(self) -> int:
        return max((chunk.stop for chunk in self._chunks), default=0)

    @property
    def gathers_in_order(self) -> bool:
        return self.world_size == 1

    def rows(self, slot: int, rank: int) -> tuple[int, int]:
        """Return the first row, and the row after the last, that `rank` keeps of parameter number `slot`."""
        chunk = self._chunks[slot]
        return min(rank * chunk.rows, chunk.total), min((rank + 1) * chunk.rows, chunk.total)

    def local_shape(self, slot: int, rank: int) -> torch.Size:
        """Return the shape of the rank's local tensor of a parameter."""
        first, last = self.rows(slot, rank)
        return self._chunks[slot].of_rows(last - first) if self.slots[slot].shape else self.slots[slot].shape

    def local_place(self, slot: int, rank: int) -> tuple[torch.Size, tuple[int, ...], int]:
        """Return the place of a parameter's local tensor in the rank's shard: size, stride and offset."""
        size, interval = self.local_shape(slot, rank), self.interval(slot, rank)
        return size, torch.empty(size, device="meta").stride(), interval.offset if interval else 0

    def local_box(self, slot: int, rank: int) -> Box:
        """Return the elements of a parameter that the rank keeps, in row-major order in the shard."""
        sizes = self.local_shape(slot, rank)
        first = self.rows(slot, rank)[0]
        from fsdp.engine.boxes import Box  # for files and sharded state

        return Box(tuple(first if dim == self.slots[slot].dim else 0 for dim in range(len(sizes))), tuple(sizes))

    def _local_shard_of(self, slot: int, value: Tensor, rank: int) -> Tensor:
        first, last = self.rows(slot, rank)
        rows = value.view(1) if value.dim() == 0 else value
        return rows.narrow(self.slots[slot].dim, first, last - first).reshape(-1)

    def interval(self, slot: int, rank: int) -> Interval | None:
        chunk = self._chunks[slot]
        first, last = self.rows(slot, rank)
        if first >= last or chunk.row_numel == 0:
            return None
        return Interval(slot, first * chunk.row_numel, last * chunk.row_numel, chunk.offset)

    def vector_of(self, slot: int, value: Tensor) -> Tensor:
        if self.slots[slot].dim == 0:
            return super().vector_of(slot, value)
        return torch.cat([self._local_shard_of(slot, value, rank) for rank in range(self.world_size)])

    def value_of(self, slot: int, vector: Tensor) -> Tensor:
        if self.slots[slot].dim == 0:
            return super().value_of(slot, vector)
        shapes = [self.local_shape(slot, rank) for rank in range(self.world_size)]
        parts = vector.split([shape.numel() for shape in shapes])
        return torch.cat([part.view(shape) for part, shape in zip(parts, shapes, strict=True)], self.slots[slot].dim)

    def paddings(self, rank: int) -> list[int]:
        order = sorted(range(len(self.slots)), key=lambda slot: (self._chunks[slot].offset, self._chunks[slot].stop))
        begins, paddings = [self._chunks[slot].offset for slot in order], [0] * len(order)
        for slot, begin, end in zip(order, begins, [*begins[1:], self.shard_numel], strict=bool(order)):
            interval = self.interval(slot, rank)
            paddings[slot] = end - begin - (interval.numel if interval else 0)
        return paddings

    def unpack(self, full: Tensor) -> list[Tensor]:
        if self.gathers_in_order:
            return self.views(full)
        unsharded = full.new_empty(self.unsharded_numel)
        for place, part in zip(*self.pairs(full, unsharded), strict=True):
            part.copy_(place)
        return self.views(unsharded)

    def places(self, full: Tensor) -> list[list[Tensor]]:
        self._check(full, self.padded_numel, "gathered buffer")
        first = int(full.storage_offset())
        # Strides are cached: this runs for every gradient, and views of views are slow.
        return [[full.as_strided(size, stride, first + at) for size, stride, at in each] for each in self._geometry]

    @cached_property
    def _geometry(self) -> tuple[tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...], ...]:
        """The places of each parameter: size, stride and offset."""
        found = []
        for chunk in self._chunks:
            places = []
            if chunk.full_ranks:
                local = torch.empty(chunk.of_rows(chunk.rows), device="meta")
                size, stride = (chunk.full_ranks, *local.shape), (self.shard_numel, *local.stride())
                places.append((size, stride, chunk.offset))
            if chunk.rest:
                local = torch.empty(chunk.of_rows(chunk.rest), device="meta")
                places.append((local.shape, local.stride(), chunk.full_ranks * self.shard_numel + chunk.offset))
            found.append(tuple(places))
        return tuple(found)

    def divided(self, slot: int, value: Tensor) -> list[Tensor]:
        chunk, found = self._chunks[slot], []
        bound = chunk.full_ranks * chunk.rows
        if chunk.full_ranks:
            full = value.narrow(chunk.dim, 0, bound) if chunk.rest else value
            sizes = chunk.full_ranks, chunk.rows
            by_rank = full.view(chunk.split) if full.is_contiguous() else full.unflatten(chunk.dim, sizes)
            found.append(by_rank.movedim(chunk.dim, 0) if chunk.dim else by_rank)
        if chunk.rest:
            found.append(value.narrow(chunk.dim, bound, chunk.rest))
        return found

    @cached_property
    def _gaps(self) -> tuple[tuple[int, int, int], ...]:
        """The unused ranges of shards, each with the first rank for which the range is unused."""
        found, stop = [], 0
        for chunk in sorted(self._chunks, key=lambda chunk: (chunk.offset, chunk.stop)):
            found.append((0, stop, chunk.offset))
            found.append((chunk.full_ranks, chunk.offset + chunk.rest * chunk.row_numel, chunk.stop))
            found.append((chunk.full_ranks + 1, chunk.offset, chunk.stop))
            stop = chunk.stop
        return tuple(gap for gap in found if gap[0] < self.world_size and gap[1] < gap[2])

    def clear_gaps(self, full: Tensor) -> None:
        by_rank = full.view(self.world_size, self.shard_numel)
        for rank, start, stop in self._gaps:
            by_rank[rank:, start:stop].zero_()

    def leaving_out(self, slots: Collection[int]) -> Layout:
        if not slots:
            return self
        left, start = [], 0
        for number, slot in enumerate(self.slots):
            shape, dim = (torch.Size([0]), 0) if number in slots else (slot.shape, slot.dim)
            left.append(replace(slot, shape=shape, dim=dim, start=start))
            start = left[-1].stop
        return replace(self, slots=tuple(left))


torch.serialization.add_safe_globals([RowsLayout])  # like the other layout, in `flat_param`


class Arrangement:
    """A buffer to all-gather into, and the views for copies from it to the unsharded parameters.

    Like the leaves, all tensors are created once; the buffer uses memory only during an all-gather.

    Args:
        layout: a layout that gathers parameters in another order than they are unsharded.
        unsharded: ``[layout.unsharded_numel]`` or more.
    """

    def __init__(self, layout: Layout, unsharded: Tensor) -> None:
        self._gathered = unsharded.new_empty(layout.padded_numel)
        self._nbytes = self._gathered.nbytes
        self._sources, self._targets = layout.pairs(self._gathered, unsharded.detach()[: layout.unsharded_numel])
        self._gathered.untyped_storage().resize_(0)

    def begin(self) -> Tensor:
        """Return the buffer ``[layout.padded_numel]``."""
        self._gathered.untyped_storage().resize_(self._nbytes)
        return self._gathered

    def end(self, is_wanted: bool) -> None:
        """Copy the received data if it `is_wanted`, and free the buffer."""
        if is_wanted and self._targets:  # all parameters may be empty
            torch._foreach_copy_(self._targets, self._sources)
        self._gathered.untyped_storage().resize_(0)
