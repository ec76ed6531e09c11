"""Copies of state in host memory, to write a checkpoint during training.

``StateDictStager().stage(tree)`` copies any tree of Python objects. Training then waits only for a copy into existing
memory, and a thread or process of the user can write the copy to disk.

`copy.deepcopy` would keep tensors on their devices. `TreeCopy` therefore first replaces all tensors in containers and
objects: a tensor is a view of a storage, each storage is replaced once, and every tensor on it becomes the same view
of the replacement. `copy.deepcopy` then copies the tree, and finds the new tensors in its memo.

User-defined classes may run code during the copy (a constructor, ``__setstate__``, ``__deepcopy__``, ``__hash__``),
and this code may read values. Replacements are therefore filled before such code runs. If there are only tensors and
plain containers, they may be filled later.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import sys
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from typing import Any, Generic, Literal, TypeVar, overload

import torch
from torch import Tensor, UntypedStorage, nn

from fsdp.distributed.devices import HOST, Arrival, has_streams, new_copy_stream
from fsdp.state_dict_utils.host_memory import HostMemory, require_pinning
from fsdp.state_dict_utils.tree import by_class, is_wrapper, missing_memory

Tree = TypeVar("Tree")
_Path = tuple[Any, ...]  # empty, or the path of the containing object, and the key in this object
_META = "meta"
# Types of objects that are immutable, or (functions, classes) copied by reference.
_ATOMIC: frozenset[type] = frozenset(
    {
        *(type(None), type(Ellipsis), type(NotImplemented), bool, int, float, complex, str, bytes, range),
        *(type, property, weakref.ref, types.CodeType, types.FunctionType, types.BuiltinFunctionType),
        *(torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format),
    }
)
# Containers that do not run user-defined code during a copy.
_PLAIN = (dict, list, tuple, set, frozenset, OrderedDict, defaultdict, deque)
_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


class PendingCopy(Generic[Tree]):
    """A copy from a device that may be in flight; see `StateDictStager.stage`."""

    def __init__(self, tree: Tree, originals: list[UntypedStorage], arrivals: list[Arrival]) -> None:
        self._tree, self._arrivals = tree, arrivals
        self._originals = originals  # keeps their memory from being reused

    def wait(self) -> Tree:
        """Block until all values have arrived, and return the copy."""
        for arrival in self._arrivals:
            arrival.synchronize()
        self._arrivals, self._originals = [], []
        return self._tree

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.wait()  # a copy in flight writes to this memory until then

    def protect(self) -> None:
        """Make the current streams wait for the copies, so that later work may change the originals.

        This method does not block. For example, call it before ``optimizer.step()``.
        """
        for arrival in self._arrivals:
            arrival.wait()


class StateDictStager(AbstractContextManager["StateDictStager"]):
    """Copies trees of tensors to reusable host memory.

    A copy is equal to the result of ``torch.save`` followed by ``torch.load(map_location="cpu")``: shared storages,
    views and classes are preserved, gradients and graphs are not copied. Other objects are copied like by
    `copy.deepcopy`. Tensors on the meta device are not moved, because they have no values.

    **A copy is valid while any of its tensors is referenced.** After its release, the next `stage` of the same tensors
    writes into its memory; before, `stage` uses different memory. Memory for a single copy is sufficient if each copy
    is released before the next, and for two copies if a variable still refers to the last copy. Memory for deleted
    tensors is released.

    Args:
        pin_memory: page-lock host memory, for copies from CUDA that overlap with computation.
        share_memory: use shared memory, so that other processes receive tensors without a copy. Readers in other
            processes are not detected: keep a reference to the copy until they have finished.
        max_bytes: the maximum host memory for referenced copies and memory kept for reuse. The latter is
            released first.
        wait_seconds: if `max_bytes` is reached, the time to wait for another thread to release earlier copies.
            `math.inf` waits forever.

    Raises:
        ValueError: for a negative `max_bytes` or `wait_seconds`, or a `wait_seconds` without `max_bytes`.
        RuntimeError: for `pin_memory` without an accelerator.
    """

    def __init__(
        self,
        pin_memory: bool = False,
        share_memory: bool = False,
        *,
        max_bytes: int | None = None,
        wait_seconds: float = 0.0,
    ) -> None:
        if max_bytes is not None and max_bytes < 0:
            raise ValueError(f"max_bytes must be a number of bytes or None, got {max_bytes}")
        if not wait_seconds >= 0 or (wait_seconds and max_bytes is None):
            raise ValueError(f"wait_seconds={wait_seconds} must not be negative, and is for use with max_bytes")
        if pin_memory:
            require_pinning()
        self.pin_memory = pin_memory
        self.share_memory = share_memory
        self._memory = HostMemory(self.pin_memory, share_memory, max_bytes, wait_seconds)
        self._lock = threading.RLock()
        self._copy_stream_of = functools.cache(new_copy_stream)
        self._is_closed = False

    @property
    def held_bytes(self) -> int:
        """Host memory for tensors: referenced copies, and memory kept for reuse."""
        return self._memory.held_bytes

    @overload
    def stage(self, tree: Tree, non_blocking: Literal[False] = False) -> Tree: ...
    @overload
    def stage(self, tree: Tree, non_blocking: Literal[True]) -> PendingCopy[Tree]: ...
    def stage(self, tree: Tree, non_blocking: bool = False) -> Tree | PendingCopy[Tree]:
        """Copy a tree. Concurrent calls are executed sequentially.

        Copies from CUDA are queued on a separate stream, after the work on the current stream, and awaited together at
        the end.

        Args:
            tree: any tree of Python objects with tensors.
            non_blocking: if True, return a `PendingCopy` without waiting. The originals must not be changed until
                `wait()` has returned or `protect()` was called. Deleting the `PendingCopy` waits for the copy.

        Raises:
            TypeError: for objects that cannot be copied, such as an open file; for a tensor without storage, with its
                position.
            RuntimeError: for a tensor whose memory was freed, or a stager that was closed.
            MemoryError: if `max_bytes` is reached, with the number of requested bytes.
        """
        with self._lock:
            if self._is_closed:
                raise RuntimeError("this StateDictStager was closed: create a new one")
            pending = self._stage(tree)
            return pending if non_blocking else pending.wait()

    def close(self) -> None:
        """Release the memory kept for reuse. Referenced copies stay valid."""
        with self._lock:
            self._memory.clear()
            self._is_closed = True

    def __exit__(self, *error: object) -> None:
        self.close()

    def _stage(self, tree: Tree) -> PendingCopy[Tree]:
        pairs: list[tuple[UntypedStorage, UntypedStorage]] = []

        def wanted_bytes() -> int:
            sizes: list[int] = []

            def note(storage: UntypedStorage) -> UntypedStorage:
                sizes.append(0 if storage.device.type == _META else storage.nbytes())
                return storage

            TreeCopy(note, lambda: None).copy(tree)
            return sum(sizes)

        def place(original: UntypedStorage) -> UntypedStorage:
            nbytes = original.nbytes()
            if original.device.type == _META:
                return UntypedStorage(nbytes, device=_META)
            if nbytes == 0:
                return _from(original.device, UntypedStorage(0, device=HOST))
            host = _from(original.device, self._memory.take(original, wanted_bytes))
            pairs.append((original, host))
            return host

        def fill() -> None:
            for arrival in self._transfer(pairs):
                arrival.synchronize()
            pairs.clear()

        with torch.inference_mode(False), torch.no_grad():
            copied = TreeCopy(place, fill).copy(tree)
            arrivals = self._transfer(pairs)
        return PendingCopy(copied, [original for original, _ in pairs], arrivals)

    def _transfer(self, pairs: list[tuple[UntypedStorage, UntypedStorage]]) -> list[Arrival]:
        arrivals = []
        for device in {original.device for original, _ in pairs}:
            copy_stream = self._copy_stream_of(device)
            with copy_stream.fork():
                for original, host in pairs:
                    if original.device == device:
                        host.copy_(original, non_blocking=has_streams(device.type))
            arrivals.append(copy_stream.arrival())
        return arrivals


def origins(copied: Any) -> list[str]:
    """Return the original device of each storage of a copy, in the order of the tree, to be saved with the copy.

    A file does not preserve the original devices of a copy, but any file can contain a list of strings.

    Args:
        copied: the result of `StateDictStager.stage`.
    """
    found: list[str] = []

    def note(storage: UntypedStorage) -> UntypedStorage:
        found.append(str(_origin(storage)))
        return storage

    with torch.inference_mode(False), torch.no_grad():
        TreeCopy(note, lambda: None, to_host=False).copy(copied)
    return found


def restore(copied: Tree, devices: Iterable[str | torch.device] | None = None) -> Tree:
    """Return a copy of a staged tree with its tensors on their original devices.

    Like `stage`, it preserves sharing, views and classes. Tensors that belong on the CPU are not copied again.

    Args:
        copied: the result of `StateDictStager.stage`, or, with `devices`, this result after saving and loading.
        devices: the result of `origins`, or other devices.

    Raises:
        ValueError: if there are more or fewer `devices` than storages.
    """
    targets = None if devices is None else [torch.device(device) for device in devices]
    count = 0

    def place(storage: UntypedStorage) -> UntypedStorage:
        nonlocal count
        count += 1
        if targets is not None and count > len(targets):
            return storage
        device = _origin(storage) if targets is None else targets[count - 1]
        if storage.device == device:
            return storage
        return UntypedStorage(storage.nbytes(), device=device).copy_(storage, False)

    with torch.inference_mode(False), torch.no_grad():
        restored: Tree = TreeCopy(place, lambda: None, to_host=False).copy(copied)
    if targets is not None and count != len(targets):
        raise ValueError(
            f"the tree has {count} storages, but there are {len(targets)} devices: these belong to another tree"
        )
    return restored


def _from(device: torch.device, storage: UntypedStorage) -> UntypedStorage:
    storage.staged_from = device  # type: ignore[attr-defined]  # lives as long as torch's storage does
    return storage


def _origin(storage: UntypedStorage) -> torch.device:
    return getattr(storage, "staged_from", storage.device)


class TreeCopy:
    """A copy of a tree of objects, with the aliases and cycles of the original.

    Args:
        place: a function that returns the replacement of a storage of the original. Called once for each storage, and
            for each tensor without memory.
        fill: a function that copies the original values into all storages that `place` has returned so far. Called
            before user-defined code runs. The caller must fill the storages that were placed since the last such call.
        to_host: all tensors of the copy must be on the CPU.
    """

    def __init__(
        self, place: Callable[[UntypedStorage], UntypedStorage], fill: Callable[[], None], *, to_host: bool = True
    ) -> None:
        self._place, self._fill, self._is_to_host = place, fill, to_host
        # The second memo is torch's, by the address of a storage, for tensors that exist only during the copy.
        self._storages: dict[int, UntypedStorage] = {}
        self._memo: dict[Any, Any] = {"torch": self._storages}
        self._seen: dict[int, Any] = {}  # keeps objects, because ids of deleted objects are reused
        self._attributes: list[tuple[Tensor, Tensor]] = []  # tensors and their copies
        self._runs_code = False

    def copy(self, tree: Any) -> Any:
        self._find(tree, ())
        if self._runs_code:
            self._fill()
        for original, replacement in self._attributes:
            for name, value in list(_lacking(original, replacement)):
                object.__setattr__(replacement, name, copy.deepcopy(value, self._memo))
        copied = copy.deepcopy(tree, self._memo)
        with torch._C.DisableTorchFunctionSubclass():
            for path, found in _objects_in(copied, (), {}) if self._runs_code and self._is_to_host else ():
                if isinstance(found, Tensor) and found.device.type not in ("cpu", _META):
                    raise TypeError(
                        f"{_spelled(path)}: the copy of an object contains a new tensor on {found.device}, which the "
                        "original does not have. Copy tensors in its __deepcopy__ with copy.deepcopy(tensor, memo)."
                    )
        return copied

    def _find(self, tree: Any, path: _Path) -> None:
        """Replace all tensors in a part of the tree."""
        for place, found in _objects_in(tree, path, self._seen):
            if isinstance(found, Tensor):
                self._tensor(found, place)
            elif isinstance(found, UntypedStorage):
                self._memo[id(found)] = self._storage(found)
            elif type(found) not in _PLAIN:
                self._runs_code = True

    def _tensor(self, original: Any, path: _Path) -> Tensor:
        if id(original) in self._memo:
            return self._memo[id(original)]
        self._seen[id(original)] = original
        kind: Any = type(original)
        copied: Any
        reduce = copyreg.dispatch_table.get(kind)
        if reduce is not None or kind.__reduce_ex__ not in (Tensor.__reduce_ex__, nn.Parameter.__reduce_ex__):
            # The class defines how it is rebuilt.
            rebuilt = original.__reduce_ex__(4) if reduce is None else reduce(original)
            self._find(rebuilt, path)
            self._fill()
            copied = original if isinstance(rebuilt, str) else copy.deepcopy(_Rebuilt(rebuilt), self._memo)
        elif hasattr(kind, "trigger_wait"):  # the result of a collective that may be in flight
            copied = self._tensor(original.trigger_wait(), path)
        else:
            copied = (self._wrapper if hasattr(kind, "__tensor_flatten__") else self._plain)(original, path)
            self._memo[id(original)] = copied
            self._attributes.append((original, copied))
            for name, value in _lacking(original, copied):
                self._find(value, (path, name))
        self._memo[id(original)] = copied
        return copied

    def _plain(self, original: Tensor, path: _Path) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():  # overridden operations of a class must not run
            view = self._view(original, path)
            if type(original) is Tensor:
                return view.requires_grad_(original.requires_grad)
            return Tensor._make_subclass(type(original), view, original.requires_grad)

    def _wrapper(self, original: Any, path: _Path) -> Tensor:
        names, context = original.__tensor_flatten__()
        parts = {name: getattr(original, name) for name in names}
        for name, part in parts.items():
            if isinstance(part, Tensor):  # others belong to the process, such as the mesh of a `DTensor`
                parts[name] = self._tensor(part, (path, name))
        if not type(original).__module__.startswith("torch."):  # torch's classes do not read values
            self._fill()
        copied: Tensor = type(original).__tensor_unflatten__(parts, context, original.size(), original.stride())
        if copied.requires_grad != original.requires_grad:
            copied.requires_grad_(original.requires_grad)
        return copied

    def _view(self, original: Tensor, path: _Path) -> Tensor:
        """Return a plain tensor that views the new storage in the same way as `original` views the old storage."""
        if original.layout in _SPARSE:  # of multiple storages, which are not reused
            return original.detach().to(_META if original.is_meta else HOST, copy=True)
        if original.layout is not torch.strided:
            raise TypeError(f"{_spelled(path)}: {by_class(original)} has a layout that cannot be copied by its memory")
        try:
            storage = original.untyped_storage()
        except (NotImplementedError, RuntimeError) as error:
            raise TypeError(f"{_spelled(path)}: {by_class(original)} has no storage to copy: {error}") from error
        self._check(original, path)
        placed = self._storage(storage)
        if original.is_quantized:
            view = torch.empty_quantized(original.shape, original, device=placed.device)
        else:
            view = torch.empty(0, dtype=original.dtype, device=placed.device)
        view.set_(placed, original.storage_offset(), original.size(), original.stride())
        if original.is_conj():
            view = view.conj()
        return torch._neg_view(view) if original.is_neg() else view

    def _check(self, original: Tensor, path: _Path) -> None:
        if original.is_nested or is_wrapper(original):
            raise TypeError(
                f"{_spelled(path)}: {by_class(original)} keeps its values in an inaccessible place. A class that wraps "
                "tensors needs __tensor_flatten__ and __tensor_unflatten__, or its own __reduce_ex__."
            )
        if missing := missing_memory(original):
            raise RuntimeError(f"{_spelled(path)}: {missing}. Stage the result of state_dict().")

    def _storage(self, original: UntypedStorage) -> UntypedStorage:
        if original.nbytes() == 0:
            return self._place(original)
        if id(original) not in self._memo:
            self._seen[id(original)] = original
            placed = self._memo[id(original)] = self._place(original)
            if original.device == HOST:
                self._storages[original._cdata] = placed
        return self._memo[id(original)]


class _Rebuilt:
    """A stand-in that `copy.deepcopy` copies to the object that pickle would rebuild from ``__reduce_ex__``."""

    def __init__(self, rebuilt: Any) -> None:
        self._rebuilt = rebuilt

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._rebuilt


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors in containers and attributes of objects, except inner tensors of tensors."""
    return (found for _, found in _objects_in(tree, (), {}) if isinstance(found, Tensor))


