"""Ranks agree before they trust each other: shards of different plans would be glued together silently."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Sequence

from fsdp._comm import Communicator
from fsdp._unit import Unit

Plan = list[tuple[str, list[str]]]


def agree(ranks: Sequence[Communicator], units: Sequence[tuple[str, Unit]]) -> None:
    """Collective. Make sure that all ranks have the same units with the same parameters, and number them alike.

    Handles get tags that nobody else on their communicators has, so that messages of different units never mix.

    Args:
        ranks: over each of these in turn, all that hold a part of the root are reached.
        units: all in the root, with their names.

    Raises:
        RuntimeError: naming the first rank that differs from rank 0, the unit, and what each of the two has; or if a
            unit was unpickled and has no group of ranks yet.
    """
    for _, unit in units:
        for handle in unit.handles:
            handle.comm.ensure_connected()
            handle.reduce_comm.ensure_connected()
            handle.replicas.ensure_connected()
    if all(comm.peers_answer for comm in ranks):
        _compare(ranks, [(name, [handle.describe() for handle in unit.handles]) for name, unit in units])
    for _, unit in units:
        unit.is_agreed = True
    for number, handle in enumerate(handle for _, unit in units for handle in unit.handles):
        handle.number_as(number)


def agree_on(comm: Communicator, things: str, name: str) -> None:
    """Collective. Make sure that all ranks have chosen the same one of some `things`, by its name.

    Raises:
        RuntimeError: naming the first rank that differs from rank 0, and what the two have.
    """
    if not comm.peers_answer:
        return
    names = [found.decode() for found in comm.all_gather_bytes(name.encode())]
    for rank, other in enumerate(names):
        if other != names[0]:
            raise RuntimeError(
                f"rank {comm.rank}: the ranks have different {things}: rank 0 has {names[0]} and rank {rank} has "
                f"{other}. Every rank must have the same."
            )


def from_everyone(ranks: Sequence[Communicator], payload: bytes) -> list[bytes]:
    """Collective. The payloads of all who are reached over each of `ranks` in turn; those of the first change fastest.

    Everybody hears everybody, so that nobody raises an error while others still wait for an answer.
    """
    payloads = [payload]
    for comm in ranks:
        payloads = [heard for other in comm.all_gather_bytes(pickle.dumps(payloads)) for heard in pickle.loads(other)]
    return payloads


def _compare(ranks: Sequence[Communicator], plan: Plan) -> None:
    text = json.dumps(plan).encode()
    digests = from_everyone(ranks, hashlib.sha256(text).digest())
    if len(set(digests)) == 1:
        return
    plans, own = [json.loads(other) for other in from_everyone(ranks, text)], 0
    for comm in reversed(ranks):
        own = own * comm.world_size + comm.rank
    for rank, other in enumerate(plans):
        if other != plans[0]:
            raise RuntimeError(
                f"rank {own}: the ranks have built different models. {_difference(plans[0], other, rank)} "
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
