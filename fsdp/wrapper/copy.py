"""Copies of a wrapped model: `copy.deepcopy`, pickling, and the groups of ranks that are missing afterwards."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from fsdp.distributed.collectives import MissingRanks, communicator
from fsdp.distributed.communicator import Group
from fsdp.engine.forward_hooks import TrainingState
from fsdp.engine.placeholder import depart, under_way
from fsdp.engine.sharding_strategy import Groups
from fsdp.wrapper.access import WrapperAccess

if TYPE_CHECKING:
    from typing_extensions import Self

MISSING = "MISSING"  # what FairScale puts in the place of a process group
_END = "_end_of_state"
_ASSIGNED = ("process_group", "process_group_reduce_scatter")
_GROUPS = (*_ASSIGNED, "replicate_group")


class WrapperCopy(WrapperAccess):
    """The part of `FullyShardedDataParallel` that lets it be copied: each rank copies its shards.

    Gradients are not copied, as torch does not copy those of other modules either.
    """

    _reduce_group: Callable[[Any, torch.device], Group]

    def __getstate__(self) -> dict[str, Any]:
        self._prepare_copy()
        for handle in self._unit.handles:
            if any(handle.flat_param.parts):
                raise NotImplementedError(
                    f"{handle.name} has parameters that are DTensors, whose mesh is of these processes: it cannot be "
                    "pickled. Save its state_dict(), or copy it with copy.deepcopy."
                )
        groups = [name for name in _GROUPS if self.__dict__[name] is not None]
        return self.__dict__ | dict.fromkeys(groups, MISSING) | {_END: depart()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state.pop(_END, None)
        if "_unit" not in state:
            raise RuntimeError(
                "this FullyShardedDataParallel was pickled by FairScale, whose wrappers have other parts. Load it "
                "there and save its state_dict(), or local_state_dict() with local_metadata_dict(), which load here."
            )
        super().__setstate__(state)
        self._forward_entries()
        self._unit.wake()

    def __copy__(self) -> Self:
        copied = type(self).__new__(type(self))  # as torch copies modules shallowly: all is shared, ranks included
        copied.__dict__.update(self.__dict__)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        self._prepare_copy()
        copied = memo[id(self)] = type(self).__new__(type(self))
        for name in _GROUPS:
            memo[id(self.__dict__[name])] = self.__dict__[name]  # the ranks are the same ones
        with under_way():
            copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        copied._forward_entries()
        copied._unit.wake()
        return copied

    def _prepare_copy(self) -> None:
        if self._unit.access.close_loading is not None:
            self._unit.access.close_loading()  # a load that was given up by an exception
        if self._unit.runtime is not None:
            self._unit.runtime.ensure_idle("copy the model")
            self._unit.runtime.release()
        if self._unit.state is TrainingState.SUMMON_FULL_PARAMS:
            raise RuntimeError(
                f"{self._unit.name}: inside summon_full_params() a copy would hold whole parameters that nobody shards "
                "again. Copy the model outside of it, or take its state_dict()."
            )
        for handle in self._unit.handles:
            handle.absorb()  # or a copy would have the values from before users replaced them

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _ASSIGNED or "_unit" not in self.__dict__ or _is_missing(value):
            super().__setattr__(name, value)
            return
        was_missing = _is_missing(self.process_group)
        if name == "process_group":
            groups = Groups.resolve(value, self.sharding_strategy)
            self._check_groups(groups)
            given = self.process_group_reduce_scatter if was_missing else None
            self._connect(groups, None if _is_missing(given) else given)
        elif was_missing:
            self.__dict__[name] = value  # until there is a group to compare it with
        else:
            groups = Groups(self.process_group, self.replicate_group, self.sharding_strategy, self._unit.ranks)
            self._connect(groups, value)

    def _check_groups(self, groups: Groups) -> None:
        group, replicas = groups.shard, self._unit.replicas.world_size
        if (group.rank(), group.size()) != (self.rank, self.world_size):
            raise ValueError(
                f"{self._unit.name} holds the shards of rank {self.rank} of {self.world_size}, and this process group "
                f"makes it rank {group.rank()} of {group.size()}. Load a state dict into a newly wrapped model to "
                "train with other ranks."
            )
        if groups.replicas != replicas:
            raise ValueError(
                f"{self._unit.name} divides gradients by its {replicas} replicas, and this process group makes it "
                f"{groups.replicas}. Load a state dict into a newly wrapped model to train with other ranks."
            )

    def _connect(self, groups: Groups, reduce_over: Any) -> None:
        unit, device = self._unit, self.compute_device
        if unit.runtime is not None:
            unit.runtime.forget()
        self.__dict__["process_group"], self.__dict__["replicate_group"] = groups.shard, groups.replicate
        reduce_group = self.__dict__["process_group_reduce_scatter"] = self._reduce_group(reduce_over, device)
        unit.comm, unit.replicas = groups.communicators(device)
        unit.ranks = groups.ranks
        unit.is_agreed = False
        for handle in unit.handles:
            handle.connect(unit.comm, communicator(reduce_group, device), unit.replicas)

    @property
    def is_connected(self) -> bool:
        """Whether it has its ranks; False after unpickling, until `process_group` is assigned."""
        return not any(isinstance(comm, MissingRanks) for comm in self._unit.everyone)


def _is_missing(group: Any) -> bool:
    return isinstance(group, str) and group == MISSING
