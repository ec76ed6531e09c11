"""Optimizer steps are recorded in journals, which the ranks compare to detect different steps.

If a rank used a different learning rate or omitted a step, its shards would belong to a different model, without an
error. So each step is recorded with the optimizer's class and options, on the page of the previous backward
(`distributed.journal`). Writes to shards and gradients between steps are recorded too, because all ranks must make the
same writes. Every thousand backwards, ranks that hold the same shards also record checksums of them.
"""

from __future__ import annotations

import warnings
import weakref
import zlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp.distributed.communicator import made_once_for_groups, ranks_of
from fsdp.distributed.consensus import peers_answer
from fsdp.distributed.devices import is_host
from fsdp.distributed.dtensor import is_dtensor
from fsdp.distributed.journal import KEPT, Finding, Journal, settings
from fsdp.engine.counted_data import version_of
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.unit import Unit, units_in
from fsdp.layers.fingerprints import fingerprint

_STEPS_DIFFER = Finding(
    "fsdp: the ranks have taken different optimizer steps after backward {page}:",
    "Their shards belong to different models from this step on. Take the same steps on every rank, with the same "
    "options, and continue from the last checkpoint. (set_watchdog(None) disables the comparison.)",
)
_CHANGES_DIFFER = Finding(
    "fsdp: some ranks have made changes that other ranks have not, found at the step after backward {page}:",
    "Change parameters and gradients on every rank, or parameters inside of summon_full_params(). Ignore this if a "
    "rank made no change because its shard needed none. (set_watchdog(raises=True) raises an error instead, and "
    "set_watchdog(None) disables the comparison.)",
    begin="between steps, ",
)
_REPLICAS_DIFFER = Finding(
    "fsdp: replicas of the same shards have different values, found when they were compared ({page}):",
    "They were changed on some ranks only, or a device has failed. Change parameters inside of summon_full_params(), "
    "on every rank, and continue from an earlier checkpoint. (set_watchdog(None) disables the comparison.)",
)


_GRAD = attrgetter("grad")
_VERSION_OF_DTENSOR = attrgetter("_version", "_local_tensor._version")  # the local tensor has a separate version
_PLAIN = {int, float, bool, str, type(None)}  # types of options that cannot be changed in place
_SLOT_BITS = 32  # for the parameter's number, below the number of the handle


class Rest:
    """The state of a shard after the last optimizer step."""

    def __init__(self, handle: FlatParamHandle) -> None:
        self.handle, self.listed = handle, list(handle.listed_params)  # the parameters with gradients
        has_rows = is_dtensor(handle.listed_params[0])
        self.tensors = self.listed if has_rows else [handle.flat_param]  # their versions count all writes to the shard
        self.version = _VERSION_OF_DTENSOR if has_rows else version_of  # function that returns a tensor's version
        self.left: list[Any] | None = None  # the versions after the last step; None before the first step


class Part:
    """An optimizer's shards of a single model."""

    def __init__(self, steps: Steps, handles: Sequence[FlatParamHandle]) -> None:
        self.steps, self.handles = steps, handles
        self.watched = steps.watched(handles)
        self.counts: dict[str, int] = {}  # of writes to the gradients of the last step, by handle names
        self.written: list[str] = []  # the recorded texts of these counts
        self._options: list[Any] = []  # of the last step, with their text
        self._text = ""

    def described(self, optimizer: torch.optim.Optimizer) -> str:
        """Return the text that must be the same on all ranks; updated only if an option has changed."""
        options: list[Any] = []
        for group in optimizer.param_groups:
            options.append(len(group["params"]))
            for value in map(group.get, optimizer.defaults):
                options += value if type(value) is tuple else (value,)
        if not self._text or not _PLAIN.issuperset(map(type, options)) or options != self._options:
            self._options, self._text = options, _described(optimizer, self.handles)
        return self._text


_counts: dict[Any, int] = made_once_for_groups()  # the number of used trees, by the default group and the ranks


def _count(root: Unit) -> int:
    """Return the number of a tree among the trees of its ranks. All its ranks use these trees in the same order."""
    key = dist.group.WORLD, root.ranks
    _counts[key] = _counts.get(key, 0) + 1
    return _counts[key]


