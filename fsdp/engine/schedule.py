"""The schedule of all-gathers: the recorded order of units predicts the next units, which are unsharded in advance.

Small units are gathered together, because a single message costs less than many: each rank sends its shards
concatenated, and copies the received shards to the buffers of their handles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from fsdp.distributed.communicator import Pending, Tag, in_stage, labelled
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.unit import Unit
from fsdp.engine.unsharded_params import UnshardedParameters

T = TypeVar("T")


def _alone(_: object) -> float:
    return math.inf


class Expected(NamedTuple):
    """The buckets expected when an item runs.

    Attributes:
        own: the bucket that begins with the item; its all-gather may be in flight.
        due: the bucket to gather next.
        later: the bucket that will be due next.
    """

    own: Sequence[Any] = ()
    due: Sequence[Any] = ()
    later: Sequence[Any] = ()


NOTHING = Expected()


class _Record(Generic[T]):
    """The items of the last pass and of the running pass, and whether both are the same so far."""

    def __init__(self) -> None:
        self.last: list[T] = []
        self.current: list[T] = []
        self.on_course = False

    @property
    def at_end(self) -> bool:
        """True if the running pass is the same as the last pass, including its length."""
        return self.on_course and len(self.current) == len(self.last)

    @property
    def next(self) -> T | None:
        """The item expected next."""
        place = len(self.current)
        return self.last[place] if self.on_course and place < len(self.last) else None

    def begin(self) -> bool:
        """Start a new pass; return whether the previous pass, if recorded, was the same as the pass before."""
        is_same = self.at_end or not self.current
        if not is_same:
            self.last = self.current
        self.current, self.on_course = [], bool(self.last)
        return is_same

    def enter(self, item: T) -> None:
        """Record an item."""
        place = len(self.current)
        self.current.append(item)
        self.on_course = self.on_course and place < len(self.last) and self.last[place] is item


class ExecutionOrder(Generic[T]):
    """Records each pass and predicts the next pass from the last one.

    At the first difference, prediction stops until the end of the pass, and the next pass is predicted from the actual
    order. An order that occurred twice in succession is *settled*.

    Predictions contain the items to gather, which all ranks gather in the same order. (An unsharded item may run again
    on some ranks only.) Consecutive items of up to `limit` bytes in total form a *bucket*. When the first item of a
    bucket runs, the next bucket is due and arrives during this bucket. If unsharded items run before the next bucket,
    it is due only when the last of these items runs, so that no memory is used earlier.

    Args:
        nbytes: returns the bytes of an item; by default, each item is in a separate bucket.
        limit: the maximum size of a bucket with multiple items.
    """

    def __init__(self, nbytes: Callable[[T], float] = _alone, limit: int = 0) -> None:
        self._nbytes, self._limit = nbytes, limit
        self._runs, self._gathers = _Record[T](), _Record[T]()
        # For each gathered item of the last pass, and of the running pass: how many unsharded items ran directly before
        # the item.
        self._last_gaps, self._gaps = list[int](), list[int]()
        self._gap = 0  # since the last gathered item
        self._expected = dict[tuple[int, int], Expected]()  # by place in `_gathers` (-1: before all) and gap
        self._has_gathered = False  # in the running pass
        self.is_settled = False

    def begin(self) -> None:
        """Start a new pass; the previous pass, if it was recorded, becomes the prediction."""
        if self._runs.current:
            self.is_settled = self._runs.at_end
        self._runs.begin()
        if not self._has_gathered:
            self._gathers.current, self._gaps = [], self._last_gaps
        if not self._gathers.begin() or self._gaps != self._last_gaps:
            self._last_gaps = self._gaps
            self._expected = self._predicted(self._gathers.last, self._gaps)
        self._gaps, self._gap, self._has_gathered = [], 0, False

    def enter(self, item: T, is_gathered: bool = True) -> Expected:
        """Record that `item` runs, and return the expected buckets; empty if the order is not known.

        Args:
            item: the running item.
            is_gathered: True if the item must be gathered now, or its all-gather is in flight.
        """
        self._runs.enter(item)
        # A pass may begin with items still unsharded from the previous pass.
        if is_gathered or (not self._has_gathered and self._gathers.next is item):
            self._has_gathered |= is_gathered
            self._gathers.enter(item)
            self._gaps.append(self._gap)
            self._gap = 0
        else:
            self._gap += 1
        place = len(self._gathers.current) - 1
        return self._expected.get((place, self._gap), NOTHING) if self._gathers.on_course else NOTHING

    def at_expected_end(self) -> bool:
        """Return whether the last entered item was also the last item of the last two passes."""
        return self.is_settled and self._runs.at_end

    def _predicted(self, order: Sequence[T], gaps: Sequence[int]) -> dict[tuple[int, int], Expected]:
        """Return the expected buckets by place in this order (-1: before the first item) and gap."""
        buckets, begins = list[list[T]](), list[int]()  # and the places of their first items
        due = list[tuple[int, int]]()  # the places and gaps where buckets are due
        filled, seen = 0.0, dict[int, int]()  # the bytes of the last bucket; the last place of each item
        after_gap = -1
        for place, item in enumerate(order):
            before, seen[id(item)] = seen.get(id(item), -2), place
            after_gap = place if gaps[place] else after_gap
            if place and item is order[place - 1]:
                continue  # still unsharded
            filled += self._nbytes(item)
            # A bucket with an item that just ran could not be gathered in advance.
            if not buckets or filled > self._limit or before >= begins[-1] - 1:
                with_last = (max(begins[-1], after_gap) if begins else -1, 0)
                due.append((place - 1, gaps[place]) if gaps[place] else with_last)
                begins.append(place)
                buckets.append([])
                filled = self._nbytes(item)
            buckets[-1].append(item)
            due[-1] = max(due[-1], (before + 1, 0))  # not before the item has run
        found = {(place, 0): Expected(own=bucket) for place, bucket in zip(begins, buckets, strict=True)}
        for at, bucket, later in zip(due, buckets, [*buckets[1:], ()], strict=True):
            found[at] = Expected(found.get(at, NOTHING).own, bucket, later)
        return found


def gathered_nbytes(unit: Unit) -> float:
    """Return the bytes that a unit gathers; infinity if the unit is always gathered separately."""
    if all(handle.is_gathered_plainly for handle in unit.handles):
        return sum(handle.unsharded.nbytes for handle in unit.handles)
    return math.inf


def unshard_together(units: Iterable[Unit], limit: int) -> None:
    """Start to unshard units. Shards of the same ranks and dtype share messages of up to `limit` gathered bytes."""
    messages: list[list[FlatParamHandle]] = []
    last: dict[Any, tuple[list[FlatParamHandle], float]] = {}  # the last message for each kind of handle, and its bytes
    for unit in units:
        unit.is_spare = False
        for handle in unit.handles:
            if not handle.begin_unshard():
                continue
            is_small = handle.unsharded.nbytes <= limit and handle.is_gathered_plainly
            kind = (handle.comm, handle.unsharded.full.dtype) if is_small else handle
            message, nbytes = last.get(kind, ([], math.inf))
            nbytes += handle.unsharded.nbytes
            if nbytes > limit:
                message, nbytes = [], handle.unsharded.nbytes
                messages.append(message)
            message.append(handle)
            last[kind] = (message, nbytes)
    for handles in messages:
        if len(handles) > 1:
            _gather(handles)
        else:
            handles[0].begin_gather()


class _Part(Pending):
    """The parameters of one handle in a message with multiple handles.

    Args:
        message: the all-gather of all handles.
        part: ``[world_size, shard_numel]``, this handle's part of the result.
        to: the parameters to fill.
    """

    def __init__(self, message: Pending, part: Tensor, to: UnshardedParameters) -> None:
        self._message, self._part, self._to = message, part, to

    def wait(self) -> Tensor:
        self._message.wait()
        full = self._to.begin_gather()
        full.view(self._part.shape).copy_(self._part)
        del self._message, self._part  # the message's memory is freed after all parts are copied
        return full


def _gather(handles: Sequence[FlatParamHandle]) -> None:
    first, sizes = handles[0], [handle.layout.shard_numel for handle in handles]
    numel, dtype = first.comm.world_size * sum(sizes), first.unsharded.full.dtype
    full = torch.empty(numel, dtype=dtype, device=first.storage.device)
    elsewhere = next((handle.storage for handle in handles if handle.storage.is_elsewhere), None)
    if elsewhere is None:
        message = _exchange(full, handles)
    else:  # shards are copied on the copy stream, during computation
        with elsewhere.copy_stream.fork():
            message = _exchange(full, handles)
        message = message.after(elsewhere.copy_stream.arrival())
    parts = full.view(first.comm.world_size, -1).split(sizes, dim=1)
    for handle, part in zip(handles, parts, strict=True):
        handle.expect(_Part(message, part, handle.unsharded))


def _exchange(full: Tensor, handles: Sequence[FlatParamHandle]) -> Pending:
    first, last = handles[0], handles[-1]
    shards = torch.cat([handle.shard_in(full.dtype) for handle in handles])
    what = f"all-gather of {first.name} to {last.name}"
    tag: Tag = tuple(handle.tags.gather for handle in handles)
    if first.comm.sends_pieces:  # else no tag is sent
        what, tag = in_stage(first.passes.stage, what, tag)
    name = first.unit_name if first.unit_name == last.unit_name else f"{first.unit_name} to {last.unit_name}"
    return labelled("all_gather", name, first.comm.all_gather, full, shards, what, tag)
