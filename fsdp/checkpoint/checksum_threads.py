"""Threads that compute checksums while the calling thread reads or writes."""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread

import torch.distributed as dist

from fsdp.checkpoint.checksums import Fragment, fragment

_MOST_THREADS = 4  # where a host has many more cores than ranks, the others stay free
_Job = tuple["Future[Fragment]", str, int, memoryview]


class ChecksumThreads:
    """Computes the checksums of blocks in the processor cores that the host's ranks do not use.

    zlib and isal release Python's global lock, as reads and writes do. A single block, and each block on a host
    without a free core, is computed by the calling thread, and then no thread is started. An executor of
    `concurrent.futures` would refuse all work at the interpreter's exit, when the last checkpoint may be written.
    """

    def __init__(self) -> None:
        self._most = min(_MOST_THREADS, free_cores())
        self._threads = 0
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._found: list[Fragment] = []
        self._running: deque[Future[Fragment]] = deque()
        self._last: tuple[str, int, memoryview] | None = None

    def add(self, name: str, begin: int, memory: memoryview) -> None:
        """Compute the checksum of a fragment. Its memory must not change until `take` has returned."""
        if self._last is not None:
            self._start(*self._last)
        self._last = (name, begin, memory)

    def take(self) -> list[Fragment]:
        """Return the fragments that were added since the last call, in their order."""
        last, self._last = self._last, None
        found, self._found = self._found, []
        running, self._running = self._running, deque()
        own = [] if last is None else [fragment(*last)]
        return found + [future.result() for future in running] + own

    def close(self) -> None:
        """End the threads; more work starts new ones."""
        for _ in range(self._threads):
            self._jobs.put(None)
        self._threads = 0

    def _start(self, name: str, begin: int, memory: memoryview) -> None:
        if self._threads < self._most:
            self._start_thread()
        if not self._threads:
            self._found.append(fragment(name, begin, memory))
            return
        if len(self._running) > self._most:  # so that few blocks wait in memory
            self._found.append(self._running.popleft().result())
        future: Future[Fragment] = Future()
        self._running.append(future)
        self._jobs.put((future, name, begin, memory))

    def _start_thread(self) -> None:
        try:
            Thread(target=_work, args=(self._jobs,), name="fsdp checksums", daemon=True).start()
        except RuntimeError:  # the interpreter exits, and the last checkpoint is written
            self._most = self._threads
        else:
            self._threads += 1


def _work(jobs: SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        future, name, begin, memory = job
        try:
            future.set_result(fragment(name, begin, memory))
        except BaseException as error:  # noqa: BLE001 (the future raises it)
            future.set_exception(error)
        del job, future, memory  # the memory, while waiting for the next


def free_cores() -> int:
    """Return how many processor cores a rank may use besides one of its own, if the host's ranks share its cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    given = os.environ.get("LOCAL_WORLD_SIZE", "")
    ranks = int(given) if given.isdecimal() else dist.get_world_size() if dist.is_initialized() else 1
    return max(0, cores // max(1, ranks) - 1)
