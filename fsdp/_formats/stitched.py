"""Whole tensors as the pieces that ranks hold of them, read by ranges: nothing is put together in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fsdp._formats.file_mappings import FileMappings

_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, eq=False)
class Stitched:
    """A tensor and its elements.

    Attributes:
        name: by which it is read.
        shape, dtype: of the whole.
        pieces: tensors on the host that have its elements in row-major order, one after the other.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    pieces: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def whole(self) -> Tensor:
        """In memory of its own, on the device of the pieces."""
        device = self.pieces[0].device if self.pieces else torch.device("cpu")
        found = torch.empty(self.shape, dtype=self.dtype, device=device)
        self.read(found.view(-1), 0)
        return found

    def read(self, target: Tensor, start: int, files: FileMappings | None = None) -> None:
        """Copy elements ``start : start + target.numel()`` to a 1-D tensor, cast to its dtype.

        Args:
            target: the tensor.
            start: the first element.
            files: read pieces that lie in these from there.
        """
        done, skipped = 0, 0
        for piece in self.pieces:
            first = max(start + done - skipped, 0)
            count = min(piece.numel() - first, target.numel() - done)
            if count > 0:
                _copy(piece.detach().reshape(-1), first, target[done : done + count], files)
                done += count
            skipped += piece.numel()


def _copy(flat: Tensor, first: int, target: Tensor, files: FileMappings | None) -> None:
    if files is None:
        target.copy_(flat[first : first + target.numel()])
        return
    step = _CHUNK_BYTES // flat.dtype.itemsize
    is_ready = target.device.type == "cpu" and target.dtype == flat.dtype
    buffer = torch.empty(0 if is_ready else min(step, target.numel()), dtype=flat.dtype)
    for at in range(0, target.numel(), step):
        part = target[at : at + step]
        source = flat[first + at : first + at + part.numel()]
        piece = part if is_ready else buffer[: part.numel()]
        if not files.read(source, piece):
            piece = source
        if piece is not part:
            part.copy_(piece)


def stitched(name: str, tensor: Tensor) -> Stitched:
    """Of a tensor that is whole already."""
    return Stitched(name, tensor.shape, tensor.dtype, (tensor,))


def cut(pieces: Iterable[Tensor], names: Sequence[str], shapes: Sequence[Sequence[int]]) -> Iterator[Stitched]:
    """The tensors that lie one after the other in a vector, of which ranks hold these pieces.

    Args:
        pieces: 1-D, in rank order, without padding, of one dtype; at least one, with as many elements as there are.
        names, shapes: of the tensors.
    """
    held = list(pieces)
    dtype, ahead = held[0].dtype, iter([piece for piece in held if piece.numel()])
    rest = held[0][:0]
    for name, shape in zip(names, map(torch.Size, shapes), strict=True):
        parts, missing = [], shape.numel()
        while missing:
            rest = rest if rest.numel() else next(ahead)
            parts.append(rest[:missing])
            missing -= parts[-1].numel()
            rest = rest[parts[-1].numel() :]
        yield Stitched(name, shape, dtype, tuple(parts or [rest[:0]]))


class StitchedReader:
    """Such tensors by name: a `fsdp._formats.source.TensorReader`.

    Args:
        path: what messages call it.
        tensors: all of them.
    """

    def __init__(self, path: str, tensors: Iterable[Stitched]) -> None:
        self.path = path
        self._tensors = {each.name: each for each in tensors}
        self._files = FileMappings()

    @property
    def tensors(self) -> Mapping[str, Stitched]:
        return self._tensors

    def read(self, name: str, target: Tensor, start: int = 0) -> None:
        """Read elements ``start : start + target.numel()`` in row-major order into `target`, cast to its dtype.

        Raises:
            ValueError: if `target` is not contiguous, or the range not in the tensor.
        """
        found = self._tensors[name]
        if not target.is_contiguous() or not 0 <= start <= found.shape.numel() - target.numel():
            raise ValueError(
                f"{name} in {self.path}: cannot read elements {start} to {start + target.numel()} of "
                f"{found.shape.numel()} into a tensor of shape {list(target.shape)} and strides {list(target.stride())}"
            )
        if not found.pieces:
            raise ValueError(f"{self.path} is closed")
        found.read(target.detach().view(-1), start, self._files)

    def close(self) -> None:
        """Let go of the files. What there is can still be seen, but not read."""
        self._files.close()
        self._tensors = {name: replace(each, pieces=()) for name, each in self._tensors.items()}
