"""Faults where ranks do different things on purpose: `fsdp.cond` and `fsdp.join`."""

from __future__ import annotations

import signal

from tests.faults.fault import (
    DIFFERENT,
    ENDED,
    GONE,
    LATE,
    STUCK,
    Action,
    Fault,
    also,
    ends_by,
    in_backward,
    in_forward,
    raises,
    skip,
    sleeps,
    stops,
)
from tests.faults.job import Block, Job

COND = "conditional setup train train train"
JOIN = "setup train joined_training train"


def runs_directly(job: Job) -> None:
    """Call the block without asking the others."""
    job.runs_directly = True


def block_fails(job: Job) -> None:
    next(module for module in job.plain.blocks[1].modules() if isinstance(module, Block)).fails = True


def inside(action: Action) -> Action:
    return lambda job: setattr(job, "inside", action)


def another_block(job: Job) -> None:
    job.asks_for = 0


FAULTS = {
    "cond": [
        Fault(
            "called directly",
            "modes",
            "forward 2",
            runs_directly,
            program=COND,
            rank=r"rank 1\b",
            unit=r"blocks\.1|fsdp\.cond",
            remedy="fsdp.cond",
        ),
        Fault(
            "for another module",
            "order",
            "forward 2",
            another_block,
            program=COND,
            rank=r"rank 1\b",
            unit=r"blocks\.0",
            remedy="fsdp.cond",
        ),
        Fault(
            "an error inside",
            "exceptions",
            "forward 2",
            in_forward(raises(ValueError("no image"))),
            program=COND,
            rank=r"rank 1",
            unit=r"blocks\.1|root",
            by="others",
        ),
        Fault(
            "an error in its module",
            "exceptions",
            "forward 2",
            block_fails,
            program=COND,
            rank=r"rank 1 .*failed in fsdp.cond of blocks\.1",
            unit=r"blocks\.1",
            by="others",
        ),
        Fault(
            "killed inside",
            "SIGKILL",
            "forward 2",
            in_forward(ends_by(signal.SIGKILL)),
            program=COND,
            rank=GONE,
            ends="SIGKILL",
        ),
        Fault(
            "stopped for good inside",
            "SIGSTOP for good",
            "forward 2",
            in_forward(stops),
            program=COND,
            rank="rank 1: gives no answer",
            ends=STUCK,
        ),
        Fault("long inside", "slow ranks", "forward 2", in_forward(sleeps(5)), program=COND, rank=LATE),
        Fault("no backward", "skipping", "backward 2", skip, program=COND, rank=r"rank 1\b"),
        Fault(
            "an error in the backward",
            "exceptions",
            "forward 2",
            in_backward(raises(ValueError("overflow"))),
            program=COND,
            rank=f"{ENDED} ValueError",
            by="others",
        ),
        Fault(
            "a state dict inside",
            "order",
            "forward 2",
            in_forward(also("state_dict")),
            program=COND,
            rank=r"rank 1",
            by="others",
        ),
    ],
    "join": [
        Fault(
            "an error inside",
            "exceptions",
            "joined_training",
            inside(raises(ValueError("a bad batch"))),
            program=JOIN,
            rank=f"{ENDED} ValueError: a bad batch",
            by="others",
        ),
        Fault(
            "killed inside",
            "SIGKILL",
            "joined_training",
            inside(ends_by(signal.SIGKILL)),
            program=JOIN,
            rank=GONE,
            ends="SIGKILL",
        ),
        Fault(
            "saved inside",
            "order",
            "joined_training",
            inside(also("save")),
            program=JOIN,
            rank=ENDED,
            unit="fsdp.join|join",
            by="others",
        ),
        Fault(
            "summoned inside",
            "order",
            "joined_training",
            inside(also("summon")),
            program=JOIN,
            rank=ENDED,
            unit="fsdp.join|join",
            by="others",
        ),
        Fault("left out", "skipping", "joined_training", skip, program=JOIN, rank=r"rank 1\b"),
        Fault(
            "not entered",
            "modes",
            "joined_training",
            lambda job: setattr(job, "joins", False),
            program=JOIN,
            rank=r"rank 1\b",
            remedy=DIFFERENT,
        ),
        Fault("long inside", "slow ranks", "joined_training", inside(sleeps(5)), program=JOIN, rank=LATE),
        Fault(
            "a second optimizer on one rank",
            "optimizer",
            "joined_training",
            lambda job: setattr(job, "joins_twice", True),
            program=JOIN,
            rank=r"rank 1\b",
            remedy="Every rank must have the same",
            unit="optimizers in fsdp.join",
        ),
    ],
}
