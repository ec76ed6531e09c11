"""Faults where ranks do different things on purpose: `fsdp.cond` and `fsdp.join`."""

from __future__ import annotations

from tests.faults.fault import (
    DIFFERENT,
    ENDED,
    Action,
    Fault,
    also,
    in_backward,
    in_forward,
    raises,
    skip,
    usual,
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
        *usual("forward 2", in_forward, program=COND),
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
            "an error in its module",
            "exceptions",
            "forward 2",
            block_fails,
            program=COND,
            rank=r"rank 1 .*failed in fsdp.cond of blocks\.1",
            unit=r"blocks\.1",
            by="others",
        ),
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
        *usual("joined_training", inside, program=JOIN),
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
