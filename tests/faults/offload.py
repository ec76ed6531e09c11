"""Faults with parameters that are offloaded to disk."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from unittest import mock

from tests.faults.fault import ENDED, GATHER, GONE, LATE, Action, Fault, ends_by, in_forward, raises, sleeps
from tests.faults.job import Job

DISK = "on_disk setup train train train"


def file(change: str) -> Action:
    def do(job: Job) -> None:
        for path in Path(job.options["offload_folder"]).rglob("*"):
            if path.is_file():
                os.truncate(path, 0) if change == "truncate" else path.unlink()

    return do


def open_files(change: str) -> Action:
    """Damage what this rank has mapped, whatever name it has or had."""

    def do(job: Job) -> None:
        for number in os.listdir("/proc/self/fd"):
            name = f"/proc/self/fd/{number}"
            try:
                target = os.readlink(name)
                if str(job.options["offload_folder"]) in target:
                    os.truncate(name, 0)
            except OSError:
                continue

    return do


def in_memory(job: Job) -> None:
    job.options.clear()


def no_folder(job: Job) -> None:
    job.options["offload_folder"] = "/proc/nowhere"


def disk_is_full(job: Job) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    job.stack.enter_context(mock.patch("os.posix_fallocate", full))
    job.stack.enter_context(mock.patch("os.ftruncate", full))


FAULTS = {
    "offload to disk": [
        Fault(
            "in memory on one rank",
            "options",
            "build",
            in_memory,
            program=DISK,
            quiet=True,
            after="trained",
        ),
        Fault(
            "a folder that cannot be written",
            "disk",
            "build",
            no_folder,
            program=DISK,
            rank=f"{ENDED} .*/proc/nowhere",
            by="others",
        ),
        Fault(
            "no space left",
            "disk",
            "wrap",
            disk_is_full,
            program=DISK,
            rank=f"{ENDED} RuntimeError.*bytes",
            by="others",
        ),
        Fault(
            "its file is truncated",
            "disk",
            "forward 2",
            open_files("truncate"),
            program=DISK,
            rank=f"{ENDED} .*truncated",
            unit=GATHER,
            by="others",
        ),
        Fault(
            "an error in the forward",
            "exceptions",
            "forward 2",
            in_forward(raises(ValueError("a bad batch"))),
            program=DISK,
            rank=f"{ENDED} ValueError",
            by="others",
        ),
        Fault(
            "killed",
            "SIGKILL",
            "forward 2",
            in_forward(ends_by(signal.SIGKILL)),
            program=DISK,
            rank=GONE,
            ends="SIGKILL",
        ),
        Fault("a slow disk", "slow ranks", "step 2", sleeps(1), program=DISK, quiet=True, after="trained"),
        Fault("a disk that hangs", "slow ranks", "forward 2", sleeps(5), program=DISK, rank=LATE, unit=GATHER),
    ],
}
