"""Reading what lies in mapped files without touching the mappings: pages that were touched count as memory.

`torch.load(..., mmap=True)` gives tensors in mapped files and does not say where in a file they are. The system does.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
from torch import Tensor

_MAPPINGS = "/proc/self/maps"


class _Mapping(NamedTuple):
    """Addresses from `begin` up to `end` are the file from `offset` on."""

    begin: int
    end: int
    offset: int
    inode: int
    path: str


class FileMappings:
    """The files that are mapped when this is made. Where the system does not tell, there are none."""

    def __init__(self) -> None:
        self._mappings: list[_Mapping] = []
        self._open: dict[_Mapping, int | None] = {}
        if os.path.exists(_MAPPINGS):
            with open(_MAPPINGS, encoding="utf-8", errors="surrogateescape") as lines:
                self._mappings = [found for line in lines if (found := _parsed(line)) is not None]

    def read(self, source: Tensor, target: Tensor) -> bool:
        """Read contiguous memory of a mapped file from the file.

        Args:
            source: where it is mapped.
            target: to be written: flat, on the CPU, of as many elements and the same dtype.

        Returns:
            Whether it is such memory; nothing was read if not.
        """
        begin, end = source.data_ptr(), source.data_ptr() + source.nbytes
        found = next((each for each in self._mappings if each.begin <= begin and end <= each.end), None)
        fd = None if found is None else self._descriptor(found)
        if found is None or fd is None:
            return False
        memory = target.view(torch.uint8).numpy().data
        done = 0
        while done < len(memory):
            count = os.preadv(fd, [memory[done:]], found.offset + begin - found.begin + done)
            if count == 0:
                raise ValueError(f"{found.path} has become too short: it ends before what is to be read of it")
            done += count
        return True

    def _descriptor(self, mapping: _Mapping) -> int | None:
        """Of the file; None if another one has its name now."""
        if mapping not in self._open:
            fd: int | None = None
            if os.path.isfile(mapping.path):
                fd = os.open(mapping.path, os.O_RDONLY | os.O_CLOEXEC)
                if os.fstat(fd).st_ino != mapping.inode:
                    os.close(fd)
                    fd = None
            self._open[mapping] = fd
        return self._open[mapping]

    def close(self) -> None:
        """Close the files."""
        while self._open:
            fd = self._open.popitem()[1]
            if fd is not None:
                os.close(fd)


def _parsed(line: str) -> _Mapping | None:
    """``begin-end permissions offset device inode path``; None for memory that is no file."""
    addresses, _, offset, _, inode, *path = line.rstrip("\n").split(maxsplit=5)
    if not path or not path[0].startswith("/"):
        return None
    begin, end = (int(each, 16) for each in addresses.split("-"))
    return _Mapping(begin, end, int(offset, 16), int(inode), path[0])
