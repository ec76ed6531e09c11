"""Parked tensors: copies of their bytes, and the classes of tensors while their memory is freed.

The copies are in host memory, or in a file that is mapped into memory. A parked tensor has the same offset in the copy
as in its storage, so a tensor in host memory can have the same values (`host_values`). Operations that only read
values, such as `detach` and `clone`, are applied to this tensor instead. State dicts and checkpoints therefore require
no special code for parked models. All other operations on a parked tensor raise an error, because accesses to freed
memory would crash the process on a CPU.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.utils.weak import WeakIdKeyDictionary

from fsdp.checkpoint.safetensors import KINDS, SUFFIX, Entry, SafetensorsFiles, plan, write_at
from fsdp.distributed.communicator import own_rank
from fsdp.distributed.devices import HOST, has_streams, is_host
from fsdp.engine.originals import is_ours
from fsdp.engine.placeholder import Placeholder
from fsdp.engine.storage import ShardStorage
from fsdp.state_dict_utils.host_memory import allocate

# The name of a storage, the dtype of its elements, and the storage.
NamedStorage = tuple[str, torch.dtype, UntypedStorage]
Named = tuple[str, Any]  # the name of a tensor in files and errors, and the tensor or None


def plain_tensors(value: Any) -> Iterator[Tensor]:
    """Yield a tensor with memory, or the inner tensors of a wrapper, such as the local tensor of a `DTensor`."""
    if not isinstance(value, Tensor) or isinstance(value, (Placeholder, Guard)):
        return
    inner = getattr(value, "__tensor_flatten__", None)
    for name in inner()[0] if inner is not None else ():
        yield from plain_tensors(getattr(value, name))
    if inner is None and not value.is_meta and value.layout is torch.strided:
        yield value
        if value._base is not None:  # gradients are often views
            yield from plain_tensors(value._base)


def in_own_memory(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor whose memory cannot be freed, such as memory of a file; any other tensor unchanged."""
    return tensor if all(one.untyped_storage().resizable() for one in plain_tensors(tensor)) else tensor.clone()


def addresses(named: Iterable[Named]) -> set[int]:
    """Return the addresses of the tensors' storages, except of empty storages, which have the same address."""
    storages = (one.untyped_storage() for _, value in named for one in plain_tensors(value))
    return {storage.data_ptr() for storage in storages if storage.nbytes()}


class ParkedTensors:
    """Tensors whose storages are freed together, and allocated and filled together again.

    Methods are called in the order `find`, `copy`, `free`, `fill`, `show`, repeatedly, and finally `end`. Copies
    between a device and the host (``to="host"``, or a folder) are queued on the current stream. `part` is the prefix of
    the tensors' names in files and errors; the other arguments are as in `guard`.
    """

    def __init__(self, part: str, to: str | os.PathLike[str], message: str, is_readable: bool) -> None:
        self.part, self._to, self.message, self._is_readable = part, to, message, is_readable
        self._copies = HostCopies() if to == "host" else FileCopies(to)
        self._tensors: dict[int, tuple[Any, int | None]] = {}  # by id; plain tensors with the address of their storage
        self._storages: dict[int, NamedStorage] = {}  # by address
        self._copied: dict[int, UntypedStorage] = {}  # by the address of the storage
        self._guarded: list[Any] = []

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes() for each in self._copied.values())

    @property
    def is_parked(self) -> bool:
        return bool(self._guarded)

    @property
    def devices(self) -> set[torch.device]:
        return {storage.device for _, _, storage in self._storages.values()}

    def find(self, named: Iterable[Named], stay: set[int]) -> None:
        """Register the tensors to park, except tensors in storages with the addresses `stay`."""
        names: set[str] = set()
        for name, value in named:
            for tensor in plain_tensors(value):
                storage, address = tensor.untyped_storage(), tensor.untyped_storage().data_ptr()
                if not storage.nbytes() or address in stay or (self._to == "host" and is_host(storage.device)):
                    continue
                self._tensors.setdefault(id(value), (value, None))
                self._tensors[id(tensor)] = tensor, address
                if address not in self._storages:
                    own = f"{self.part}.{name}"
                    if not storage.resizable():
                        raise ValueError(
                            f"{own} cannot be parked, because its memory is or was shared with NumPy or another "
                            "process, or was allocated by torch.load or by an earlier parking in a folder: use a copy "
                            "(tensor.detach().clone()) for NumPy, or in the loaded model or optimizer, or omit this "
                            "part"
                        )
                    own = f"{own}.{len(names)}" if own in names else own
                    names.add(own)
                    fits = tensor.dtype in KINDS and storage.nbytes() % tensor.dtype.itemsize == 0
                    self._storages[address] = own, tensor.dtype if fits else torch.uint8, storage

    def copy(self) -> None:
        """Copy all storages, and keep their memory. After an error, no tensors are registered or parked."""
        if self._storages:
            try:
                copies = self._copies.keep([*self._storages.values()])
            except BaseException:
                self.show()
                self._copies.close()
                raise
            self._copied = dict(zip(self._storages, copies, strict=True))

    def free(self) -> None:
        """Free the memory, and make operations on the tensors raise errors."""
        self.drop()
        for tensor, address in self._tensors.values():
            copied = None if address is None else self._copied[address]
            if guard(tensor, self.message, copied, self._is_readable):
                self._guarded.append(tensor)

    def fill(self) -> None:
        """Allocate the memory again, and fill it from the copies."""
        for address, (_, _, storage) in self._storages.items():
            storage.resize_(self._copied[address].nbytes())
        if self._storages:
            self._copies.restore([*self._storages.values()])

    def drop(self) -> None:
        """Free the memory, even after `fill`."""
        for _, _, storage in self._storages.values():
            storage.resize_(0)

    def show(self) -> None:
        """Allow all operations again, and unregister the tensors."""
        for tensor in self._guarded:
            tensor.__class__ = tensor.kind
            _values.pop(tensor, None)
        self._tensors, self._storages, self._copied, self._guarded = {}, {}, {}, []

    def end(self) -> None:
        """Allow all operations again, and free the copies."""
        self.show()
        self._copies.close()


