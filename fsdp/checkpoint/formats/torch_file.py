"""Files of `torch.save`, examined without loading them: their objects, and the offsets of each tensor's bytes.

The file is a zip archive without compression: ``data.pkl`` contains the objects, which refer to storages by number,
and ``data/<number>`` contains the bytes of each storage.

[Note: nothing is called] The objects are read by an unpickler that creates only containers, numbers and a given
representation of tensors (`StridedTensor`). Every other object in a pickle becomes a `Foreign`, which records its
class and arguments. Untrusted files therefore cannot run code, and an unknown object does not prevent reading the
other objects.

[Note: bounds] The standard library has two unpicklers. The C unpickler trusts sizes in the pickle: it allocates as
many bytes as a string claims to have, and a memo of twice the largest memo index. The Python unpickler, which is the
base class here, reads only existing bytes. However, hashing a key takes time proportional to the number of paths
through nested shared tuples, which can be exponential. Tuples therefore count again each time they are referenced. At
the end the tree is also checked, because a walk visits shared objects once per path.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import pickle
import struct
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from operator import index
from typing import IO, Any, ClassVar, NamedTuple

import torch

from fsdp.checkpoint.checksums import crc32, spans
from fsdp.checkpoint.formats.source import SeenFile, StridedTensor, is_lazy, whole
from fsdp.checkpoint.json_values import MAX_TENSOR_BYTES, encoded
from fsdp.checkpoint.untrusted import BROKEN, opened, readable, short
from fsdp.state_dict_utils.tree import leaves

_ZIP = b"PK\3\4"
_LOCAL_HEADER = 30  # bytes before the name and extra fields, whose lengths are at offset 26
# Files of torch before 1.6 begin with a pickle of their magic number.
_OLD = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_KINDS = (
    "Double float64, Float float32, Half float16, BFloat16 bfloat16, Long int64, Int int32, Short int16, Char int8, "
    "Byte uint8, Bool bool, ComplexFloat complex64, ComplexDouble complex128, Untyped uint8"
)
_STORAGES = {f"{kind}Storage": getattr(torch, name) for kind, name in map(str.split, _KINDS.split(", "))}
_PLAIN_TYPES = ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")
_PATHS_PER_BYTE = 100  # of a pickle: an object counts each time that it is referenced
_FREE_PATHS = 1 << 20  # for small pickles


def is_torch_file(path: str | os.PathLike[str]) -> bool:
    """Return whether a file was written by `torch.save`, even if it is damaged. Only a few bytes are read."""
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
    """A file in an archive."""

    name: str
    begin: int  # the offset of the first byte in the file that contains the archive
    nbytes: int
    checksum: int

    @property
    def has_checksum(self) -> bool:
        return self.checksum != 0 or self.nbytes == 0  # zero in archives without checksums


class _Window(io.RawIOBase):
    """A byte range of a file, with the interface of a file."""

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
        left = max(self._nbytes - self._place, 0)  # a larger size would be allocated in vain
        found = _bytes_of(self._file, self._begin + self._place, left if size < 0 else min(size, left))
        self._place += len(found)
        return found


class TorchArchive:
    """An archive of `torch.save`: a file, or a byte range of a file. Messages use `what` as the name."""

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
                    f"{self.what} has the format of torch before 1.6, which is not supported: load it with torch.load, "
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
            f"{self.what} is not a file of torch.save, or is truncated or damaged ({type(error).__name__}: "
            f"{readable(str(error), 500)}): use another copy of it, or another checkpoint"
        )

    def _read(self, file: IO[bytes], begin: int, nbytes: int) -> None:
        with zipfile.ZipFile(_Window(file, begin, nbytes)) as archive:
            infos = archive.infolist()
            self.records = {info.filename: _record(file, begin, info) for info in infos}
            if sum(each.nbytes for each in self.records.values()) > nbytes or any(
                each.begin + each.nbytes > begin + nbytes for each in self.records.values()
            ):
                raise ValueError("its contents exceed the file, or overlap")
            self._root = infos[0].filename.rpartition("/")[0]
        if self._content_of(file, "byteorder", b"little") != b"little":
            raise ValueError("its numbers are big-endian")
        self._pickle = self._content_of(file, "data.pkl")

    def _content_of(self, file: IO[bytes], name: str, default: bytes | None = None) -> bytes:
        path = f"{self._root}/{name}"
        if default is not None and path not in self.records:
            return default
        record = self.records[path]
        found = _bytes_of(file, record.begin, record.nbytes)
        if record.has_checksum and crc32(found) != record.checksum:
            raise ValueError(f"{record.name} in it does not match its checksum")
        return found

    @cached_property
    def content(self) -> Any:
        """Return the saved objects, with `StridedTensor`s instead of tensors."""
        try:
            return Unpickler(self._pickle, self._tensor).load()
        except BROKEN as error:
            raise ValueError(self._broken(error)) from None

    @property
    def identity(self) -> str:
        """Return the same text for files with the same contents."""
        return hashlib.sha256(repr([(name, each.checksum) for name, each in self.records.items()]).encode()).hexdigest()

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
        if begin < record.begin or begin + found.extent * kind.itemsize > record.begin + record.nbytes:
            raise ValueError(f"a tensor of shape {list(found.shape)} and {kind} is not in storage {storage.number}")
        return found

    def damaged(self, advance: Callable[[int], None]) -> Iterator[str]:
        """Yield the errors of the records, reading each once in blocks of 4 MiB; `advance` receives the bytes read."""
        with opened(self.path) as file:
            for record in self.records.values():
                file.seek(record.begin)
                checksum = 0
                for begin, end in spans(0, record.nbytes):
                    checksum = crc32(file.read(end - begin), checksum)
                    advance(end - begin)
                if checksum != record.checksum and record.has_checksum:
                    yield f"{self.what} is damaged: {record.name} in it does not match its checksum"

    @property
    def has_checksums(self) -> bool:
        return all(record.has_checksum for record in self.records.values())


def _bytes_of(file: IO[bytes], begin: int, nbytes: int) -> bytes:
    if begin < 0:
        raise ValueError(f"it refers to a position {-begin} bytes before its beginning")
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


class Foreign:
    """Represents an object whose class is not instantiated, by the name of the class, arguments and attributes."""

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
        """Ignore items added to an object that is not a container here."""

    append = extend = add = __setitem__ = _take

    def __repr__(self) -> str:
        return readable(f"<{self.origin}>", 200)

    @property
    def fields(self) -> dict[str, Any]:
        """Return the attributes by name, including attributes in slots."""
        parts = self.state if isinstance(self.state, tuple) else (self.state,)
        return {key: value for part in parts if isinstance(part, dict) for key, value in part.items()}


class Storage(NamedTuple):
    """The memory of tensors, by its number and dtype in a pickle."""

    number: str
    dtype: torch.dtype


def _once_more(load: Callable[[Any], None]) -> Callable[[Unpickler], None]:
    """Wrap a method that pushes an object on the stack again: if the object is a tuple, its paths count again."""

    def loaded(unpickler: Unpickler) -> None:
        load(unpickler)
        ahead = [unpickler.stack[-1]]
        while ahead:
            each = ahead.pop()
            if isinstance(each, (tuple, frozenset)):
                unpickler.left -= 1 + len(each)
                _require(unpickler.left)
                ahead += each

    return loaded


class Unpickler(pickle._Unpickler):
    """An unpickler that creates containers, numbers and tensors, and calls no function that a file names.

    Args:
        content: the pickle, without trailing bytes.
        make: a function that creates a tensor from a storage, an offset, a shape, strides and an optional dtype. If
            None, tensors become `Foreign`.

    Raises:
        Exception: a member of `fsdp.checkpoint.untrusted.BROKEN`, if the content is not a pickle, or requires more
            memory or time than its size permits.
    """

    stack: list[Any]
    read: Callable[[int], bytes]
    append: Callable[[Any], None]
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(pickle._Unpickler.dispatch)

    def __init__(self, content: bytes, make: Callable[..., Any] | None = None) -> None:
        super().__init__(io.BytesIO(content))
        self._most = self.left = _FREE_PATHS + _PATHS_PER_BYTE * len(content)
        self._make = make

    def load(self) -> Any:
        found = super().load()
        _require_small(found, self._most)
        return found

    def _load_bytearray(self) -> None:
        """Read only the existing bytes; the standard library allocates the claimed size."""
        (nbytes,) = struct.unpack("<Q", self.read(8))
        self.append(bytearray(self.read(nbytes)))

    dispatch[pickle.BYTEARRAY8[0]] = _load_bytearray

    for _code in (pickle.GET, pickle.BINGET, pickle.LONG_BINGET, pickle.DUP):
        dispatch[_code[0]] = _once_more(dispatch[_code[0]])

    def find_class(self, module: str, name: str) -> Any:
        origin = f"{module}.{name}"
        if origin in _HARMLESS:
            return _HARMLESS[origin]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _STORAGES[name]
        own = {
            "torch._utils._rebuild_tensor": self._tensor,
            "torch._utils._rebuild_tensor_v2": self._tensor,
            "torch._utils._rebuild_tensor_v3": self._tensor_of_dtype,
            "torch._tensor._rebuild_from_type_v2": self._of_type,
        }
        return own.get(origin) or _foreign_class(origin)

    def persistent_load(self, pid: Any) -> Storage:
        if pid[0] != "storage" or not isinstance(pid[1], torch.dtype):
            raise pickle.UnpicklingError(f"a {short(pid[0])} of the kind {short(pid[1])}")
        return Storage(str(pid[2]), pid[1])

    def _tensor(
        self, storage: Any, offset: int, shape: Any, strides: Any, grad: Any = None, hooks: Any = None, bits: Any = None
    ) -> Any:
        return self._tensor_of_dtype(storage, offset, shape, strides, grad, hooks, None, bits)

    def _tensor_of_dtype(
        self, storage: Any, offset: int, shape: Any, strides: Any, grad: Any, hooks: Any, dtype: Any, bits: Any = None
    ) -> Any:
        if self._make is None or bits:  # lazily conjugated or negated
            return _foreign_class("torch.Tensor")()
        return self._make(storage, offset, shape, strides, dtype)

    def _of_type(self, rebuild: Callable[..., Any], kind: Any, args: Any, state: Any) -> Any:
        """Create a tensor of a subclass, or a tensor with attributes."""
        origin = getattr(kind, "origin", "")
        if origin in _PLAIN_TYPES and rebuild in (self._tensor, self._tensor_of_dtype, _data_of):
            return rebuild(*args)
        made = _foreign_class(origin)()
        made.args, made.state = args, state
        return made


def unpickled(content: bytes) -> Any:
    """Return the containers and numbers of a pickle, with `Foreign`s for other objects, without calling functions."""
    try:
        return Unpickler(content).load()
    except BROKEN as error:
        raise pickle.UnpicklingError(f"the pickle cannot be read: {type(error).__name__}: {error}") from None


def _foreign_class(origin: str) -> type[Foreign]:
    module, _, name = origin.rpartition(".")
    return type(name, (Foreign,), {"origin": origin, "__module__": module})


def _inside(owner: Any, name: str) -> type[Foreign]:
    """Replace `getattr`, which pickles use to access nested classes, by a class with the nested name."""
    return _foreign_class(f"{getattr(owner, 'origin', '')}.{name}")


def _data_of(data: Any, *_: Any) -> Any:
    return data


def _bytearray(*args: Any) -> bytearray:
    """Create a bytearray from bytes; a number, which would allocate that many bytes, is not supported."""
    if args and not isinstance(args[0], (bytes, str)):
        raise TypeError(f"a bytearray of a {type(args[0]).__name__}")
    return bytearray(*args)


_BUILTINS = {"set": set, "frozenset": frozenset, "complex": complex, "bytearray": _bytearray, "getattr": _inside}
_HARMLESS: dict[str, Any] = {
    "collections.Counter": Counter,
    "collections.OrderedDict": OrderedDict,
    "collections.defaultdict": lambda *_: {},
    "_codecs.encode": lambda text, encoding="latin1": text.encode("latin1"),  # old pickles store bytes as text
    "torch.Size": torch.Size,
    "torch._utils._rebuild_parameter": _data_of,
    "torch._utils._rebuild_parameter_with_state": _data_of,
    **{f"{module}.{name}": made for module in ("builtins", "__builtin__") for name, made in _BUILTINS.items()},
}


def _require_small(tree: Any, most: int) -> None:
    """Raise ValueError if a tree of containers has more than `most` paths.

    Cycles are not checked here: any walk through them fails immediately.
    """
    counts: dict[int, int] = {}
    stack = [(tree, False)]
    while stack:
        value, is_done = stack.pop()
        inside = _objects_in(value)
        if is_done:
            counts[id(value)] = 1 + sum(counts.get(id(each), 1) for each in inside)
            _require(most - counts[id(value)])
        elif inside and id(value) not in counts:
            counts[id(value)] = 1
            stack.append((value, True))
            stack.extend((each, False) for each in inside)


def _require(left: int) -> None:
    if left < 0:
        raise ValueError("repeated references in it make its contents many times larger than the file")


def _objects_in(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    state = getattr(value, "state", None)  # of a `Foreign`
    return [state, getattr(value, "args", ())] if state is not None else []


def materialised(value: Any, *, keep_state: bool = False) -> Any:
    """Return the tree with small tensors loaded, and with ``argparse.Namespace``s converted to dictionaries.

    `keep_state` skips the values of ``state``.
    """
    if is_lazy(value) and value.shape.numel() * value.dtype.itemsize <= MAX_TENSOR_BYTES:
        return whole(value)
    if isinstance(value, Foreign) and value.origin == "argparse.Namespace" and isinstance(value.state, Mapping):
        return materialised(value.state)
    if isinstance(value, Mapping):
        kept = "state" if keep_state else None
        found = {
            key: each if key == kept or str(key).startswith(f"{kept}.") else materialised(each)
            for key, each in value.items()
        }
        return Counter(found) if isinstance(value, Counter) else found
    if isinstance(value, (list, tuple)):
        made = [materialised(each) for each in value]
        return made if isinstance(value, list) else tuple(made)
    return value


def values_of(content: Mapping[Any, Any], leave: Iterable[Any], notes: list[str]) -> dict[Any, Any]:
    """Return the user's other values, if a checkpoint can contain them; skipped values are added to `notes`."""
    left, found = set(leave), {}
    for key, value in content.items():
        if key not in left:
            try:
                read = materialised(value)
                encoded(read, str(key))
            except (TypeError, RecursionError) as error:
                has_tensors = isinstance(error, TypeError) and any(is_lazy(leaf) for _, leaf in leaves(value))
                what = f"{key}, with tensors that are not the model's" if has_tensors else str(error).partition(":")[0]
                notes.append(f"left out: {what}")
            else:
                found[key] = read
    return found


def shown(value: Any) -> str:
    if isinstance(value, Foreign):
        return value.origin
    return "Tensor" if is_lazy(value) else type(value).__name__
