"""Faults in hybrid sharding: shards that have replicas on other ranks."""

from __future__ import annotations

from functools import partial

from tests.faults.fault import Fault, also, assigns, in_backward, sets, skip, usual
from tests.faults.job import Job
from tests.faults.optimizer import write

HYBRID = "mesh setup train train train"
STEP = r"(all-gather|reduce-scatter|all-reduce|exchange|sum over replicas) of"


def full_sharding(job: Job) -> None:
    job.options.clear()


def damage(job: Job) -> None:
    """Have other bits in memory, which nothing has written."""
    next(job.model.parameters()).detach().numpy()[0] += 1e-3


hybrid = partial(Fault, program=HYBRID, at="build", sizes=(4,))

# fmt: off
FAULTS = {
    "hybrid": [
        *usual("forward 2", in_backward, unit=STEP, program=HYBRID, sizes=(4,)),
        hybrid("no replicas on one rank", "options", full_sharding),
        hybrid("other options on one rank", "options", sets(bucket_cap_mb=0), unit="Unit '", remedy="on every rank"),
        hybrid("no backward", "skipping", skip, at="backward 2", unit=STEP),
        hybrid("a state dict on one replica", "extra calls", also("state_dict"), at="batch 2", unit=r"state_dict\(\)"),
        hybrid("a replica drifts", "values", damage, at="batch 2",
            program="mesh compare_replicas setup train train train pause train", rank=r"ranks? 1\b",
            unit="head.weight of unit 'root", remedy="continue from an earlier checkpoint", by="victim"),
        hybrid("a replica is written on one rank", "values", write(0.0), at="batch 2", program=HYBRID + " pause train",
            unit="the shard of root", remedy="on every rank"),
        hybrid("other values", "values", assigns(seed=1),
            rank="Rank 1 has other values", unit="head", remedy="torch.manual_seed"),
    ],
}
# fmt: on
