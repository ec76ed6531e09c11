"""A checkpoint of any format as a single source: named tensors, read by ranges, and all other data.

The reader of each format creates a `Source`. Loading, inspecting and converting checkpoints use only this class.

[Note: tensors in files] A tensor is stored with strides, as in safetensors files and `torch.save` (`StridedTensor`),
divided into boxes (`ChunkedTensor`), or as consecutive parts of the ranks (`Stitched`). A range in row-major order
consists of a few boxes (`engine.boxes`). A box requires a single read if its bytes are contiguous, for example in a
contiguous tensor. Files are not mapped, because touched pages of a mapping count as memory.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fsdp.checkpoint.checksums import spans
from fsdp.checkpoint.untrusted import descriptor, readable
from fsdp.distributed.devices import host_bytes, is_host
from fsdp.engine.boxes import Box, boxes_of, overlap

_MOST_OPEN = 64  # maximum of open files: thousands of ranks may each have written a file


@dataclass(frozen=True)
class Source:
    """A checkpoint of any format."""

    format: str  # the name on the command line
    path: str
    model: TensorReader  # of parameters and buffers, under plain names
    optimizer: TensorReader | None = None  # of elementwise state, under ``<name>/<key>``
    optimizer_rest: Any = None  # other values of the state (`fsdp.checkpoint.optim.rest_of`)
    extra: Mapping[str, Any] = field(default_factory=dict)  # extra state of modules, by name, encoded
    values: Any = None  # the user's values, encoded (`fsdp.checkpoint.json_values`)
    world_size: int | None = None  # the number of ranks of the save; None if unknown
    notes: tuple[str, ...] = ()  # for the user, such as skipped data and the reason
    generators: list[Any] | None = None  # for each rank the states of its random number generators, encoded
    identity: str = ""  # distinguishes checkpoints with equal other fields; empty if unknown
    aliases: Mapping[str, str] = field(default_factory=dict)  # from additional names of tied parameters to the first
    is_in_order: bool = True  # whether `model` has the order of the modules, in which optimizers number parameters
    kinds: Mapping[str, Any] = field(default_factory=dict)  # of the state, if decoded already (`optim.kinds_in`)

    def close(self) -> None:
        self.model.close()
        if self.optimizer is not None:
            self.optimizer.close()


@dataclass(frozen=True)
class FoundTensor:
    """A readable tensor, with the names of the tensor and the file for messages."""

    reader: TensorReader
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
    def form(self) -> str:
        """Return the form of the parameter that this tensor contains; empty if the file has no form."""
        return self.reader.forms.get(self.name, "")

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def __str__(self) -> str:
        return readable(f"{self.name} in {self.file}")


class TensorReader(AbstractContextManager["TensorReader"]):
    """Tensors by name, which are read on demand and not kept in memory.

    As a context manager, a reader closes the opened files. Messages contain `path`.
    """

    def __init__(self, path: str, tensors: Mapping[str, LazyTensor]) -> None:
        self.path = path
        self.forms: dict[str, str] = {}  # of parameters in other forms, by name: class, inner tensors, metadata
        self.tensors = {name: FoundTensor(self, name, path, tensor) for name, tensor in tensors.items()}
        self._files = OpenFiles()

    def read(self, name: str, target: Tensor, start: int = 0) -> None:
        """Read elements ``start : start + target.numel()`` of a tensor, in row-major order.

        The elements are read directly into the memory of `target` if it is on the CPU and has the stored dtype,
        without a change of its version counter. Otherwise, blocks of 4 MiB are read and cast as by `Tensor.copy_`.

        Raises:
            ValueError: if `target` is not contiguous, or the range is not in the tensor; if a file is damaged, or was
                changed after the reader was created.
        """
        found, numel = self.tensors[name], target.numel()
        if not target.is_contiguous() or not 0 <= start <= found.shape.numel() - numel:
            raise ValueError(
                f"{found}: cannot read elements {start} to {start + numel} of {found.shape.numel()} into a tensor of "
                f"shape {list(target.shape)} and strides {list(target.stride())}"
            )
        flat = target.detach().view(-1)
        dtype = found.dtype
        size = dtype.itemsize
        is_ready = is_host(flat.device) and flat.dtype == dtype
        for begin, end in spans(start * size, (start + numel) * size):
            first, last = begin // size, end // size
            into = flat if last - first == numel else flat[first - start : last - start]
            read = into if is_ready else torch.empty(last - first, dtype=dtype, device="cpu")
            self._fill(found, read, first)
            if not is_ready:
                into.copy_(read)

    def _fill(self, found: FoundTensor, into: Tensor, start: int) -> None:
        """Read elements of a block; `into` is flat, of the stored dtype, on the CPU."""
        found.tensor.fill(self._files, into, start)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Close the open files; reading opens them again."""
        self._files.close()


