"""Files of `torch.save`, looked at without loading them: what is in them, and where the bytes of each tensor are.

Such a file is a zip archive without compression: ``data.pkl`` has the objects, in which storages are mentioned by
number, and ``data/<number>`` has the bytes of each. The objects are read by an unpickler that makes tensors
(`StridedTensor`), containers and numbers, and calls nothing that the file names
(`fsdp.checkpoint.formats.torch_pickle`).
"""

from __future__ import annotations

import io
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import cached_property
from operator import index
from typing import IO, Any, NamedTuple

import torch

from fsdp.checkpoint.formats.lazy_tensors import PIECE_BYTES, SeenFile, StridedTensor
from fsdp.checkpoint.formats.torch_pickle import Storage, Unpickler
from fsdp.checkpoint.untrusted import BROKEN, opened, readable, short

_ZIP = b"PK\3\4"
_LOCAL_HEADER = 30  # bytes, and then the name and extra fields, whose lengths are at 26
# Files of torch before 1.6 begin with a pickle of their magic number.
_OLD = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


def is_torch_file(path: str | os.PathLike[str]) -> bool:
    """Whether a file is, or has been before it was damaged, one of `torch.save`. Reads a few bytes of it."""
    try:
        with opened(path) as file:
            head = file.read(len(_OLD))
            if not head.startswith(_ZIP):
                return head == _OLD
            try:
                with zipfile.ZipFile(_Window(file, 0, os.fstat(file.fileno()).st_size)) as archive:
                    return any(name.endswith("/data.pkl") for name in archive.namelist())
            except BROKEN:
                return True
    except (OSError, ValueError):
        return False


class Record(NamedTuple):
    """One file in an archive: its first byte in the file that the archive is in, and what the archive says of it."""

    name: str
    begin: int
    nbytes: int
    checksum: int

    @property
    def end(self) -> int:
        return self.begin + self.nbytes

    @property
    def has_checksum(self) -> bool:
        """Whether the archive has one; what torch writes without has zero."""
        return self.checksum != 0 or self.nbytes == 0


class _Window(io.RawIOBase):
    """Some bytes of a file, as a file."""

    def __init__(self, file: IO[bytes], begin: int, nbytes: int) -> None:
        super().__init__()
        self._file, self._begin, self._nbytes, self._place = file, begin, nbytes, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._place = offset + (0, self._place, self._nbytes)[whence]
        if self._place < 0:
            raise ValueError("it is too short")
        return self._place

    def tell(self) -> int:
        return self._place

    def read(self, size: int = -1) -> bytes:
        left = max(self._nbytes - self._place, 0)  # more would be allocated, and not found
        found = _bytes_of(self._file, self._begin + self._place, left if size < 0 else min(size, left))
        self._place += len(found)
        return found


