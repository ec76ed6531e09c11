"""`Groups` contains the process groups along the axes of a unit's mesh, with the placements along these axes.

Users pass a group, a pair of groups, or a mesh. The placements define how a single group is used.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn

from fsdp.distributed.collectives import LONE_RANK, Communicator, communicator, during
from fsdp.distributed.communicator import (
    Group,
    backend_names,
    default_group,
    once_for_groups,
    ranks_of,
    served_device,
    timeout_of,
)
from fsdp.distributed.consensus import agree_on, from_everyone, new_group
from fsdp.distributed.devices import HOST, has_streams
from fsdp.engine.placements import UNSHARDED, Placements, ShardingStrategy

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from fsdp.engine.kept_shard import KeptShard


class ProcessGroupName(str, Enum):
    """Names for process groups in the constructor."""

    default = "default"
    reduce_scatter = "reduce_scatter"


def group_to_reduce_over(given: Any, group: Group, device: torch.device) -> Group:
    """Return the group for reducing gradients that a user passed or named, for parameters sharded over `group`.

    Collective over all ranks the first time with NCCL.
    """
    if given in (None, ProcessGroupName.reduce_scatter):
        # With NCCL, a second group of all ranks, so that reductions do not queue behind all-gathers.
        is_nccl = group is dist.group.WORLD and backend_names(group).get(device.type) == "nccl"
        return group_apart(group) if is_nccl else group
    if given == ProcessGroupName.default:
        return group
    if not hasattr(given, "rank") or not hasattr(given, "size"):
        # The third positional argument of torch's FSDP1 is the sharding strategy.
        hint = ". Pass it as sharding_strategy=..." if type(given).__name__ == "ShardingStrategy" else ""
        raise TypeError(
            f"process_group_reduce_scatter must be a process group or a ProcessGroupName, got {given!r}{hint}"
        )
    if given.size() != group.size():
        warnings.warn(
            f"process_group_reduce_scatter has {given.size()} ranks and process_group {group.size()}: "
            "gradients are reduced over process_group instead",
            stacklevel=6,
        )
        return group
    ours, theirs = ranks_of(group), ranks_of(given)
    if ours and theirs and list(ours) != list(theirs):
        raise ValueError(
            f"process_group_reduce_scatter has the ranks {list(theirs)}, and parameters are sharded over the ranks "
            f"{list(ours)}: each rank would get the gradients of another shard. Pass a group of the same ranks in the "
            "same order."
        )
    return given


class LoneGroup:
    """A group of this rank only, without a process group, whose creation would require all ranks."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


@dataclass(frozen=True)
class Groups:
    """The process groups of a unit, and the placements of its parameters, gradients and optimizer state."""

    shard: Group  # along the shard axis
    replicate: Group | None  # along the replica axis; None without a replica axis
    ranks: frozenset[int]  # global numbers of all ranks; empty if torch does not know them
    placements: Placements  # REPLICATED along an axis with a single rank

    @property
    def replicas(self) -> int:
        """Return the number of ranks along the replica axis."""
        return 1 if self.replicate is None else self.replicate.size()

    def axes(self, device: torch.device) -> tuple[Communicator, Communicator]:
        """Return the communicators along the shard axis and the replica axis."""
        replicas = LONE_RANK if self.replicate is None else communicator(self.replicate, device)
        return communicator(self.shard, device), replicas

    def communicators(self, device: torch.device) -> tuple[Communicator, Communicator]:
        """Return the communicators over the shards that optimizers step, and over the ranks with the same shard.

        Collective the first time if both axes are sharded.
        """
        shard, replicas = self.axes(device)
        if not self.placements.is_nested:
            return shard, replicas
        together, ranks = _together(self.shard, cast(Group, self.replicate))
        all_ranks = None if together is None else communicator(together, device)
        from fsdp.distributed.nested import nested  # only for shards that are divided along both axes

        return nested(shard, replicas, all_ranks, ranks), LONE_RANK

    def new_kept_shard(self, device: torch.device) -> KeptShard | None:
        """Collective the first time. Return a `KeptShard` for a handle if the placements require it, else None.

        Raises:
            ValueError: if `reshard_after_forward` does not divide the number of ranks along the shard axis.
        """
        size, lasts = self.placements.reshard_after_forward, bool(self.placements.gather and self.placements.unshard)
        if size == "host":
            from fsdp.layers.host_copy import HostCopy  # like the import below, only for few placements

            return HostCopy()
        group = self.shard if lasts else None if isinstance(size, bool) else _post_forward_group(self.shard, size)
        if group is None:
            return None
        from fsdp.engine.kept_shard import KeptShard

        return KeptShard(communicator(group, device), lasts)

    @classmethod
    def resolve(cls, given: Any, placements: Placements, strategy: ShardingStrategy | None = None) -> Groups:
        """Return the groups of the argument `process_group` for these placements, which a strategy may define.

        Collective over the ranks if two groups are given or must be created.

        Raises:
            RuntimeError: if `torch.distributed` is not initialized, or if `LOCAL_WORLD_SIZE` differs between ranks.
            TypeError: if the argument is not a group that contains this rank.
            ValueError: if the groups do not match the strategy, or each other.
        """
        shard: Group
        replicate: Group | None
        pair = _pair_of(given)
        if pair is None:
            group = _group_of(given)
            members = _members(group)
            shard, replicate = (group, None) if placements.optimizer != UNSHARDED else (LoneGroup(), group)
            if placements.is_nested or (strategy is not None and strategy.is_hybrid):
                shard, replicate = _by_machine(group, os.environ.get("LOCAL_WORLD_SIZE", "missing"))
        else:
            if strategy is not None and not strategy.is_hybrid:
                raise ValueError(
                    f"process_group is a {_kind(given)}, which is hybrid sharding, and sharding_strategy is "
                    f"{strategy.name}. Pass one group, use HYBRID_SHARD, or omit sharding_strategy."
                )
            if placements.optimizer == UNSHARDED:
                raise ValueError(
                    f"process_group is a {_kind(given)}, and the placements shard nothing along its axes: pass one "
                    "group of all ranks, or shard the optimizer state"
                )
            shard, replicate = pair
            members = _members(*pair)
        has_one_axis = replicate is None or replicate.size() == 1
        return cls(shard, replicate, members, placements.on_one_axis if has_one_axis else placements)


