"""A `Fault` is a line of the table: where a training goes wrong on one rank, and what must be said about it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.faults.job import Job

Action = Callable[["Job"], Any]

# How the harness calls the end of a rank that does not answer.
STUCK = "still running"

TRAIN = "setup train train train"

# Patterns of what is said.
ANY = ""  # it makes no sense to ask for one: an error that all ranks make alike names no rank
GATHER = r"all-gather of (blocks\.[01]|root)"
ENDED = r"rank 1 was ended by"
GONE = r"rank 1:? is gone"
LATE = r"The others wait for rank 1\b"
DIFFERENT = r"different (collectives|calls)"
SAME_CALLS = "[Mm]ake the same calls? on every rank|they have taken different paths"


@dataclass(frozen=True)
class Fault:
    """A training that goes wrong, and what is promised then.

    Attributes:
        name: for people.
        kind: the kind of fault, a column of `python -m tests.faults`.
        do: the fault on the victim. It may raise `Skip` to leave the operation out.
        at: the operation before which the fault strikes; with a number if it is not the first of its name.
        program: the operations of `Job` that all ranks perform, in this order. "setup" and "train" stand for several.
        rank, unit, remedy: patterns of what must be said: where it happened, to what, and what to do.
        by: who must say it: "all" that still live, the "others" than the victim, the "victim", or "one" of the others.
        after: operations that all ranks perform when the error was caught.
        sizes: worlds that it is run in.
        victim: the rank that goes wrong; None for all.
        door: that the model is sharded by, "wrapper" or "fully_shard".
        quiet: nothing may be said at all, and the training must end well.
        raises: the watchdog's reports end the waits.
        ends: how the fault itself ends the victim; another signal is a failure.
        damages: the fault is that files are damaged, so they are not looked at in the end.
        missed: why it is not found, or not named, yet. A fault that is marked so and found fails.
    """

    name: str
    kind: str
    do: Action
    at: str
    rank: str = r"rank 1\b"
    unit: str = ANY
    remedy: str = ANY
    program: str = TRAIN
    by: str = "all"
    after: str = ""
    sizes: tuple[int, ...] = (2, 4)
    victim: int | None = 1
    door: str = "wrapper"
    quiet: bool = False
    raises: bool = True
    ends: str = ""
    damages: bool = False
    missed: str = ""


class Skip(Exception):  # noqa: N818 - it is no error
    """The victim leaves the operation out that the fault strikes before."""


def assigns(**attributes: Any) -> Action:
    """Have other values in attributes of the job."""
    return lambda job: vars(job).update(attributes)


def updates(mapping: str, **items: Any) -> Action:
    """Have other values in a mapping of the job."""
    return lambda job: getattr(job, mapping).update(items)


def sets(**options: Any) -> Action:
    """Have other options for what is wrapped next."""
    return updates("options", **options)


# --- what may happen to a rank ----------------------------------------------------------------------------------------


def skip(job: Job) -> None:
    """Leave the operation out that comes next."""
    raise Skip


def also(*operations: str) -> Action:
    """Perform operations that the other ranks do not."""

    def do(job: Job) -> None:
        for operation in operations:
            getattr(job, operation)()

    return do


def instead(*operations: str) -> Action:
    """Perform other operations in the place of the next."""

    def do(job: Job) -> None:
        also(*operations)(job)
        raise Skip

    return do


def raises(error: BaseException) -> Action:
    """Fail with an exception."""

    def do(job: Job) -> None:
        raise error

    return do


def sleeps(seconds: float) -> Action:
    """Take long for something that is no collective."""

    def do(job: Job) -> None:
        time.sleep(seconds)

    return do


def ends_by(number: signal.Signals) -> Action:
    """Get a signal that ends the process, as from the kernel or from whoever runs the job."""

    def do(job: Job) -> None:
        os.kill(os.getpid(), number)

    return do


def exits(job: Job) -> None:
    """End without a word, and with success."""
    os._exit(0)


def interrupted(job: Job) -> None:
    """Get what Ctrl-C sends."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the harness ignores it
    os.kill(os.getpid(), signal.SIGINT)


def stops(job: Job) -> None:
    """Be stopped for good."""
    os.kill(os.getpid(), signal.SIGSTOP)


def stops_for(seconds: float) -> Action:
    """Be stopped for some seconds."""

    def do(job: Job) -> None:
        subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)

    return do


def in_forward(action: Action) -> Action:
    """Have it happen inside of the next forward, in front of the second block."""
    return assigns(in_forward=action)


def in_backward(action: Action) -> Action:
    """Have it happen inside of the next backward, between the two blocks."""
    return assigns(in_backward=action)


def inside(action: Action) -> Action:
    """Have it happen inside of the next context, or of the second training_step."""
    return assigns(inside=action)


# --- what may happen anywhere -----------------------------------------------------------------------------------------


def usual(
    at: str, within: Callable[[Action], Action] = lambda action: action, where: str = "", unit: str = ANY, **how: Any
) -> list[Fault]:
    """Return what may come to a rank in any phase: it raises, is interrupted, killed, stopped, or late.

    Args:
        at: the operation before which it strikes.
        within: has an action strike inside of the operation.
        where: words behind the names, if a phase has several such families.
        unit: what the others are in then.
        how: what else all these faults have.
    """
    bad, silent = ValueError("a bad batch"), r"rank 1: (gives no answer|has wrapped no model yet)"
    family = {
        "an error": ("exceptions", raises(bad), f"{ENDED} ValueError: a bad batch", {"by": "others"}),
        "Ctrl-C": ("interrupts", interrupted, f"{ENDED} KeyboardInterrupt", {"by": "others"}),
        "killed": ("SIGKILL", ends_by(signal.SIGKILL), GONE, {"ends": "SIGKILL"}),
        "stopped for good": ("SIGSTOP for good", stops, silent, {"ends": STUCK}),
        "late": ("slow ranks", sleeps(5), LATE, {"remedy": "rank 1: in no collective, at .*in do"}),
    }
    return [
        Fault(f"{name} {where}".strip(), kind, within(do), at, rank=rank, unit=unit, **(how | more))
        for name, (kind, do, rank, more) in family.items()
    ]
