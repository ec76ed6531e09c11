"""Writing converted checkpoints as one file of `torch.save`, without having them in memory.

torch writes the file with room for the tensors (``torch.serialization.skip_data``); then each is read from the source
and written to its place, a piece at a time, and its checksum to the archive's lists.
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fsdp.checkpoint.formats.convert import OPTIMIZER, Advance, Content, Item, tree_of
from fsdp.checkpoint.formats.convert_place import new_place
from fsdp.checkpoint.formats.lazy_tensors import StridedTensor
from fsdp.checkpoint.formats.torch_archive import TorchArchive
from fsdp.checkpoint.safetensors_writer import write_at

_NOTHING_ELSE = re.compile("")
_END, _END_64 = b"PK\5\6", b"PK\6\6"
_DESCRIPTOR = b"PK\7\x08"


def write_torch(path: str, content: Content, *, by_number: bool, overwrite: bool, advance: Advance) -> None:
    """One file. An optimizer alone is its state, without a dictionary around it.

    Raises:
        ValueError: if the source is damaged.
        OSError: if it cannot be written.
    """
    items: dict[int, Item] = {}
    rooms: dict[tuple[int, str], Tensor] = {}  # tied tensors stay tied

    def make(item: Item) -> Tensor:
        place = (id(item.reader), item.key)
        if place not in rooms:
            rooms[place] = torch.empty(item.shape, dtype=item.dtype)  # which is never touched
            items[id(rooms[place])] = item
        return rooms[place]

    tree = tree_of(content, make, by_number=by_number)
    whole = tree[OPTIMIZER] if content.model is None else tree
    with new_place(path, is_folder=False, overwrite=overwrite, own=_NOTHING_ELSE) as part:
        _save_in_pieces(part, whole, items, advance)


def _save_in_pieces(path: str, tree: Any, items: Mapping[int, Item], advance: Advance) -> None:
    """Write a tree as `torch.save` does; `items` has, by `id`, where tensors come from that are in no memory."""
    with torch.serialization.skip_data():
        torch.save(tree, path)
    archive = TorchArchive(path)
    checksums: dict[int, int] = {}
    fd = os.open(path, os.O_WRONLY)
    try:
        for tensor, place in zip(_tensors(tree), _tensors(archive.content), strict=True):
            if place.begin in checksums:
                continue
            item = items.get(id(tensor))
            pieces = iter([tensor.contiguous().view(-1)]) if item is None else item.pieces()
            checksums[place.begin] = _write(fd, place.begin, pieces, None if item is None else advance)
    finally:
        os.close(fd)
    _note_checksums(path, archive, checksums)


def _write(fd: int, place: int, pieces: Iterator[Tensor], advance: Advance | None) -> int:
    checksum = 0
    for piece in pieces:
        memory = piece.view(torch.uint8).numpy().data
        write_at(fd, memory, place)
        checksum, place = zlib.crc32(memory, checksum), place + len(memory)
        if advance is not None:
            advance(len(memory))
    return checksum


def _tensors(tree: Any) -> Iterator[Any]:
    """All in it, in its order."""
    if isinstance(tree, (Tensor, StridedTensor)):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _tensors(value)


def _note_checksums(path: str, archive: TorchArchive, checksums: Mapping[int, int]) -> None:
    """Write the checksums of records, by their first bytes, to where an archive has them: after each and at its end."""
    records = {record.name: record for record in archive.records.values()}
    with open(path, "r+b") as file:
        for record in records.values():
            if record.begin in checksums and record.nbytes:
                file.seek(record.begin + record.nbytes)
                if file.read(4) == _DESCRIPTOR:
                    file.write(struct.pack("<I", checksums[record.begin]))
        place, count = _directory(file)
        for _ in range(count):
            file.seek(place)
            head = file.read(46)
            name_bytes, extra, comment = struct.unpack_from("<HHH", head, 28)
            record = records[file.read(name_bytes).decode()]
            if record.begin in checksums and record.nbytes:
                file.seek(place + 16)
                file.write(struct.pack("<I", checksums[record.begin]))
            place += 46 + name_bytes + extra + comment


def _directory(file: Any) -> tuple[int, int]:
    """Where an archive's list of records begins, and how many there are."""
    size = file.seek(0, os.SEEK_END)
    file.seek(size - 22)  # there is no comment
    end = file.read(22)
    if end[:4] != _END:
        raise ValueError("torch has written an archive whose end is not where it should be")
    count, place = struct.unpack_from("<H", end, 10)[0], struct.unpack_from("<I", end, 16)[0]
    if count == 0xFFFF or place == 0xFFFFFFFF:
        file.seek(size - 22 - 20 + 8)
        file.seek(struct.unpack("<Q", file.read(8))[0])
        end = file.read(56)
        if end[:4] != _END_64:
            raise ValueError("torch has written an archive whose end is not where it should be")
        count, place = struct.unpack_from("<Q", end, 32)[0], struct.unpack_from("<Q", end, 48)[0]
    return place, count
