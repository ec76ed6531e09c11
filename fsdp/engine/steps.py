"""Optimizer steps are entered in journals, by which the ranks find out that they have not taken the same ones.

A rank with another learning rate, or one that leaves a step out, would train on in silence: its shards would be those
of another model. So each step is noted with its optimizer's class and options, on the page of the backward before it
(`distributed.journal`). Every thousand backwards ranks that hold the same shards note what those are, too.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from fsdp.distributed.communicator import Communicator, ranks_of
from fsdp.distributed.consensus import peers_answer
from fsdp.distributed.dtensor import is_dtensor
from fsdp.distributed.journal import Journal
from fsdp.engine.fingerprints import fingerprint
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.unit import Unit, units_in

_COMPARE_EVERY = 1000  # backwards, of which one costs more than to read the shards once
_STEPS_DIFFER = "fsdp: the ranks have taken different optimizer steps after backward {page}:"
_STEP_ALIKE = (
    "Their shards are of different models from there on. Take the same steps on every rank, with the same options, and "
    "go on from the last checkpoint. (set_watchdog(None) compares nothing.)"
)
_REPLICAS_DIFFER = "fsdp: replicas of the same shards have different values, found when they were compared ({page}):"
_KEEP_REPLICAS = (
    "Something has changed them on some ranks only, or a device has failed. Change parameters inside of "
    "summon_full_params(), on every rank, and go on from a checkpoint of before. (set_watchdog(None) compares nothing.)"
)


class Steps:
    """The steps of one model's optimizers on this rank.

    Args:
        root: the outermost unit; all ranks have numbered its handles alike.

    Attributes:
        backwards: so many have ended and reduced gradients.
        taken: so many steps were taken.
    """

    def __init__(self, root: Unit) -> None:
        self._root = root
        self.backwards = self.taken = 0
        self._compared_at = 0
        self._begun: tuple[weakref.ref[torch.optim.Optimizer], int] | None = None
        self._journal: Journal | None = None
        self._of_replicas: dict[Communicator, Journal] = {}
        for handle in self.handles if peers_answer(self._root.everyone) else ():
            ways = ((handle.comm, handle.tag), (handle.replicas, handle.replica_tag))
            tags = [str(tag) for comm, tag in ways if comm.world_size > 1]
            name = " ".join(tags)
            if tags and self._journal is None and self._root.comm in (handle.comm, handle.replicas):
                self._journal = Journal(f"steps {name}", self._root.ranks, _STEPS_DIFFER, _STEP_ALIKE)
            if handle.is_replicated and handle.replicas not in self._of_replicas:
                ranks = ranks_of(handle.replicas.group)
                self._of_replicas[handle.replicas] = Journal(f"shards {name}", ranks, _REPLICAS_DIFFER, _KEEP_REPLICAS)

    @property
    def handles(self) -> list[FlatParamHandle]:
        return [handle for _, unit in units_in(self._root) for handle in unit.handles]

    def end_backward(self) -> None:
        """Note that a backward has ended, and reduced gradients."""
        self.backwards += 1
        if self._journal is not None:
            self._journal.page = self.backwards

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that a step begins; raise RuntimeError if it is known that the ranks' models differ."""
        for journal in self._journals:
            if journal.difference:
                journal.is_raised = True
                raise RuntimeError(journal.difference)
        if self._of_replicas and self.backwards - self._compared_at >= _COMPARE_EVERY:
            self._compare_replicas()
        self._begun = weakref.ref(optimizer), _version(optimizer)

    def end(self, optimizer: torch.optim.Optimizer, text: str) -> None:
        """Note that a step was taken."""
        self._begun = None
        self.taken += 1
        if self._journal is not None:
            self._journal.note(id(optimizer), text)

    @property
    def interrupted(self) -> torch.optim.Optimizer | None:
        """The optimizer whose step has begun and not ended."""
        return None if self._begun is None else self._begun[0]()

    @property
    def problem(self) -> str:
        """A text that says why the weights are not those of the last step, which all ranks have taken."""
        if any(journal.difference for journal in self._journals):
            return "have different models, as was reported"
        optimizer = self.interrupted
        if optimizer is not None and self._begun is not None and _version(optimizer) != self._begun[1]:
            return "failed in the middle of a step, with a part of the weights written"
        return ""

    @property
    def _journals(self) -> list[Journal]:
        return [*filter(None, [self._journal]), *self._of_replicas.values()]

    def _compare_replicas(self) -> None:
        self._compared_at = self.backwards
        for handle in self.handles:
            # A user's hook in the place of the all-reduce may keep replicas apart on purpose.
            if not handle.is_replicated or handle.shard_gradient.all_reduce_hook is not None:
                continue
            for slot, shard in zip(handle.layout.slots, handle.local_shards, strict=True):
                text = f"{slot.name} of unit '{handle.unit_name}' has the checksum {fingerprint(shard):016x}"
                self._of_replicas[handle.replicas].note(slot.name, text)
            handle.storage.release()
        for journal in self._of_replicas.values():
            journal.page += 1


def describe_step(optimizer: torch.optim.Optimizer) -> str:
    """Return what must be alike on all ranks when an optimizer takes a step.

    Options that the user has added to groups are left out, and what other ranks may have none of: local shards of
    original parameters are often empty, and may not be listed.
    """
    kind, lines = type(optimizer).__name__, []
    for number, group in enumerate(optimizer.param_groups):
        options = [f"{name}={text}" for name in optimizer.defaults if (text := _shown(group.get(name)))]
        params = group["params"]
        is_alike = params and (is_dtensor(params[0]) or getattr(params[0], "owner", None) is params[0])
        count = f", {len(params)} parameters" if is_alike else ""
        lines.append(f"{kind}.step() of group {number}{count}: {', '.join(options)}")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    """Return an option as text, so that it does not depend on the last bits of a number; empty if it cannot be told."""
    if isinstance(value, Tensor):
        if value.device.type != "cpu" or value.numel() != 1:
            return ""  # nobody waits for a device
        value = value.item()
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_shown, value))})"
    return str(value) if isinstance(value, (int, str)) and value is not False else ""


def _version(optimizer: torch.optim.Optimizer) -> int:
    """Return a number that changes when a step has begun to write.

    It writes to the first parameter that has a gradient, and to its state, before others or together with them.
    """
    params = (param for group in optimizer.param_groups for param in group["params"])
    first = next((param for param in params if param.grad is not None), None)
    if first is None:
        return 0
    state = optimizer.state.get(first, {}).values()
    return sum((value._version for value in state if isinstance(value, Tensor)), first._version)
