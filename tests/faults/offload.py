"""Faults with parameters that are offloaded to disk."""

from __future__ import annotations

import errno
import os
from functools import partial
from pathlib import Path
from unittest import mock

from tests.faults.fault import ENDED, GATHER, Action, Fault, in_forward, sleeps, usual
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


offload_to_disk = partial(Fault, program=DISK)

# fmt: off
FAULTS = {
    "offload to disk": [
        *usual("forward 2", in_forward, program=DISK),
        offload_to_disk("in memory on one rank", "options", in_memory, at="build", quiet=True, after="trained"),
        offload_to_disk("a folder that cannot be written", "disk", no_folder, at="build",
            rank=f"{ENDED} .*/proc/nowhere", by="others"),
        offload_to_disk("no space left", "disk", disk_is_full, at="wrap",
            rank=f"{ENDED} RuntimeError.*bytes", by="others"),
        offload_to_disk("its file is truncated", "disk", open_files("truncate"), at="forward 2",
            rank=f"{ENDED} .*truncated", unit=GATHER, by="others"),
        offload_to_disk("a slow disk", "slow ranks", sleeps(1), at="step 2", quiet=True, after="trained"),
    ],
}
# fmt: on
