"""Tensors that lie in files, and are read by ranges: with strides, as `torch.save` keeps them, or cut into boxes.

A range of a tensor in row-major order is a few boxes (`engine.layout`), and a box is read by one read if it lies in one
piece, as all do of a contiguous tensor. Nothing is mapped: pages of a mapping that were touched count as memory.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fsdp.checkpoint.untrusted import descriptor, readable
from fsdp.engine.layout import Box, boxes_of, overlap

PIECE_BYTES = 4 << 20
_MOST_OPEN = 64  # of files at once: thousands of ranks may have written one each


class SeenFile(NamedTuple):
    """A file as it was when it was looked at. What is found in another one at its place is not what was found there."""

    path: str
    nbytes: int
    changed: int  # when, in nanoseconds

    @classmethod
    def of(cls, path: str, fd: int) -> SeenFile:
        """One that is open."""
        status = os.fstat(fd)
        return cls(path, status.st_size, status.st_mtime_ns)


class OpenFiles:
    """Files that are opened when they are first read."""

    def __init__(self) -> None:
        self._open: dict[SeenFile, int] = {}
        self._last: tuple[StridedTensor, Tensor] | None = None

    def read(self, file: SeenFile, memory: memoryview, begin: int) -> None:
        """Fill some memory with what a file has from byte `begin` on.

        Raises:
            ValueError: if the file has changed since, or ends before.
            OSError: if it cannot be read.
        """
        if file not in self._open:
            if len(self._open) >= _MOST_OPEN:
                os.close(self._open.pop(next(iter(self._open))))
            self._open[file] = _opened(file)
        done = 0
        while done < len(memory):
            count = os.preadv(self._open[file], [memory[done:]], begin + done)
            if count == 0:
                raise ValueError(f"{file.path} is truncated: it ends before byte {begin + len(memory)}")
            done += count

    def whole(self, tensor: StridedTensor) -> Tensor:
        """All elements of one that is not contiguous, as they lie in the file; the last one is kept."""
        if self._last is None or self._last[0] is not tensor:
            self._last = None  # before there is memory for another one
            self._last = (tensor, tensor.span(self, 0, tensor.extent))
        return self._last[1]

    def close(self) -> None:
        """Close what was opened; reading opens it again."""
        self._last = None
        while self._open:
            os.close(self._open.popitem()[1])


def _opened(file: SeenFile) -> int:
    fd = descriptor(file.path)
    if SeenFile.of(file.path, fd) != file:
        os.close(fd)
        raise ValueError(
            f"{file.path} was changed, or another file was put in its place, after it was looked at: begin anew, when "
            "nobody writes it"
        )
    return fd


class LazyTensor(Protocol):
    """A tensor that is read by ranges."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def shape(self) -> torch.Size: ...

    def fill(self, files: OpenFiles, into: Tensor, start: int) -> None:
        """Read elements from `start` on in row-major order; `into` is flat, of the same dtype, on the CPU."""


@dataclass(frozen=True, eq=False)
class StridedTensor:
    """A tensor whose first element is at byte `begin` of `file`, and the others at strides from there, in elements."""

    file: SeenFile
    begin: int
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]

    @property
    def extent(self) -> int:
        """How many elements there are from the first to the last one in the file."""
        return 1 + _place(self.strides, [size - 1 for size in self.shape]) if self.shape.numel() else 0

    @cached_property
    def is_contiguous(self) -> bool:
        """Whether elements follow each other in row-major order."""
        return _is_dense(self.shape, self.strides)

    def span(self, files: OpenFiles, first: int, count: int) -> Tensor:
        """Elements as they lie in the file."""
        flat = torch.empty(count, dtype=self.dtype)
        files.read(self.file, _bytes_of(flat), self.begin + first * self.dtype.itemsize)
        return flat

    def fill(self, files: OpenFiles, into: Tensor, start: int) -> None:
        if self.is_contiguous and into.numel():
            files.read(self.file, _bytes_of(into), self.begin + start * self.dtype.itemsize)
            return
        for box, part in _boxes(self.shape, into, start):
            self.fill_box(files, part, box)

    def fill_box(self, files: OpenFiles, into: Tensor, box: Box) -> None:
        """Read a box; `into` has its sizes, and any strides."""
        first, count = _place(self.strides, box.offsets), 1 + _place(self.strides, [size - 1 for size in box.sizes])
        if _is_dense(box.sizes, self.strides) and into.is_contiguous():
            files.read(self.file, _bytes_of(into.view(-1)), self.begin + first * self.dtype.itemsize)
        elif self.is_contiguous:
            into.copy_(self.span(files, first, count).as_strided(box.sizes, self.strides))
        else:  # a small box may be spread over all of it
            into.copy_(files.whole(self).as_strided(box.sizes, self.strides, first))


