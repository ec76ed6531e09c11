"""Threads that compute checksums while the calling thread reads or writes."""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

import torch.distributed as dist

from fsdp.checkpoint.checksums import Fragment, fragment

_MOST_THREADS = 4  # of a rank; additional cores are not used


class ChecksumThreads:
    """Computes the checksums of blocks in the processor cores that the host's ranks do not use.

    zlib and isal release Python's global lock, as reads and writes do. The calling thread computes single blocks, and
    all blocks on a host without a free core; in these cases no thread is started.
    """

    def __init__(self) -> None:
        self._most = min(_MOST_THREADS, free_cores())
        self._pool: ThreadPoolExecutor | None = None
        self._found: list[Fragment] = []
        self._running: deque[Future[Fragment]] = deque()
        self._last: tuple[str, int, memoryview] | None = None

    def add(self, name: str, begin: int, memory: memoryview) -> None:
        """Compute the checksum of a fragment. Its memory must not change until `take` has returned."""
        if self._last is not None:
            self._start(*self._last)
        self._last = (name, begin, memory)
        if not self._most:  # now, while the processor's cache has the block
            self._found.append(fragment(*self._last))
            self._last = None

    def take(self) -> list[Fragment]:
        """Return the fragments added since the last call, in order."""
        last, self._last = self._last, None
        found, self._found = self._found, []
        running, self._running = self._running, deque()
        own = [] if last is None else [fragment(*last)]
        return found + [future.result() for future in running] + own

    def close(self) -> None:
        """Stop the threads; later blocks start new threads."""
        if self._pool is not None:
            self._pool.shutdown(wait=False)
            self._pool = None

    def _start(self, name: str, begin: int, memory: memoryview) -> None:
        if len(self._running) > self._most:  # limits the number of blocks in memory
            self._found.append(self._running.popleft().result())
        if self._most:
            try:
                self._pool = self._pool or ThreadPoolExecutor(self._most, "fsdp checksums")
                self._running.append(self._pool.submit(fragment, name, begin, memory))
                return
            except RuntimeError:  # the interpreter exits during the last save
                self._found += [future.result() for future in self._running]
                self._running.clear()
                self._most = 0
        self._found.append(fragment(name, begin, memory))


def free_cores() -> int:
    """Return the number of additional processor cores for a rank, if the ranks of the host divide its cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    given = os.environ.get("LOCAL_WORLD_SIZE", "")
    ranks = int(given) if given.isdecimal() else dist.get_world_size() if dist.is_initialized() else 1
    return max(0, cores // max(1, ranks) - 1)
