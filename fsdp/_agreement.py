"""Ranks agree before they trust each other: shards of different plans would be glued together silently."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Sequence

from fsdp._comm import Communicator
from fsdp._fingerprints import first_difference
from fsdp._handle import FlatParamHandle
from fsdp._unit import Unit

Plan = list[tuple[str, list[str]]]


def agree(comm: Communicator, units: Sequence[tuple[str, Unit]]) -> None:
    """Collective. Make sure that all ranks have the same units with the same parameters, and number them alike.

    Handles get tags that nobody else on their communicator has, so that messages of different units never mix.

    Raises:
        RuntimeError: naming the first rank that differs from rank 0, the unit, and what each of the two has; or if a
            unit was unpickled and has no group of ranks yet.
    """
    for _, unit in units:
        for handle in unit.handles:
            handle.comm.ensure_connected()
            handle.reduce_comm.ensure_connected()
    if comm.peers_answer:
        agree_on_plan(comm, [(name, [handle.describe() for handle in unit.handles]) for name, unit in units])
    for _, unit in units:
        unit.is_agreed = True
        for handle in unit.handles:
            handle.tag = handle.comm.new_tag()


def agree_on(comm: Communicator, things: str, name: str, shown: str = "") -> None:
    """Collective. Make sure that all ranks have chosen the same one of some `things`, by its name.

    Args:
        comm: the ranks.
        things: what they have.
        name: which one this rank has.
        shown: what messages call it, if not by that name.

    Raises:
        RuntimeError: naming the first rank that differs from rank 0, and what the two have.
    """
    if not comm.peers_answer:
        return
    found = [json.loads(other) for other in comm.all_gather_bytes(json.dumps([name, shown or name]).encode())]
    for rank, (other, text) in enumerate(found):
        if other != found[0][0]:
            raise RuntimeError(
                f"rank {comm.rank}: the ranks have different {things}: rank 0 has {found[0][1]} and rank {rank} has "
                f"{text}. Every rank must have the same."
            )


def agree_on_outcome(comms: Iterable[Communicator], what: str, error: Exception | None) -> None:
    """Collective. Go on only if all ranks have done what they were to do.

    Args:
        comms: the ranks.
        what: they did.
        error: what went wrong on this rank.

    Raises:
        Exception: `error`, on the rank that has one.
        RuntimeError: on the others, naming the first rank that failed.
    """
    for comm in comms:
        if comm.peers_answer:
            mine = "" if error is None else f"{type(error).__name__}: {error}"
            for rank, text in enumerate(comm.all_gather_bytes(mine.encode())):
                if text and error is None:
                    raise RuntimeError(f"rank {comm.rank}: rank {rank} could not {what}. {text.decode()}")
    if error is not None:
        raise error


def agree_on_values(units: Sequence[tuple[str, Unit]]) -> None:
    """Collective while there are parameters whose values the ranks have not compared. Make sure that they were equal.

    Each group of ranks compares what its ranks have seen at wrapping, in one exchange for all units, once. Parameters
    that any rank has written since are left out, and so are those that are not sharded, and buffers.

    Raises:
        RuntimeError: naming the first rank that differs from rank 0, the unit and the parameter.
    """
    pending: dict[Communicator, list[tuple[str, FlatParamHandle]]] = {}
    for name, unit in units:
        for handle in unit.handles:
            if handle.fingerprints is not None:
                handle.absorb()
                handle.settle_fingerprints()
                pending.setdefault(handle.comm, []).append((name, handle))
    for comm, handles in pending.items():
        if comm.peers_answer:
            _compare_values(comm, handles)
        for _, handle in handles:
            handle.fingerprints = None


def _compare_values(comm: Communicator, handles: Sequence[tuple[str, FlatParamHandle]]) -> None:
    seen = [(unit, handle, slot) for unit, handle in handles for slot in range(len(handle.layout.slots))]
    found = [handle.fingerprints.wholes[slot] for _, handle, slot in seen if handle.fingerprints is not None]
    known = bytes(one is not None for one in found)
    payload = known + struct.pack(f"<{len(found)}Q", *(one or 0 for one in found))
    by_rank = []
    for other in comm.all_gather_bytes(payload):
        values = struct.unpack(f"<{len(found)}Q", other[len(found) :])
        by_rank.append([one if is_known else None for one, is_known in zip(values, other[: len(found)], strict=True)])
    difference = first_difference(by_rank)
    if difference is not None:
        rank, number, count = difference
        unit, handle, slot = seen[number]
        more = f" (and of {count - 1} more)" if count > 1 else ""
        raise RuntimeError(
            f"rank {comm.rank}: the ranks were wrapped with different values. Rank {rank} has other values than rank 0 "
            f"of {handle.layout.slots[slot].name} of unit '{unit}'{more}: their shards are of different models. Seed "
            "all ranks alike before the model is built (torch.manual_seed), wrap with sync_module_states=True, or "
            "load a checkpoint before the first use."
        )


def agree_on_plan(comm: Communicator, plan: Plan) -> None:
    """Collective. Make sure that all ranks have the same units, each with the same texts about it.

    Raises:
        RuntimeError: naming the first rank that differs from rank 0, the unit, and what each of the two has.
    """
    text = json.dumps(plan).encode()
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