class TorchArchive:
    """What `torch.save` has written, as a file or within one.

    Args:
        path: the file.
        begin: of the archive in it.
        nbytes: of the archive; None for the rest of the file.
        what: what messages call it.

    Raises:
        ValueError: if it is none, or damaged.
        OSError: if it cannot be read.
    """

    def __init__(self, path: str, begin: int = 0, nbytes: int | None = None, what: str = "") -> None:
        self.path, self.what = path, what or path
        with opened(path) as file:
            self._file = SeenFile.of(path, file.fileno())
            size = self._file.nbytes
            nbytes = size - begin if nbytes is None else nbytes
            if min(begin, nbytes) < 0 or begin + nbytes > size:
                raise ValueError(f"{self.what} is truncated: {path} has {size} bytes, and it ends at {begin + nbytes}")
            if _bytes_of(file, begin, len(_OLD)) == _OLD:
                raise ValueError(
                    f"{self.what} has the format of torch before 1.6, which is not read here: load it with torch.load, "
                    "and save it again with torch.save"
                )
            try:
                self._read(file, begin, nbytes)
            except BROKEN as error:
                raise ValueError(self._broken(error)) from None

    def __str__(self) -> str:
        return self.what

    def _broken(self, error: Exception) -> str:
        return readable(
            f"{self.what} is no file of torch.save, or is cut short or damaged ({type(error).__name__}: "
            f"{readable(str(error), 500)}): take another copy of it, or another checkpoint"
        )

    def _read(self, file: IO[bytes], begin: int, nbytes: int) -> None:
        with zipfile.ZipFile(_Window(file, begin, nbytes)) as archive:
            infos = archive.infolist()
            self.records = {info.filename: _record(file, begin, info) for info in infos}
            if sum(record.nbytes for record in self.records.values()) > nbytes or any(
                record.end > begin + nbytes for record in self.records.values()
            ):
                raise ValueError("what is in it lies outside of it, or over each other")
            self._root = infos[0].filename.rpartition("/")[0]
        if self._content_of(file, "byteorder", b"little") != b"little":
            raise ValueError("its numbers are big-endian")
        self._pickle = self._content_of(file, "data.pkl")

    def _content_of(self, file: IO[bytes], name: str, default: bytes | None = None) -> bytes:
        record = self.records.get(f"{self._root}/{name}")
        if record is None and default is not None:
            return default
        record = self.records[f"{self._root}/{name}"]
        found = _bytes_of(file, record.begin, record.nbytes)
        if record.has_checksum and zlib.crc32(found) != record.checksum:
            raise ValueError(f"{record.name} in it is not what was saved")
        return found

    @cached_property
    def content(self) -> Any:
        """What was saved, with `StridedTensor`s in the place of tensors.

        Raises:
            ValueError: if it cannot be read.
        """
        try:
            return Unpickler(self._pickle, self._tensor).load()
        except BROKEN as error:
            raise ValueError(self._broken(error)) from None

    def _tensor(
        self, storage: Storage, offset: int, shape: Any, strides: Any, dtype: torch.dtype | None = None
    ) -> StridedTensor:
        record = self.records[f"{self._root}/data/{storage.number}"]
        kind = storage.dtype if dtype is None else dtype
        begin = record.begin + offset * kind.itemsize
        sizes, steps = tuple(map(index, shape)), tuple(map(index, strides))
        if len(sizes) != len(steps) or min((0, *sizes, *steps)) < 0 or math.prod(filter(None, sizes)) >= 1 << 63:
            raise ValueError(f"a tensor has shape {short(sizes)} and strides {short(steps)}")
        found = StridedTensor(self._file, begin, kind, torch.Size(sizes), steps)
        if begin < record.begin or found.begin + found.extent * kind.itemsize > record.end:
            raise ValueError(f"a tensor of shape {list(found.shape)} and {kind} is not in storage {storage.number}")
        return found

    def damaged(self, advance: Callable[[int], None]) -> Iterator[str]:
        """What is wrong with its records, each read once, 4 MiB at a time.

        Args:
            advance: is told how many bytes were read.
        """
        with opened(self.path) as file:
            for record in self.records.values():
                file.seek(record.begin)
                left, checksum = record.nbytes, 0
                while left:
                    piece = file.read(min(left, PIECE_BYTES))
                    if not piece:
                        break
                    checksum, left = zlib.crc32(piece, checksum), left - len(piece)
                    advance(len(piece))
                if checksum != record.checksum and record.has_checksum:
                    yield f"{self.what} is damaged: {record.name} in it is not what was saved"

    @property
    def has_checksums(self) -> bool:
        """Whether it says what its records' checksums are; torch can leave them out."""
        return all(record.has_checksum for record in self.records.values())


def _bytes_of(file: IO[bytes], begin: int, nbytes: int) -> bytes:
    if begin < 0:
        raise ValueError(f"it says that something begins {-begin} bytes before it")
    file.seek(begin)
    return file.read(nbytes)


def _record(file: IO[bytes], begin: int, info: zipfile.ZipInfo) -> Record:
    header = _bytes_of(file, begin + info.header_offset, _LOCAL_HEADER)
    if header[:4] != b"PK\3\4":
        raise ValueError(f"the header of {info.filename} is not where it should be")
    name, extra = struct.unpack_from("<HH", header, 26)
    place = begin + info.header_offset + _LOCAL_HEADER + name + extra
    if info.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{info.filename} in it is compressed, as torch.save never does")
    return Record(info.filename, place, info.file_size, info.CRC)
