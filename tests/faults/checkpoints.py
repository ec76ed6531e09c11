"""Faults while checkpoints are saved, at once and in the background, loaded, and resumed from."""

from __future__ import annotations

import errno
import hashlib
import json
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from tests.faults.fault import (
    ENDED,
    GONE,
    STUCK,
    Action,
    Fault,
    also,
    ends_by,
    instead,
    interrupted,
    raises,
    skip,
    sleeps,
    stops,
    stops_for,
    usual,
)
from tests.faults.job import Job
from tests.helpers.killed_saves import counted_steps

SAVE = "setup train save train save train"
BACKGROUND = "setup train save_in_background wait train save_in_background train wait train"
LOAD = "setup train save train load train"
SAVING, LOADING, IN_BACKGROUND = r"fsdp\.save\(\)", r"fsdp\.load\(\)", r"fsdp\.checkpoint\.Saver\.save\(\)"
SAME_CALLS = "[Mm]ake the same calls? on every rank|they have taken different paths"
EVERY = "[Ee]very rank"
FULL = OSError(errno.ENOSPC, "No space left on device")
DAMAGED = partial(Fault, kind="damaged files", at="load", program=LOAD, victim=0, rank="", damages=True)


def while_writing(action: Action, step: int = 3) -> Action:
    """Have something happen before the next write, or another change of the disk, of that number."""
    return lambda job: job.stack.enter_context(counted_steps(step, lambda: job.strike(action)))


def saving(**options: Any) -> Action:
    return lambda job: job.saving.update(options)


def loading(**options: Any) -> Action:
    return lambda job: job.loading.update(options)


def elsewhere(job: Job) -> None:
    job.path = job.folder / "elsewhere"


def without_optimizer(job: Job) -> None:
    job.without_optimizer = True


def a_job_holds_the_lock(job: Job) -> None:
    from fsdp.checkpoint.folder import _Lock

    job.lock = _Lock(str(job.path))
    job.lock.take()


def a_dead_job_has_left_its_lock(job: Job) -> None:
    Path(f"{job.path}.saving.lock").write_text("process 1 on a machine that is off")


def file(pattern: str, change: Callable[[Path], Any]) -> Action:
    """Do something to a file of the checkpoint."""
    return lambda job: change(job.file(pattern))


KEPT = r"saved is a complete checkpoint: that from before, or this one if all ranks had written it"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def noise(path: Path) -> None:
    path.write_bytes(b"\xff" * path.stat().st_size)


