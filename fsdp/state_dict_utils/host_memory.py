"""Host memory for copies of storages: a block for each original, which is reused when it is no longer referenced.

A block is returned as a storage. Its reference count shows whether a tensor still uses it, so a copy is not
overwritten while it is referenced, and no explicit release is needed. A block whose original was deleted is freed with
its last reference.
"""

from __future__ import annotations

import gc
import mmap
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import UntypedStorage
from torch.utils.weak import WeakIdKeyDictionary

from fsdp.distributed.devices import HOST, accelerator, can_page_lock, page_lock

# From this size on, glibc maps new memory for each block anyway. Mapping the memory here permits huge pages, with which
# the first write to 200 MB took a third of the time.
_MAPPED_BYTES = 32 << 20

# Smaller blocks use torch's allocator of pinned memory, because registering memory takes longer than a small copy.
# Larger blocks do not, because this allocator rounds sizes up to powers of two.
_REGISTERED_BYTES = 1 << 20

_POLL_SECONDS = 0.005


class _Block:
    def __init__(self, nbytes: int, pin: bool, share: bool) -> None:
        self.storage = allocate(nbytes, pin, share)
        self._alone = self._holders()

    def _holders(self) -> tuple[int, int]:
        # Tensors refer to torch's storage, Python variables to its Python object.
        return torch._C._storage_Use_Count(self.storage._cdata), sys.getrefcount(self.storage)

    @property
    def is_free(self) -> bool:
        return self._holders() == self._alone


class HostMemory:
    """Blocks by original. Only one thread at a time may call `take`; copies may be released by any thread.

    The arguments are as in `StateDictStager`.
    """

    def __init__(self, pin: bool, share: bool, max_bytes: int | None, wait_seconds: float) -> None:
        self._pin, self._share = pin, share
        self._max_bytes, self._wait_seconds = max_bytes, wait_seconds
        # A list of blocks for each original; the least recently taken or examined original is first.
        self._kept: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._held_bytes, self._lock = 0, threading.Lock()
        self._gone_bytes: deque[int] = deque()  # sizes of deleted storages (in any thread), to be subtracted later

    @property
    def held_bytes(self) -> int:
        """Bytes of all existing blocks: in use, in use by copies of deleted originals, and kept for reuse."""
        with self._lock:
            while self._gone_bytes:
                self._held_bytes -= self._gone_bytes.popleft()
            return self._held_bytes

    def take(self, original: UntypedStorage, wanted: Callable[[], int]) -> UntypedStorage:
        """Return an unreferenced block with the size of the original, which is not empty.

        If the limit is reached, `wanted` returns the total number of requested bytes, for the MemoryError.
        """
        nbytes = original.nbytes()
        kept = self._kept[original] = self._kept.pop(original, [])
        kept[:] = [each for each in kept if each.storage.nbytes() == nbytes]
        block = next((each for each in kept if each.is_free), None)
        kept[:] = [each for each in kept if each is block or not each.is_free]  # a single unreferenced block suffices
        if block is None:
            rounds_up = not self._share and _rounds_up(nbytes, self._pin)
            size = 1 << (nbytes - 1).bit_length() if rounds_up else nbytes
            self._make_room(size, wanted)
            block = _Block(nbytes, self._pin, self._share)
            with self._lock:
                self._held_bytes += size
            weakref.finalize(block.storage, self._gone_bytes.append, size).atexit = False
            kept.append(block)
        return block.storage

    def clear(self) -> None:
        """Release all blocks; referenced blocks exist until their last reference is deleted."""
        self._kept.clear()

    def _make_room(self, nbytes: int, wanted: Callable[[], int]) -> None:
        if self._max_bytes is None or self._evict(nbytes):
            return
        gc.collect()  # unreferenced copies with cycles may not be collected yet
        total = wanted()
        deadline = time.monotonic() + self._wait_seconds
        while not self._evict(nbytes):
            if total > self._max_bytes or time.monotonic() >= deadline:
                raise MemoryError(self._no_room(total))
            time.sleep(_POLL_SECONDS)  # there is no notification when a tensor is released

    def _evict(self, nbytes: int) -> bool:
        """Release free blocks until there is room for `nbytes`, and return whether there is."""
        most = (self._max_bytes or 0) - nbytes
        for _ in range(len(self._kept)):
            if self.held_bytes <= most:
                return True
            if (original := next(iter(self._kept), None)) is not None:
                kept = self._kept[original] = self._kept.pop(original)  # moved to the end: each is examined once
                kept[:] = [block for block in kept if not block.is_free]
        return self.held_bytes <= most

    def _no_room(self, total: int) -> str:
        if total > (self._max_bytes or 0):
            return (
                f"the tree has {total} bytes of tensors, but max_bytes={self._max_bytes} are allowed: increase "
                "max_bytes, or stage it in parts."
            )
        return (
            f"the tree has {total} bytes of tensors, max_bytes={self._max_bytes} are allowed, and earlier copies still "
            f"use too many of them (waited {self._wait_seconds:g} s). Release them before staging again (del, or end "
            "the thread that writes them), increase max_bytes, or set wait_seconds."
        )


def require_pinning() -> None:
    """Raise RuntimeError if host memory cannot be page-locked."""
    if accelerator() is None:
        raise RuntimeError(
            "pin_memory=True needs an accelerator, which copies from and to pinned memory, and torch sees none here. "
            "Pass pin_memory=torch.accelerator.is_available()."
        )


def allocate(nbytes: int, pin: bool, share: bool) -> UntypedStorage:
    """Return new host memory; `nbytes` must be positive."""
    if share:
        try:
            storage = UntypedStorage._new_shared(nbytes, device=HOST)
        except RuntimeError as error:
            raise RuntimeError(
                f"share_memory: no shared memory of {nbytes} bytes: {error}. Each storage needs a file descriptor "
                "(raise `ulimit -n`, or use torch.multiprocessing.set_sharing_strategy('file_system')) and space in "
                "/dev/shm."
            ) from error
    elif _rounds_up(nbytes, pin):
        return torch.empty(nbytes, dtype=torch.uint8, device=HOST, pin_memory=True).untyped_storage()
    elif nbytes >= _MAPPED_BYTES or pin:
        storage = _mapped(nbytes)
    else:
        return UntypedStorage(nbytes, device=HOST)
    if pin:
        # Unregistered before the memory is freed; not at exit, when the accelerator's runtime may already be closed.
        weakref.finalize(storage, page_lock(storage)).atexit = False
    return storage


def _rounds_up(nbytes: int, pin: bool) -> bool:
    """Return whether torch's allocator of pinned memory is used, which rounds up to a power of two."""
    return pin and (nbytes < _REGISTERED_BYTES or not can_page_lock())


def _mapped(nbytes: int) -> UntypedStorage:
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # the kernel has no huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
    with HOST:
        return torch.frombuffer(mapping, dtype=torch.uint8).untyped_storage()
