"""Optimizer steps are entered in journals, by which the ranks find out that they have not taken the same ones.

A rank with another learning rate, or one that leaves a step out, would train on in silence: its shards would be those
of another model. So each step is noted with its optimizer's class and options, on the page of the backward before it
(`distributed.journal`). So is what was written between steps, to shards and to gradients: everybody may do that, if all
do (`ShardChanges`). Every thousand backwards ranks that hold the same shards note what those are, too.
"""

from __future__ import annotations

import warnings
import weakref
import zlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fsdp.distributed.communicator import ranks_of
from fsdp.distributed.consensus import peers_answer
from fsdp.distributed.devices import is_host
from fsdp.distributed.dtensor import is_dtensor
from fsdp.distributed.journal import Finding, Journal, settings
from fsdp.engine.fingerprints import fingerprint
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.unit import Unit, units_in

_STEPS_DIFFER = Finding(
    "fsdp: the ranks have taken different optimizer steps after backward {page}:",
    "Their shards are of different models from there on. Take the same steps on every rank, with the same options, and "
    "go on from the last checkpoint. (set_watchdog(None) compares nothing.)",
)
_CHANGES_DIFFER = Finding(
    "fsdp: some ranks have changed what others have not, found at the step after backward {page}:",
    "Change parameters and gradients on every rank, or parameters inside of summon_full_params(). If a rank changes "
    "nothing because it finds nothing to do in its shard, that is all right. (set_watchdog(raises=True) makes an error "
    "of it, and set_watchdog(None) compares nothing.)",
    begin="between steps, ",
)
_REPLICAS_DIFFER = Finding(
    "fsdp: replicas of the same shards have different values, found when they were compared ({page}):",
    "Something has changed them on some ranks only, or a device has failed. Change parameters inside of "
    "summon_full_params(), on every rank, and go on from a checkpoint of before. (set_watchdog(None) compares "
    "nothing.)",
)


_SLOT_BITS = 32  # of a parameter's number, which has its handle's before


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
        self._has_warned = False
        self._changes = ShardChanges(root)
        self._of_replicas: dict[Any, Journal] = {}  # by the group of ranks
        for handle in self.handles if peers_answer(self._root.everyone) else ():
            ways = ((handle.comm, handle.tag), (handle.replicas, handle.replica_tag))
            tags = [str(tag) for comm, tag in ways if comm.world_size > 1]
            name = " ".join(tags)
            if tags and self._journal is None and self._root.comm in (handle.comm, handle.replicas):
                self._journal = Journal(f"steps {name}", self._root.ranks, _STEPS_DIFFER, _CHANGES_DIFFER)
            if handle.is_replicated and handle.replicas.group not in self._of_replicas:
                ranks = ranks_of(handle.replicas.group)
                self._of_replicas[handle.replicas.group] = Journal(f"shards {name}", ranks, _REPLICAS_DIFFER)

    @property
    def handles(self) -> list[FlatParamHandle]:
        return [handle for _, unit in units_in(self._root) for handle in unit.handles]

    def end_backward(self) -> None:
        """Note that a backward has ended, and reduced gradients."""
        self.backwards += 1
        if self._journal is not None:
            self._journal.page = self.backwards

    def begin(self, optimizer: torch.optim.Optimizer, handles: Sequence[FlatParamHandle]) -> None:
        """Note that an optimizer is about to step these handles' shards, which has all their gradients.

        Raises:
            RuntimeError: if it is known that the ranks' models differ.
        """
        for journal in self._journals:
            if journal.difference:
                journal.is_raised = True
                raise RuntimeError(journal.difference)
            if journal.warning and not self._has_warned:
                self._has_warned = True
                warnings.warn(journal.warning, stacklevel=6)
        if self._of_replicas and self.backwards - self._compared_at >= settings.replicas_every:
            self._compare_replicas()
        if self._journal is not None:
            for text in self._changes.found(handles, self.backwards):
                self._journal.note(object(), _CHANGES_DIFFER.begin + text)  # what is there twice says no more
        self._begun = weakref.ref(optimizer), _version(optimizer)

    def end(self, optimizer: torch.optim.Optimizer, handles: Sequence[FlatParamHandle]) -> None:
        """Note that a step was taken."""
        self._begun = None
        self.taken += 1
        if self._journal is not None:
            self._journal.note(id(optimizer), _described(optimizer, handles))
            self._changes.rest(handles)

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
            if not handle.is_replicated or handle.policy.all_reduce_hook is not None:
                continue
            for slot, shard in zip(handle.layout.slots, handle.values.local_shards, strict=True):
                text = f"{slot.name} of unit '{handle.unit_name}' has the checksum {fingerprint(shard):016x}"
                self._of_replicas[handle.replicas.group].note(slot.name, text)
            handle.storage.release()
        for journal in self._of_replicas.values():
            journal.page += 1


