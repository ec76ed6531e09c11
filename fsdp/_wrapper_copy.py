"""Copies of a wrapped model: `copy.deepcopy`, pickling, and the groups of ranks that are missing afterwards."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from fsdp._comm import Group, MissingRanks, communicator, reduce_group
from fsdp._unit import TrainingState
from fsdp._wrapper_access import WrapperAccess

if TYPE_CHECKING:
    from typing_extensions import Self

MISSING = "MISSING"  # what FairScale puts in the place of a process group
_GROUPS = ("process_group", "process_group_reduce_scatter")


class WrapperCopy(WrapperAccess):
    """The part of `FullyShardedDataParallel` that lets it be copied: each rank copies its shards.

    Gradients are not copied, as torch does not copy those of other modules either.
    """

    def __getstate__(self) -> dict[str, Any]:
        self._prepare_copy()
        return self.__dict__ | dict.fromkeys(_GROUPS, MISSING)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._unit.wake()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        self._prepare_copy()
        copied = memo[id(self)] = type(self).__new__(type(self))
        for name in _GROUPS:
            memo[id(self.__dict__[name])] = self.__dict__[name]  # the ranks are the same ones
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        copied._unit.wake()
        return copied

    def _prepare_copy(self) -> None:
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
        if name not in _GROUPS or "_unit" not in self.__dict__ or value == MISSING:
            super().__setattr__(name, value)
        elif name == "process_group":
            self._check_group(value)
            self.__dict__.update(dict.fromkeys(_GROUPS, value))
            self.__dict__["process_group_reduce_scatter"] = reduce_group(value, self.compute_device)
            self._connect()
        else:
            self.__dict__[name] = self.process_group if value is None else value
            self._connect()

    def _check_group(self, group: Group) -> None:
        if (group.rank(), group.size()) != (self.rank, self.world_size):
            raise ValueError(
                f"{self._unit.name} holds the shards of rank {self.rank} of {self.world_size}, and this process group "
                f"makes it rank {group.rank()} of {group.size()}. Load a state dict into a newly wrapped model to "
                "train with other ranks."
            )

    def _connect(self) -> None:
        if self._unit.runtime is not None:
            self._unit.runtime.forget()
        unit, device = self._unit, self.compute_device
        unit.comm = communicator(self.process_group, device)
        unit.is_agreed = False
        for handle in unit.handles:
            handle.connect(unit.comm, communicator(self.process_group_reduce_scatter, device))

    @property
    def is_connected(self) -> bool:
        """Whether it has its ranks; False after unpickling, until `process_group` is assigned."""
        return not isinstance(self._unit.comm, MissingRanks)