def newer(path: Path) -> None:
    content = json.loads(path.read_text())
    content["checkpoint"]["version"] = 2
    text = json.dumps(content["checkpoint"], separators=(",", ":"))
    content["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(json.dumps(content))


def exchanged(job: Job) -> None:
    """Find the first checkpoint in the place of the second one."""
    job.path = job.folder / f"first {job.rank}"


def of_another_model(job: Job) -> None:
    place = job.file("model*.safetensors")
    place.write_bytes(place.read_bytes().replace(b"blocks.0", b"layers.0"))


def changes_while_it_is_read(job: Job) -> None:
    """Have the file written to between two of the reads."""
    import fsdp.checkpoint.loader as loader

    read = loader.read

    def changed_first(*args: Any) -> Any:
        flip(job.file("model*.safetensors"))
        return read(*args)

    job.stack.enter_context(mock.patch.object(loader, "read", changed_first))


def not_readable(job: Job) -> None:
    job.stack.enter_context(
        mock.patch("fsdp.checkpoint.loader.read", side_effect=OSError(errno.EIO, "Input/output error"))
    )


FAULTS = {
    "save": [
        *usual("save 2", program=SAVE),
        Fault(
            "rank 0 only",
            "extra calls",
            "batch 2",
            also("save"),
            victim=0,
            rank=r"rank 0\b",
            unit=SAVING,
            remedy=SAME_CALLS,
        ),
        Fault("left out", "skipping", "save 2", skip, program=SAVE, unit=SAVING, remedy=SAME_CALLS),
        Fault(
            "a state dict instead",
            "order",
            "save 2",
            instead("state_dict"),
            program=SAVE,
            unit=SAVING,
            remedy=SAME_CALLS,
        ),
        Fault(
            "another folder",
            "options",
            "save 2",
            elsewhere,
            program=SAVE,
            unit="elsewhere",
            remedy=EVERY,
            after="kept train",
        ),
        Fault(
            "another step",
            "options",
            "save 2",
            saving(step=7),
            program=SAVE,
            unit="step",
            remedy=EVERY,
            after="kept train",
        ),
        Fault(
            "without the optimizer",
            "options",
            "save 2",
            without_optimizer,
            program=SAVE,
            unit="optimizer",
            remedy=EVERY,
            after="kept train",
        ),
        Fault(
            "no space left",
            "disk",
            "save 2",
            while_writing(raises(FULL)),
            program=SAVE,
            rank="rank 1 could not",
            by="others",
            unit="saved",
            after="kept train",
        ),
        Fault(
            "no space left on rank 0",
            "disk",
            "save 2",
            while_writing(raises(FULL), 6),
            victim=0,
            program=SAVE,
            rank="rank 0 could not",
            by="others",
            unit="saved",
            after="kept train",
        ),
        Fault(
            "an error of the disk",
            "disk",
            "save 2",
            while_writing(raises(OSError(errno.EIO, "Input/output error"))),
            program=SAVE,
            rank="rank 1 could not",
            by="others",
            after="kept train",
        ),
        Fault(
            "killed while writing",
            "SIGKILL",
            "save 2",
            while_writing(ends_by(signal.SIGKILL)),
            program=SAVE,
            rank=GONE,
            unit=SAVING,
            remedy=KEPT,
            ends="SIGKILL",
        ),
        Fault(
            "rank 0 killed while writing",
            "SIGKILL",
            "save 2",
            while_writing(ends_by(signal.SIGKILL), 8),
            victim=0,
            program=SAVE,
            rank="rank 0 is gone",
            unit=SAVING,
            remedy=KEPT,
            ends="SIGKILL",
        ),
        Fault(
            "values that cannot be saved",
            "structure",
            "save 2",
            saving(values={"net": object()}),
            program=SAVE,
            by="others",
            unit="values",
            after="kept train",
        ),
        Fault(
            "a slow disk", "slow ranks", "save 2", while_writing(sleeps(5)), program=SAVE, quiet=True, after="trained"
        ),
        Fault(
            "stopped for good while writing",
            "SIGSTOP for good",
            "save 2",
            while_writing(stops),
            program=SAVE,
            rank="rank 1: gives no answer",
            ends=STUCK,
        ),
        Fault(
            "stopped for seconds while writing",
            "SIGSTOP for seconds",
            "save 2",
            while_writing(stops_for(6)),
            program=SAVE,
            rank="rank 1: gives no answer",
            raises=False,
            by="one",
            after="trained",
        ),
        Fault(
            "another job saves there",
            "two jobs",
            "save 2",
            a_job_holds_the_lock,
            victim=0,
            program=SAVE,
            rank="",
            unit=r"another save to .*saved is running, by process \d+ on \w+",
            remedy="a separate folder",
            after="kept train",
        ),
        Fault(
            "a dead job has left its lock",
            "two jobs",
            "save 2",
            a_dead_job_has_left_its_lock,
            victim=0,
            program=SAVE,
            quiet=True,
            after="trained",
        ),
        Fault(
            "Ctrl-C while writing",
            "interrupts",
            "save 2",
            while_writing(interrupted),
            program=SAVE,
            rank=f"{ENDED} KeyboardInterrupt",
            unit=SAVING,
            by="others",
        ),
    ],
    "background save": [
        *usual("save_in_background 2", program=BACKGROUND),
        Fault(
            "one rank only",
            "extra calls",
            "batch 2",
            also("save_in_background"),
            program="setup train train train",
            unit=IN_BACKGROUND,
            remedy=SAME_CALLS,
        ),
        Fault(
            "left out",
            "skipping",
            "save_in_background 2",
            skip,
            program=BACKGROUND,
            unit=IN_BACKGROUND,
            remedy=SAME_CALLS,
        ),
        Fault(
            "no space left",
            "disk",
            "save_in_background 2",
            while_writing(raises(FULL)),
            program=BACKGROUND,
            rank="rank 1 could not",
            by="others",
            unit="saved",
            after="train",
        ),
        Fault(
            "killed while writing",
            "SIGKILL",
            "save_in_background 2",
            while_writing(ends_by(signal.SIGKILL)),
            program=BACKGROUND,
            rank=GONE,
            remedy=KEPT,
            ends="SIGKILL",
        ),
        Fault(
            "an error in the training meanwhile",
            "exceptions",
            "forward 3",
            raises(ValueError("a bad batch")),
            program=BACKGROUND,
            rank=f"{ENDED} ValueError: a bad batch",
            by="others",
        ),
        Fault(
            "a slow disk",
            "slow ranks",
            "save_in_background 2",
            while_writing(sleeps(4)),
            program=BACKGROUND,
            quiet=True,
            after="trained",
        ),
        Fault(
            "another folder",
            "options",
            "save_in_background 2",
            elsewhere,
            program=BACKGROUND,
            unit="elsewhere",
            remedy=EVERY,
            after="train",
        ),
        Fault(
            "an error that nobody asks for",
            "disk",
            "save_in_background 2",
            while_writing(raises(FULL)),
            program=BACKGROUND.replace(" train wait train", " train forget_saver train"),
            rank="rank 1 could not",
            by="others",
        ),
    ],
    "load": [
        *usual("load", program=LOAD),
        Fault(
            "one rank only",
            "extra calls",
            "batch 3",
            also("load"),
            program="setup train save train train",
            unit=LOADING,
            remedy=SAME_CALLS,
        ),
        Fault("left out", "skipping", "load", skip, program=LOAD, unit=LOADING, remedy=SAME_CALLS),
        Fault(
            "another folder",
            "options",
            "load",
            elsewhere,
            program=LOAD,
            rank="rank 1 could not",
            by="others",
            unit="elsewhere",
            after="kept train",
        ),
        Fault(
            "a checkpoint with other values",
            "exchanged files",
            "load",
            exchanged,
            program="setup train save copy_saved train save load train",
            rank="rank 1",
            unit="different checkpoints",
            remedy=EVERY,
        ),
        Fault(
            "not strict on one rank",
            "options",
            "load",
            loading(strict=False),
            program=LOAD,
            unit="strict=False",
            remedy=EVERY,
            after="kept train",
        ),
        Fault(
            "without the optimizer",
            "options",
            "load",
            without_optimizer,
            program=LOAD,
            unit="no optimizer",
            remedy=EVERY,
            after="kept train",
        ),
        Fault(
            "an error of the disk",
            "disk",
            "load",
            not_readable,
            program=LOAD,
            rank="rank 1 could not",
            by="others",
            unit="saved",
        ),
        DAMAGED(
            "a bit of the weights",
            do=file("model*.safetensors", flip),
            unit=r"head\.weight|blocks\.|saved",
            remedy="load another checkpoint|is damaged",
        ),
        DAMAGED(
            "weights cut short", do=file("model*.safetensors", cut), unit=r"model.*\.safetensors", after="kept train"
        ),
        DAMAGED(
            "weights are gone",
            do=file("model*.safetensors", Path.unlink),
            unit=r"model.*\.safetensors",
            after="kept train",
        ),
        DAMAGED(
            "noise instead of weights",
            do=file("model*.safetensors", noise),
            unit=r"model.*\.safetensors",
            after="kept train",
        ),
        DAMAGED(
            "a bit of the optimizer's state",
            do=file("optim*.safetensors", flip),
            unit=r"head|blocks|saved",
            remedy="load another checkpoint|is damaged",
        ),
        DAMAGED("the manifest cut short", do=file("checkpoint.json", cut), unit="saved", after="kept train"),
        DAMAGED(
            "the manifest is gone",
            do=file("checkpoint.json", Path.unlink),
            unit="saved",
            remedy="no complete checkpoint",
            after="kept train",
        ),
        DAMAGED(
            "of a newer version",
            do=file("checkpoint.json", newer),
            kind="other versions",
            unit="version 2",
            after="kept train",
        ),
        DAMAGED(
            "weights of another model",
            do=of_another_model,
            kind="exchanged files",
            unit=r"layers|model.*\.safetensors",
            after="kept train",
        ),
        Fault(
            "weights change while they are read",
            "damaged files",
            "load",
            changes_while_it_is_read,
            victim=0,
            program=LOAD,
            rank="",
            unit=r"model.*\.safetensors",
            damages=True,
        ),
    ],
    "resume": [
        *usual("save_step 2", program="setup train save_step train save_step"),
        Fault(
            "from another step",
            "options",
            "load",
            lambda job: setattr(job, "path", job.folder / "run" / "step-00000001"),
            program="setup train save_step train save_step newest load train",
            rank="rank 1",
            unit="step-0000000",
            remedy="every rank|same",
        ),
        Fault(
            "one rank from the beginning",
            "skipping",
            "load",
            skip,
            program="setup train save_step newest load train",
            unit=LOADING,
            remedy=SAME_CALLS,
        ),
        Fault(
            "killed in the save before",
            "SIGKILL",
            "save_step 2",
            while_writing(ends_by(signal.SIGKILL)),
            program="setup train save_step train save_step",
            rank=GONE,
            unit=SAVING,
            ends="SIGKILL",
        ),
        Fault(
            "newest is gone on one rank",
            "exchanged files",
            "newest",
            instead("lose_newest"),
            program="setup train save_step newest load train",
            rank="rank 1",
            unit="lost",
            damages=True,
            by="others",
        ),
    ],
}