class ShardChanges:
    """The shards of a model as its optimizers have left them.

    Args:
        root: the outermost unit. Shards are watched of which all of its ranks change theirs if one does.
    """

    def __init__(self, root: Unit) -> None:
        self._root = root
        self._is_watched: dict[FlatParamHandle, bool] = {}  # those that were stepped
        self._left: dict[FlatParamHandle, Any] = {}  # of those that are: a value that changes when the shard is written
        self._looked_at: int | None = None  # the number of backwards before the last look at all of these

    def _watched(self, handles: Iterable[FlatParamHandle]) -> list[FlatParamHandle]:
        for handle in handles:
            if handle not in self._is_watched:
                self._is_watched[handle] = _is_changed_by_all(handle, self._root)
        return [handle for handle in handles if self._is_watched[handle]]

    def rest(self, handles: Iterable[FlatParamHandle]) -> None:
        """Take what these shards have for what a step has made of them."""
        self._left |= {handle: _written(handle) for handle in self._watched(handles)}

    def found(self, handles: Sequence[FlatParamHandle], backwards: int) -> Iterator[str]:
        """Yield what was written since the last steps, and to the gradients of these handles since the last backward.

        All shards are looked at in the first step after each backward; so many have ended.
        """
        if self._looked_at != backwards:
            self._looked_at = backwards
            written = (handle for handle, left in self._left.items() if _written(handle) != left)
            yield from (f"the shard of {handle.name} was written" for handle in written)
        counts: dict[str, int] = {}
        for handle in self._watched(handles):
            grads = [param.grad for param in handle.listed_params]
            versions = [grad._version for grad in grads if grad is not None]
            if len(versions) < len(grads):
                names = [slot.name for slot, grad in zip(handle.layout.slots, grads, strict=False) if grad is None]
                yield f"{handle.name} has no gradient of {', '.join(names)}"
            counts[handle.name] = sum(versions)
        # One line for what is the same of most of them, as after clipping.
        tally = Counter(counts.values())
        usual = min(tally, key=lambda times: (-tally[times], times), default=0)
        if usual:
            yield f"gradients were written {usual} times"
        yield from (f"the gradient of {name} was written {n} times" for name, n in counts.items() if n != usual)


def _is_changed_by_all(handle: FlatParamHandle, root: Unit) -> bool:
    """Return whether all ranks change a shard if one does.

    Units may have ranks of their own; and of parameters that a rank has nothing of, users leave local shards out.
    """
    if root.comm not in (handle.comm, handle.replicas) or handle.is_local:
        return False
    if handle.orig_params is None or is_dtensor(handle.orig_params.params[0]):
        return True
    ranks, slots = range(handle.comm.world_size), range(len(handle.layout.slots))
    return all(handle.layout.interval(slot, rank) is not None for slot in slots for rank in ranks)


def _written(handle: FlatParamHandle) -> Any:
    """Return what changes when a shard is written."""
    version = handle.flat_param._version
    return version if handle.orig_params is None else (version, handle.orig_params.versions)


def _described(optimizer: torch.optim.Optimizer, handles: Sequence[FlatParamHandle]) -> str:
    """Return what must be alike on all ranks when an optimizer has stepped these handles' shards.

    Options that the user has added to groups are left out, and what other ranks may have none of: local shards of
    original parameters are often empty, and may not be listed.
    """
    kind, lines, order = type(optimizer).__name__, [], array("q")
    listed = ((handle.number << _SLOT_BITS, handle.listed_params) for handle in handles)
    numbers = {id(param): number for first, params in listed for number, param in enumerate(params, first)}
    for number, group in enumerate(optimizer.param_groups):
        options = [f"{name}={text}" for name in optimizer.defaults if (text := _shown(group.get(name)))]
        params = group["params"]
        is_alike = params and (is_dtensor(params[0]) or getattr(params[0], "owner", None) is params[0])
        count = f", {len(params)} parameters" if is_alike else ""
        lines.append(f"{kind}.step() of group {number}{count}: {', '.join(options)}")
        if is_alike:
            order.extend([numbers.get(id(param), -1) for param in params])
    if order:
        lines.append(f"{kind}.step() of parameters in the order {zlib.crc32(order):08x}")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    """Return an option as text, so that it does not depend on the last bits of a number; empty if it cannot be told."""
    if isinstance(value, Tensor):
        if not is_host(value.device) or value.numel() != 1:
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