def _is_mesh(given: Any) -> bool:
    module = sys.modules.get("torch.distributed.device_mesh")  # slow to import; if not imported, no mesh exists
    return module is not None and isinstance(given, module.DeviceMesh)


def _kind(given: Any) -> str:
    return f"{given.ndim}-D DeviceMesh" if _is_mesh(given) else "pair of groups"


def _pair_of(given: Any) -> tuple[Group, Group] | None:
    """Return the shard group and the replica group, if two groups are given."""
    if _is_mesh(given):
        if given.get_coordinate() is None:
            raise ValueError(f"rank {dist.get_rank()} is not in the mesh {given}: shard only on its ranks")
        if given.ndim > 2:
            names = given.mesh_dim_names or ("replicate", "shard")
            raise ValueError(
                f"got a {given.ndim}-D DeviceMesh, and sharding uses at most two dimensions: pass a part of it, "
                f'mesh["{names[0]}", "{names[1]}"] to replicate over {names[0]} and shard over {names[1]}'
            )
        return None if given.ndim == 1 else (given.get_group(1), given.get_group(0))
    if not isinstance(given, (tuple, list)):
        return None
    if len(given) != 2:
        raise ValueError(
            f"process_group is a {type(given).__name__} of {len(given)}: pass one group, or the pair (shard_group, "
            "replicate_group)"
        )
    if any(group is None for group in given):
        raise TypeError(
            "process_group is a pair of groups with a None in it: pass both, (shard_group, replicate_group)"
        )
    shard, replicate = map(default_group, given)
    return shard, replicate


def _group_of(given: Any) -> Group:
    return given.get_group() if _is_mesh(given) else default_group(given)


# The results are cached, because all units of a model usually use the same groups.


@once_for_groups
@during("FullyShardedDataParallel() or fully_shard()")
def _rows(shard: Group, replicate: Group) -> tuple[tuple[int, ...], ...]:
    """Collective the first time. Return the rows of the rectangle of ranks that this rank's two groups must form."""
    rows, columns = [ranks_of(shard)], [ranks_of(replicate)]
    over_shard, over_replicas = communicator(shard, HOST), communicator(replicate, HOST)
    if over_shard.peers_answer and over_replicas.peers_answer:
        # All ranks exchange their answers before any rank raises an error.
        rows, columns = from_everyone([over_replicas], rows[0]), from_everyone([over_shard], columns[0])
        _check_rectangle(rows, columns, shard, replicate)
    return tuple(map(tuple, rows))


@once_for_groups
def _members(group: Group, replicate: Group | None = None) -> frozenset[int]:
    """Return the ranks of a group, or of the rectangle of two groups; all units of these groups share the set."""
    rows = [] if replicate is None else [*_rows(group, replicate), ranks_of(replicate)]
    return frozenset(chain(ranks_of(group), *rows))


