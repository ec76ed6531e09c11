"""Files of `torch.save`, looked at without loading them: what is in them, and where the bytes of each tensor are.

Such a file is a zip archive without compression: ``data.pkl`` has the objects, in which storages are mentioned by
number, and ``data/<number>`` has the bytes of each. Before torch 1.6 it was five pickles one after the other: a magic
number, a version, what machine it was, the objects, and the storages' numbers; their bytes follow, in that order, each
after how many elements it has. The objects are read by an unpickler that makes tensors (`StridedTensor`), containers
and numbers, and calls nothing that the file names (`fsdp._formats.torch_pickle`).
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import IO, Any, NamedTuple

import torch

from fsdp._formats.lazy_tensors import PIECE_BYTES, SeenFile, StridedTensor
from fsdp._formats.torch_pickle import BROKEN, Storage, Unpickler

_ZIP = b"PK\3\4"
_LOCAL_HEADER = 30  # bytes, and then the name and extra fields, whose lengths are at 26
# With which files of torch before 1.6 begin: a pickle of their magic number.
_OLD = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


def is_torch_file(path: str | os.PathLike[str]) -> bool:
    """Whether a file is, or has been before it was damaged, one of `torch.save`. Reads a few bytes of it."""
    try:
        with open(path, "rb") as file:
            head = file.read(len(_OLD))
        if not head.startswith(_ZIP):
            return head == _OLD
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith("/data.pkl") for name in archive.namelist())
    except zipfile.BadZipFile:
        return True
    except OSError:
        return False


class Record(NamedTuple):
    """One file in an archive: its first byte in the file that the archive is in, and what the archive says of it."""

    name: str
    begin: int
    nbytes: int
    checksum: int
    is_compressed: bool

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

    def readinto(self, buffer: Any) -> int:
        memory = memoryview(buffer)[: max(self._nbytes - self._place, 0)]
        self._file.seek(self._begin + self._place)
        count = self._file.readinto(memory)  # type: ignore[attr-defined]
        self._place += count
        return count


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
        with open(path, "rb") as file:
            self._file = SeenFile.of(path, file.fileno())
            size = self._file.nbytes
            nbytes = size - begin if nbytes is None else nbytes
            if begin + nbytes > size:
                raise ValueError(f"{self.what} is truncated: {path} has {size} bytes, and it ends at {begin + nbytes}")
            try:
                file.seek(begin)
                if file.read(len(_OLD)) == _OLD:
                    self._read_old(file, begin, begin + nbytes)
                else:
                    self._read(file, begin, nbytes)
            except BROKEN as error:
                raise ValueError(self._broken(error)) from None

    def __str__(self) -> str:
        return self.what

    def _broken(self, error: Exception) -> str:
        return (
            f"{self.what} is no file of torch.save, or is cut short or damaged ({type(error).__name__}: {error}): take "
            "another copy of it, or another checkpoint"
        )

    def _read_old(self, file: IO[bytes], begin: int, end: int) -> None:
        file.seek(begin)
        _, _, machine = (Unpickler(file).load() for _ in range(3))
        if not machine["little_endian"]:
            raise ValueError("its numbers are big-endian")
        place, objects = file.tell(), Unpickler(file)
        objects.load()  # to know where they end; they are made when somebody wants them
        self._root, self._pickle = "", _bytes_of(file, place, file.tell() - place)
        numbers = Unpickler(file).load()
        place = file.tell()
        self.records = {}
        for number in numbers:
            count = struct.unpack("<q", _bytes_of(file, place, 8))[0]
            name = f"/data/{number}"
            self.records[name] = Record(name, place + 8, count * objects.storages[str(number)].itemsize, 0, False)
            place += 8 + self.records[name].nbytes
        if place > end:
            raise ValueError(f"it has {end - begin} bytes of {place - begin}")

    def _read(self, file: IO[bytes], begin: int, nbytes: int) -> None:
        with zipfile.ZipFile(_Window(file, begin, nbytes)) as archive:
            infos = archive.infolist()
            self.records = {info.filename: _record(file, begin, info) for info in infos}
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
            return Unpickler(io.BytesIO(self._pickle), self._tensor).load()
        except BROKEN as error:
            raise ValueError(self._broken(error)) from None

    def _tensor(
        self, storage: Storage, offset: int, shape: Any, strides: Any, dtype: torch.dtype | None = None
    ) -> StridedTensor:
        record = self.records[f"{self._root}/data/{storage.number}"]
        kind = storage.dtype if dtype is None else dtype
        begin = record.begin + storage.first * storage.dtype.itemsize + offset * kind.itemsize
        found = StridedTensor(self._file, begin, kind, torch.Size(shape), tuple(map(int, strides)))
        if record.is_compressed or found.begin + found.extent * kind.itemsize > record.begin + record.nbytes:
            raise ValueError(f"a tensor of shape {list(found.shape)} and {kind} is not in storage {storage.number}")
        return found

    def damaged(self, advance: Callable[[int], None]) -> Iterator[str]:
        """What is wrong with its records, each read once, 4 MiB at a time.

        Args:
            advance: is told how many bytes were read.
        """
        with open(self.path, "rb") as file:
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
        """Whether it says what its records' checksums are; torch can leave them out, and did so before 1.6."""
        return all(record.has_checksum for record in self.records.values())


def _bytes_of(file: IO[bytes], begin: int, nbytes: int) -> bytes:
    file.seek(begin)
    return file.read(nbytes)


def _record(file: IO[bytes], begin: int, info: zipfile.ZipInfo) -> Record:
    file.seek(begin + info.header_offset)
    header = file.read(_LOCAL_HEADER)
    if header[:4] != b"PK\3\4":
        raise ValueError(f"the header of {info.filename} is not where it should be")
    name, extra = struct.unpack_from("<HH", header, 26)
    place = begin + info.header_offset + _LOCAL_HEADER + name + extra
    return Record(info.filename, place, info.file_size, info.CRC, info.compress_type != zipfile.ZIP_STORED)
