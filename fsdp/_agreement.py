"""Ranks agree before they trust each other: shards of different plans would be glued together silently."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fsdp._collect import is_ours
from fsdp._comm import Communicator
from fsdp._names import clean_name
from fsdp._unit import Unit, units_in

if TYPE_CHECKING:
    from fsdp._runtime import Runtime

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
        _compare(comm, [(name, [handle.describe() for handle in unit.handles]) for name, unit in units])
    for _, unit in units:
        unit.is_agreed = True
        for handle in unit.handles:
            handle.tag = handle.comm.new_tag()


def refuse_strangers(root: Unit, units: Sequence[Unit]) -> None:
    """Raise RuntimeError if a parameter was added after wrapping."""
    ours = {(place.module, place.name) for unit in units for place in unit.places()}
    # What was put into ignored modules since, is theirs too.
    ignored = {inner for unit in units for module in unit.ignored.modules for inner in module.modules()}
    for name, param in root.module.named_parameters():
        path, _, attribute = name.rpartition(".")
        module = root.module.get_submodule(path)
        is_ignored = module in ignored or any(param in unit.ignored.parameters for unit in units)
        if is_ours(param) or is_ignored or (module, attribute) in ours:
            continue
        raise RuntimeError(
            f"{clean_name(name)} became a parameter after wrapping: it is not sharded, and ranks would train it each "
            "for itself. Complete the module before wrapping, or leave it out of sharding with ignored_parameters or "
            "ignored_modules."
        )


def adopt(runtime: Runtime, named_units: Sequence[tuple[str, Unit]]) -> None:
    """Have a root's runtime run all units inside.

    Raises:
        RuntimeError: if one has become a root itself.
    """
    root = runtime.root
    for name, unit in named_units:
        if unit is not root and unit.runtime is not None and unit.runtime.root is unit:
            raise RuntimeError(
                f"a second root: unit '{name}' was called on its own before the {type(root.module).__name__} around "
                "it, and became a root itself. Call the outermost unit first, or `_reset_lazy_init()` on the inner one "
                "before the outer one is used."
            )
    for name, unit in named_units:
        if unit.runtime is not None:
            unit.runtime.ensure_idle(f"become part of another {type(root.module).__name__}")
        unit.runtime = runtime
        unit.rename(name)
        unit.is_inside_mixed = False
    for _, unit in named_units:
        for _, inner in units_in(unit) if unit.precision.is_mixed else ():
            inner.is_inside_mixed |= inner is not unit


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


def _compare(comm: Communicator, plan: Plan) -> None:
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
