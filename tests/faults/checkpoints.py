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
    SAME_CALLS,
    STUCK,
    TRAIN,
    Action,
    Fault,
    also,
    assigns,
    ends_by,
    instead,
    interrupted,
    raises,
    skip,
    sleeps,
    stops,
    stops_for,
    updates,
    usual,
)
from tests.faults.job import Job
from tests.helpers.killed_saves import counted_steps

SAVE = "setup train save train save train"
BACKGROUND = "setup train save_in_background wait train save_in_background train wait train"
LOAD = "setup train save train load train"
SAVING, LOADING, IN_BACKGROUND = r"fsdp\.save\(\)", r"fsdp\.load\(\)", r"fsdp\.checkpoint\.Saver\.save\(\)"
EVERY = "[Ee]very rank"
FULL = OSError(errno.ENOSPC, "No space left on device")
damaged = partial(Fault, kind="damaged files", at="load", program=LOAD, victim=0, rank="", damages=True)


def while_writing(action: Action, step: int = 3) -> Action:
    """Have something happen before the next write, or another change of the disk, of that number."""
    return lambda job: job.stack.enter_context(counted_steps(step, lambda: job.strike(action)))


def elsewhere(job: Job) -> None:
    job.path = job.folder / "elsewhere"


def a_job_holds_the_lock(job: Job) -> None:
    from fsdp.checkpoint.folder import _Lock

    job.lock = _Lock(str(job.path))
    job.lock.take()


def a_dead_job_has_left_its_lock(job: Job) -> None:
    Path(f"{job.path}.saving.lock").write_text("process 1 on a machine that is off")


def file(pattern: str, change: Callable[[Path], Any]) -> Action:
    """Do something to a file of the checkpoint."""
    return lambda job: change(job.file(pattern))


KEPT = r"saved is a complete checkpoint: the previous one, or this one if all ranks had written it"


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
    """Have the file written to after it was opened; this rank reads its part afterwards."""
    import fsdp.checkpoint.loader as loader

    read = loader.read

    def changed_first(*args: Any) -> Any:
        place = job.file("model*.safetensors")
        place.write_bytes(bytes(byte ^ 1 for byte in place.read_bytes()))
        return read(*args)

    job.stack.enter_context(mock.patch.object(loader, "read", changed_first))


def not_readable(job: Job) -> None:
    job.stack.enter_context(
        mock.patch("fsdp.checkpoint.loader.read", side_effect=OSError(errno.EIO, "Input/output error"))
    )


save = partial(Fault, program=SAVE, at="save 2")
background_save = partial(Fault, program=BACKGROUND, at="save_in_background 2")
load = partial(Fault, program=LOAD, at="load")

