"""Faults where ranks do different things on purpose: `fsdp.cond` and `fsdp.join`."""

from __future__ import annotations

from functools import partial

from tests.faults.fault import (
    DIFFERENT,
    ENDED,
    Fault,
    also,
    assigns,
    in_backward,
    in_forward,
    inside,
    raises,
    skip,
    usual,
)
from tests.faults.job import Block, Job

COND = "conditional setup train train train"
JOIN = "setup train joined_training train"


def block_fails(job: Job) -> None:
    next(module for module in job.plain.blocks[1].modules() if isinstance(module, Block)).fails = True


cond = partial(Fault, program=COND, at="forward 2")
join = partial(Fault, program=JOIN, at="joined_training")

# fmt: off
FAULTS = {
    "cond": [
        *usual("forward 2", in_forward, program=COND),
        cond("called directly", "modes", assigns(runs_directly=True), unit=r"blocks\.1|fsdp\.cond", remedy="fsdp.cond"),
        cond("for another module", "order", assigns(asks_for=0), unit=r"blocks\.0", remedy="fsdp.cond"),
        cond("an error in its module", "exceptions", block_fails,
            rank=r"rank 1 .*failed in fsdp.cond of blocks\.1", unit=r"blocks\.1", by="others"),
        cond("no backward", "skipping", skip, at="backward 2"),
        cond("an error in the backward", "exceptions", in_backward(raises(ValueError("overflow"))),
            rank=f"{ENDED} ValueError", by="others"),
        cond("a state dict inside", "order", in_forward(also("state_dict")), rank=r"rank 1", by="others"),
    ],
    "join": [
        *usual("joined_training", inside, program=JOIN),
        join("saved inside", "order", inside(also("save")), rank=ENDED, unit="fsdp.join|join", by="others"),
        join("summoned inside", "order", inside(also("summon")), rank=ENDED, unit="fsdp.join|join", by="others"),
        join("left out", "skipping", skip),
        join("not entered", "modes", assigns(joins=False), remedy=DIFFERENT),
        join("a second optimizer on one rank", "optimizer", assigns(joins_twice=True),
            unit="optimizers in fsdp.join", remedy="Every rank must have the same"),
    ],
}
# fmt: on
