"""Safetensors files written by several ranks at once: who knows the layout knows every byte's place.

`plan` is arithmetic: from names, dtypes and shapes it makes headers and places, the same on every rank. Then each rank
writes its parts where they belong (`write_parts`). Nothing is gathered, and a part is written from the memory that it
is in; what is not on the CPU, or of another dtype, goes through one block.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fsdp.checkpoint.checksums import BLOCK_BYTES, Fragment, fragment, spans
from fsdp.checkpoint.safetensors import DTYPES, INDEX_SUFFIX, MAX_HEADER

SUFFIX = ".safetensors"
KINDS = {dtype: kind for kind, dtype in DTYPES.items()}
_LENGTH_BYTES = 8  # of the header's length, before it
# Data begin at a multiple of these bytes in the file, as tensors do in memory, behind spaces, which are allowed. Where
# the two lie differently in lines of the processor's cache, copying to and from the system's took twice the time.
_LINE = 64


@dataclass(frozen=True, eq=False)
class Part:
    """Elements of a tensor, from number `start` on in row-major order; `values` is flat, of any dtype and device."""

    start: int
    values: Tensor


@dataclass(frozen=True, eq=False)
class Entry:
    """A tensor to be written, and what this rank writes of it."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    parts: list[Part] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class PlannedFile:
    """A file that is to be written.

    Attributes:
        name: in its folder.
        head: all that is before the data.
        begins: by a tensor's name, the byte of the file at which it begins.
        nbytes: of the whole file.
    """

    name: str
    head: bytes
    begins: dict[str, int]
    nbytes: int


def plan(entries: Sequence[Entry], stem: str, max_file_bytes: int | None = None) -> list[PlannedFile]:
    """The files for some tensors: ``model.safetensors``, or ``model-00001-of-00003.safetensors`` and so on.

    Args:
        entries: the tensors, in their order.
        stem: the first part of the files' names.
        max_file_bytes: begin a new file before there are more bytes of tensors in one; one tensor may be larger.

    Raises:
        TypeError: for a dtype that the format has not.
        ValueError: for two tensors of one name, or too many for a header.
    """
    names = [entry.name for entry in entries]
    twice = next((name for name in names if names.count(name) > 1), None) if len(set(names)) < len(names) else None
    if twice is not None:
        raise ValueError(f"two tensors have the name {twice}: a file can hold one of them")
    for entry in entries:
        if entry.dtype not in KINDS:
            raise TypeError(f"{entry.name} is of {entry.dtype}, which safetensors files cannot hold")
    bundles: list[list[Entry]] = [[]]
    room = max_file_bytes
    for entry in entries:
        if room is not None and max_file_bytes is not None:
            if bundles[-1] and entry.nbytes > room:
                bundles.append([])
                room = max_file_bytes
            room -= entry.nbytes
        bundles[-1].append(entry)
    count = len(bundles)
    return [
        _planned(f"{stem}{SUFFIX}" if count == 1 else f"{stem}-{number:05d}-of-{count:05d}{SUFFIX}", bundle)
        for number, bundle in enumerate(bundles, start=1)
    ]


def _planned(name: str, entries: Sequence[Entry]) -> PlannedFile:
    header: dict[str, object] = {
        "__metadata__": {"format": "pt"}
    }  # older versions of transformers refuse files that do not say it
    offset, offsets = 0, {}
    # So that each is aligned: what fills whole lines, and then from the largest elements to the smallest.
    for entry in sorted(entries, key=lambda each: (each.nbytes % _LINE > 0, -each.dtype.itemsize)):
        offsets[entry.name] = offset
        header[entry.name] = {
            "dtype": KINDS[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [offset, offset + entry.nbytes],
        }
        offset += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + _LENGTH_BYTES) % _LINE)
    if len(text) > MAX_HEADER:
        raise ValueError(
            f"the names of {len(entries)} tensors need {len(text)} bytes, and a safetensors file can have "
            f"{MAX_HEADER}: divide them among several files (max_file_bytes)"
        )
    head = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    begins = {key: len(head) + begin for key, begin in offsets.items()}
    return PlannedFile(name, head, begins, len(head) + offset)


def index_of(files: Sequence[PlannedFile], entries: Sequence[Entry]) -> bytes:
    """The text of the index of several files (``model.safetensors.index.json``)."""
    weight_map = {name: file.name for file in files for name in file.begins}
    total = sum(entry.nbytes for entry in entries)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1).encode()


def index_name(stem: str) -> str:
    """What the index is called."""
    return f"{stem}{INDEX_SUFFIX}"


def create(folder: str, file: PlannedFile) -> None:
    """Make a file of its size, with what is before the data."""
    path = os.path.join(folder, file.name)
    with open(path, "xb") as made:
        made.write(file.head)
        made.truncate(file.nbytes)
        made.flush()
        os.fsync(made.fileno())  # of a file without elements nobody else does


def write_parts(folder: str, files: Sequence[PlannedFile], entries: Sequence[Entry]) -> list[Fragment]:
    """Write this rank's parts into files that are there, have the disk keep them, and return their checksums.

    Raises:
        OSError: if that fails; it names the file.
    """
    fragments: list[Fragment] = []
    for file in files:
        mine = [entry for entry in entries if entry.name in file.begins and entry.parts]
        if not mine:
            continue
        with written(folder, file) as fd:
            for entry in mine:
                for begin, memory in chunks_of(entry):
                    fragments.append(fragment(entry.name, begin, memory))
                    write_at(fd, memory, file.begins[entry.name] + begin)
    return fragments


@contextmanager
def written(folder: str, file: PlannedFile) -> Iterator[int]:
    """The descriptor of a file that is there; in the end, the disk keeps it."""
    path = os.path.join(folder, file.name)
    fd = os.open(path, os.O_WRONLY | getattr(os, "O_CLOEXEC", 0))
    try:
        yield fd
        os.fsync(fd)
    except OSError as error:
        error.filename = error.filename or path  # which writes and syncs do not know
        raise
    finally:
        os.close(fd)


def chunks_of(entry: Entry) -> Iterator[tuple[int, memoryview]]:
    """What this rank has of a tensor, cut at the borders of blocks: the first byte's number in the tensor, and bytes.

    The memory may be used again for the next chunk.
    """
    size = entry.dtype.itemsize
    buffer: Tensor | None = None
    for part in entry.parts:
        values = part.values.detach()
        is_ready = values.device.type == "cpu" and values.dtype == entry.dtype
        for begin, end in spans(part.start * size, (part.start + values.numel()) * size):
            chunk = values[begin // size - part.start : end // size - part.start]
            if not is_ready:
                if buffer is None:
                    buffer = torch.empty(BLOCK_BYTES // size, dtype=entry.dtype, device="cpu")
                chunk = buffer[: chunk.numel()].copy_(chunk)
            yield begin, chunk.view(torch.uint8).numpy().data


def write_at(fd: int, memory: memoryview, offset: int) -> None:
    """Write all of it, in as many calls as the system wants."""
    while memory:
        count = os.pwrite(fd, memory, offset)
        memory, offset = memory[count:], offset + count