class Steps:
    """The steps of the optimizers of a model on this rank.

    The ranks compare, using journals, the options of each step, whether shards were written between steps, and how
    often gradients were written. A step only reads the version of each tensor.

    Args:
        root: the outermost unit; the handles' numbers must be the same on all ranks.

    Attributes:
        backwards: the number of completed backwards that reduced gradients.
        taken: the number of steps.
    """

    def __init__(self, root: Unit) -> None:
        self.root = root
        self.backwards = self.taken = 0
        self._parts: weakref.WeakKeyDictionary[torch.optim.Optimizer, Part] = weakref.WeakKeyDictionary()
        self._compared_at = 0
        self._begun: tuple[weakref.ref[torch.optim.Optimizer], int] | None = None
        self._journal: Journal | None = None
        self._has_warned = False
        self._rests: dict[FlatParamHandle, Rest | None] = {}  # of the shards that were stepped; None: not watched
        self._looked_at: int | None = None  # the number of backwards before the last check of all these shards
        self._of_replicas: dict[Any, Journal] = {}  # by the process group
        number = _count(self.root) if peers_answer(self.root.everyone) else 0
        for handle in self.handles if number else ():
            comms = handle.comm, handle.replicas
            if self._journal is None and self.root.comm in comms and any(comm.world_size > 1 for comm in comms):
                self._journal = Journal(f"steps {number}", self.root.ranks, _STEPS_DIFFER, _CHANGES_DIFFER)
            if handle.is_replicated and handle.replicas.group not in self._of_replicas:
                ranks = ranks_of(handle.replicas.group)
                self._of_replicas[handle.replicas.group] = Journal(f"shards {number}", ranks, _REPLICAS_DIFFER)
        self.journals = [*filter(None, [self._journal]), *self._of_replicas.values()]

    @property
    def handles(self) -> list[FlatParamHandle]:
        return [handle for unit in units_in(self.root) for handle in unit.handles]

    def part(self, optimizer: torch.optim.Optimizer, handles: Sequence[FlatParamHandle]) -> Part:
        """Return an optimizer's part of the model, which is kept as long as the model and the optimizer."""
        found = self._parts[optimizer] = Part(self, handles)
        return found

    def watched(self, handles: Iterable[FlatParamHandle]) -> list[Rest]:
        """Return the `Rest` of each of these shards, without shards that ranks may change separately."""
        for handle in handles:
            rest = self._rests.get(handle)
            listed = list(map(id, handle.listed_params))
            if handle not in self._rests or (rest is not None and list(map(id, rest.listed)) != listed):
                self._rests[handle] = Rest(handle) if _is_changed_by_all(handle, self.root) else None
        return [rest for handle in handles if (rest := self._rests[handle]) is not None]

    def end_backward(self) -> None:
        """Record that a backward has ended and reduced gradients."""
        self.backwards += 1
        if self._journal is not None:
            self._journal.page = self.backwards
        if self._of_replicas and self.backwards - self._compared_at >= settings.replicas_every:
            self._compare_replicas()

    def begin(self, optimizer: torch.optim.Optimizer, part: Part) -> None:
        """Record the beginning of an optimizer step on shards, whose gradients are complete.

        Also record writes to shards since the last steps, and to the gradients of these shards since the last backward.
        All shards are checked in the first step after each backward.

        Raises:
            RuntimeError: if the ranks' models are known to differ.
        """
        for journal in self.journals:
            if journal.difference:
                journal.is_raised = True
                raise RuntimeError(journal.difference)
            if journal.warning and not self._has_warned:
                self._has_warned = True
                warnings.warn(journal.warning, stacklevel=6)
        for notify in self.root.observers.step:
            notify(optimizer)
        self._begun = weakref.ref(optimizer), _version(optimizer)
        if (own := self._journal) is None:
            return
        changes: list[str] = []
        if self._looked_at != self.backwards:
            self._looked_at = self.backwards
            for rest in self._rests.values():
                left = None if rest is None else rest.left
                if rest is not None and left is not None and list(map(rest.version, rest.tensors)) != left:
                    changes.append(f"{_CHANGES_DIFFER.begin}the shard of {rest.handle.name} was written")
        counts: dict[str, int] = {}
        for rest in part.watched:
            count, absent = 0, False
            for grad in map(_GRAD, rest.listed):
                if grad is None:
                    absent = True
                else:
                    count += grad._version
            counts[rest.handle.name] = count
            if absent:
                slots = zip(rest.handle.layout.slots, rest.listed, strict=False)
                names = [slot.name for slot, param in slots if param.grad is None]
                changes.append(f"{_CHANGES_DIFFER.begin}{rest.handle.name} has no gradient of {', '.join(names)}")
        if counts != part.counts:
            part.counts, part.written = counts, list(_written_gradients(counts))
        for change in (*changes, *part.written):  # counted once, even if recorded twice
            own.notes.setdefault(own.page, {})[object(), change] = 1

    def end(self, optimizer: torch.optim.Optimizer, part: Part) -> None:
        """Record a completed step, and the versions of shards after the step."""
        self._begun = None
        self.taken += 1
        if self._journal is not None:  # `Journal.note` is inlined, because this runs in each step
            notes, key = (
                self._journal.notes.setdefault(self._journal.page, {}),
                (id(optimizer), part.described(optimizer)),
            )
            notes[key] = notes.get(key, 0) + 1
            if len(self._journal.notes) > KEPT:
                self._journal.forget()
            for rest in part.watched:
                rest.left = list(map(rest.version, rest.tensors))
        for notify in self.root.observers.step_end:
            notify(optimizer)

    @property
    def interrupted(self) -> torch.optim.Optimizer | None:
        """The optimizer whose step has begun, but not ended."""
        return None if self._begun is None else self._begun[0]()

    @property
    def problem(self) -> str:
        """The reason if the weights differ from the result of the last step that all ranks have completed; else ""."""
        if any(journal.difference for journal in self.journals):
            return "have different models, as was reported"
        optimizer = self.interrupted
        if optimizer is not None and self._begun is not None and _version(optimizer) != self._begun[1]:
            return "failed in the middle of a step, with a part of the weights written"
        return ""

    def _compare_replicas(self) -> None:
        self._compared_at = self.backwards
        for handle in self.handles:
            # A user's hook that replaces the all-reduce may let replicas differ on purpose.
            if not handle.is_replicated or handle.policy.all_reduce_hook is not None:
                continue
            for slot, shard in zip(handle.layout.slots, handle.values.local_shards, strict=True):
                text = f"{slot.name} of unit '{handle.unit_name}' has the checksum {fingerprint(shard):016x}"
                self._of_replicas[handle.replicas.group].note(slot.name, text)
            handle.storage.release()
        for journal in self._of_replicas.values():
            journal.page += 1


