"""Faults in hybrid sharding: shards that have replicas on other ranks."""

from __future__ import annotations

from tests.faults.fault import (
    Fault,
    also,
    in_backward,
    sets,
    skip,
    usual,
)
from tests.faults.job import Job
from tests.faults.optimizer import write

HYBRID = "mesh setup train train train"
STEP = r"(all-gather|reduce-scatter|all-reduce|exchange|sum over replicas) of"


def full_sharding(job: Job) -> None:
    job.options.clear()


def damage(job: Job) -> None:
    """Have other bits in memory, which nothing has written."""
    next(job.model.parameters()).detach().numpy()[0] += 1e-3


FAULTS = {
    "hybrid": [
        *usual("forward 2", in_backward, unit=STEP, program=HYBRID, sizes=(4,)),
        Fault(
            "no replicas on one rank", "options", "build", full_sharding, program=HYBRID, sizes=(4,), rank=r"rank 1\b"
        ),
        Fault(
            "other options on one rank",
            "options",
            "build",
            sets(bucket_cap_mb=0),
            program=HYBRID,
            sizes=(4,),
            rank=r"rank 1\b",
            unit="Unit '",
            remedy="on every rank",
        ),
        Fault("no backward", "skipping", "backward 2", skip, program=HYBRID, sizes=(4,), rank=r"rank 1\b", unit=STEP),
        Fault(
            "a state dict on one replica",
            "extra calls",
            "batch 2",
            also("state_dict"),
            program=HYBRID,
            sizes=(4,),
            rank=r"rank 1\b",
            unit=r"state_dict\(\)",
        ),
        Fault(
            "a replica drifts",
            "values",
            "batch 2",
            damage,
            program="mesh compare_replicas setup train train train pause train",
            sizes=(4,),
            rank=r"ranks? 1\b",
            unit="head.weight of unit 'root",
            remedy="go on from a checkpoint",
            by="victim",
        ),
        Fault(
            "a replica is written on one rank",
            "values",
            "batch 2",
            write(0.0),
            program=HYBRID + " pause train",
            sizes=(4,),
            rank=r"rank 1\b",
            unit="the shard of root",
            remedy="on every rank",
        ),
        Fault(
            "other values",
            "values",
            "build",
            lambda job: setattr(job, "seed", 1),
            program=HYBRID,
            sizes=(4,),
            rank="Rank 1 has other values",
            unit="head",
            remedy="torch.manual_seed",
        ),
    ],
}
