"""Faults with parameters that are offloaded to disk."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from functools import partial
from unittest import mock

from tests.faults.fault import ENDED, GATHER, Fault, in_forward, sleeps, usual
from tests.faults.job import Job

DISK = "on_disk setup train train train"


def truncate_open_files(job: Job) -> None:
    """Damage what this rank has mapped, whatever name it has or had."""
    for number in os.listdir("/proc/self/fd"):
        name = f"/proc/self/fd/{number}"
        with suppress(OSError):
            if str(job.options["offload_folder"]) in os.readlink(name):
                os.truncate(name, 0)


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
        offload_to_disk("its file is truncated", "disk", truncate_open_files, at="forward 2",
            rank=f"{ENDED} .*truncated", unit=GATHER, by="others"),
        offload_to_disk("a slow disk", "slow ranks", sleeps(1), at="step 2", quiet=True, after="trained"),
    ],
}
# fmt: on
