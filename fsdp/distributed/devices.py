"""All differences between devices: the choice of device, streams, pinned host memory, random numbers.

No other module mentions a type of accelerator. This module distinguishes two kinds of device. A CPU computes in order,
so its streams and events have no effect. An *accelerator* queues its computations. The library uses torch's module for
its type (`torch.get_device_module`); these modules have the same functions: `torch.cuda` (ROCm too), `torch.xpu`,
`torch.mtia`, and the modules of plug-ins (``torch.npu``, ``torch.hpu``). Apple's MPS has neither streams nor
collectives in torch: it can compute, but it is not chosen by default, and copies do not overlap with its computation.

This module also returns freed host memory to the operating system.

A `CopyStream` runs copies between an accelerator and the host in parallel with computation. A copy waits for the work
queued on the compute stream before it, and the compute stream waits for the copy only before its result is used.
"""

from __future__ import annotations

import ctypes
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, UntypedStorage

HOST = torch.device("cpu")


def is_host(device: torch.device) -> bool:
    """Return whether tensors on `device` are in host memory."""
    return device.type == HOST.type


@cache
def has_streams(kind: str) -> bool:
    """Return whether devices of a type queue computations, and copy from and to pinned host memory in parallel."""
    if kind == HOST.type:
        return False
    # `torch.mps` has streams since torch 2.15, but no numbered devices, and no backend communicates its tensors.
    return all(hasattr(getattr(torch, kind, None), name) for name in ("Stream", "current_device"))


def current_device(kind: str) -> torch.device:
    """Return the current device of a type, including the index if devices of this type are numbered."""
    if not has_streams(kind):
        return torch.device(kind)
    return torch.device(kind, torch.get_device_module(kind).current_device())


def accelerator() -> torch.device | None:
    """Return the current accelerator of this process, including the index; None without an accelerator."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None or not has_streams(found.type) else current_device(found.type)


class Arrival:
    """An arrival represents the work queued on a stream until now; on a CPU, this work is already complete."""

    def wait(self, *limit: Any) -> None:
        """Make later work on the current stream wait for this arrival; the host does not wait, so `limit` is unused."""

    def synchronize(self) -> None:
        """Block the host until the work is complete."""


class CopyStream:
    """A copy stream that runs all work in order, for a CPU and for devices whose streams are not supported."""

    def fork(self) -> AbstractContextManager[None]:
        """Queue the work in the context after earlier work, in parallel with later work."""
        return nullcontext()

    def arrival(self) -> Arrival:
        """Return the arrival of all work queued in forks until now."""
        return Arrival()

    def copied_to_host(self, source: Tensor) -> tuple[Tensor, Arrival]:
        """Return a copy of `source` on the host, and the copy's arrival."""
        return source.to(HOST, copy=True), Arrival()

    def to_host(self, source: Tensor, use: Callable[[Tensor], None]) -> None:
        """Call `use` with the values of `source` on the host, copied unless they are there, in `settle` or earlier."""
        use(source.cpu())

    def settle(self) -> None:
        """Block until all copies are complete and used, so that the sources may be written again."""


class QueuedArrival(Arrival):
    """The arrival of the work queued on an accelerator's stream.

    Args:
        stream: a stream of torch's module for the device type.
    """

    def __init__(self, stream: Any) -> None:
        self._device = stream.device
        self._event = torch.get_device_module(self._device).Event()
        self._event.record(stream)

    def wait(self, *limit: Any) -> None:
        torch.get_device_module(self._device).current_stream(self._device).wait_event(self._event)

    def synchronize(self) -> None:
        self._event.synchronize()


class QueuedCopies(CopyStream):
    """Copies to the host, which are used after their arrival; subclasses define `copied_to_host`."""

    def __init__(self) -> None:
        self._leaving: deque[tuple[Arrival, Tensor, Callable[[Tensor], None]]] = deque()
        self._last_source: Tensor | None = None

    def to_host(self, source: Tensor, use: Callable[[Tensor], None]) -> None:
        # The compute stream may reuse a source's memory once the source is released. The previous source is released
        # now, so the compute stream first waits for the copy of that source, which is complete or nearly complete.
        if self._leaving:
            self._leaving[-1][0].wait()
        host, copied = self.copied_to_host(source)
        self._leaving.append((copied, host, use))
        self._last_source = source

    def settle(self) -> None:
        while self._leaving:
            copied, host, use = self._leaving.popleft()
            copied.synchronize()
            use(host)
        self._last_source = None


