"""Copies of states in host memory, from which a checkpoint is written while training goes on.

``StateDictStager().stage(tree)`` copies any nest of Python objects. What a checkpoint makes training wait for is then
one copy of memory into memory that is there already; writing it to disk is up to a thread or a process of yours.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Generic, Literal, TypeVar, overload

import torch
from torch import UntypedStorage

from fsdp.distributed.streams import Arrival, CopyStream, new_copy_stream
from fsdp.state_dict_utils.host_memory import HostMemory, require_pinning
from fsdp.state_dict_utils.tree_copy import TreeCopy

Tree = TypeVar("Tree")
_META = "meta"


class PendingCopy(Generic[Tree]):
    """A copy that may be under way from a device; see `StateDictStager.stage`."""

    def __init__(self, tree: Tree, originals: list[UntypedStorage], arrivals: list[Arrival]) -> None:
        self._tree, self._arrivals = tree, arrivals
        self._originals = originals  # or their memory could be used for something else

    def wait(self) -> Tree:
        """Block until all values have arrived, and return the copy."""
        for arrival in self._arrivals:
            arrival.synchronize()
        self._originals = []
        return self._tree

    def protect(self) -> None:
        """What is queued from now on, on the current streams, runs after the copies, and may change the originals.

        It does not block. Call it before ``optimizer.step()``, say.
        """
        for arrival in self._arrivals:
            arrival.wait()


class StateDictStager:
    """Copies trees of tensors to host memory that is used again.

    A copy is what ``torch.load(map_location="cpu")`` gives of what ``torch.save`` has written: storages that were
    shared are shared, views are views, classes survive, gradients and graphs stay behind. Whatever is no tensor is
    treated as by `copy.deepcopy`. Tensors on the meta device stay there, since they have no values.

    **A copy is yours as long as you hold any of its tensors.** Once you have dropped it, the next `stage` of the same
    tensors writes into its memory; while you hold it, `stage` takes other memory. So memory for one copy is enough if
    each is dropped before the next, and for two if a variable still holds the last. Memory for tensors that are gone is
    released.

    Args:
        pin_memory: page-lock host memory, for copies from CUDA that run beside computation.
        share_memory: put it where other processes can map it, so that they get tensors without a copy. A process that
            still reads is not seen: hold the copy until it is done.
        max_bytes: the most host memory at any time, for copies that you hold and for what is kept to be used again.
            The latter is released first.
        wait_seconds: when there is no room within `max_bytes`, wait so long for earlier copies to be dropped (by
            another thread). `math.inf` waits for ever.

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
        self._under_way: PendingCopy[Any] | None = None
        self._is_closed = False

    @property
    def held_bytes(self) -> int:
        """Host memory for tensors: of copies that somebody holds, and what is kept to be used again."""
        return self._memory.held_bytes

    @overload
    def stage(self, tree: Tree, non_blocking: Literal[False] = False) -> Tree: ...
    @overload
    def stage(self, tree: Tree, non_blocking: Literal[True]) -> PendingCopy[Tree]: ...
    def stage(self, tree: Tree, non_blocking: bool = False) -> Tree | PendingCopy[Tree]:
        """Copy a tree. Threads take turns.

        Copies from CUDA are queued on a stream of their own, after what is queued on the current one, and awaited
        together at the end.

        Args:
            tree: any nest of Python objects with tensors.
            non_blocking: do not wait, and return a `PendingCopy`. Until its `wait()` has returned or `protect()` was
                called, the originals must not be changed.

        Raises:
            TypeError: for what cannot be copied (an open file; a tensor without storage); says where it is.
            RuntimeError: for a tensor whose memory was freed, or a stager that was closed.
            MemoryError: if there is no room within `max_bytes`; says how many bytes are wanted.
        """
        with self._lock:
            if self._is_closed:
                raise RuntimeError("this StateDictStager was closed: make a new one")
            self._settle()  # the memory of a copy that was dropped under way is written to until then
            pending = self._stage(tree)
            if non_blocking:
                self._under_way = pending
                return pending
            return pending.wait()

    def close(self) -> None:
        """Release what is kept to be used again. Copies that somebody holds stay as they are."""
        with self._lock:
            self._settle()
            self._memory.clear()
            self._is_closed = True

    def __enter__(self) -> StateDictStager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _settle(self) -> None:
        if self._under_way is not None:
            self._under_way.wait()
            self._under_way = None

    def _stage(self, tree: Tree) -> PendingCopy[Tree]:
        pairs: list[tuple[UntypedStorage, UntypedStorage]] = []

        def place(original: UntypedStorage) -> UntypedStorage:
            nbytes = original.nbytes()
            if original.device.type == _META:
                return UntypedStorage(nbytes, device=_META)
            if nbytes == 0:
                return _from(original.device, UntypedStorage(0, device="cpu"))
            host = _from(original.device, self._memory.take(original, lambda: _bytes_in(tree)))
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
                        host.copy_(original, non_blocking=device.type == "cuda")
            arrivals.append(copy_stream.arrival())
        return arrivals


def origins(copied: Any) -> list[str]:
    """The devices that a copy came from, to be saved with it: one for each of its storages, in the order of the tree.

    A list of strings passes through any file, where what a copy knows about its devices is lost.

    Args:
        copied: what `StateDictStager.stage` has returned.
    """
    return [str(_origin(storage)) for storage in _storages_of(copied)]


def restore(copied: Tree, devices: Iterable[str | torch.device] | None = None) -> Tree:
    """A copy of a staged tree with its tensors on the devices that they came from.

    As `stage` it keeps sharing, views and classes. What belongs on the CPU is not copied once more.

    Args:
        copied: what `StateDictStager.stage` has returned, or, with `devices`, what was saved of it and loaded.
        devices: what `origins` has returned, or others in their place.

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


def _bytes_in(tree: Any) -> int:
    return sum(storage.nbytes() for storage in _storages_of(tree) if storage.device.type != _META)


def _storages_of(tree: Any) -> list[UntypedStorage]:
    """As a copy meets them."""
    found: list[UntypedStorage] = []

    def note(storage: UntypedStorage) -> UntypedStorage:
        found.append(storage)
        return storage

    with torch.inference_mode(False), torch.no_grad():
        TreeCopy(note).copy(tree)
    return found
