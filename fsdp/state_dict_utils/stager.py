"""Copies of state in host memory, to write a checkpoint during training.

``StateDictStager().stage(tree)`` copies any tree of Python objects. Training then waits only for a copy into existing
memory; a thread or process of the user can write the copy to disk.

`copy.deepcopy` would keep tensors on their devices. `TreeCopy` represents a tensor like ``torch.save``: a storage, and
a view of it. Each storage is replaced once, by a function of the caller, and every tensor on it becomes the same view
of the replacement. All other objects follow the rules of `copy.deepcopy`. Staging, restoring and counting use the same
walk with three different functions.

User-defined classes may run code during the copy (a constructor, ``__setstate__``, ``__deepcopy__``, ``__hash__``),
and this code may read values. Replacements are therefore filled before such code runs. If there are only tensors and
plain containers, they may be filled later.
"""

from __future__ import annotations

import copyreg
import sys
import threading
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, Literal, TypeVar, overload

import torch
from torch import Tensor, UntypedStorage, nn

from fsdp.distributed.devices import HOST, Arrival, CopyStream, has_streams, new_copy_stream
from fsdp.state_dict_utils.host_memory import HostMemory, require_pinning
from fsdp.state_dict_utils.tree import by_class, class_name, is_wrapper, missing_memory

Tree = TypeVar("Tree")
_META = "meta"
# They are immutable, or (functions, classes) are copied by reference.
_ATOMIC: frozenset[type] = frozenset(
    {
        *(type(None), type(Ellipsis), type(NotImplemented), bool, int, float, complex, str, bytes, range),
        *(type, property, weakref.ref, types.CodeType, types.FunctionType, types.BuiltinFunctionType),
        *(torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format),
    }
)
_COMPRESSED = {
    torch.sparse_csr: (Tensor.crow_indices, Tensor.col_indices),
    torch.sparse_bsr: (Tensor.crow_indices, Tensor.col_indices),
    torch.sparse_csc: (Tensor.ccol_indices, Tensor.row_indices),
    torch.sparse_bsc: (Tensor.ccol_indices, Tensor.row_indices),
}
_MISSING = object()
# They store their items without examining them.
_STORING: frozenset[Any] = frozenset({list.append, deque.append, dict.__setitem__, OrderedDict.__setitem__})


class PendingCopy(Generic[Tree]):
    """A copy that may be under way from a device; see `StateDictStager.stage`."""

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
            self.wait()  # the memory of a copy that is dropped under way is written to until then

    def protect(self) -> None:
        """Make the current streams wait for the copies, so that later work may change the originals.

        This method does not block. For example, call it before ``optimizer.step()``.
        """
        for arrival in self._arrivals:
            arrival.wait()