class SeenFile(NamedTuple):
    """The identity of a file when it was examined, to detect a replaced file."""

    path: str
    nbytes: int
    changed: int  # the time of the last change, in nanoseconds

    @classmethod
    def of(cls, path: str, fd: int) -> SeenFile:
        status = os.fstat(fd)
        return cls(path, status.st_size, status.st_mtime_ns)


class OpenFiles:
    """Files, each opened during the first read."""

    def __init__(self) -> None:
        self._open: dict[SeenFile, int] = {}
        self._last: tuple[StridedTensor, Tensor] | None = None

    def open(self, file: SeenFile) -> int:
        """Return the descriptor of a file; raise ValueError if the file has changed."""
        fd = self._open.get(file)
        if fd is None:
            if len(self._open) >= _MOST_OPEN:
                os.close(self._open.pop(next(iter(self._open))))
            fd = descriptor(file.path)
            if SeenFile.of(file.path, fd) != file:
                os.close(fd)
                raise ValueError(
                    f"{file.path} was changed or replaced after it was opened: start again when no process writes it"
                )
            self._open[file] = fd
        return fd

    def read(self, file: SeenFile, memory: memoryview, begin: int) -> None:
        """Fill memory with a file's bytes from `begin` on; raise ValueError if the file has changed or is too short."""
        fd = self.open(file)
        done = 0
        while done < len(memory):  # a read may be shorter, for example after an interrupt
            count = os.preadv(fd, [memory[done:]], begin + done)
            if count == 0:
                raise ValueError(f"{file.path} is truncated: it ends before byte {begin + len(memory)}")
            done += count

    def whole(self, tensor: StridedTensor) -> Tensor:
        """Return all elements of a non-contiguous tensor in file order; the last such tensor is cached."""
        if self._last is None or self._last[0] is not tensor:
            self._last = None  # before allocating another tensor
            self._last = (tensor, tensor.span(self, 0, tensor.extent))
        return self._last[1]

    def close(self) -> None:
        self._last = None
        while self._open:
            os.close(self._open.popitem()[1])


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
    """A tensor whose first element is at byte `begin` of `file`: row-major without gaps, or with given strides."""

    file: SeenFile
    begin: int
    dtype: torch.dtype
    shape: torch.Size
    given_strides: tuple[int, ...] | None = None  # in elements

    @property
    def strides(self) -> tuple[int, ...]:
        if self.given_strides is not None or not self.shape:
            return self.given_strides or ()
        return tuple(accumulate(reversed(self.shape[1:]), mul, initial=1))[::-1]

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    @property
    def extent(self) -> int:  # in elements, from the first to the last element in the file
        return 1 + _place(self.strides, [size - 1 for size in self.shape]) if self.shape.numel() else 0

    @property
    def is_contiguous(self) -> bool:
        return self.given_strides is None or _is_dense(self.shape, self.given_strides)

    def span(self, files: OpenFiles, first: int, count: int) -> Tensor:
        """Return elements in the order of the file."""
        flat = torch.empty(count, dtype=self.dtype, device="cpu")
        files.read(self.file, host_bytes(flat), self.begin + first * self.dtype.itemsize)
        return flat

    def fill(self, files: OpenFiles, into: Tensor, start: int) -> None:
        if self.is_contiguous and into.numel():
            files.read(self.file, host_bytes(into), self.begin + start * self.dtype.itemsize)
            return
        for box, values in _boxes(self.shape, into, start):
            self.fill_box(files, values, box)

    def fill_box(self, files: OpenFiles, into: Tensor, box: Box) -> None:
        """Read a box; `into` has the sizes of the box, and any strides."""
        first, count = _place(self.strides, box.offsets), 1 + _place(self.strides, [size - 1 for size in box.sizes])
        if _is_dense(box.sizes, self.strides) and into.is_contiguous():
            files.read(self.file, host_bytes(into.view(-1)), self.begin + first * self.dtype.itemsize)
        elif self.is_contiguous:
            into.copy_(self.span(files, first, count).as_strided(box.sizes, self.strides))
        else:  # a small box may be spread over the whole tensor
            into.copy_(files.whole(self).as_strided(box.sizes, self.strides, first))


