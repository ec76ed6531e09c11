"""Copies between a device and the host that run beside what is computed.

On CUDA a `CopyStream` is a stream of its own: a copy waits for what was queued on the compute stream before it, and the
compute stream waits for the copy only where its result is used. On a CPU everything already happens in order, and the
twin with the same interface does nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache

import torch
from torch import Tensor


class Arrival:
    """The copies that a fork has queued; on a CPU they have happened."""

    def wait(self) -> None:
        """Have what is queued from now on run after it."""

    def synchronize(self) -> None:
        """Block until it has happened."""


class CopyStream:
    """A stream on which everything happens in order: on a CPU, and on devices whose streams we do not know."""

    def fork(self) -> AbstractContextManager[None]:
        """Queue what is inside after what was queued before, and beside what is queued next."""
        return nullcontext()

    def arrival(self) -> Arrival:
        """Return that of all that was queued in forks until now."""
        return Arrival()

    def to_host(self, source: Tensor, use: Callable[[Tensor], None]) -> None:
        """Have `use` called with `source` on the host, at the latest in `settle`."""
        use(source.cpu())

    def settle(self) -> None:
        """Block until all copies are done and used, so that their sources may be written again."""


class CudaArrival(Arrival):
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def wait(self) -> None:
        torch.cuda.current_stream(self._stream.device).wait_event(self._event)

    def synchronize(self) -> None:
        self._event.synchronize()


class CudaCopyStream(CopyStream):
    """A stream for each direction, beside the compute stream (the one that is current when a method is called)."""

    def __init__(self, device: torch.device) -> None:
        self._inward, self._outward = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._has_forked = False
        self._leaving: deque[tuple[CudaArrival, Tensor, Callable[[Tensor], None]]] = deque()
        self._last_source: Tensor | None = None

    @contextmanager
    def fork(self) -> Iterator[None]:
        self._has_forked = True
        with self._beside(self._inward):
            yield

    @contextmanager
    def _beside(self, stream: torch.cuda.Stream) -> Iterator[None]:
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            yield

    def arrival(self) -> Arrival:
        return CudaArrival(self._inward)

    def to_host(self, source: Tensor, use: Callable[[Tensor], None]) -> None:
        # The memory of a source is used again, by the compute stream, once it is dropped: so the one before is dropped
        # now, and the compute stream first waits for its copy, which by now is done or nearly so.
        if self._leaving:
            self._leaving[-1][0].wait()
        host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        with self._beside(self._outward):
            host.copy_(source, non_blocking=True)
        self._leaving.append((CudaArrival(self._outward), host, use))
        self._last_source = source

    def settle(self) -> None:
        while self._leaving:
            copied, host, use = self._leaving.popleft()
            copied.synchronize()
            use(host)
        self._last_source = None
        if self._has_forked:
            self._has_forked = False
            self._inward.synchronize()


_CPU_COPY_STREAM = CopyStream()


@cache
def _cuda_copy_stream(device: torch.device) -> CopyStream:
    return CudaCopyStream(device)


def copy_stream_of(device: torch.device) -> CopyStream:
    """Return the one copy stream of a device."""
    if device.type != "cuda":
        return _CPU_COPY_STREAM
    return _cuda_copy_stream(
        torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    )


def new_copy_stream(device: torch.device) -> CopyStream:
    """Return one besides, for copies that nothing else should wait for."""
    return CudaCopyStream(device) if device.type == "cuda" else _CPU_COPY_STREAM
