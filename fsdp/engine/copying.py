"""Copies of a sharded model: what is settled before one is made, and the process groups that it is given afterwards.

A unit hangs on its module, and wrapper, unit, handles and hooks are plain objects that refer to each other, so
`copy.deepcopy` and pickle find all of it and keep the references. The runtime and what is built from shards stay behind
(`Unit.wake` builds it again). Process groups belong to the process: deep copies share them, and a pickle has `MISSING`
in their place until groups are assigned.
"""

from __future__ import annotations

from typing import Any

from fsdp.distributed.collectives import MissingRanks, communicator
from fsdp.distributed.process_groups import Group
from fsdp.engine.sharding_strategy import Groups
from fsdp.engine.unit import TrainingState, Unit

MISSING = "MISSING"  # what FairScale puts in the place of a process group


def is_missing(group: Any) -> bool:
    """Return whether this stands for a process group that was pickled."""
    return isinstance(group, str) and group == MISSING


def is_connected(unit: Unit) -> bool:
    """Return whether a unit can reach its ranks; a pickled one cannot."""
    return not any(isinstance(comm, MissingRanks) for comm in unit.everyone)


def prepare_to_copy(unit: Unit) -> None:
    """Bring a unit into a state in which its shards are all there is to copy.

    Raises:
        RuntimeError: inside a forward, backward or `summon_full_params`.
    """
    unit.require_idle("copy the model")
    if unit.runtime is not None:
        unit.runtime.release()
    if unit.state is TrainingState.SUMMON_FULL_PARAMS:
        raise RuntimeError(
            f"{unit.name}: inside summon_full_params() a copy would hold unsharded parameters that nobody shards "
            "again. Copy the model outside of it, or take its state_dict()."
        )
    for handle in unit.handles:
        handle.absorb()  # or a copy would have the values from before users replaced them


def refuse_to_pickle_dtensors(unit: Unit) -> None:
    """Raise NotImplementedError if a unit has parameters whose mesh is of these processes."""
    for handle in unit.handles:
        if any(handle.flat_param.parts):
            raise NotImplementedError(
                f"{handle.name} has parameters that are DTensors, whose mesh is of these processes: it cannot be "
                "pickled. Save its state_dict(), or copy it with copy.deepcopy."
            )


def require_same_place(unit: Unit, groups: Groups) -> None:
    """Raise ValueError if process groups give a unit another rank or size than its shards were made for."""
    comm, group, replicas = unit.comm, groups.shard, unit.replicas.world_size
    if (group.rank(), group.size()) != (comm.rank, comm.world_size):
        raise ValueError(
            f"{unit.name} holds the shards of rank {comm.rank} of {comm.world_size}, and this process group "
            f"makes it rank {group.rank()} of {group.size()}. Load a state dict into a newly wrapped model to "
            "train with other ranks."
        )
    if groups.replicas != replicas:
        raise ValueError(
            f"{unit.name} divides gradients by its {replicas} replicas, and this process group makes it "
            f"{groups.replicas}. Load a state dict into a newly wrapped model to train with other ranks."
        )


def connect(unit: Unit, groups: Groups, reduce_group: Group) -> None:
    """Have a unit communicate over other process groups from now on."""
    if unit.runtime is not None:
        unit.runtime.forget()
    unit.comm, unit.replicas = groups.communicators(unit.device)
    unit.ranks = groups.ranks
    unit.is_agreed = False
    for handle in unit.handles:
        handle.connect(unit.comm, communicator(reduce_group, unit.device), unit.replicas)
