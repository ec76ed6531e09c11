"""Copies of a sharded model: the preparation of a copy, and the assignment of process groups afterwards.

A unit is an attribute of its module, and wrapper, unit, handles and hooks are plain objects that refer to each other.
`copy.deepcopy` and pickle therefore copy all of them and keep the references. The runtime and objects created
from shards are not copied (`Unit.wake` creates them again). Process groups belong to the process: deep copies share
them, and an unpickled model contains `MISSING` until groups are assigned.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsdp.distributed.collectives import MissingRanks, communicator
from fsdp.engine.placeholder import depart
from fsdp.engine.unit import TrainingState, Unit
from fsdp.layers.sharding_strategy import Groups, group_to_reduce_over
from fsdp.layers.verify import agreed

MISSING = "MISSING"  # replaces a process group, as in FairScale
END = "_end_of_state"  # the last attribute of a pickled wrapper
# The attributes of a wrapper with process groups.
GROUPS = ("process_group", "process_group_reduce_scatter", "replicate_group")


def is_missing(group: Any) -> bool:
    """Return whether `group` replaces a pickled process group."""
    return isinstance(group, str) and group == MISSING


def is_connected(unit: Unit) -> bool:
    """Return whether a unit has process groups; an unpickled unit has none."""
    return not any(isinstance(comm, MissingRanks) for comm in unit.axes)


def prepare_to_copy(unit: Unit) -> None:
    """Store all values of a unit in its shards before they are copied; raise RuntimeError while the unit is in use."""
    unit.require_idle("copy the model")
    if unit.state is TrainingState.SUMMON_FULL_PARAMS:
        raise RuntimeError(
            f"{unit.name}: inside summon_full_params() a copy would contain unsharded parameters that are never "
            "resharded. Copy the model outside the context, or use its state_dict()."
        )
    for handle in dict.fromkeys([*unit.visible_handles, *unit.owned_handles]):
        handle.absorb()  # otherwise a copy would miss values that users have assigned
        handle.release()
        handle.settle()


def state_to_pickle(unit: Unit, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a unit's wrapper for a pickle, without process groups."""
    prepare_to_copy(unit)
    for handle in unit.handles:
        if any(handle.flat_param.parts):
            raise NotImplementedError(
                f"{handle.name} has parameters that are DTensors, whose mesh belongs to these processes: it cannot be "
                "pickled. Save its state_dict(), or copy it with copy.deepcopy."
            )
    groups = [name for name in GROUPS if attributes[name] is not None]
    return {**attributes, **dict.fromkeys(groups, MISSING), END: depart()}


def require_same_place(unit: Unit, groups: Groups) -> None:
    """Raise ValueError if process groups do not match the rank and number of ranks of a unit's shards."""
    comm, group, replicas = unit.axes[0], groups.shard, unit.axes[1].world_size
    if (group.rank(), group.size()) != (comm.rank, comm.world_size):
        raise ValueError(
            f"{unit.name} holds the shards of rank {comm.rank} of {comm.world_size}, but is rank {group.rank()} of "
            f"{group.size()} in this process group. Load a state dict into a newly wrapped model to train with other "
            "ranks."
        )
    if groups.replicas != replicas:
        raise ValueError(
            f"{unit.name} has gradients averaged over {replicas} replicas, but this process group has "
            f"{groups.replicas}. Load a state dict into a newly wrapped model to train with other ranks."
        )


def assign_group(groups_now: Mapping[str, Any], unit: Unit, name: str, given: Any) -> dict[str, Any]:
    """Connect a wrapper's unit to an assigned group, as soon as all groups are assigned.

    `groups_now` contains the wrapper's groups by attribute name; the new values are returned.
    """
    was_missing, placements = is_missing(groups_now["process_group"]), unit.placements
    if name == "process_group":
        groups = Groups.resolve(given, placements, placements.strategy(groups_now["replicate_group"] is not None))
        require_same_place(unit, groups)
        reduce_over = groups_now["process_group_reduce_scatter"] if was_missing else None
        reduce_over = None if is_missing(reduce_over) else reduce_over
    elif was_missing:
        return {name: given}  # until `process_group` is assigned
    else:
        groups = Groups(groups_now["process_group"], groups_now["replicate_group"], unit.ranks, placements)
        reduce_over = given
    reduce_group = group_to_reduce_over(reduce_over, groups.shard, unit.device)
    if unit.runtime is not None:
        unit.runtime.forget()
    unit.comm, unit.replicas = groups.communicators(unit.device)
    unit.axes = groups.axes(unit.device)
    unit.ranks = groups.ranks
    agreed.discard(unit)
    for handle in unit.handles:
        handle.connect(unit.comm, communicator(reduce_group, unit.device), unit.replicas, unit.axes[1])
        handle.gradients.comm = handle.reduce_comm
        if handle.kept_shard is not None:
            handle.kept_shard = groups.new_kept_shard(unit.device)
    found = {"process_group": groups.shard, "replicate_group": groups.replicate}
    return found | {"process_group_reduce_scatter": reduce_group}