class StateDictStager:
    """Copies trees of tensors to reusable host memory.

    A copy is equal to the result of ``torch.save`` followed by ``torch.load(map_location="cpu")``: shared storages,
    views and classes are preserved, gradients and graphs are not copied. Other objects are copied like by
    `copy.deepcopy`. Tensors on the meta device stay there, because they have no values.

    **A copy is valid while any of its tensors is referenced.** After its release, the next `stage` of the same tensors
    writes into its memory; before, `stage` uses different memory. Memory for a single copy is sufficient if each copy
    is released before the next, and for two copies if a variable still refers to the last copy. Memory for deleted
    tensors is released.

    Args:
        pin_memory: page-lock host memory, for copies from CUDA that overlap with computation.
        share_memory: use shared memory, so that other processes receive tensors without a copy. Readers in other
            processes are not detected: keep a reference to the copy until they have finished.
        max_bytes: the maximum host memory for referenced copies and memory that is kept for reuse. The latter is
            released first.
        wait_seconds: if `max_bytes` is reached, the time to wait for another thread to release earlier copies.
            `math.inf` waits forever.

    Raises:
        ValueError: for a negative `max_bytes` or `wait_seconds`, or a `wait_seconds` without `max_bytes`.
        RuntimeError: for `pin_memory` without CUDA.
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
        self._copy_streams: dict[torch.device, CopyStream] = {}
        self._is_closed = False

    @property
    def held_bytes(self) -> int:
        """Host memory for tensors: referenced copies, and memory that is kept for reuse."""
        return self._memory.held_bytes

    @overload
    def stage(self, tree: Tree, non_blocking: Literal[False] = False) -> Tree: ...
    @overload
    def stage(self, tree: Tree, non_blocking: Literal[True]) -> PendingCopy[Tree]: ...
    def stage(self, tree: Tree, non_blocking: bool = False) -> Tree | PendingCopy[Tree]:
        """Copy a tree. Threads take turns.

        Copies from CUDA are queued on a separate stream, after the work on the current stream, and awaited together at
        the end.

        Args:
            tree: any tree of Python objects with tensors.
            non_blocking: return a `PendingCopy` without waiting. The originals must not be changed until `wait()` has
                returned or `protect()` was called. Deleting the `PendingCopy` waits for the copy.

        Raises:
            TypeError: for objects that cannot be copied (an open file; a tensor without storage), with their position.
            RuntimeError: for a tensor whose memory was freed, or a stager that was closed.
            MemoryError: if `max_bytes` is reached, with the number of requested bytes.
        """
        with self._lock:
            if self._is_closed:
                raise RuntimeError("this StateDictStager was closed: make a new one")
            pending = self._stage(tree)
            return pending if non_blocking else pending.wait()

    def close(self) -> None:
        """Release the memory that is kept for reuse. Referenced copies stay valid."""
        with self._lock:
            self._memory.clear()
            self._is_closed = True

    def __enter__(self) -> StateDictStager:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _stage(self, tree: Tree) -> PendingCopy[Tree]:
        pairs: list[tuple[UntypedStorage, UntypedStorage]] = []

        def wanted_bytes() -> int:
            return sum(storage.nbytes() for storage in _storages_of(tree) if storage.device.type != _META)

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
            if device not in self._copy_streams:
                self._copy_streams[device] = new_copy_stream(device)
            copy_stream = self._copy_streams[device]
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
    return [str(_origin(storage)) for storage in _storages_of(copied)]


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
        restored = TreeCopy(place).copy(copied)
    if targets is not None and count != len(targets):
        raise ValueError(f"the tree has {count} storages and there are {len(targets)} devices: it is another tree")
    return restored


def _from(device: torch.device, storage: UntypedStorage) -> UntypedStorage:
    storage.staged_from = device  # type: ignore[attr-defined]  # lives as long as torch's storage does
    return storage


def _origin(storage: UntypedStorage) -> torch.device:
    return getattr(storage, "staged_from", storage.device)


def _storages_of(tree: Any) -> list[UntypedStorage]:
    """Return the storages of a tree, in the order in which a copy meets them."""
    found: list[UntypedStorage] = []

    def note(storage: UntypedStorage) -> UntypedStorage:
        found.append(storage)
        return storage

    with torch.inference_mode(False), torch.no_grad():
        TreeCopy(note).copy(tree)
    return found


class TreeCopy:
    """A copy of a tree of objects, with the aliases and cycles of the original.

    Args:
        place: a function that returns the replacement of a storage of the original. Called once for each storage, and
            for each tensor without memory.
        fill: a function that copies the original values into all storages that `place` has returned so far. Called
            before user-defined code runs. The caller must fill the storages that were placed since the last such call.
    """

    def __init__(
        self, place: Callable[[UntypedStorage], UntypedStorage], fill: Callable[[], None] = lambda: None
    ) -> None:
        self._place, self._fill = place, fill
        # In the form of `copy.deepcopy`, because objects' own `__deepcopy__` receive it. It also keeps the originals:
        # the id of a temporary object must not be reused during the copy.
        self._originals: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._memo[id(self._memo)] = self._originals
        self._path: list[Any] = []
        self._copiers: dict[type, Callable[[TreeCopy, Any], Any]] = dict(_COPIERS)  # and of classes that were met

    def copy(self, original: Any) -> Any:
        """Return the copy of a part of the nest; errors say where in it."""
        kind = type(original)
        if kind in _ATOMIC:
            return original
        known = self._memo.get(id(original), _MISSING)
        if known is not _MISSING:
            return known
        copier = self._copiers.get(kind)
        if copier is None:
            copier = self._copiers[kind] = _copier_of(kind)
        return copier(self, original)

    def _remember(self, original: Any, copied: Any) -> Any:
        self._memo[id(original)] = copied
        self._originals.append(original)
        return copied

    def _where(self) -> str:
        return "the tree" + "".join(f"[{key!r}]" for key in self._path)

    # --- containers and objects ---------------------------------------------------------------------------------

    def _part(self, key: Any, original: Any) -> Any:
        self._path.append(key)
        copied = self.copy(original)
        self._path.pop()
        return copied

    def _dict(self, original: dict[Any, Any]) -> Any:
        copied = self._remember(original, {})
        for key, value in original.items():
            copied[self._key(key)] = self._part(key, value)
        return copied

    def _key(self, original: Any) -> Any:
        copied = self.copy(original)
        if copied is not original:  # its hash may depend on values
            self._fill()
        return copied

    def _list(self, original: list[Any]) -> Any:
        copied = self._remember(original, [])
        for index, value in enumerate(original):
            copied.append(self._part(index, value))
        return copied

    def _tuple(self, original: tuple[Any, ...]) -> Any:
        copied = tuple(self._part(index, value) for index, value in enumerate(original))
        if id(original) in self._memo:  # a part of it refers to it, and has copied it already
            return self._memo[id(original)]
        if all(one is other for one, other in zip(original, copied, strict=True)):
            return original
        return self._remember(original, copied)

    def _by_itself(self, original: Any) -> Any:
        # The object passes its parts to `copy.deepcopy`, which checks the memo first.
        for found in tensors_in(original):
            self.copy(found)
        self._fill()
        copied = original.__deepcopy__(self._memo)
        if copied is original:
            return original
        for found in tensors_in(copied):
            if isinstance(found, Tensor) and found.device.type not in ("cpu", "meta"):
                raise TypeError(
                    f"{self._where()}: the __deepcopy__ of {class_name(type(original))} makes a tensor on "
                    f"{found.device}, which is not in its attributes. Have it copy its tensors with "
                    "copy.deepcopy(tensor, memo)."
                )
        return self._remember(original, copied)

    def _by_reducing(self, original: Any) -> Any:
        reduce = copyreg.dispatch_table.get(type(original))
        try:
            rebuilt = reduce(original) if reduce else original.__reduce_ex__(4)
        except TypeError as error:
            raise TypeError(f"{self._where()}: a {class_name(type(original))} cannot be copied: {error}") from error
        if isinstance(rebuilt, str):  # a global
            return original
        build, args, state, items, pairs, set_state = (*rebuilt, None, None, None, None)[:6]
        own_args = [self.copy(arg) for arg in args]
        if any(own is not arg for own, arg in zip(own_args, args, strict=True)):
            self._fill()
        copied = self._remember(original, build(*own_args))
        if state is not None:
            own_state = self.copy(state)
            if set_state is not None or hasattr(copied, "__setstate__"):
                self._fill()
            _give_state(copied, own_state, set_state)
        for item in items or ():
            own_item = self.copy(item)
            if type(copied).append not in _STORING:
                self._fill()
            copied.append(own_item)
        for key, value in pairs or ():
            own_value, own_key = self._part(key, value), self._key(key)
            if type(copied).__setitem__ not in _STORING:
                self._fill()
            copied[own_key] = own_value
        return copied

    # --- tensors ------------------------------------------------------------------------------------------------

    def _storage(self, original: UntypedStorage) -> UntypedStorage:
        if original.nbytes() == 0:
            return self._place(original)
        placed = self._memo.get(id(original))
        return self._remember(original, self._place(original)) if placed is None else placed

    def _plain(self, original: Tensor) -> Tensor:
        view = self._view(original)
        if original.requires_grad:
            view.requires_grad_()
        self._remember(original, view)
        return self._with_attributes(original, view) if original.__dict__ else view

    def _subclass(self, original: Tensor) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():  # overridden operations of a class must not run
            copied = Tensor._make_subclass(type(original), self._view(original), original.requires_grad)
        return self._with_attributes(original, self._remember(original, copied))

    def _wrapper(self, original: Any) -> Tensor:
        names, context = original.__tensor_flatten__()
        parts = {name: getattr(original, name) for name in names}
        for name, part in parts.items():
            if isinstance(part, Tensor):  # else it belongs to the process, as the mesh of a `DTensor` does
                parts[name] = self._part(name, part)
        if not type(original).__module__.startswith("torch."):  # torch's classes do not read values
            self._fill()
        copied = type(original).__tensor_unflatten__(parts, context, original.size(), original.stride())
        if copied.requires_grad != original.requires_grad:
            copied.requires_grad_(original.requires_grad)
        return self._with_attributes(original, self._remember(original, copied))

    def _with_attributes(self, original: Tensor, copied: Tensor) -> Tensor:
        for name, value in original.__dict__.items():
            if name not in copied.__dict__:  # a wrapper was given its parts already
                copied.__dict__[name] = self._part(name, value)
        for name in _slots(type(original)):
            if hasattr(original, name) and not hasattr(copied, name):
                setattr(copied, name, self._part(name, getattr(original, name)))
        return copied

    def _view(self, original: Tensor) -> Tensor:
        """Return a tensor of no special class that looks at its storage as the original does."""
        if original.layout != torch.strided:
            return self._sparse(original)
        try:
            storage = original.untyped_storage()
        except (NotImplementedError, RuntimeError) as error:
            raise TypeError(f"{self._where()}: {by_class(original)} has no storage to copy: {error}") from error
        self._check(original)
        placed = self._storage(storage)
        if original.is_quantized:
            view = torch.empty_quantized(original.shape, original, device=placed.device)
        else:
            view = torch.empty(0, dtype=original.dtype, device=placed.device)
        view.set_(placed, original.storage_offset(), original.size(), original.stride())
        if original.is_conj():
            view = view.conj()
        return torch._neg_view(view) if original.is_neg() else view

    def _check(self, original: Tensor) -> None:
        if original.is_nested or is_wrapper(original):
            raise TypeError(
                f"{self._where()}: {by_class(original)} keeps its values in an inaccessible place. A class that wraps "
                "tensors needs __tensor_flatten__ and __tensor_unflatten__, or its own __reduce_ex__."
            )
        if missing := missing_memory(original):
            raise RuntimeError(f"{self._where()}: {missing}. Stage the result of state_dict().")

    def _sparse(self, original: Tensor) -> Tensor:
        if original.layout == torch.sparse_coo:
            indices, values = self._plain(original._indices()), self._plain(original._values())
            # Unchecked, because the values may still be on their way.
            return torch.sparse_coo_tensor(
                indices, values, original.shape, is_coalesced=original.is_coalesced(), check_invariants=False
            )
        if original.layout not in _COMPRESSED:
            raise TypeError(f"{self._where()}: {by_class(original)} has a layout that cannot be copied by its memory")
        first, second = (self._plain(indices(original)) for indices in _COMPRESSED[original.layout])
        values = self._plain(original.values())
        return torch.sparse_compressed_tensor(
            first, second, values, original.shape, layout=original.layout, check_invariants=False
        )


# By name and not bound, or a copy would be garbage that holds on to its tensors.
_COPIERS: dict[type, Callable[[TreeCopy, Any], Any]] = {
    dict: TreeCopy._dict,
    list: TreeCopy._list,
    tuple: TreeCopy._tuple,
    types.MethodType: lambda copy, method: types.MethodType(method.__func__, copy.copy(method.__self__)),
    Tensor: TreeCopy._plain,
    UntypedStorage: TreeCopy._storage,
}


def _copier_of(kind: type) -> Callable[[TreeCopy, Any], Any]:
    if issubclass(kind, Tensor):
        # Classes with their own pickling define how they are rebuilt.
        is_torchs = kind.__reduce_ex__ in (Tensor.__reduce_ex__, nn.Parameter.__reduce_ex__)
        if kind in copyreg.dispatch_table or not is_torchs:
            return TreeCopy._by_reducing
        if hasattr(kind, "trigger_wait"):  # the result of a collective that may be under way
            return lambda copy, result: copy._remember(result, copy.copy(result.trigger_wait()))
        return TreeCopy._wrapper if hasattr(kind, "__tensor_flatten__") else TreeCopy._subclass
    if issubclass(kind, type):
        return lambda copy, same: same
    return TreeCopy._by_itself if hasattr(kind, "__deepcopy__") else TreeCopy._by_reducing


def tensors_in(tree: Any) -> Iterator[Tensor | UntypedStorage]:
    """Yield tensors and storages in containers and attributes of objects, each once; not those inside of tensors."""
    seen: dict[int, Any] = {}
    pending = [tree]
    while pending:
        found = pending.pop()
        if type(found) in _ATOMIC or isinstance(found, (type, types.ModuleType)) or id(found) in seen:
            continue
        seen[id(found)] = found
        if isinstance(found, (Tensor, UntypedStorage)):
            yield found
            continue
        if isinstance(found, dict):
            pending += [*found.keys(), *found.values()]
        elif isinstance(found, (list, tuple, set, frozenset)):
            pending += found
        pending += getattr(found, "__dict__", {}).values()
        pending += [getattr(found, name) for name in _slots(type(found)) if hasattr(found, name)]


def _slots(kind: type) -> list[str]:
    return copyreg._slotnames(kind)  # type: ignore[attr-defined]


def _give_state(copied: Any, state: Any, set_state: Callable[[Any, Any], None] | None) -> None:
    """Set the state of a copy by pickle's rules, in the form that `__reduce_ex__` returned."""
    if set_state is not None:
        set_state(copied, state)
    elif hasattr(copied, "__setstate__"):
        copied.__setstate__(state)
    else:
        attributes, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
        if attributes:
            copied.__dict__.update(attributes)
        for name, value in (slots or {}).items():
            setattr(copied, name, value)