# fmt: off
FAULTS = {
    "save": [
        *usual("save 2", program=SAVE),
        save("rank 0 only", "extra calls", also("save"), at="batch 2", program=TRAIN, victim=0,
            rank=r"rank 0\b", unit=SAVING, remedy=SAME_CALLS),
        save("left out", "skipping", skip, unit=SAVING, remedy=SAME_CALLS),
        save("a state dict instead", "order", instead("state_dict"), unit=SAVING, remedy=SAME_CALLS),
        save("another folder", "options", elsewhere, unit="elsewhere", remedy=EVERY, after="kept train"),
        save("another step", "options", updates("saving", step=7), unit="step", remedy=EVERY, after="kept train"),
        save("without the optimizer", "options", assigns(without_optimizer=True),
            unit="optimizer", remedy=EVERY, after="kept train"),
        save("no space left", "disk", while_writing(raises(FULL)),
            rank="rank 1 could not", unit="saved", by="others", after="kept train"),
        save("no space left on rank 0", "disk", while_writing(raises(FULL), 6), victim=0,
            rank="rank 0 could not", unit="saved", by="others", after="kept train"),
        save("an error of the disk", "disk", while_writing(raises(OSError(errno.EIO, "Input/output error"))),
            rank="rank 1 could not", by="others", after="kept train"),
        save("killed while writing", "SIGKILL", while_writing(ends_by(signal.SIGKILL)),
            rank=GONE, unit=SAVING, remedy=KEPT, ends="SIGKILL"),
        save("rank 0 killed while writing", "SIGKILL", while_writing(ends_by(signal.SIGKILL), 8), victim=0,
            rank="rank 0 is gone", unit=SAVING, remedy=KEPT, ends="SIGKILL"),
        save("values that cannot be saved", "structure", updates("saving", values={"net": object()}),
            unit="values", by="others", after="kept train"),
        save("a slow disk", "slow ranks", while_writing(sleeps(5)), quiet=True, after="trained"),
        save("stopped for good while writing", "SIGSTOP for good", while_writing(stops),
            rank="rank 1: gives no answer", ends=STUCK),
        save("stopped for seconds while writing", "SIGSTOP for seconds", while_writing(stops_for(6)),
            rank="rank 1: gives no answer", by="one", raises=False, after="trained"),
        save("another job saves there", "two jobs", a_job_holds_the_lock, victim=0, rank="",
            unit=r"another save to .*saved is running, by process \d+ on \w+", remedy="a separate folder",
            after="kept train"),
        save("a dead job has left its lock", "two jobs", a_dead_job_has_left_its_lock, victim=0,
            quiet=True, after="trained"),
        save("Ctrl-C while writing", "interrupts", while_writing(interrupted),
            rank=f"{ENDED} KeyboardInterrupt", unit=SAVING, by="others"),
    ],
    "background save": [
        *usual("save_in_background 2", program=BACKGROUND),
        background_save("one rank only", "extra calls", also("save_in_background"), at="batch 2", program=TRAIN,
            unit=IN_BACKGROUND, remedy=SAME_CALLS),
        background_save("left out", "skipping", skip, unit=IN_BACKGROUND, remedy=SAME_CALLS),
        background_save("no space left", "disk", while_writing(raises(FULL)),
            rank="rank 1 could not", unit="saved", by="others", after="train"),
        background_save("killed while writing", "SIGKILL", while_writing(ends_by(signal.SIGKILL)),
            rank=GONE, remedy=KEPT + "|Look at what this rank has printed", ends="SIGKILL"),  # others may train already
        background_save("an error in the training meanwhile", "exceptions", raises(ValueError("a bad batch")),
            at="forward 3", rank=f"{ENDED} ValueError: a bad batch", by="others"),
        background_save("a slow disk", "slow ranks", while_writing(sleeps(4)), quiet=True, after="trained"),
        background_save("another folder", "options", elsewhere, unit="elsewhere", remedy=EVERY, after="train"),
        background_save("an error that nobody asks for", "disk", while_writing(raises(FULL)),
            program=BACKGROUND.replace(" train wait train", " train forget_saver train"), rank="rank 1 could not",
            by="others"),
    ],
    "load": [
        *usual("load", program=LOAD),
        load("one rank only", "extra calls", also("load"), at="batch 3", program="setup train save train train",
            unit=LOADING, remedy=SAME_CALLS),
        load("left out", "skipping", skip, unit=LOADING, remedy=SAME_CALLS),
        load("another folder", "options", elsewhere,
            rank="rank 1 could not", unit="elsewhere", by="others", after="kept train"),
        load("a checkpoint with other values", "exchanged files", exchanged,
            program="setup train save copy_saved train save load train", rank="rank 1", unit="different checkpoints",
            remedy=EVERY),
        load("not strict on one rank", "options", updates("loading", strict=False),
            unit="strict=False", remedy=EVERY, after="kept train"),
        load("without the optimizer", "options", assigns(without_optimizer=True),
            unit="no optimizer", remedy=EVERY, after="kept train"),
        load("an error of the disk", "disk", not_readable, rank="rank 1 could not", unit="saved", by="others"),
        damaged("a bit of the weights", do=file("model*.safetensors", flip),
            unit=r"head\.weight|blocks\.|saved", remedy="load another checkpoint|is damaged"),
        damaged("weights cut short", do=file("model*.safetensors", cut),
            unit=r"model.*\.safetensors", after="kept train"),
        damaged("weights are gone", do=file("model*.safetensors", Path.unlink),
            unit=r"model.*\.safetensors", after="kept train"),
        damaged("noise instead of weights", do=file("model*.safetensors", noise),
            unit=r"model.*\.safetensors", after="kept train"),
        damaged("a bit of the optimizer's state", do=file("optim*.safetensors", flip),
            unit=r"head|blocks|saved", remedy="load another checkpoint|is damaged"),
        damaged("the manifest cut short", do=file("checkpoint.json", cut), unit="saved", after="kept train"),
        damaged("the manifest is gone", do=file("checkpoint.json", Path.unlink),
            unit="saved", remedy="not a complete checkpoint", after="kept train"),
        damaged("of a newer version", do=file("checkpoint.json", newer), kind="other versions",
            unit="version 2", after="kept train"),
        damaged("weights of another model", do=of_another_model, kind="exchanged files",
            unit=r"layers|model.*\.safetensors", after="kept train"),
        load("weights change while they are read", "damaged files", changes_while_it_is_read, victim=0,
            rank="", unit=r"model.*\.safetensors", damages=True),
    ],
    "resume": [
        *usual("save_step 2", program="setup train save_step train save_step"),
        Fault("from another step", "options", lambda job: setattr(job, "path", job.folder / "run" / "step-00000001"),
            at="load", program="setup train save_step train save_step newest load train", rank="rank 1",
            unit="step-0000000", remedy="every rank|same"),
        Fault("one rank from the beginning", "skipping", skip, at="load",
            program="setup train save_step newest load train", unit=LOADING, remedy=SAME_CALLS),
        Fault("killed in the save before", "SIGKILL", while_writing(ends_by(signal.SIGKILL)), at="save_step 2",
            program="setup train save_step train save_step", rank=GONE, unit=SAVING, ends="SIGKILL"),
        Fault("newest is gone on one rank", "exchanged files", instead("lose_newest"), at="newest",
            program="setup train save_step newest load train", rank="rank 1", unit="lost", by="others", damages=True),
    ],
}
# fmt: on
