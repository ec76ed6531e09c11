"""Requests to the operating system about memory on CPU."""

from __future__ import annotations

import ctypes
import sys

# glibc's name for "larger blocks than this are mapped by themselves, and unmapped when they are freed".
_M_MMAP_THRESHOLD = -3


def return_freed_blocks(larger_than: int) -> None:
    """From now on, have every block of memory above this many bytes given back when it is freed.

    glibc otherwise raises its own limit with each large block that is freed, up to 32 MiB, and keeps smaller ones. It
    costs the time to map them again, and is for where memory is what counts.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_M_MMAP_THRESHOLD, larger_than)


def return_freed_memory() -> None:
    """Give memory that was freed, and that glibc keeps, back to the operating system.

    Cutting a model frees all of it in pieces between the shards that stay. glibc reuses such holes, but rarely gives
    them back, and how many there are is a matter of luck. Other C libraries return memory by themselves.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
