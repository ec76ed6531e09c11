"""Text as bytes for the training job: its source, its split, and its windows.

The module depends on ranks only by a seed, and is independent of sharding: the process that checks the saved weights
reads the same text and validation batches through the same functions.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

# The standard library's tests, its generated tables and what was installed beside it are not what to learn.
_SKIPPED_FOLDERS = frozenset({"__pycache__", "encodings", "idle_test", "pydoc_data", "test", "tests"})
_SKIPPED_PREFIXES = (".", "site-packages", "dist-packages")
_VALIDATION_FRACTION = 0.1


class TextError(Exception):
    """The data cannot be used for training; the message is a single line for the user."""


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on and bytes held out.

    Args:
        train: `[num_bytes]` uint8, the beginning of the text.
        validation: `[num_bytes]` uint8, its last tenth: never trained on.
        digest: of all the bytes, so that another process can check that it reads the same text.
        origin: a description of the text for the output.
    """

    train: Tensor
    validation: Tensor
    digest: str
    origin: str


def load_corpus(data: str | None, *, context: int, max_bytes: int) -> Corpus:
    """Read the text and hold out its last tenth.

    Args:
        data: a file or a folder of text files; None for the source of Python's standard library.
        context: the window that is trained on; there must be enough text for some of them.
        max_bytes: how much to read at most, in the sorted order of the paths.

    Raises:
        TextError: the path does not exist, cannot be read, or holds too little text.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = _standard_library(folder) if data is None else _user_files(Path(data).expanduser())
    text = _concatenate(files, max_bytes)
    origin = "the source of Python's standard library" if data is None else data
    split = len(text) - int(len(text) * _VALIDATION_FRACTION)
    needed = 4 * (context + 1)
    if len(text) - split < needed:
        found = f"{len(text):,} bytes of text in {folder if data is None else data}"
        raise TextError(
            f"{found} are too few: at least {int(needed / _VALIDATION_FRACTION):,} are needed. "
            "Give a longer file or a folder with DATA=path."
        )
    tokens = torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy())
    return Corpus(tokens[:split], tokens[split:], hashlib.sha256(text).hexdigest(), origin)


def _standard_library(folder: Path) -> Iterator[Path]:
    return (path for path in _walk(folder, _SKIPPED_FOLDERS) if path.suffix == ".py")


def _user_files(path: Path) -> Iterator[Path]:
    if path.is_dir():
        return _walk(path, frozenset())
    if path.is_file():
        return iter([path])
    found = "neither a file nor a folder" if path.exists() else "not there"
    raise TextError(f"The data {path} is {found}. Give a file or a folder of text with DATA=path.")


def _walk(folder: Path, skipped: frozenset[str]) -> Iterator[Path]:
    """Regular files below `folder`, in an order that does not depend on the file system."""
    for parent, folders, names in os.walk(folder):
        # In place: that is how `os.walk` is told where to go.
        folders[:] = sorted(f for f in folders if f not in skipped and not f.startswith(_SKIPPED_PREFIXES))
        for name in sorted(names):
            path = Path(parent, name)
            if not name.startswith(".") and path.is_file():
                yield path


def _concatenate(files: Iterator[Path], max_bytes: int) -> bytes:
    pieces: list[bytes] = []
    missing = max_bytes
    for path in files:
        if missing <= 0:
            break
        try:
            with path.open("rb") as file:
                piece = file.read(missing)
        except OSError as error:
            raise TextError(f"{path} cannot be read: {error.strerror}.") from error
        # Images and archives lie in folders of text too; text has no zero bytes.
        if b"\0" not in piece[:8192]:
            pieces.append(piece)
            missing -= len(piece)
    return b"".join(pieces)


def training_batches(text: Tensor, *, batch: int, context: int, seed: int) -> Iterator[Tensor]:
    """Endless random windows, `[batch, context + 1]` int64; every rank takes another seed."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - context, (batch,), generator=generator)
        yield _windows(text, starts, context)


def validation_batches(text: Tensor, *, batch: int, context: int, max_batches: int) -> list[Tensor]:
    """Return evenly spread windows, equal on all ranks; all batches except the last contain `batch` windows."""
    num_windows = min(batch * max_batches, (len(text) - 1) // context)
    starts = torch.linspace(0, len(text) - context - 1, num_windows, dtype=torch.float64).long()
    return [_windows(text, piece, context) for piece in starts.split(batch)]


def _windows(text: Tensor, starts: Tensor, context: int) -> Tensor:
    return text[starts[:, None] + torch.arange(context + 1)].long()