def _objects_in(tree: Any, path: _Path, seen: dict[int, Any]) -> Iterator[tuple[_Path, Any]]:
    """Yield the objects in containers and attributes with their paths, in order and once; tensors are not entered."""
    pending = [(path, tree)]
    while pending:
        path, found = pending.pop()
        if type(found) in _ATOMIC or isinstance(found, (type, types.ModuleType)) or id(found) in seen:
            continue
        if not isinstance(found, (Tensor, UntypedStorage)):
            seen[id(found)] = found
            pending += [((path, key), part) for key, part in _parts(found)][::-1]
        yield path, found


def _parts(found: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the parts of a container or an object that `copy.deepcopy` copies, as far as known in advance."""
    kind = type(found)
    if kind in (dict, OrderedDict, defaultdict):
        yield from ((key, part) for key, value in found.items() for part in (key, value))
    elif kind in _PLAIN:
        yield from enumerate(found)
    elif kind is types.MethodType:
        yield "__self__", found.__self__
        return
    elif not hasattr(kind, "__deepcopy__"):
        reduce = copyreg.dispatch_table.get(kind)
        with suppress(TypeError):  # the copy will raise it
            rebuilt = found.__reduce_ex__(4) if reduce is None else reduce(found)
            for name, part in zip(("arguments", "state", "items", "pairs"), rebuilt[1:5], strict=False):
                yield name, list(part) if name in ("items", "pairs") and part is not None else part
        return
    yield from _attributes_of(found)


def _attributes_of(found: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(found, "__dict__", {}).items()
    yield from ((name, getattr(found, name)) for name in copyreg._slotnames(type(found)) if hasattr(found, name))  # type: ignore[attr-defined]


def _lacking(original: Tensor, copied: Tensor) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in _attributes_of(original) if not hasattr(copied, name))


def _spelled(path: _Path) -> str:
    return f"{_spelled(path[0])}[{path[1]!r}]" if path else "the tree"