@dataclass(frozen=True, eq=False)
class ChunkedTensor:
    """A tensor divided into boxes (chunks); a function for each chunk returns the chunk's tensor in a file."""

    dtype: torch.dtype
    shape: torch.Size
    chunks: Mapping[Box, Callable[[], StridedTensor]]

    def fill(self, files: OpenFiles, into: Tensor, start: int) -> None:
        for box, values in _boxes(self.shape, into, start):
            for held, find in self.chunks.items():
                common = overlap(box, held)
                if common is not None:
                    place = zip(common.offsets, box.offsets, common.sizes, strict=True)
                    target = values[tuple(slice(at - begin, at - begin + size) for at, begin, size in place)]
                    find().fill_box(files, target, common.moved([-begin for begin in held.offsets]))


def are_all_of(shape: torch.Size, boxes: Collection[Box]) -> bool:
    """Return whether boxes fill a tensor: boxes are in the tensor, do not overlap, and have all elements."""
    if any(size < 0 for size in shape) or sum(box.numel for box in boxes) != math.prod(shape):
        return False
    inside = Box.whole(shape)
    if any(min((0, *box.sizes)) < 0 or (box.numel and overlap(box, inside) != box) for box in boxes):
        return False
    open_ones: list[Box] = []  # boxes that share rows with the next box
    for box in sorted((box for box in boxes if box.numel), key=lambda each: each.offsets):
        open_ones = [each for each in open_ones if not shape or each.offsets[0] + each.sizes[0] > box.offsets[0]]
        if any(overlap(box, each) is not None for each in open_ones):
            return False
        open_ones.append(box)
    return True


def is_lazy(value: Any) -> bool:
    return isinstance(value, (StridedTensor, ChunkedTensor, Stitched))


def is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or is_lazy(value)


def memory_of(value: Any) -> Any:
    """Return the memory location of a tensor; for an object without memory, a unique value."""
    if not is_tensor(value) or value.shape.numel() == 0:
        return object()
    if isinstance(value, Tensor):
        return value.data_ptr(), value.shape, value.stride(), value.dtype
    if isinstance(value, StridedTensor):
        return value.file, value.begin, value.shape, value.strides, value.dtype
    return tuple(memory_of(find()) for find in value.chunks.values()) if isinstance(value, ChunkedTensor) else value


def whole(tensor: LazyTensor, device: torch.device | str = "cpu") -> Tensor:
    """Return a complete tensor in new memory on `device`."""
    made, files = torch.empty(tensor.shape, dtype=tensor.dtype, device=device), OpenFiles()
    try:
        tensor.fill(files, made.view(-1), 0)
    finally:
        files.close()
    return made


def _boxes(shape: torch.Size, flat: Tensor, start: int) -> Iterator[tuple[Box, Tensor]]:
    """Yield the boxes of a range of a tensor, each with its elements in `flat`, which contains the range."""
    done = 0
    for box in boxes_of(shape, start, start + flat.numel()):
        yield box, flat[done : done + box.numel].view(box.sizes)
        done += box.numel


def _place(strides: Sequence[int], indices: Sequence[int]) -> int:
    return sum(map(math.prod, zip(strides, indices, strict=True)))


def _is_dense(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether the elements of a box are contiguous in row-major order."""
    expected = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


class Piece(NamedTuple):
    """A rank's part of a vector: the first `numel` elements of a tensor, which is flat if it is in memory."""

    tensor: Tensor | LazyTensor
    numel: int

    @classmethod
    def of(cls, tensor: Tensor | LazyTensor, numel: int | None = None) -> Piece:
        flat = tensor.detach().reshape(-1) if isinstance(tensor, Tensor) else tensor
        return cls(flat, tensor.shape.numel() if numel is None else numel)


class Stitched:
    """A tensor in a vector of consecutive rank parts (a `LazyTensor`), assembled when it is read."""

    def __init__(self, pieces: Sequence[Piece], start: int, shape: Sequence[int]) -> None:
        self._pieces, self._start, self.shape, self.dtype = pieces, start, torch.Size(shape), pieces[0].tensor.dtype

    def whole(self) -> Tensor:
        """Return the tensor in separate memory, on the device of the first piece."""
        first = self._pieces[0].tensor
        return whole(self, first.device if isinstance(first, Tensor) else "cpu")

    def fill(self, files: OpenFiles, into: Tensor, start: int) -> None:
        done, before = 0, 0
        for tensor, numel in self._pieces:
            first = max(self._start + start + done - before, 0)
            count = min(numel - first, into.numel() - done)
            if count > 0:
                part = into[done : done + count]
                if isinstance(tensor, Tensor):
                    part.copy_(tensor[first : first + count])
                else:
                    tensor.fill(files, part, first)
                done += count
            before += numel
