"""Tensors backed by files: the system writes unused pages to disk, and reads pages on access.

Space is reserved on the disk before a tensor exists, because writing a page without space kills the process without an
error message. For the same reason a mapping is checked before use: the pages of a truncated file cannot be read.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from fsdp.distributed.devices import return_freed_blocks

_PAGE = mmap.PAGESIZE

# Small tensors share files of this size, because each mapping uses a file descriptor, and their number is limited.
_SHARED_FILE_BYTES = 1 << 22

_READ_AHEAD_BYTES = 1 << 17


class Region:
    """A page-aligned part of a mapped file."""

    def __init__(self, mapping: mmap.mmap, path: str, start: int, nbytes: int) -> None:
        self._mapping = weakref.ref(mapping)  # only tensors keep the mapping alive
        self._path = path
        self._start, self._length = start, _in_pages(nbytes)

    @property
    def is_alive(self) -> bool:
        return self._mapping() is not None

    def check(self, what: str) -> None:
        """Raise RuntimeError if the mapped file is missing or too short, so that reading it would crash."""
        mapping = self._mapping()
        if mapping is None:
            return
        try:
            size = mapping.size()
        except OSError as error:
            raise RuntimeError(f"{what}: its file {self._path} is no longer accessible: {error}") from error
        if size < self._start + self._length:
            raise RuntimeError(
                f"{what}: its file {self._path} was truncated to {size} bytes while it was in use, and its values are "
                "lost. Start again from a checkpoint, with an offload_folder that no other process changes."
            )

    def read_ahead(self) -> None:
        """Read the region from disk in the background."""
        # In pieces, because Linux limits a request to the device's read-ahead, usually this size.
        for start in range(0, self._length, _READ_AHEAD_BYTES):
            self._advise("MADV_WILLNEED", start, min(_READ_AHEAD_BYTES, self._length - start))

    def release(self) -> None:
        """Remove the region from the process's memory; the system may keep it cached."""
        self._advise("MADV_DONTNEED", 0, self._length)

    def _advise(self, advice: str, start: int, length: int) -> None:
        mapping = self._mapping()
        if mapping is not None and hasattr(mmap, advice):
            mapping.madvise(getattr(mmap, advice), self._start + start, length)


class MappedFiles:
    """Files for tensors in a folder of this process below `folder`, which is created if missing.

    Without `keep`, files are never named, so the system deletes them when the process ends, even in a crash.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: bool) -> None:
        self._below, self._keep = os.path.abspath(folder), keep
        self._regions: dict[int, Region] = {}  # by address; regions of freed tensors are removed at a length of `_most`
        self._most = 0
        self._shared: tuple[mmap.mmap, str] | None = None
        self._shared_used = 0
        self._count = 0
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.folder = tempfile.mkdtemp(prefix=f"fsdp-{os.getpid()}-", dir=folder)
        except OSError as error:
            raise ValueError(
                f"offload_folder={os.fspath(folder)!r} cannot be used: {error}. Pass a folder on a disk with space for "
                "the model's shards, gradients and optimizer state."
            ) from error
        return_freed_blocks(larger_than=1 << 20)
        if not keep:
            weakref.finalize(self, _remove, self.folder, os.getpid())

    def __reduce__(self) -> tuple[Any, ...]:  # copies in the same process are this object
        return files_under, (self._below, self._keep)

    def allocate(self, numel: int, dtype: torch.dtype, role: str) -> tuple[Tensor, Region]:
        """Return a tensor ``[numel]`` of zeros, named after its `role`; raise RuntimeError if the disk is full."""
        nbytes = max(numel, 1) * dtype.itemsize
        if self._keep or nbytes >= _SHARED_FILE_BYTES // 4:
            mapping, path = self._map(_in_pages(nbytes), role)
            start = 0
        else:
            if self._shared is None or self._shared_used + _in_pages(nbytes) > _SHARED_FILE_BYTES:
                self._shared, self._shared_used = self._map(_SHARED_FILE_BYTES, "small tensors"), 0
            (mapping, path), start = self._shared, self._shared_used
            self._shared_used += _in_pages(nbytes)
        region = Region(mapping, path, start, nbytes)
        made = torch.frombuffer(mapping, dtype=dtype, count=max(numel, 1), offset=start)
        if len(self._regions) >= self._most:
            self._regions = {place: each for place, each in self._regions.items() if each.is_alive}
            self._most = 2 * len(self._regions) + 1
        self._regions[made.data_ptr()] = region
        return made[:numel], region

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor was allocated here."""
        region = self._regions.get(tensor.data_ptr())
        return region is not None and region.is_alive

    @property
    def addresses(self) -> list[int]:
        """The addresses of the existing tensors allocated here."""
        return [address for address, region in self._regions.items() if region.is_alive]

    def regions_of(self, tensors: Iterable[Any]) -> list[Region]:
        """Return the regions of the `tensors` allocated here."""
        ours = (each for each in tensors if isinstance(each, Tensor) and self.holds(each))
        return [self._regions[each.data_ptr()] for each in ours]

    def release(self) -> None:
        """Remove all regions from the process's memory."""
        for region in self._regions.values():
            region.release()

    def _open(self, path: str) -> IO[bytes]:
        if self._keep:
            return open(path, "x+b", opener=lambda name, flags: os.open(name, flags, 0o600))
        return tempfile.TemporaryFile(dir=self.folder)

    def _map(self, nbytes: int, role: str) -> tuple[mmap.mmap, str]:
        self._count += 1
        path = os.path.join(self.folder, f"{self._count:05d}-{role.replace(' ', '-')}.bin")
        try:
            with self._open(path) as file:
                try:
                    _reserve(file.fileno(), nbytes)
                    mapping = mmap.mmap(file.fileno(), nbytes)
                except OSError:
                    if self._keep:
                        os.unlink(path)
                    raise
        except OSError as error:
            free: int | str = "no longer known how many"
            with suppress(OSError):
                free = shutil.disk_usage(os.path.dirname(self.folder)).free
            raise RuntimeError(
                f"offload='disk': cannot make a file of {nbytes} bytes for {role} in {self.folder}: {error}; the disk "
                f"has {free} bytes free. Free space, or pass an offload_folder on another disk. (If there are too many "
                "open files, raise `ulimit -n`.)"
            ) from error
        return mapping, path


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked child
        shutil.rmtree(folder, ignore_errors=True)


def _reserve(fd: int, nbytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, nbytes)
        return
    zeros = bytes(1 << 20)
    for start in range(0, nbytes, len(zeros)):
        os.pwrite(fd, zeros[: nbytes - start], start)


def _in_pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


def files_under(folder: str | os.PathLike[str], keep: bool) -> MappedFiles:
    """Return this process's folder of files below `folder`."""
    key = (os.path.abspath(folder), keep)
    files = _open.get(key)
    if files is None:
        files = _open[key] = MappedFiles(folder, keep)
    return files


# Kept alive by the tensors' owners. The folder is deleted with the last owner, unless files are kept.
_open: weakref.WeakValueDictionary[tuple[str, bool], MappedFiles] = weakref.WeakValueDictionary()
