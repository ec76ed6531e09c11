"""A plan of a stream: which rows of which tensors each bucket contains, and which bytes of a bucket each rank sends.

A plan is pure arithmetic over names, dtypes, shapes and the ranges that ranks hold, and requires no process group. A
process that receives weights computes the same positions from the same plan.

[Note: buckets] A bucket is a flat tensor of bytes. Each tensor is completely in a single bucket; only a tensor that is
larger than a bucket is divided, by rows. Tensors are placed in the order of the model, each in the first bucket with
enough space. Consecutive tensors of a flat parameter are on different ranks, so that all ranks send parts of a bucket.
If the order from the largest to the smallest tensor results in fewer buckets, this order is used.

[Note: parts of a bucket] A rank's part of a bucket consists of boxes of tensors (`Run`), because a shard is a range or
a box of a row-major tensor. Packed, the runs follow each other in the order of the bucket.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsdp.checkpoint.model_tensors import Held
from fsdp.checkpoint.safetensors import DTYPES, KINDS
from fsdp.engine.boxes import Box, boxes_of, overlap

ALIGN = 16  # the alignment of tensors in a bucket, in bytes; sufficient for all dtypes and for vector instructions

_MOST_MESSAGES = 512  # for a bucket, from one rank to another


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor of a stream.

    Attributes:
        names: the names in the stream; multiple names if parameters are tied.
        dtype: the dtype in the stream.
        shape: the unsharded shape.
        form: class, inner tensors and metadata of a parameter sent as bytes; empty for other tensors.
    """

    names: tuple[str, ...]
    dtype: torch.dtype
    shape: torch.Size
    form: str = ""

    @property
    def name(self) -> str:
        """The first name."""
        return self.names[0]

    @property
    def nbytes(self) -> int:
        """The number of bytes of the whole tensor."""
        return self.shape.numel() * self.dtype.itemsize

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape; for a 0-d tensor, a dimension with a single row."""
        return tuple(self.shape) or (1,)

    @property
    def row_nbytes(self) -> int:
        """The number of bytes of one index of the first dimension."""
        return math.prod(self.sizes[1:]) * self.dtype.itemsize


class Piece(NamedTuple):
    """Rows of a tensor in a bucket: `rows` rows from row `first` on, at byte `offset` of the bucket."""

    tensor: int
    first: int
    rows: int
    offset: int


class Run(NamedTuple):
    """A box of a piece that a rank holds.

    The elements are consecutive in the rank's vector, from element `start` on. In the rank's packed part of the bucket,
    they begin at byte `packed`.
    """

    piece: Piece
    box: Box  # in the piece
    start: int
    packed: int


# The elements of each tensor that a rank holds, by the number of the tensor.
Holding = Mapping[int, Held]


@dataclass(frozen=True)
class WeightPlan:
    """The content of a stream, equal on all ranks and in the receiving process.

    Attributes:
        tensors: all tensors, in the order of the model.
        buckets: the pieces in each bucket.
        parts: the elements that each rank sends. No element is sent by two ranks.
        rank: this rank's index in `parts`.
        stream: an identifier of the stream, equal on all ranks and different for each stream.
        base: the identifier of the earlier stream to which a stream of changes applies; empty for complete weights.
    """

    tensors: tuple[PlannedTensor, ...]
    buckets: tuple[tuple[Piece, ...], ...]
    parts: tuple[Holding, ...]
    rank: int = 0
    stream: str = ""
    base: str = ""

    @property
    def nbytes(self) -> int:
        """The number of bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @cached_property
    def bucket_nbytes(self) -> tuple[int, ...]:
        """The number of bytes of each bucket."""
        return tuple(max((each.offset + self._nbytes(each) for each in pieces), default=0) for pieces in self.buckets)

    @cached_property
    def is_whole(self) -> bool:
        """True if no tensor is divided among buckets."""
        return all(each.rows == self.tensors[each.tensor].sizes[0] for pieces in self.buckets for each in pieces)

    def _nbytes(self, piece: Piece) -> int:
        return piece.rows * self.tensors[piece.tensor].row_nbytes

    def view(self, piece: Piece, bucket: Tensor) -> Tensor:
        """Return the rows of a piece as a view of its bucket, in the dtype in which the tensor is sent."""
        tensor = self.tensors[piece.tensor]
        flat = bucket[piece.offset : piece.offset + self._nbytes(piece)].view(tensor.dtype)
        return flat.view(piece.rows, *tensor.sizes[1:])

    def named(self, number: int, bucket: Tensor) -> dict[str, Tensor]:
        """Return the tensors of a bucket by name, as views; for plans in which each tensor is in a single bucket."""
        return {
            name: self.view(piece, bucket).view(self.tensors[piece.tensor].shape)
            for piece in self.buckets[number]
            for name in self.tensors[piece.tensor].names
        }

    def runs(self, number: int, holding: Holding) -> list[Run]:
        """Return the boxes of a bucket that a rank holds, in the order of its packed part."""
        found, at = [], 0
        for piece in self.buckets[number]:
            tensor = self.tensors[piece.tensor]
            rows = Box.rows(piece.first, piece.first + piece.rows, tensor.sizes)
            for held, start, common in shares(tensor, holding.get(piece.tensor), rows):
                at = aligned(at, tensor.dtype.itemsize)
                start += (common.offsets[0] - held.offsets[0]) * math.prod(held.sizes[1:])
                box = Box((common.offsets[0] - piece.first, *common.offsets[1:]), common.sizes)
                found.append(Run(piece, box, start, at))
                at += common.numel * tensor.dtype.itemsize
        return found

    def is_direct(self, part: Holding) -> bool:
        """Return whether each run of a part can be a message: runs are contiguous in their bucket, and not too many."""
        for number in range(len(self.buckets)):
            runs = self.runs(number, part)
            for run in runs:
                sizes = (run.piece.rows, *self.tensors[run.piece.tensor].sizes[1:])
                begin, end = next(run.box.ranges(sizes, 0, run.box.numel))
                if end - begin != run.box.numel:
                    return False
            if len(runs) > _MOST_MESSAGES:
                return False
        return True

    def packed_nbytes(self, runs: Sequence[Run]) -> int:
        """Return the number of bytes of some packed runs."""
        return runs[-1].packed + runs[-1].box.numel * self.dtype_of(runs[-1]).itemsize if runs else 0

    def largest_part(self, holding: Holding) -> int:
        """Return the number of bytes of the largest packed part of a bucket."""
        return max((self.packed_nbytes(self.runs(each, holding)) for each in range(len(self.buckets))), default=0)

    def packed_view(self, run: Run, packed: Tensor) -> Tensor:
        """Return a run in a rank's packed part of a bucket, as a view with the sizes of its box."""
        dtype = self.dtype_of(run)
        flat = packed[run.packed : run.packed + run.box.numel * dtype.itemsize].view(dtype)
        return flat.view(run.box.sizes)

    def run_view(self, run: Run, bucket: Tensor) -> Tensor:
        """Return a run in its bucket, as a view with the sizes of its box."""
        return box_view(self.view(run.piece, bucket), run.box)

    def dtype_of(self, run: Run) -> torch.dtype:
        """Return the dtype in which a run is sent."""
        return self.tensors[run.piece.tensor].dtype

    def unpack(self, runs: Iterable[Run], packed: Tensor, bucket: Tensor) -> None:
        """Copy a rank's packed part of a bucket to the bucket."""
        for run in runs:
            self.run_view(run, bucket).copy_(self.packed_view(run, packed))

    def pack(self, runs: Iterable[Run], bucket: Tensor, packed: Tensor) -> None:
        """Copy a rank's part of a bucket from the bucket."""
        for run in runs:
            self.packed_view(run, packed).copy_(self.run_view(run, bucket))

    def to_json(self) -> dict[str, Any]:
        """Return the plan as a JSON value."""
        parts = [
            [[number, held.box.offsets, held.box.sizes, held.start, held.stop] for number, held in part.items()]
            for part in self.parts
        ]
        tensors = [
            [each.names, KINDS[each.dtype], list(each.shape), *([each.form] if each.form else [])]
            for each in self.tensors
        ]
        return {"tensors": tensors, "buckets": self.buckets, "parts": parts, "stream": self.stream, "base": self.base}

    @classmethod
    def from_json(cls, value: Any) -> WeightPlan:
        """Return the plan that `to_json` describes; ValueError for any other value."""
        try:
            tensors = tuple(
                PlannedTensor(tuple(map(str, names)), DTYPES[kind], torch.Size(shape), *map(str, form[:1]))
                for names, kind, shape, *form in value["tensors"]
            )
            buckets = tuple(tuple(Piece(*map(int, piece)) for piece in pieces) for pieces in value["buckets"])
            parts = tuple(
                {
                    int(number): Held(Box(tuple(offsets), tuple(sizes)), int(start), int(stop), 0)
                    for number, offsets, sizes, start, stop in part
                }
                for part in value["parts"]
            )
            stream, base = str(value["stream"]), str(value["base"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"the sender's plan is not valid: {type(error).__name__}: {error}") from None
        return cls(tensors, buckets, parts, 0, stream, base)


def box_view(tensor: Tensor, box: Box) -> Tensor:
    """Return a box of a tensor as a view."""
    return tensor[tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))]


