"""The disk of a folder: its type, its bandwidth, and the bytes read and written."""

from __future__ import annotations

import contextlib
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

_BLOCK = 8 << 20  # large enough that the disk's latency does not count
_PASSES = 3
_SECTOR = 512  # the unit of the kernel's counters, whatever the disk's own is

# File systems in memory: "written" data still needs memory.
_IN_MEMORY = ("tmpfs", "ramfs")


@dataclass(frozen=True)
class Bandwidth:
    """Bytes per second of a large file in sequential blocks, bypassing the system's cache.

    Args:
        read, write: medians.
        how: the method to bypass the cache.
    """

    read: float
    write: float
    how: str

    def seconds(self, read: float, written: float) -> float:
        """Return the time to move these bytes if the disk runs a single operation at a time."""
        return read / self.read + written / self.write


def measure_bandwidth(folder: Path, nbytes: int) -> Bandwidth:
    """Write and read a file of `nbytes` in `folder` a few times."""
    fd, path = tempfile.mkstemp(prefix="bandwidth-", dir=folder)
    try:
        os.close(fd)
        direct = getattr(os, "O_DIRECT", 0)
        try:
            fd = os.open(path, os.O_RDWR | direct)
        except OSError:  # not on this file system
            direct = 0
            fd = os.open(path, os.O_RDWR)
        writes, reads = [], []
        with _block() as block:
            for _ in range(_PASSES):
                writes.append(_rate(nbytes, lambda: _write(fd, block, nbytes)))
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                reads.append(_rate(nbytes, lambda: _read(fd, block, nbytes)))
    finally:
        with contextlib.suppress(OSError):
            os.close(fd)
        os.unlink(path)
    how = "O_DIRECT" if direct else "fsync, and cache dropped"
    return Bandwidth(statistics.median(reads), statistics.median(writes), how)


@contextlib.contextmanager
def _block() -> Iterator[mmap.mmap]:
    with mmap.mmap(-1, _BLOCK) as block:  # O_DIRECT wants whole pages
        block.write(os.urandom(_BLOCK))  # nothing that could be compressed
        yield block


def _rate(nbytes: int, move: Callable[[], None]) -> float:
    start = time.perf_counter()
    move()
    return nbytes / (time.perf_counter() - start)


def _write(fd: int, block: mmap.mmap, nbytes: int) -> None:
    for start in range(0, nbytes, _BLOCK):
        os.pwritev(fd, [block], start)
    os.fsync(fd)


def _read(fd: int, block: mmap.mmap, nbytes: int) -> None:
    for start in range(0, nbytes, _BLOCK):
        os.preadv(fd, [block], start)


def moved_bytes(folder: Path) -> tuple[int, int] | None:
    """Bytes read from and written to the disk below `folder` since the system started, by whomever.

    None where the kernel does not tell: no block device, or none of its own (overlays, network).
    """
    device = os.stat(folder).st_dev
    with contextlib.suppress(OSError, ValueError, IndexError):
        counters = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat").read_text().split()
        return int(counters[2]) * _SECTOR, int(counters[6]) * _SECTOR
    return None


def file_system(folder: Path) -> str:
    """Type of the file system that `folder` is on, "?" if that is not known."""
    where, found = folder.resolve(), ("", "?")
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mounts").read_text().splitlines():
            _, mount, kind, *_ = line.split()
            if (where == Path(mount) or Path(mount) in where.parents) and len(mount) >= len(found[0]):
                found = mount, kind
    return found[1]


def is_in_memory(folder: Path) -> bool:
    return file_system(folder) in _IN_MEMORY