@once_for_groups
def _together(shard: Group, replicate: Group) -> tuple[Group | None, Sequence[int]]:
    """Collective the first time. Return a group of the ranks of a rectangle, and their order in a `Nested`."""
    rows = _rows(shard, replicate)
    if len(rows) < replicate.size():
        return None, ()  # the ranks are simulated
    ranks = sorted(chain(*rows))
    if len(ranks) == dist.get_world_size():
        group = default_group(None)
    else:
        group = new_group([communicator(shard, HOST), communicator(replicate, HOST)], ranks)
    return group, [rank for column in zip(*rows, strict=True) for rank in column]


def _check_rectangle(rows: Sequence[Any], columns: Sequence[Any], shard: Group, replicate: Group) -> None:
    """Raise ValueError unless the groups of all ranks form a single rectangle.

    Rows are the shard groups of all replicas; columns are the replica groups of all ranks in the shard group.
    """
    flat = [rank for row in rows for rank in row]
    turned = [list(row) for row in zip(*columns, strict=True)] if len({*map(len, columns)}) == 1 else []
    if len(set(flat)) == len(flat) and [list(row) for row in rows] == turned:
        return
    ours, theirs = list(ranks_of(shard)), list(ranks_of(replicate))
    raise ValueError(
        f"process_group is a pair of groups that do not fit: rank {dist.get_rank()} shards over ranks {ours} and "
        f"replicates over {theirs}, whose other ranks shard over {list(rows)}. Shard groups must be disjoint and of "
        "equal size, and their n-th ranks must form a replicate group: create both with init_device_mesh(device, "
        "(replicas, shards))."
    )


@once_for_groups
def _by_machine(group: Group, given: str) -> tuple[Group, Group | None]:
    """Collective the first time. Split a group over multiple machines into groups within and across machines.

    `given` is the value of `LOCAL_WORLD_SIZE`, the number of ranks of a machine. For a single machine, the second
    group is None.
    """
    if group.size() == 1:
        return group, None
    agree_on([communicator(group, HOST)], "values of LOCAL_WORLD_SIZE", given)
    local, ranks = int(given) if given.isdecimal() else 0, sorted(ranks_of(group))
    machines: dict[int, list[int]] = {}
    for rank in ranks if local else ():
        machines.setdefault(rank // local, []).append(rank)
    rows = list(machines.values())
    if len({len(row) for row in rows}) != 1:
        raise ValueError(
            "HYBRID_SHARD over one group shards within each machine, and LOCAL_WORLD_SIZE (which torchrun sets) is "
            f"{given}: that does not split ranks {ranks} into equal machines. Start with torchrun, or pass the groups: "
            "process_group=(shard_group, replicate_group), or a 2-D DeviceMesh."
        )
    if len(rows) == 1:
        return group, None
    columns = [list(column) for column in zip(*rows, strict=True)]
    # All shard groups are created before the replica groups, because only the members of a group may take part.
    return _new_group(group, rows), _new_group(group, columns)


@once_for_groups
def _post_forward_group(group: Group, size: int) -> Group | None:
    """Collective the first time. Return this rank's group of `size` neighbouring ranks.

    None if `size` is 1 or the number of ranks. `size` must divide the number of ranks.
    """
    ranks = list(ranks_of(group))
    if size < 1 or len(ranks) % size:
        raise ValueError(
            f"reshard_after_forward={size} shards parameters over groups of {size} ranks, but {len(ranks)} ranks "
            "cannot be divided into such groups: pass a divisor of their number, True or False"
        )
    if size in (1, len(ranks)):
        return None
    return _new_group(group, [ranks[start : start + size] for start in range(0, len(ranks), size)])


@once_for_groups
def group_apart(group: Group) -> Group:
    """Collective the first time. Return another group of the same ranks, with separate connections."""
    return _new_group(group, [ranks_of(group)])


def _new_group(group: Group, parts: Sequence[Sequence[int]]) -> Group:
    """Collective over `group`. Create a group of each of the parts, and return this rank's group."""
    mine = dist.get_rank()
    if group.size() == dist.get_world_size():
        made = [dist.new_group(list(part), timeout_of(group)) for part in parts]
        return next(each for each, part in zip(made, parts, strict=True) if mine in part)
    return new_group([communicator(group, HOST)], next(part for part in parts if mine in part))


def mesh_of_all(module: nn.Module) -> DeviceMesh:
    """Return the mesh of all ranks."""
    if not dist.is_initialized():
        raise RuntimeError("fully_shard needs a process group: call fsdp.init_distributed() first, or pass a mesh")
    on = (param.device.type for param in module.parameters() if has_streams(param.device.type))
    world = default_group(None)
    return _mesh_over(world, next(on, served_device(world).type))


@once_for_groups
def _mesh_over(world: Group, kind: str) -> DeviceMesh:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(kind, (world.size(),))