class Share(NamedTuple):
    """The part of a requested box that a rank holds.

    `held` is a box of the tensor whose elements are consecutive in the rank's vector, from element `start` on. The
    rank sends the elements of `common`, which is in both boxes.
    """

    held: Box
    start: int
    common: Box

    def of_vector(self, vector: Tensor) -> Tensor:
        """Return the elements in the rank's vector, as a view with the sizes of `common`."""
        values = vector[self.start : self.start + self.held.numel].reshape(self.held.sizes)
        return box_view(values, self.common.moved([-at for at in self.held.offsets]))


def shares(tensor: PlannedTensor, held: Held | None, wanted: Box) -> list[Share]:
    """Return the parts of a requested box that a rank holds, in the order in which they are sent."""
    if held is None:
        return []
    found, start = [], held.offset
    for part in boxes_of(held.box.sizes, held.start, held.stop):
        box = part.moved(held.box.offsets) if tensor.shape else Box((0,), (1,))
        common = overlap(box, wanted)
        if common is not None:
            found.append(Share(box, start, common))
        start += box.numel
    return found


def aligned(nbytes: int, align: int = ALIGN) -> int:
    """Round a number of bytes up to a multiple of `align`."""
    return -(-nbytes // align) * align


def in_buckets(
    tensors: Sequence[PlannedTensor], bucket_bytes: int, groups: Iterable[Sequence[int]]
) -> tuple[tuple[Piece, ...], ...]:
    """Divide tensors among buckets; the tensors of a group are in the same bucket, see [Note: buckets].

    Raises:
        ValueError: if a row or a group is larger than a bucket.
    """
    bundles = [list(group) for group in groups if group]
    grouped = {number for group in bundles for number in group}
    bundles += [[number] for number in range(len(tensors)) if number not in grouped]
    items: list[_Item] = []
    for bundle in sorted(bundles, key=min):
        nbytes = 0
        for number in bundle:
            nbytes = aligned(nbytes) + tensors[number].nbytes
        if nbytes <= bucket_bytes:
            items.append(_Item(nbytes, [(number, 0, tensors[number].sizes[0]) for number in bundle]))
        elif len(bundle) > 1:
            names = ", ".join(tensors[number].name for number in bundle)
            raise ValueError(
                f"bucket_bytes={bucket_bytes} is too small to keep {names} together: they have {nbytes} bytes"
            )
        else:
            items += _by_rows(bundle[0], tensors[bundle[0]], bucket_bytes)
    orders = items, sorted(items, key=lambda item: -item.nbytes)
    buckets = min((_first_fit(tensors, order, bucket_bytes) for order in orders), key=len)
    return tuple(sorted((tuple(pieces) for pieces in buckets), key=min))


class _Item(NamedTuple):
    """Tensors in the same bucket, or rows of a tensor."""

    nbytes: int
    rows: list[tuple[int, int, int]]  # the number of a tensor, the first row, and the number of rows


def _first_fit(tensors: Sequence[PlannedTensor], items: Sequence[_Item], bucket_bytes: int) -> list[list[Piece]]:
    """Place each item in the first bucket that has enough space, or in a new bucket."""
    filled: list[int] = []
    buckets: list[list[Piece]] = []
    for nbytes, rows in items:
        fits = (number for number, used in enumerate(filled) if aligned(used) + nbytes <= bucket_bytes)
        place = next(fits, len(buckets))
        if place == len(buckets):
            buckets.append([])
            filled.append(0)
        for number, first, count in rows:
            offset = aligned(filled[place])
            buckets[place].append(Piece(number, first, count, offset))
            filled[place] = offset + count * tensors[number].row_nbytes
    return buckets


def _by_rows(number: int, tensor: PlannedTensor, bucket_bytes: int) -> list[_Item]:
    most = bucket_bytes // tensor.row_nbytes
    if most == 0:
        raise ValueError(
            f"bucket_bytes={bucket_bytes} is smaller than a row of {tensor.name}, which has {tensor.row_nbytes} bytes. "
            "Use larger buckets"
        )
    spans = [(first, min(most, tensor.sizes[0] - first)) for first in range(0, tensor.sizes[0], most)]
    return [_Item(rows * tensor.row_nbytes, [(number, first, rows)]) for first, rows in spans]


def chosen(names: Sequence[Collection[str]], only: Iterable[str] | None) -> list[int]:
    """Return the numbers of the tensors in `only`, a list of tensor or module names in which * matches any text."""
    if only is None:
        return list(range(len(names)))
    found: set[int] = set()
    for pattern in _texts("only", only):
        wanted = re.compile(rf"{_regex(pattern)}(?:\..+)?")
        matching = [number for number, each in enumerate(names) if any(map(wanted.fullmatch, each))]
        if not matching:
            raise ValueError(f"only has {pattern!r}, but this model has no tensor or module of this name")
        found.update(matching)
    return sorted(found)


def groups_of(names: Sequence[Collection[str]], together: Iterable[Iterable[str]]) -> list[list[int]]:
    """Return the numbers of the tensors of each group, whose names match with the same text for *.

    Raises:
        ValueError: if a name matches no tensor, or a tensor is in two groups.
    """
    found: dict[tuple[int, tuple[str, ...]], list[int]] = {}
    group_of: dict[int, tuple[int, tuple[str, ...]]] = {}
    for row, patterns in enumerate(together):
        for pattern in _texts("together", patterns):
            wanted, count = re.compile(_regex(pattern)), 0
            for number, each in enumerate(names):
                match = next(filter(None, map(wanted.fullmatch, each)), None)
                if match is not None:
                    count += 1
                    key = (row, match.groups())
                    if group_of.setdefault(number, key) != key:
                        raise ValueError(f"together has {next(iter(each))} in two groups")
                    if number not in found.setdefault(key, []):
                        found[key].append(number)
            if not count:
                raise ValueError(f"together has {pattern!r}, but the stream has no tensor of this name")
    return list(found.values())


def _regex(pattern: str) -> str:
    return re.escape(pattern).replace(r"\*", "(.*)")


def _texts(option: str, names: Iterable[str]) -> list[str]:
    texts = [names] if isinstance(names, str) else list(names)
    if not all(isinstance(each, str) for each in texts):
        raise TypeError(f"argument {option} must contain names of tensors, got {texts!r}")
    return texts
