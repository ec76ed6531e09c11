"""What the operating system is told about memory on CPU."""

from __future__ import annotations

import ctypes
import sys


def return_freed_memory() -> None:
    """Give memory that was freed, and that glibc keeps, back to the operating system.

    Cutting a model frees all of it in pieces between the shards that stay. glibc reuses such holes, but rarely gives
    them back, and how many there are is a matter of luck. Other C libraries return memory by themselves.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
