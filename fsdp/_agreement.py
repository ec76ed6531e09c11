"""Ranks agree before they trust each other: shards of different plans would be glued together silently."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from fsdp._comm import Communicator
from fsdp._handle import FlatParamHandle

Plan = list[tuple[str, list[str]]]


def check_same_plan(comm: Communicator, units: Sequence[tuple[str, Sequence[FlatParamHandle]]]) -> None:
    """Collective. Raise on every rank unless all ranks have the same units with the same parameters.

    Raises:
        RuntimeError: naming the first rank that differs from rank 0, the unit, and what each of the two has.
    """
    plan: Plan = [(name, [handle.describe() for handle in handles]) for name, handles in units]
    text = json.dumps(plan).encode()
    if not comm.peers_answer:
        return
    digests = comm.all_gather_bytes(hashlib.sha256(text).digest())
    if len(set(digests)) == 1:
        return
    plans = [json.loads(other) for other in comm.all_gather_bytes(text)]
    for rank, other in enumerate(plans):
        if other != plans[0]:
            raise RuntimeError(
                f"rank {comm.rank}: the ranks have built different models. {_difference(plans[0], other, rank)} "
                "Build and wrap the same modules in the same order on every rank."
            )


def _difference(first: Plan, other: Plan, rank: int) -> str:
    for number, (ours, theirs) in enumerate(zip(first, other, strict=False)):
        if ours[0] != theirs[0]:
            return f"Unit number {number} is '{ours[0]}' on rank 0 and '{theirs[0]}' on rank {rank}."
        if ours[1] != theirs[1]:
            return f"Unit '{ours[0]}' has {ours[1]} on rank 0 and {theirs[1]} on rank {rank}."
    longer, more, fewer = (0, first, other) if len(first) > len(other) else (rank, other, first)
    missing = more[len(fewer)][0]
    return f"Rank 0 has {len(first)} units and rank {rank} has {len(other)}: unit '{missing}' is only on rank {longer}."