class SideStream(QueuedCopies):
    """A copy stream for each direction, separate from the compute stream (the current stream at each call)."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._module = torch.get_device_module(device)
        self._inward, self._outward = self._module.Stream(device), self._module.Stream(device)
        self._has_forked = False

    @contextmanager
    def fork(self) -> Iterator[None]:
        self._has_forked = True
        with self._beside(self._inward):
            yield

    @contextmanager
    def _beside(self, stream: Any) -> Iterator[None]:
        stream.wait_stream(self._module.current_stream(stream.device))
        with self._module.stream(stream):
            yield

    def arrival(self) -> Arrival:
        return QueuedArrival(self._inward)

    def copied_to_host(self, source: Tensor) -> tuple[Tensor, Arrival]:
        host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True, device=HOST)
        with self._beside(self._outward):
            host.copy_(source, non_blocking=True)
        return host, QueuedArrival(self._outward)

    def settle(self) -> None:
        super().settle()
        if self._has_forked:
            self._has_forked = False
            self._inward.synchronize()


_IN_ORDER = CopyStream()


_side_stream = cache(SideStream)  # by device


def copy_stream_of(device: torch.device) -> CopyStream:
    """Return the shared copy stream of a device."""
    if not has_streams(device.type):
        return _IN_ORDER
    return _side_stream(device if device.index is not None else current_device(device.type))


def new_copy_stream(device: torch.device) -> CopyStream:
    """Return an additional copy stream, whose copies do not delay other copies."""
    return SideStream(device) if has_streams(device.type) else _IN_ORDER


def arrival_on(device: torch.device) -> Arrival:
    """Return the arrival of the work queued on the current stream of a device."""
    if not has_streams(device.type):
        return Arrival()
    return QueuedArrival(torch.get_device_module(device).current_stream(device))


def run_after(event: Any, device: torch.device) -> None:
    """Make later work on the current stream of a device wait for a user's event; without effect on a CPU."""
    if has_streams(device.type):
        torch.get_device_module(device).current_stream(device).wait_event(event)


def finish_queued(device: torch.device) -> None:
    """Block until all work queued on the current stream of an accelerator is complete."""
    torch.accelerator.current_stream(device).synchronize()


def page_lock(storage: UntypedStorage) -> Callable[[], Any]:
    """Pin host memory of torch that was allocated without pinning.

    Returns:
        A function that unpins the memory; the caller must call it before the memory is freed.

    Raises:
        RuntimeError: if the system permits no more pinned memory, or if CUDA is not available.
    """
    if not can_page_lock():
        raise RuntimeError(
            "share_memory=True and pin_memory=True can be combined with CUDA only, which can pin memory that is shared "
            "already. Omit one of them."
        )
    runtime, address = torch.cuda.cudart(), storage.data_ptr()
    failure = int(runtime.cudaHostRegister(address, storage.nbytes(), 1))  # 1: for all CUDA contexts
    if failure:
        raise RuntimeError(
            f"pin_memory: CUDA cannot page-lock {storage.nbytes()} bytes (error {failure}). Use pin_memory=False, or "
            "let the process lock more memory (`ulimit -l`)."
        )
    return partial(runtime.cudaHostUnregister, address)


def can_page_lock() -> bool:
    """Return whether `page_lock` is supported in this process."""
    return torch.cuda.is_available()


def default_generators(device: torch.device) -> list[torch.Generator]:
    """Return the default generators of the host and of `device`."""
    found = [torch.default_generator]
    if has_streams(device.type):
        index = current_device(device.type).index if device.index is None else device.index
        found.append(torch.get_device_module(device).default_generators[index])
    return found


def generator_state() -> tuple[str, Tensor] | None:
    """Return the type of the current accelerator, and the state ``[n]`` of its generator, as bytes on the host.

    Returns None if there is no accelerator, or if torch did not initialize it.
    """
    device = accelerator()
    if device is None or not torch.get_device_module(device).is_initialized():
        return None
    return device.type, torch.get_device_module(device).get_rng_state(device)


def set_generator_state(kind: str, state: Tensor) -> None:
    """Restore a `generator_state` of the current accelerator; a state of another device type is ignored."""
    device = accelerator()
    if device is not None and device.type == kind:
        torch.get_device_module(device).set_rng_state(state, device)


def return_cached_memory(device: torch.device) -> None:
    """Release memory that torch or glibc caches for later tensors, so that other processes can allocate it."""
    if is_host(device):
        return_freed_memory()
    elif has_streams(device.type):
        torch.get_device_module(device).empty_cache()


def host_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the host. The result keeps the tensor alive.

    Accesses the memory by address, because torch never frees a storage after exporting it to NumPy.
    """
    found: Any = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    found.tensor = tensor
    return memoryview(found)


def byte_view(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as a vector of bytes."""
    # A single element is contiguous with any stride, and a view as bytes requires 1.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


# An option of glibc: blocks larger than this threshold are mapped separately, and unmapped when they are freed.
_M_MMAP_THRESHOLD = -3


def return_freed_blocks(larger_than: int) -> None:
    """From now on, release each freed block of host memory above `larger_than` bytes to the operating system.

    By default, glibc raises this threshold whenever a large block is freed, up to 32 MiB, and caches smaller blocks.
    Mapping blocks again takes time, so the setting is intended for programs that are limited by memory.
    """
    _call_glibc("mallopt", _M_MMAP_THRESHOLD, larger_than)


def return_freed_memory() -> None:
    """Release freed memory that glibc caches to the operating system.

    Sharding a model frees the parameters in blocks between the allocated shards. glibc reuses such holes, but rarely
    releases them, and their number varies. Other C libraries release memory without this call.
    """
    _call_glibc("malloc_trim", 0)


def _call_glibc(name: str, *arguments: int) -> None:
    """Call a function of glibc; without effect if another C library is used."""
    function = getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
    if function is not None:
        function(*arguments)
