"""Layouts pack parameters into a flat vector, pad the vector, and divide it into equal shards, one per rank.

A layout is pure arithmetic over shapes: it requires no process group, device or tensor. Views, gradient buffers, state
dicts and checkpoints are all computed from layouts, and this arithmetic is not duplicated elsewhere.

Both layouts share a property that all other code relies on: *a rank's part of a parameter is a contiguous range of the
row-major parameter*, at a contiguous position of the rank's shard. This range is an `Interval`. If a parameter is
divided along a dimension other than the first, the part is a range of slices along this dimension. The shard stores
these slices as a contiguous local tensor. Gathering concatenates the shards in rank order. In every layout, position
``offset`` of rank ``r`` is therefore at ``r * shard_numel + offset`` of the gathered buffer.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from typing_extensions import Self

_Layout = TypeVar("_Layout", bound="Layout")

NO_SLOTS: frozenset[int] = frozenset()  # shared by all handles: each empty set is an object of 216 bytes


@dataclass(frozen=True)
class Slot:
    """A parameter of a layout; `start` counts elements from the beginning of the first parameter.

    The parameter is row-major in the unsharded vector, and divided along `dim` if the layout divides each parameter.
    """

    name: str
    shape: torch.Size
    start: int
    dim: int = 0

    @cached_property
    def stride(self) -> tuple[int, ...]:
        return torch.empty(self.shape, device="meta").stride()

    @cached_property
    def numel(self) -> int:
        return self.shape.numel()

    @cached_property
    def stop(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True)
class Interval:
    """Elements ``start:stop`` of the row-major parameter `slot`, stored at `offset` of a rank's shard."""

    slot: int
    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Layout(ABC):
    """Parameters in order, and the intervals that each rank keeps."""

    slots: tuple[Slot, ...]
    world_size: int
    align: int = 1
    block: int = 1

    def __post_init__(self) -> None:
        for name in ("world_size", "block"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @classmethod
    def of(
        cls,
        named_shapes: Iterable[tuple[str, torch.Size | Sequence[int]]],
        world_size: int,
        align: int = 1,
        dims: Iterable[int] | None = None,
        block: int = 1,
    ) -> Self:
        """Pack parameters, given as (name, shape), in the given order; units with the same parameters share a layout.

        Args:
            named_shapes: the parameters.
            world_size: the number of ranks to share them.
            align: every parameter starts at a multiple of `align` and `block` elements; gaps belong to no parameter.
            dims: for each parameter, the dimension that is stored first. Default: the first.
            block: no rank's part of a parameter begins or ends inside a block of this number of its elements.
        """
        named = tuple((name, torch.Size(shape)) for name, shape in named_shapes)
        return _packed(cls, named, world_size, align, (0,) * len(named) if dims is None else tuple(dims), block)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the parameters."""
        return tuple(slot.name for slot in self.slots)

    @cached_property
    def shapes(self) -> tuple[torch.Size, ...]:
        """The shapes of the parameters."""
        return tuple(slot.shape for slot in self.slots)

    @cached_property
    def numel(self) -> int:
        """The number of elements from the first parameter's begin to the last parameter's end."""
        return self.slots[-1].stop if self.slots else 0

    @property
    @abstractmethod
    def shard_numel(self) -> int:
        """The number of elements of every rank's shard, including padding."""

    @abstractmethod
    def interval(self, slot: int, rank: int) -> Interval | None:
        """Return the part of parameter number `slot` that `rank` keeps, or None."""

    @cached_property
    def padded_numel(self) -> int:
        """The number of elements of the gathered buffer: every rank's shard, including padding."""
        return self.shard_numel * self.world_size

    def intervals(self, rank: int) -> list[Interval]:
        """Return all intervals that `rank` keeps, in the order of the parameters."""
        found = (self.interval(slot, rank) for slot in range(len(self.slots)))
        return [interval for interval in found if interval is not None]

    def padding(self, rank: int) -> int:
        """Return the number of elements of the rank's shard that belong to no parameter."""
        return sum(self.paddings(rank))

    @abstractmethod
    def paddings(self, rank: int) -> list[int]:
        """Return the number of padding elements between each parameter and the next."""

    def local_shards(self, shard: Tensor, rank: int) -> list[Tensor]:
        """Return views of a shard ``[shard_numel]``: its flat part of each parameter, which may be empty."""
        self._check(shard, self.shard_numel, "shard")
        found = (self.interval(slot, rank) for slot in range(len(self.slots)))
        return [shard[i.offset : i.offset + i.numel] if i is not None else shard[:0] for i in found]

    @abstractmethod
    def unpack(self, full: Tensor) -> list[Tensor]:
        """Return every parameter in its shape, from a gathered buffer ``[padded_numel]``; views where possible."""

    @property
    def gathers_in_order(self) -> bool:
        """True if a gathered buffer has the same order as an unsharded buffer and can be used as one."""
        return True

    @property
    def unsharded_numel(self) -> int:
        """The number of elements of an unsharded buffer, which contains all parameters consecutively."""
        return self.padded_numel if self.gathers_in_order else self.numel

    def views(self, unsharded: Tensor) -> list[Tensor]:
        """Return every parameter in its shape, as views of an unsharded buffer ``[unsharded_numel]``."""
        self._check(unsharded, self.unsharded_numel, "unsharded buffer")
        first = int(unsharded.storage_offset())
        return [unsharded.as_strided(slot.shape, slot.stride, first + slot.start) for slot in self.slots]

    @abstractmethod
    def places(self, full: Tensor) -> list[list[Tensor]]:
        """Return for every parameter its views in a gathered buffer, shaped like the views of `divided`."""

    @abstractmethod
    def divided(self, slot: int, value: Tensor) -> list[Tensor]:
        """Return the views of a tensor with the parameter's shape that correspond to its `places`."""

    def pairs(self, full: Tensor, unsharded: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return views of a gathered buffer ``[padded_numel]``, and their destinations in an unsharded buffer."""
        places = [place for places in self.places(full) for place in places]
        views = self.views(unsharded)
        return places, [part for slot, view in enumerate(views) for part in self.divided(slot, view)]

    @abstractmethod
    def clear_gaps(self, full: Tensor) -> None:
        """Write zeros to elements of a gathered buffer that belong to no parameter."""

    def leaving_out(self, slots: Collection[int]) -> Layout:
        """Return a layout with the same numbers that omits these parameters, if this makes shards smaller."""
        return self

    def local_shard_of(self, slot: int, value: Tensor, rank: int) -> Tensor:
        """Return the rank's flat shard of a parameter, of any dtype and device; a view if possible, or empty."""
        wanted = self.slots[slot]
        if value.shape != wanted.shape:
            raise ValueError(f"{wanted.name}: expected shape {tuple(wanted.shape)}, got {tuple(value.shape)}")
        return self._local_shard_of(slot, value.detach(), rank)

    @abstractmethod
    def _local_shard_of(self, slot: int, value: Tensor, rank: int) -> Tensor: ...

    def vector_of(self, slot: int, value: Tensor) -> Tensor:
        """Return a value as a vector, of which ranks keep their `interval`s; memory is shared if possible."""
        return value.reshape(-1)

    def value_of(self, slot: int, vector: Tensor) -> Tensor:
        """Return the value in the shape of the parameter, from the result of `vector_of`."""
        return vector.view(self.slots[slot].shape)

    def shard_of(self, slot: int, value: Tensor, shard: Tensor, rank: int) -> None:
        """Copy the rank's shard of a parameter, of any dtype and device, into its shard."""
        local = self.local_shard_of(slot, value, rank)
        self._check(shard, self.shard_numel, "shard")
        interval = self.interval(slot, rank)
        if interval is not None:
            shard[interval.offset : interval.offset + interval.numel].copy_(local)

    @staticmethod
    def _check(tensor: Tensor, numel: int, what: str) -> None:
        if tensor.dim() != 1 or tensor.numel() != numel:
            raise ValueError(f"a {what} of this layout has shape [{numel}], got {list(tensor.shape)}")


@lru_cache(maxsize=1 << 10)
def _packed(
    kind: type[_Layout],
    named_shapes: tuple[tuple[str, torch.Size], ...],
    world_size: int,
    align: int,
    dims: tuple[int, ...],
    block: int,
) -> _Layout:
    slots: list[Slot] = []
    start, align = 0, math.lcm(align, block)
    for (name, shape), dim in zip(named_shapes, dims, strict=True):
        slots.append(Slot(name, shape, -(-start // align) * align, dim))
        start = slots[-1].stop
    return kind(tuple(slots), world_size, align, block)


class ContiguousLayout(Layout):
    """A flat vector in equal shards, with less than ``world_size * block`` elements of padding at the end.

    The gathered buffer *is* the flat vector, so parameters are views of it. Shards are the same as FairScale's
    (the chunks of ``torch.chunk``, each padded to the size of the first). A shard has a multiple of `block` elements.
    """

    @cached_property
    def shard_numel(self) -> int:
        if self.world_size == 1:
            return self.numel
        return -(-self.numel // (self.world_size * self.block)) * self.block

    def interval(self, slot: int, rank: int) -> Interval | None:
        begin = rank * self.shard_numel
        kept = self.slots[slot]
        start, stop = max(kept.start, begin), min(kept.stop, begin + self.shard_numel)
        if start >= stop:
            return None
        return Interval(slot, start - kept.start, stop - kept.start, start - begin)

    @cached_property
    def gaps(self) -> list[int]:
        """The number of elements of a gathered buffer between each parameter and the next, or the end."""
        nexts = [*(slot.start for slot in self.slots[1:]), self.padded_numel]
        return [start - slot.stop for slot, start in zip(self.slots, nexts, strict=True)] if self.slots else []

    def paddings(self, rank: int) -> list[int]:
        begin, end = rank * self.shard_numel, (rank + 1) * self.shard_numel
        behind = ((slot.stop, slot.stop + gap) for slot, gap in zip(self.slots, self.gaps, strict=True))
        return [max(0, min(stop, end) - max(start, begin)) for start, stop in behind]

    @cached_property
    def _empty_ranges(self) -> list[tuple[int, int]]:
        return [(slot.stop, slot.stop + gap) for slot, gap in zip(self.slots, self.gaps, strict=True) if gap]

    def clear_gaps(self, full: Tensor) -> None:
        for start, stop in self._empty_ranges:
            full[start:stop].zero_()

    def unpack(self, full: Tensor) -> list[Tensor]:
        self._check(full, self.padded_numel, "gathered buffer")
        return self.views(full)

    def places(self, full: Tensor) -> list[list[Tensor]]:
        return [[view] for view in self.views(full)]

    def divided(self, slot: int, value: Tensor) -> list[Tensor]:
        return [value]

    def _local_shard_of(self, slot: int, value: Tensor, rank: int) -> Tensor:
        flat, interval = value.reshape(-1), self.interval(slot, rank)
        return flat[interval.start : interval.stop] if interval is not None else flat[:0]