class HostCopies:
    """Copies of storages in host memory, pinned for accelerators with streams."""

    def __init__(self) -> None:
        self._copies: list[Tensor] = []

    def keep(self, named: Sequence[NamedStorage]) -> list[UntypedStorage]:
        """Copy storages with unique names, and return the copies. Memory of earlier copies is reused."""
        before = dict(enumerate(self._copies))
        self._copies = []
        for number, (_, _, storage) in enumerate(named):
            copied = before.get(number)
            if copied is None or copied.numel() != storage.nbytes():
                copied = _elements(allocate(storage.nbytes(), has_streams(storage.device.type), share=False))
            self._copies.append(copied.copy_(_elements(storage), non_blocking=True))
        return [copied.untyped_storage() for copied in self._copies]

    def restore(self, named: Sequence[NamedStorage]) -> None:
        """Fill the same storages, whose memory is allocated again."""
        for (_, _, storage), copied in zip(named, self._copies, strict=True):
            _elements(storage).copy_(copied, non_blocking=True)

    def close(self) -> None:
        self._copies = []


class FileCopies:
    """Copies in a safetensors file with a unique name, so no file of a killed process is overwritten."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder, self._path = os.fspath(folder), ""

    def keep(self, named: Sequence[NamedStorage]) -> list[UntypedStorage]:
        values = [(name, _elements(storage, dtype)) for name, dtype, storage in named]
        entries = [Entry(name, each.dtype, each.shape, each) for name, each in values]
        os.makedirs(self._folder, exist_ok=True)
        before = self._path
        fd, self._path = tempfile.mkstemp(SUFFIX, f"parked-rank-{own_rank()}-", self._folder)
        (file,) = plan(entries, "parked")
        try:
            write_at(fd, memoryview(file.head), 0)
            for entry in entries:
                for begin, memory in entry.chunks():
                    write_at(fd, memory, file.begins[entry.name] + begin)
            # Private: writes to tensors of a state dict do not change the file.
            mapped = mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            error.filename = error.filename or self._path
            raise
        finally:
            os.close(fd)
            _remove(before)
        spans = [(storage.nbytes(), file.begins[name]) for name, _, storage in named]
        return [
            torch.frombuffer(mapped, dtype=torch.uint8, count=count, offset=begin).untyped_storage()
            for count, begin in spans
        ]

    def restore(self, named: Sequence[NamedStorage]) -> None:
        if named:
            with SafetensorsFiles(self._path) as file:
                for name, dtype, storage in named:
                    file.read(name, _elements(storage, dtype))

    def close(self) -> None:
        _remove(self._path)


def _remove(path: str) -> None:
    with suppress(FileNotFoundError):
        if path:
            os.unlink(path)


def _elements(storage: UntypedStorage, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Return all elements of a storage as a vector with a separate version counter."""
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage)


