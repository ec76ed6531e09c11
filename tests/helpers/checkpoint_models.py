"""What tests of checkpoints share: models of every kind, changes to files, and a count of what is written."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from safetensors.torch import load_file
from torch import Tensor, nn

import fsdp


def stored_state(folder: Path) -> dict[str, Tensor]:
    """The model of a checkpoint, as the reference implementation reads it."""
    return load_file(folder / "model.safetensors")


def save_in(folder: Path, make: Callable[..., nn.Module], wrap: Any, seed: int = 1, **options: Any) -> None:
    """Collective. A checkpoint of a model that is made with a seed."""
    fsdp.save(folder, make(wrap, seed=seed), **options)


def content(folder: Path) -> dict[str, bytes]:
    """All files below a folder."""
    return {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


def flip(path: Path, place: int) -> None:
    """Change one bit of a file."""
    with path.open("r+b") as file:
        file.seek(place, os.SEEK_END if place < 0 else os.SEEK_SET)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x10]))


@contextmanager
def small_files(nbytes: int) -> Iterator[None]:
    """The system lets this process write the first bytes of files only, as if the disk were full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def counted_writes() -> Iterator[list[int]]:
    """The bytes of each write of tensors."""
    sizes: list[int] = []

    def pwrite(fd: int, data: Any, offset: int, do: Callable[..., int] = os.pwrite) -> int:
        sizes.append(do(fd, data, offset))
        return sizes[-1]

    with mock.patch("os.pwrite", pwrite):
        yield sizes


def tied_state(make: Callable[..., nn.Module], seed: int) -> dict[str, Tensor]:
    """A plain model's state with tied parameters under their first names only."""
    model = make(seed=seed)
    params = dict(model.named_parameters())  # which has them once
    return {
        name: value
        for name, value in model.state_dict().items()
        if name in params or name in dict(model.named_buffers())
    }