class Chunk(Protocol):
    """A box of a tensor, in a file."""

    @property
    def box(self) -> Box: ...
    @property
    def tensor(self) -> StridedTensor: ...


@dataclass(frozen=True, eq=False)
class ChunkedTensor:
    """A tensor that is cut into boxes, each somewhere in a file."""

    dtype: torch.dtype
    shape: torch.Size
    chunks: Sequence[Chunk]

    def fill(self, files: OpenFiles, into: Tensor, start: int) -> None:
        for box, part in _boxes(self.shape, into, start):
            for chunk in self.chunks:
                common = overlap(box, chunk.box)
                if common is not None:
                    inside = common.moved([-begin for begin in box.offsets])
                    slices = [
                        slice(begin, begin + size) for begin, size in zip(inside.offsets, inside.sizes, strict=True)
                    ]
                    target = part[tuple(slices)]
                    chunk.tensor.fill_box(files, target, common.moved([-begin for begin in chunk.box.offsets]))


def is_lazy(value: Any) -> bool:
    """Whether it is a tensor in a file."""
    return isinstance(value, (StridedTensor, ChunkedTensor))


def whole(tensor: LazyTensor, device: torch.device | str = "cpu") -> Tensor:
    """All of a tensor, in memory of its own. What lies in files comes to the CPU."""
    made, files = torch.empty(tensor.shape, dtype=tensor.dtype, device=device), OpenFiles()
    try:
        tensor.fill(files, made.view(-1), 0)
    finally:
        files.close()
    return made


@dataclass(frozen=True)
class Found:
    """A tensor that can be read, for those who ask what there is."""

    name: str
    file: str
    tensor: LazyTensor

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def __str__(self) -> str:
        return readable(f"{self.name} in {self.file}")


class LazyReader:
    """Tensors by name, read by ranges (`fsdp.checkpoint.formats.source.TensorReader`).

    Args:
        path: what messages call it.
        tensors: what there is.
    """

    def __init__(self, path: str, tensors: Mapping[str, LazyTensor]) -> None:
        self.path = path
        self._tensors = {name: Found(name, path, tensor) for name, tensor in tensors.items()}
        self._files = OpenFiles()

    @property
    def tensors(self) -> Mapping[str, Found]:
        return self._tensors

    def read(self, name: str, target: Tensor, start: int = 0) -> None:
        """Read elements ``start : start + target.numel()`` of a tensor, in row-major order, cast to another dtype.

        Straight into the memory of `target` where that is possible, otherwise through 4 MiB.

        Raises:
            ValueError: if `target` is not contiguous, or the range not in the tensor; if the file is damaged.
            OSError: if the file cannot be read.
        """
        found = self._tensors[name]
        if not target.is_contiguous() or not 0 <= start <= found.shape.numel() - target.numel():
            raise ValueError(
                f"{found}: cannot read elements {start} to {start + target.numel()} of {found.shape.numel()} into a "
                f"tensor of shape {list(target.shape)} and strides {list(target.stride())}"
            )
        flat = target.detach().as_strided((target.numel(),), (1,))  # one element may have any stride
        step = PIECE_BYTES // found.dtype.itemsize
        is_ready = flat.device.type == "cpu" and flat.dtype == found.dtype
        buffer = torch.empty(0 if is_ready else min(step, flat.numel()), dtype=found.dtype)
        for first in range(0, flat.numel(), step):
            part = flat[first : first + step]
            piece = part if is_ready else buffer[: part.numel()]
            found.tensor.fill(self._files, piece, start + first)
            if not is_ready:
                part.copy_(piece)

    def close(self) -> None:
        """Close all files."""
        self._files.close()


def _boxes(shape: torch.Size, flat: Tensor, start: int) -> Iterator[tuple[Box, Tensor]]:
    """A range of a tensor as boxes, and of `flat`, which has its elements, the part of each."""
    done = 0
    for box in boxes_of(shape, start, start + flat.numel()):
        yield box, flat[done : done + box.numel].view(box.sizes)
        done += box.numel


def _place(strides: Sequence[int], indices: Sequence[int]) -> int:
    return sum(map(math.prod, zip(strides, indices, strict=True)))


def _is_dense(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements of a box follow each other in row-major order."""
    expected = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _bytes_of(flat: Tensor) -> memoryview:
    return flat.view(torch.uint8).numpy().data
