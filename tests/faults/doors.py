"""Faults with `fully_shard` in the place of the wrapper."""

from __future__ import annotations

import signal

import torch

from tests.faults.fault import (
    GONE,
    Action,
    Fault,
    also,
    ends_by,
    in_backward,
    in_forward,
    raises,
    sets,
    skip,
    usual,
)
from tests.faults.job import Job
from tests.faults.wrapping import BUILD_ALIKE, DIFFERS, frozen, in_half, narrow, other_seed


def calls(method: str, *args: object) -> Action:
    return lambda job: getattr(job.model, method)(*args)


def policy(job: Job) -> None:
    from fsdp import MixedPrecisionPolicy

    job.options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def sharded(name: str, kind: str, at: str, do: Action, **more: object) -> Fault:
    return Fault(name, kind, at, do, door="fully_shard", **more)  # type: ignore[arg-type]


FAULTS = {
    "fully_shard": [
        *usual("forward 2", in_forward, door="fully_shard"),
        sharded(
            "reshard_after_forward=False on one rank",
            "options",
            "wrap",
            sets(reshard_after_forward=False),
            rank=DIFFERS,
            unit="Unit '",
            remedy=BUILD_ALIKE,
            after="kept",
        ),
        sharded(
            "another precision",
            "options",
            "wrap",
            policy,
            rank=DIFFERS,
            unit="Unit '",
            remedy=BUILD_ALIKE,
            after="kept",
        ),
        sharded("another layer", "structure", "wrap", narrow, rank=DIFFERS, unit=r"blocks\.1", remedy=BUILD_ALIKE),
        sharded(
            "a block in half precision",
            "structure",
            "wrap",
            in_half,
            rank=DIFFERS,
            unit=r"blocks\.1",
            remedy=BUILD_ALIKE,
        ),
        sharded("a frozen parameter", "structure", "wrap", frozen, rank=DIFFERS, unit=r"blocks\.1", remedy=BUILD_ALIKE),
        sharded(
            "other values",
            "values",
            "build",
            other_seed,
            rank="Rank 1 has other values",
            unit="head",
            remedy="torch.manual_seed",
        ),
        sharded(
            "unsharded on one rank", "extra calls", "batch 2", calls("unshard"), rank=r"rank 1\b", unit="all-gather of"
        ),
        sharded(
            "no reduction on one rank",
            "modes",
            "forward 2",
            calls("set_requires_gradient_sync", False),
            rank=r"rank 1\b",
            unit=r"root|blocks",
            remedy="no_sync|set_requires_gradient_sync",
        ),
        sharded(
            "another divisor",
            "options",
            "forward 2",
            calls("set_gradient_divide_factor", 3.0),
            rank=r"rank 1\b",
            unit="root|blocks",
        ),
        sharded(
            "resharding switched off on one rank",
            "modes",
            "forward 2",
            calls("set_reshard_after_forward", False),
            rank=r"rank 1\b",
            unit="all-gather of",
        ),
        sharded(
            "resharding after backward switched off on one rank",
            "modes",
            "forward 2",
            calls("set_reshard_after_backward", False),
            quiet=True,
            after="trained",
        ),
        sharded(
            "an error in the backward of all, which is caught",
            "exceptions",
            "forward 2",
            in_backward(raises(ValueError("overflow"))),
            victim=None,
            rank="overflow",
            after="kept train train trained",
        ),
        sharded(
            "killed in the backward",
            "SIGKILL",
            "forward 2",
            in_backward(ends_by(signal.SIGKILL)),
            rank=GONE,
            ends="SIGKILL",
        ),
        sharded("no backward", "skipping", "backward 2", skip, rank=r"rank 1\b"),
        sharded(
            "a state dict loaded on one rank only",
            "extra calls",
            "load_state_dict",
            skip,
            program="setup train state_dict load_state_dict train train pause train",
            rank=r"rank 1\b",
            unit="the shard of root",
            remedy="on every rank",
        ),
        sharded(
            "a checkpoint on one rank only",
            "extra calls",
            "batch 2",
            also("save"),
            rank=r"rank 1\b",
            unit=r"fsdp.save\(\)",
            remedy="same call|different",
        ),
    ],
}
