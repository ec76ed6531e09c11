"""Faults in summoning parameters, and in state dicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.faults.fault import (
    DIFFERENT,
    ENDED,
    Action,
    Fault,
    also,
    instead,
    raises,
    skip,
    usual,
)
from tests.faults.job import Job

SUMMON = "setup train summon train"
STATE = "setup train state_dict train"
LOAD = "setup train state_dict load_state_dict train"
SAME_CALLS = "[Mm]ake the same calls? on every rank|they have taken different paths"


def inside(action: Action) -> Action:
    return lambda job: setattr(job, "inside", action)


def summoning(**options: Any) -> Action:
    return lambda job: job.summoning.update(options)


def writes(value: float) -> Action:
    def do(job: Job) -> None:
        with torch.no_grad():
            job.plain.head.weight.fill_(value)

    return do


def replaces(job: Job) -> None:
    job.plain.head.weight = torch.nn.Parameter(torch.zeros(7, 7))


def state(change: Callable[[dict[str, Any]], Any]) -> Action:
    return lambda job: change(job.state)


FAULTS = {
    "summon": [
        *usual("summon", inside, program=SUMMON),
        Fault(
            "one rank only", "extra calls", "batch 2", also("summon"), unit=r"summon_full_params\(\)", remedy=SAME_CALLS
        ),
        Fault(
            "left out", "skipping", "summon", skip, program=SUMMON, unit=r"summon_full_params\(\)", remedy=SAME_CALLS
        ),
        Fault(
            "without writeback on one rank",
            "options",
            "summon",
            summoning(volatile=True),
            program=SUMMON,
            remedy=DIFFERENT + "|every rank",
        ),
        Fault(
            "rank0_only on one rank",
            "options",
            "summon",
            summoning(rank0_only=True),
            program=SUMMON,
            remedy=DIFFERENT + "|every rank",
        ),
        Fault(
            "one unit instead of all",
            "options",
            "summon",
            summoning(recurse=False),
            program=SUMMON,
            remedy=DIFFERENT + "|every rank",
        ),
        Fault(
            "an error inside on all ranks, which is caught",
            "exceptions",
            "summon",
            inside(raises(KeyError("weight"))),
            victim=None,
            program=SUMMON,
            rank="weight",
            after="kept train trained",
        ),
        Fault("other values are written", "values", "summon", inside(writes(1.0)), program=SUMMON, unit="head.weight"),
        Fault(
            "a parameter of another shape is assigned",
            "structure",
            "summon",
            inside(replaces),
            program=SUMMON,
            unit="head.weight",
            by="others",
        ),
        Fault(
            "forward inside",
            "order",
            "summon",
            inside(also("batch", "forward")),
            program=SUMMON,
            rank=f"{ENDED} RuntimeError",
            by="others",
        ),
        Fault(
            "saving inside",
            "order",
            "summon",
            inside(also("save")),
            program=SUMMON,
            rank=r"rank 1\b",
            unit="summon_full_params|fsdp.save",
            by="others",
        ),
        Fault(
            "summoned in the middle of a step",
            "order",
            "backward 2",
            also("summon"),
            rank=r"rank 1\b",
            unit="summon_full_params|root",
        ),
    ],
    "state dicts": [
        *usual("state_dict", program=STATE),
        Fault(
            "rank 0 only",
            "extra calls",
            "batch 2",
            also("state_dict"),
            victim=0,
            rank=r"rank 0\b",
            unit=r"state_dict\(\)",
            remedy=SAME_CALLS,
        ),
        Fault("left out", "skipping", "state_dict", skip, program=STATE, unit=r"state_dict\(\)", remedy=SAME_CALLS),
        Fault(
            "summoning instead",
            "order",
            "state_dict",
            instead("summon"),
            program=STATE,
            unit=r"state_dict\(\)|summon_full_params\(\)",
            remedy=SAME_CALLS,
        ),
        Fault(
            "a local state instead",
            "order",
            "state_dict",
            instead("local_state"),
            program=STATE,
            unit=r"state_dict\(\)",
            remedy=SAME_CALLS,
        ),
        Fault(
            "a sharded state on one rank only, which needs nobody",
            "extra calls",
            "batch 2",
            also("sharded_state"),
            quiet=True,
            after="trained",
        ),
        Fault(
            "an optimizer's state on one rank only",
            "extra calls",
            "batch 2",
            also("optimizer_state"),
            unit=r"full_optim_state_dict\(\)",
            remedy=SAME_CALLS,
        ),
        Fault(
            "loaded on one rank only",
            "extra calls",
            "batch 3",
            also("load_state_dict"),
            program="setup train state_dict train train",
            unit=r"load_state_dict\(\)",
            remedy=SAME_CALLS,
        ),
        Fault(
            "a key is missing",
            "structure",
            "load_state_dict",
            state(lambda each: each.pop("head.bias")),
            program=LOAD,
            unit="head.bias",
            after="kept train trained",
            by="others",
        ),
        Fault(
            "a key too many",
            "structure",
            "load_state_dict",
            state(lambda each: each.update(late=torch.ones(1))),
            program=LOAD,
            unit="late",
            after="kept train trained",
            by="others",
        ),
        Fault(
            "another shape",
            "structure",
            "load_state_dict",
            state(lambda each: each.update({"head.bias": torch.ones(3)})),
            program=LOAD,
            unit="head.bias",
            after="kept train trained",
            by="others",
        ),
        Fault(
            "other values",
            "values",
            "load_state_dict",
            state(lambda each: each["blocks.0.linear.weight"].add_(1)),
            program=LOAD,
            after="kept train trained",
            unit="blocks.0.linear.weight",
            remedy="[Ee]very rank",
        ),
        Fault(
            "an empty state",
            "structure",
            "load_state_dict",
            state(lambda each: each.clear()),
            program=LOAD,
            unit="head|blocks",
            after="kept train trained",
            by="others",
        ),
        Fault(
            "another key of a sharded state",
            "structure",
            "load_sharded_state",
            lambda job: job.sharded.pop("head.bias"),
            program="setup train sharded_state load_sharded_state train",
            unit="head.bias",
            after="kept train trained",
            by="others",
        ),
        Fault(
            "a local state of another model",
            "structure",
            "load_local_state",
            lambda job: job.local.popitem(),
            program="setup train local_state load_local_state train",
            rank=r"rank 1\b",
        ),
        Fault(
            "an optimizer's state without a parameter",
            "structure",
            "load_optimizer_state",
            lambda job: job.full["state"].pop("head.bias"),
            program="setup train optimizer_state load_optimizer_state train",
            unit="head.bias",
            by="others",
        ),
        Fault(
            "an optimizer's state with other values",
            "values",
            "load_optimizer_state",
            lambda job: job.full["param_groups"][0].update(lr=0.1),
            program="setup train optimizer_state load_optimizer_state train",
            unit="lr",
        ),
    ],
}
