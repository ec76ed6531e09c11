"""Files of `torch.save`, looked at without loading them: what is in them, and where the bytes of each tensor are.

Such a file is a zip archive without compression: ``data.pkl`` has the objects, in which storages are mentioned by
number, and ``data/<number>`` has the bytes of each. The pickle is read by an unpickler that makes tensors
(`StridedTensor`), containers and numbers, and calls nothing that the file names. Whatever else is in it becomes a
`Foreign`, which says what it would have been. So files from elsewhere cannot run code, and one strange object does not
keep anybody from the rest.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import IO, Any, NamedTuple

import torch

from fsdp._formats.lazy_tensors import PIECE_BYTES, StridedTensor

_LOCAL_HEADER = 30  # bytes, and then the name and extra fields, whose lengths are at 26
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
    "UntypedStorage": torch.uint8,
}
_PLAIN_TYPES = ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")
_BROKEN = (
    zipfile.BadZipFile,
    pickle.UnpicklingError,
    EOFError,
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
    ValueError,
    struct.error,
    RecursionError,
    NotImplementedError,
)


class Foreign:
    """An object of a class that is not made when a file is read.

    Attributes:
        origin: the class or function that would have made it.
        args: what that would have been given.
        state: what would have been its attributes.
    """

    origin = ""

    def __new__(cls, *args: Any, **options: Any) -> Foreign:
        made = super().__new__(cls)
        made.args, made.state = args, {}
        return made

    def __init__(self, *args: Any, **options: Any) -> None:
        self.args: tuple[Any, ...]
        self.state: Any

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def _take(self, *_: Any) -> None:
        """Items of what is a container to others."""

    append = extend = add = __setitem__ = _take

    def __repr__(self) -> str:
        return f"<{self.origin}>"


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


class _Storage(NamedTuple):
    number: str
    dtype: torch.dtype


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
    """An archive that `torch.save` has written, as a file or within one.

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
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            nbytes = size - begin if nbytes is None else nbytes
            if begin + nbytes > size:
                raise ValueError(f"{self.what} is truncated: {path} has {size} bytes, and it ends at {begin + nbytes}")
            try:
                self._read(file, begin, nbytes)
            except _BROKEN as error:
                raise ValueError(self._broken(error)) from None

    def _broken(self, error: Exception) -> str:
        return f"{self.what} is no archive of torch.save, or is damaged: {type(error).__name__}: {error}"

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
        file.seek(record.begin)
        found = file.read(record.nbytes)
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
            return _Unpickler(self._pickle, self._tensor).load()
        except _BROKEN as error:
            raise ValueError(self._broken(error)) from None

    def _tensor(
        self, storage: _Storage, offset: int, shape: Any, strides: Any, dtype: torch.dtype | None = None
    ) -> StridedTensor:
        record = self.records[f"{self._root}/data/{storage.number}"]
        kind = storage.dtype if dtype is None else dtype
        found = StridedTensor(
            self.path, record.begin + offset * kind.itemsize, kind, torch.Size(shape), tuple(map(int, strides))
        )
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
        """Whether it says what its records' checksums are; torch can leave them out."""
        return all(record.has_checksum for record in self.records.values())


def _record(file: IO[bytes], begin: int, info: zipfile.ZipInfo) -> Record:
    file.seek(begin + info.header_offset)
    header = file.read(_LOCAL_HEADER)
    if header[:4] != b"PK\3\4":
        raise ValueError(f"the header of {info.filename} is not where it should be")
    name, extra = struct.unpack_from("<HH", header, 26)
    place = begin + info.header_offset + _LOCAL_HEADER + name + extra
    return Record(info.filename, place, info.file_size, info.CRC, info.compress_type != zipfile.ZIP_STORED)


# What a pickle may make


class _Unpickler(pickle.Unpickler):
    """Makes containers, numbers and tensors.

    Args:
        content: the pickle.
        make: a tensor of a storage, an offset, a shape, strides, and perhaps a dtype.
    """

    def __init__(self, content: bytes, make: Callable[..., Any] | None = None) -> None:
        super().__init__(io.BytesIO(content))
        self._make = make

    def find_class(self, module: str, name: str) -> Any:
        origin = f"{module}.{name}"
        if origin in _HARMLESS:
            return _HARMLESS[origin]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _STORAGES[name]
        own = {
            "torch._utils._rebuild_tensor_v2": self._tensor,
            "torch._utils._rebuild_tensor_v3": self._tensor_of_dtype,
            "torch._tensor._rebuild_from_type_v2": self._of_type,
        }
        return own.get(origin) or type(name, (Foreign,), {"origin": origin, "__module__": module})

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, number, *_ = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise pickle.UnpicklingError(f"a storage of the kind {kind} {dtype}")
        return _Storage(str(number), dtype)

    def _tensor(
        self, storage: Any, offset: int, shape: Any, strides: Any, grad: Any = None, hooks: Any = None, bits: Any = None
    ) -> Any:
        return self._made(storage, offset, shape, strides, None, bits)

    def _tensor_of_dtype(
        self, storage: Any, offset: int, shape: Any, strides: Any, grad: Any, hooks: Any, dtype: Any, bits: Any = None
    ) -> Any:
        return self._made(storage, offset, shape, strides, dtype, bits)

    def _made(self, storage: Any, offset: int, shape: Any, strides: Any, dtype: Any, bits: Any) -> Any:
        if self._make is None or bits:  # conjugated, or negated, when it is looked at
            return _foreign("torch.Tensor")
        return self._make(storage, offset, shape, strides, dtype)

    def _of_type(self, rebuild: Callable[..., Any], kind: Any, args: Any, state: Any) -> Any:
        """A tensor of a class, or one that was given attributes."""
        origin = getattr(kind, "origin", "")
        if origin in _PLAIN_TYPES and rebuild in (self._tensor, self._tensor_of_dtype, _data_of):
            return rebuild(*args)
        return _foreign(origin)


def unpickled(content: bytes) -> Any:
    """What a pickle has of containers and numbers, with `Foreign`s for the rest. Nothing that it names is called.

    Raises:
        ValueError: if it cannot be read.
    """
    try:
        return _Unpickler(content).load()
    except _BROKEN as error:
        raise ValueError(f"the pickle cannot be read: {type(error).__name__}: {error}") from None


def _foreign(origin: str) -> Foreign:
    made: Foreign = type("Foreign", (Foreign,), {"origin": origin})()
    return made


def _data_of(data: Any, *_: Any) -> Any:
    """A parameter as its values."""
    return data


def _bytes(text: str, encoding: str = "latin1") -> bytes:
    """As old pickles have them."""
    return text.encode("latin1")


def _default_dict(*_: Any) -> dict[Any, Any]:
    return {}


_BUILTINS = (set, frozenset, complex, bytearray)
_HARMLESS: dict[str, Any] = {
    "collections.OrderedDict": OrderedDict,
    "collections.defaultdict": _default_dict,
    "_codecs.encode": _bytes,
    "torch.Size": torch.Size,
    "torch._utils._rebuild_parameter": _data_of,
    "torch._utils._rebuild_parameter_with_state": _data_of,
    **{f"{module}.{kind.__name__}": kind for module in ("builtins", "__builtin__") for kind in _BUILTINS},
}
