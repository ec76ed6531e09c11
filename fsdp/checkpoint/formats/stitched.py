"""Whole tensors as the pieces that ranks hold of them, read by ranges: nothing is put together before that."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsdp.checkpoint.formats.lazy_tensors import LazyReader, LazyTensor, OpenFiles, StridedTensor, is_lazy, whole


def is_tensor(value: Any) -> bool:
    """Whether it is a tensor, in memory or in a file."""
    return isinstance(value, Tensor) or is_lazy(value)


def memory_of(value: Any) -> Any:
    """Where a tensor lies; of what has no memory, what no other has."""
    if not is_tensor(value) or value.shape.numel() == 0:
        return object()
    if isinstance(value, Tensor):
        return value.data_ptr(), value.shape, value.stride(), value.dtype
    return (
        (value.file, value.begin, value.shape, value.strides, value.dtype)
        if isinstance(value, StridedTensor)
        else value
    )


@dataclass(frozen=True, eq=False)
class Elements:
    """Some elements of a tensor, one after the other in row-major order.

    Attributes:
        tensor: it, in memory or in a file.
        start: the first element.
        numel: how many they are.
    """

    tensor: Tensor | LazyTensor
    start: int
    numel: int

    @classmethod
    def of(cls, tensor: Tensor | LazyTensor, numel: int | None = None) -> Elements:
        """The first ones of a tensor, or all."""
        flat = tensor.detach().reshape(-1) if isinstance(tensor, Tensor) else tensor
        return cls(flat, 0, tensor.shape.numel() if numel is None else numel)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def device(self) -> torch.device:
        return self.tensor.device if isinstance(self.tensor, Tensor) else torch.device("cpu")

    def part(self, first: int, numel: int) -> Elements:
        """Some of them."""
        return Elements(self.tensor, self.start + first, numel)

    def fill(self, files: OpenFiles, into: Tensor) -> None:
        """Read all; `into` is flat, of as many elements and the same dtype."""
        if isinstance(self.tensor, Tensor):
            into.copy_(self.tensor[self.start : self.start + self.numel])
        else:
            self.tensor.fill(files, into, self.start)


@dataclass(frozen=True, eq=False)
class Stitched:
    """A tensor and its elements (a `fsdp.checkpoint.formats.lazy_tensors.LazyTensor`).

    Attributes:
        name: by which it is read.
        shape, dtype: of the whole.
        pieces: that have its elements in row-major order, one after the other.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    pieces: tuple[Elements, ...]

    def whole(self) -> Tensor:
        """In memory of its own, on the device of the pieces."""
        return whole(self, self.pieces[0].device if self.pieces else "cpu")

    def fill(self, files: OpenFiles, into: Tensor, start: int) -> None:
        done, skipped = 0, 0
        for piece in self.pieces:
            first = max(start + done - skipped, 0)
            count = min(piece.numel - first, into.numel() - done)
            if count > 0:
                piece.part(first, count).fill(files, into[done : done + count])
                done += count
            skipped += piece.numel


def stitched(name: str, tensor: Tensor | LazyTensor) -> Stitched:
    """Of a tensor that is whole already."""
    return Stitched(name, tensor.shape, tensor.dtype, (Elements.of(tensor),))


def cut(pieces: Iterable[Elements], names: Sequence[str], shapes: Sequence[Sequence[int]]) -> Iterator[Stitched]:
    """The tensors that lie one after the other in a vector, of which ranks hold these pieces.

    Args:
        pieces: in rank order, without padding, of one dtype; at least one, with as many elements as there are.
        names, shapes: of the tensors.
    """
    held = list(pieces)
    dtype, ahead = held[0].dtype, iter([piece for piece in held if piece.numel])
    rest = held[0].part(0, 0)
    for name, shape in zip(names, map(torch.Size, shapes), strict=True):
        parts, missing = [], shape.numel()
        while missing:
            rest = rest if rest.numel else next(ahead)
            parts.append(rest.part(0, min(missing, rest.numel)))
            missing -= parts[-1].numel
            rest = rest.part(parts[-1].numel, rest.numel - parts[-1].numel)
        yield Stitched(name, shape, dtype, tuple(parts or [rest.part(0, 0)]))


def reader_of(path: str, tensors: Iterable[Stitched]) -> LazyReader:
    """What reads them by name; `path` is what messages call it."""
    return LazyReader(path, {each.name: each for each in tensors})
