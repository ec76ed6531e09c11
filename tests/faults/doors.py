"""Faults with `fully_shard` in the place of the wrapper."""

from __future__ import annotations

import signal
from functools import partial

import torch

from tests.faults.fault import (
    GONE,
    Action,
    Fault,
    also,
    assigns,
    ends_by,
    in_backward,
    in_forward,
    raises,
    sets,
    skip,
    usual,
)
from tests.faults.job import Job
from tests.faults.wrapping import BUILD_ALIKE, DIFFERS, frozen, in_half, narrow


def calls(method: str, *args: object) -> Action:
    return lambda job: getattr(job.model, method)(*args)


def policy(job: Job) -> None:
    from fsdp import MixedPrecisionPolicy

    job.options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


sharded = partial(Fault, door="fully_shard")

# fmt: off
FAULTS = {
    "fully_shard": [
        *usual("forward 2", in_forward, door="fully_shard"),
        sharded("reshard_after_forward=False on one rank", "options", sets(reshard_after_forward=False), at="wrap",
            rank=DIFFERS, unit="Unit '", remedy=BUILD_ALIKE, after="kept"),
        sharded("another precision", "options", policy, at="wrap",
            rank=DIFFERS, unit="Unit '", remedy=BUILD_ALIKE, after="kept"),
        sharded("another layer", "structure", narrow, at="wrap", rank=DIFFERS, unit=r"blocks\.1", remedy=BUILD_ALIKE),
        sharded("a block in half precision", "structure", in_half, at="wrap",
            rank=DIFFERS, unit=r"blocks\.1", remedy=BUILD_ALIKE),
        sharded("a frozen parameter", "structure", frozen, at="wrap",
            rank=DIFFERS, unit=r"blocks\.1", remedy=BUILD_ALIKE),
        sharded("other values", "values", assigns(seed=1), at="build",
            rank="Rank 1 has other values", unit="head", remedy="torch.manual_seed"),
        sharded("unsharded on one rank", "extra calls", calls("unshard"), at="batch 2", unit="all-gather of"),
        sharded("no reduction on one rank", "modes", calls("set_requires_gradient_sync", False), at="forward 2",
            unit=r"root|blocks", remedy="no_sync|set_requires_gradient_sync"),
        sharded("another divisor", "options", calls("set_gradient_divide_factor", 3.0), at="forward 2",
            unit="root|blocks"),
        sharded("resharding switched off on one rank", "modes", calls("set_reshard_after_forward", False),
            at="forward 2", unit="all-gather of"),
        sharded("resharding after backward switched off on one rank", "modes",
            calls("set_reshard_after_backward", False), at="forward 2", quiet=True, after="trained"),
        sharded("an error in the backward of all, which is caught", "exceptions",
            in_backward(raises(ValueError("overflow"))), at="forward 2", victim=None, rank="overflow",
            after="kept train train trained"),
        sharded("killed in the backward", "SIGKILL", in_backward(ends_by(signal.SIGKILL)), at="forward 2",
            rank=GONE, ends="SIGKILL"),
        sharded("no backward", "skipping", skip, at="backward 2"),
        sharded("a state dict loaded on one rank only", "extra calls", skip, at="load_state_dict",
            program="setup train state_dict load_state_dict train train pause train", unit="the shard of root",
            remedy="on every rank"),
        sharded("a checkpoint on one rank only", "extra calls", also("save"), at="batch 2",
            unit=r"fsdp.save\(\)", remedy="same call|different"),
    ],
}
# fmt: on