# Attributes that return values or aliases; all others are metadata, which parked tensors support.
_VALUES = frozenset({"T", "mT", "H", "mH", "real", "imag", "_base"})
_METADATA = (
    *("numel", "nelement", "dim", "ndimension", "size", "stride", "storage_offset", "data_ptr", "untyped_storage"),
    *("element_size", "is_contiguous", "is_floating_point", "is_complex", "is_pinned", "is_inference"),
    *("get_device", "_is_view", "__hash__"),
)
# Operations that only read values: state dicts, checkpoints and copies of optimizer states use them.
_READS = ("detach", "clone", "to", "cpu", "numpy", "item", "tolist")

# The values of each parked plain tensor, in host memory.
_values: WeakIdKeyDictionary = WeakIdKeyDictionary()


class Guard:
    """A mixin for the class of a parked tensor: its values can be read, and other operations raise an error."""

    __slots__ = ()
    message: str
    kind: Any  # the previous class of the tensor
    is_readable: bool  # whether values can be read

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, first = func.__name__, args[0] if args else None
        if name in _READS and isinstance(first, Guard) and first.is_readable:
            return func(host_values(first), *args[1:], **(kwargs or {}))
        if name == "copy_" and not isinstance(first, Guard) and cls.is_readable:
            return func(first, *map(host_values, args[1:]), **(kwargs or {}))
        if name == "__get__":
            is_harmless = func.__self__.__name__ not in _VALUES
        elif name in ("__set__", "__delete__"):
            is_harmless = func.__self__.__name__ in ("grad", "requires_grad")
        else:
            is_harmless = name in _METADATA
        if not is_harmless:
            raise RuntimeError(cls.message)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def _refuse(self, *_: Any) -> Any:
        raise RuntimeError(self.message)

    data = property(_refuse, _refuse)  # a Python property in parameters that count writes

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo[id(self)] = self._apart().clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._apart().__reduce_ex__(protocol)

    def _apart(self) -> Tensor:
        """Return the values. RuntimeError for a model's parameter: parked models cannot be copied or pickled."""
        found: Any = self
        if not self.is_readable or isinstance(found, nn.Parameter) or is_ours(found):
            raise RuntimeError(self.message)
        values: Tensor = host_values(found)
        return values

    def __repr__(self, **_: Any) -> str:
        return f"<{self.message}>"


@cache
def _guarded(kind: Any, message: str, is_readable: bool) -> Any:
    known = {"__module__": __name__, "message": message, "kind": kind, "is_readable": is_readable}
    return type(f"Parked{kind.__name__}", (Guard, kind), known)


def guard(tensor: Any, message: str, copied: UntypedStorage | None, is_readable: bool) -> bool:
    """Make operations on a tensor raise an error; return False if the tensor's class does not permit this.

    If `is_readable`, values can be read. For a plain tensor, `copied` is the copy of its storage.
    """
    if copied is not None and is_readable:
        place = tensor.storage_offset(), tensor.shape, tensor.stride()
        _values[tensor] = torch.empty(0, dtype=tensor.dtype, device=HOST).set_(copied, *place)
    with suppress(TypeError):  # the class of some objects cannot be replaced
        kind: Any = type(tensor)
        tensor.__class__ = _guarded(kind, message, is_readable)
        return True
    return False


def host_values(tensor: Any) -> Any:
    """Return a tensor in host memory with the values of a parked tensor; any other object unchanged."""
    if not isinstance(tensor, Guard):
        return tensor
    found: Any = tensor
    with torch._C.DisableTorchFunctionSubclass():
        if found in _values:
            return _values[found].detach()
        names, context = found.__tensor_flatten__()
        inner = {name: getattr(found, name) for name in names}
        shape, stride = found.shape, found.stride()
    values = {name: host_values(each) for name, each in inner.items()}
    return found.kind.__tensor_unflatten__(values, context, shape, stride).detach()


class ParkedStorage(ShardStorage):
    """The storage of a parked flat parameter: values can be read, but not used in computation or written."""

    is_resident = False
    is_elsewhere = True
    keeps_shards = True
    state_device = HOST

    def __init__(self, storage: ShardStorage, message: str) -> None:
        super().__init__(storage.device)
        self._before, self._message = storage, message

    def check(self, what: str, state: Iterable[Any] = ()) -> None:
        raise RuntimeError(f"{what}: {self._message}")

    def check_readable(self, what: str, state: Iterable[Any] = ()) -> None:
        self._before.check_readable(what, state)

    def release(self) -> None:
        self._before.release()

    def adopt(self, flat_param: Any) -> None:
        raise RuntimeError(self._message)

    def __reduce__(self) -> Any:
        raise RuntimeError(self._message)  # also when a model is copied