def _written_gradients(counts: dict[str, int]) -> Iterator[str]:
    """Yield texts with the number of writes to gradients, with a single text for the most frequent number."""
    tally = Counter(counts.values())
    usual = min(tally, key=lambda times: (-tally[times], times), default=0)
    if usual:
        yield f"{_CHANGES_DIFFER.begin}gradients were written {usual} times"
    for name, times in counts.items():
        if times != usual:
            yield f"{_CHANGES_DIFFER.begin}the gradient of {name} was written {times} times"


def _is_changed_by_all(handle: FlatParamHandle, root: Unit) -> bool:
    """Return whether all ranks change a shard if a single rank does.

    This may be false for units with separate ranks, and for empty local shards, which users may omit.
    """
    if root.comm not in (handle.comm, handle.replicas) or handle.is_local:
        return False
    if handle.orig_params is None or is_dtensor(handle.listed_params[0]):
        return True
    # The elements of a parameter are contiguous, so that the ranks between the first and the last have some as well.
    ranks, slots = {0, handle.comm.world_size - 1}, range(len(handle.layout.slots))
    return all(handle.layout.interval(slot, rank) is not None for slot in slots for rank in ranks)


def _described(optimizer: torch.optim.Optimizer, handles: Sequence[FlatParamHandle]) -> str:
    """Return a text that must be the same on all ranks when an optimizer has stepped these handles' shards.

    The text excludes options that the user has added to groups, and the number and order of local shards of original
    parameters: empty local shards may be missing on other ranks.
    """
    kind, lines, order = type(optimizer).__name__, [], array("q")
    listed = ((handle.tags.number << _SLOT_BITS, handle.listed_params) for handle in handles)
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
    """Return an option as text, without the last bits of a number; empty if ranks cannot compare the option."""
    if isinstance(value, Tensor):
        if not is_host(value.device) or value.numel() != 1:
            return ""  # without a device synchronization
        value = value.item()
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_shown, value))})"
    return str(value) if isinstance(value, (int, str)) and value is not False else ""


def _version(optimizer: torch.optim.Optimizer) -> int:
    """Return a number to detect whether a step has begun to write.

    A step writes to the first parameter with a gradient, and to its state, before other parameters or with them.
    """
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                version = int(param._version)
                for value in optimizer.state[param].values() if param in optimizer.state else ():
                    if isinstance(value, Tensor) and not value.is_inference():  # inference tensors have no version
                        version += value._version
                return version
    return 0
