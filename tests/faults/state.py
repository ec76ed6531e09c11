"""Faults in summoning parameters, and in state dicts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tests.faults.fault import (
    ENDED,
    SAME_CALLS,
    TRAIN,
    Action,
    Fault,
    also,
    inside,
    instead,
    raises,
    skip,
    updates,
    usual,
)
from tests.faults.job import Job

SUMMON = "setup train summon train"
STATE = "setup train state_dict train"
LOAD = "setup train state_dict load_state_dict train"


def writes(value: float) -> Action:
    def do(job: Job) -> None:
        with torch.no_grad():
            job.plain.head.weight.fill_(value)

    return do


def replaces(job: Job) -> None:
    job.plain.head.weight = torch.nn.Parameter(torch.zeros(7, 7))


def state(change: Callable[[dict[str, Any]], Any]) -> Action:
    return lambda job: change(job.state)


summon = partial(Fault, program=SUMMON, at="summon")
state_dicts = partial(Fault, at="load_state_dict")

# fmt: off
FAULTS = {
    "summon": [
        *usual("summon", inside, program=SUMMON),
        summon("one rank only", "extra calls", also("summon"), at="batch 2", program=TRAIN,
            unit=r"summon_full_params\(\)", remedy=SAME_CALLS),
        summon("left out", "skipping", skip, unit=r"summon_full_params\(\)", remedy=SAME_CALLS),
        summon("without writeback on one rank", "options", updates("summoning", volatile=True), remedy="Every rank"),
        summon("rank0_only on one rank", "options", updates("summoning", rank0_only=True), remedy="Every rank"),
        summon("one unit instead of all", "options", updates("summoning", recurse=False), remedy="Every rank"),
        summon("an error inside on all ranks, which is caught", "exceptions", inside(raises(KeyError("weight"))),
            victim=None, rank="weight", after="kept train trained"),
        summon("other values are written", "values", inside(writes(1.0)), unit="head.weight"),
        summon("a parameter of another shape is assigned", "structure", inside(replaces),
            unit="head.weight", by="others"),
        summon("forward inside", "order", inside(also("batch", "forward")), rank=f"{ENDED} RuntimeError", by="others"),
        summon("saving inside", "order", inside(also("save")), unit="summon_full_params|fsdp.save", by="others"),
        summon("summoned in the middle of a step", "order", also("summon"), at="backward 2", program=TRAIN,
            unit="summon_full_params|root"),
    ],
    "state dicts": [
        *usual("state_dict", program=STATE),
        state_dicts("rank 0 only", "extra calls", also("state_dict"), at="batch 2", victim=0,
            rank=r"rank 0\b", unit=r"state_dict\(\)", remedy=SAME_CALLS),
        state_dicts("left out", "skipping", skip, at="state_dict", program=STATE,
            unit=r"state_dict\(\)", remedy=SAME_CALLS),
        state_dicts("summoning instead", "order", instead("summon"), at="state_dict", program=STATE,
            unit=r"state_dict\(\)|summon_full_params\(\)", remedy=SAME_CALLS),
        state_dicts("a local state instead", "order", instead("local_state"), at="state_dict", program=STATE,
            unit=r"state_dict\(\)", remedy=SAME_CALLS),
        state_dicts("a sharded state on one rank only, which needs nobody", "extra calls", also("sharded_state"),
            at="batch 2", quiet=True, after="trained"),
        state_dicts("an optimizer's state on one rank only", "extra calls", also("optimizer_state"), at="batch 2",
            unit=r"full_optim_state_dict\(\)", remedy=SAME_CALLS),
        state_dicts("loaded on one rank only", "extra calls", also("load_state_dict"), at="batch 3",
            program="setup train state_dict train train", unit=r"load_state_dict\(\)", remedy=SAME_CALLS),
        state_dicts("a key is missing", "structure", state(lambda each: each.pop("head.bias")), program=LOAD,
            unit="head.bias", by="others", after="kept train trained"),
        state_dicts("a key too many", "structure", state(lambda each: each.update(late=torch.ones(1))), program=LOAD,
            unit="late", by="others", after="kept train trained"),
        state_dicts("another shape", "structure", state(lambda each: each.update({"head.bias": torch.ones(3)})),
            program=LOAD, unit="head.bias", by="others", after="kept train trained"),
        state_dicts("other values", "values", state(lambda each: each["blocks.0.linear.weight"].add_(1)), program=LOAD,
            unit="blocks.0.linear.weight", remedy="[Ee]very rank", after="kept train trained"),
        state_dicts("an empty state", "structure", state(lambda each: each.clear()), program=LOAD,
            unit="head|blocks", by="others", after="kept train trained"),
        state_dicts("another key of a sharded state", "structure", lambda job: job.sharded.pop("head.bias"),
            at="load_sharded_state", program="setup train sharded_state load_sharded_state train", unit="head.bias",
            by="others", after="kept train trained"),
        state_dicts("a local state of another model", "structure", lambda job: job.local.popitem(),
            at="load_local_state", program="setup train local_state load_local_state train"),
        state_dicts("an optimizer's state without a parameter", "structure",
            lambda job: job.full["state"].pop("head.bias"), at="load_optimizer_state",
            program="setup train optimizer_state load_optimizer_state train", unit="head.bias", by="others"),
        state_dicts("an optimizer's state with other values", "values",
            lambda job: job.full["param_groups"][0].update(lr=0.1), at="load_optimizer_state",
            program="setup train optimizer_state load_optimizer_state train", unit="lr"),
    ],
}
# fmt: on
