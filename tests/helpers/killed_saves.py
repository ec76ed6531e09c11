"""What tests of killed saves share: the disk at every moment of a save, and a process that is killed at one of them."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

# Code that is followed line by line: ours that writes, and the library's that it has do so.
FOLLOWED = (
    "/checkpoint/folder.py",
    "/checkpoint/safetensors.py",
    "/checkpoint/writer.py",
    "/shutil.py",
    "/pathlib.py",
    "os.py",
    "<frozen os>",
)

# What changes the disk, in front of which a process may be killed.
STEPS = ["mkdir", "open", "pwrite", "fsync", "rename", "unlink", "rmdir"]


def disk_at_every_moment(folder: Path, copies: Path, save: Callable[[], Any]) -> list[Path]:
    """Copies of a folder for every state that it is in while something is saved, in their order.

    It is looked at in front of every line that runs, in any thread, of ours and of the library's that touches files.
    A process that is killed leaves the disk as it is, so these are all states that a killed save can leave; those
    within a single call of the system are left out.
    """
    seen: list[Path] = []
    last: list[Any] = [None]

    def look(frame: FrameType, event: str, _: Any) -> Any:
        if event == "call" and not frame.f_code.co_filename.endswith(FOLLOWED):
            return None
        found = _fingerprint(folder)
        if found != last[0]:
            last[0] = found
            seen.append(copies / f"{len(seen):04d}")
            shutil.copytree(folder, seen[-1], symlinks=True)
        return look

    threading.settrace(look)
    sys.settrace(look)
    try:
        save()
    finally:
        sys.settrace(None)
        threading.settrace(None)
    return seen


def _fingerprint(folder: Path) -> list[Any]:
    found: list[Any] = []
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            status = os.lstat(os.path.join(root, name))
            found.append((root, name, status.st_ino, status.st_size, status.st_mtime_ns))
    return found


@contextmanager
def counted_steps(last: int = -1, kill: Callable[[], None] | None = None) -> Iterator[list[int]]:
    """Counts what changes the disk, in all threads; this process is killed just in front of step number `last`."""
    numbers, count = itertools.count(1), [0]
    kill = kill or (lambda: os.kill(os.getpid(), signal.SIGKILL))

    def counted(name: str) -> Any:
        do = getattr(os, name)

        def step(*args: Any, **options: Any) -> Any:
            count[0] = next(numbers)
            if count[0] == last:
                kill()
            return do(*args, **options)

        return mock.patch(f"os.{name}", step)

    with ExitStack() as stack:
        for name in STEPS:
            stack.enter_context(counted(name))
        yield count
