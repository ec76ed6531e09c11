"""The reduction of gradients from flat buffers to shards: limited in number, and batched for small gradients.

A reduction consists of a stage for each axis of the unit's mesh, see `fsdp.engine.placements`: a reduce-scatter along
the shard axis, and then an all-reduce along the replica axis, or another reduce-scatter. When a new reduction starts,
the stage in flight of each older reduction is awaited and the next stage starts. Transfers within a machine, transfers
across machines, and backward therefore overlap.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fsdp.distributed.collectives import Pending
from fsdp.distributed.communicator import labelled, own_rank, reduced_scattered, summed
from fsdp.engine.grad_buffer import divided
from fsdp.engine.handle import FlatParamHandle

# Collectives above this size are limited by bandwidth, so batching does not make them faster.
SMALL_BYTES = 1 << 20

_log = logging.getLogger(__name__)

# Each step first waits for the collectives started by the previous step.
Stages = Generator[None, None, None]


@dataclass(eq=False)
class Bucket:
    """Handles whose gradients are reduced at the same time.

    Uses a single collective, or a communication hook for each handle, in the same order on all ranks.
    """

    handles: set[FlatParamHandle] = field(default_factory=set)  # a handle may be submitted again while the bucket waits
    brings_nothing: bool = False  # no rank has a new gradient since the last backward
    is_abandoned: bool = False  # results are no longer required
    steps: int = 0  # steps of `reduce` that have run

    def reduce(self) -> Stages:
        """Sum the gradients over the ranks; the last step adds the results to the shards' gradients."""
        handles = sorted(self.handles, key=lambda handle: handle.tags)  # the same on all ranks, in any order of arrival
        first, *_, last = [handles[0], *handles]
        divisors = [handle.policy.postdivide for handle in handles]
        name = first.unit_name if last is first else f"{first.name} to {last.name}"
        if is_logged := _log.isEnabledFor(logging.DEBUG):
            _note(handles, "reduction started")
        if self.brings_nothing and all(handle.gradients.was_scattered for handle in handles):
            each = [_scattered_before(handles)]
        elif len(handles) == 1 or first.policy.comm_hook is not None:
            each = [handle.reduce() for handle in handles]
        else:
            each = [_reduce_together(handles, name)]
        if first.reduce_comm.world_size > 1 or first.replica_axis.world_size == 1:
            yield
        # Sent unsharded gradients are released.
        shards = [labelled("reduce_scatter_wait", name, each.pop(0).wait) for _ in list(each)]
        if first.replica_axis.world_size > 1:  # and there is no hook, so there is only one shard
            what = f"sum over replicas of {first.name}" + (f" to {last.name}" if last is not first else "")
            tag = tuple(handle.tags.replica for handle in handles)
            scattered = shards.pop()
            if not self.is_abandoned and _hold(handles, scattered):
                return
            reduced = summed if first.is_replicated else reduced_scattered
            summing = reduced(first.replica_axis, scattered, first.gradients.dtype, what, tag)
            del scattered
            shards = [(yield from _shown("all_reduce", name, summing)).to(first.sum_dtype)]
        if self.is_abandoned:
            return
        if len(shards) < len(handles):
            if len(set(divisors)) == 1:
                shards, divisors = [divided(shards[0], divisors[0])], [1.0] * len(handles)
            shards = list(shards[0].split([handle.gradients.layout.shard_numel for handle in handles]))
        for handle, shard, divisor in zip(handles, shards, divisors, strict=True):
            gradient, hook = divided(shard, divisor), handle.policy.all_reduce_hook
            if hook is not None:
                gradient = hook.run(gradient.to(handle.gradients.dtype)).to(handle.sum_dtype)
            handle.accept(gradient)
        if is_logged:
            _note(handles, "reduction finished")


def _note(handles: Sequence[FlatParamHandle], event: str) -> None:
    for handle in handles:
        _log.debug("rank %d, %s: %s", own_rank(), handle.name, event)


def _hold(handles: Sequence[FlatParamHandle], scattered: Tensor) -> bool:
    """Add earlier sums that the handles hold to `scattered`; return True if the results are held as well."""
    sizes = [handle.gradients.layout.shard_numel for handle in handles]
    parts: list[list[Tensor]] = [[] for _ in handles]
    # Shards of this rank, and of ranks that divide them with this rank along the replica axis, if any.
    first = handles[0].comm.rank - handles[0].comm.rank % (scattered.numel() // sum(sizes))
    for rank, row in enumerate(scattered.view(-1, sum(sizes)), first):
        for one, own, shard in zip(handles, parts, row.split(sizes), strict=True):
            own += one.gradients.layout.local_shards(shard, rank)
    return all([one.gradients.hold(own) for one, own in zip(handles, parts, strict=True)])  # noqa: C419 (each)


def _scattered_before(handles: Sequence[FlatParamHandle]) -> Pending:
    """Return zeros as the sum over the shard's ranks: all gradients are reduce-scattered and held already."""
    first = handles[0]
    numel = sum(handle.gradients.layout.padded_numel for handle in handles) // first.reduce_comm.world_size
    for handle in handles:
        handle.gradients.skip()
    zeros = torch.zeros(numel, dtype=first.reduced_dtype, device=first.storage.device)
    return Pending("", (), lambda: zeros)


def _shown(what: str, name: str, stages: Generator[None, None, Tensor]) -> Generator[None, None, Tensor]:
    """Run stages in order; profilers show each stage under the label."""
    while True:
        try:
            labelled(what, name, next, stages)
        except StopIteration as end:
            return end.value
        yield


def _reduce_together(handles: Sequence[FlatParamHandle], name: str) -> Pending:
    first = handles[0]
    # Rank r receives row r: the r-th shards of all gradients, concatenated.
    taken = [handle.gradients.take() for handle in handles]
    divisor = taken[0].divisor  # nearly always the same for all
    flats = [divided(one.flat, one.divisor / divisor).view(first.comm.world_size, -1) for one in taken]
    together, dtype = divided(torch.cat(flats, dim=1).view(-1), divisor), first.reduced_dtype
    for handle, one in zip(handles, taken, strict=True):
        handle.gradients.reuse(one)
    what = f"reduce-scatter of {name}"
    # Tags of all handles, because ranks that reduce other handles together must not add these gradients to theirs.
    tag = tuple(handle.tags.reduce for handle in handles)
    reduce_scatter = first.reduce_comm.reduce_scatter
    return labelled("reduce_scatter", name, reduce_scatter, together, what, tag, dtype)


class Reductions:
    """The reductions of a backward, started as gradients complete and finished as late as memory allows.

    Buckets of small gradients are determined when a backward begins: ranks may complete gradients in different orders,
    but must send the same buckets. All ranks submit the same handles, see `Usage`.

    Args:
        bucket_bytes: maximum size of a bucket of small gradients; 0 sends each gradient separately.
    """

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._in_flight: list[tuple[Bucket, Stages]] = []  # the oldest first
        self._companions: dict[FlatParamHandle, list[FlatParamHandle]] = {}
        self._waiting: dict[int, Bucket] = {}  # by the number of the first companion
        self._most_in_flight = 1
        self._keeps = False  # in this backward, ranks may start reductions in different orders
        self._brings_nothing = False

    def begin(self, handles: Iterable[FlatParamHandle], in_flight: int, *, brings_nothing: bool) -> None:
        """Begin a backward that may bring gradients of these handles, in about this order.

        Args:
            handles: the handles to reduce.
            in_flight: the maximum number of reductions in flight while another reduction is started.
            brings_nothing: If True, this backward only reduces gradients of earlier backwards, on all ranks.
        """
        self._brings_nothing, self._keeps = brings_nothing, False
        self._most_in_flight = in_flight
        self._companions.clear()
        filling: dict[tuple[Any, ...], tuple[list[FlatParamHandle], int]] = {}
        for handle in handles:
            nbytes = handle.gradients.layout.padded_numel * handle.gradients.dtype.itemsize
            if nbytes > min(SMALL_BYTES, self._bucket_bytes) or handle.is_local or not handle.requires_grad:
                continue
            comms = handle.reduce_comm, handle.replica_axis, handle.replicas
            way = (*comms, handle.policy.comm_hook is None, handle.gradients.sync)
            key = (*way, handle.gradients.dtype, handle.sum_dtype)
            companions, filled = filling.pop(key, ([], 0))
            companions.append(handle)
            self._companions[handle] = companions
            if filled + nbytes < self._bucket_bytes:
                filling[key] = (companions, filled + nbytes)

    def submit(self, handle: FlatParamHandle, *, keep: bool = False) -> None:
        """Sum the accumulated gradient of the handle over the ranks, now or together with other gradients.

        Args:
            handle: the handle to reduce.
            keep: If True, do not wait for earlier reductions until backward ends, regardless of their number: other
                ranks may be about to run an operation that requires this rank before they send their gradients.
        """
        self._keeps = self._keeps or keep
        companions = self._companions.get(handle)
        if companions is None:
            self._start(Bucket({handle}, self._brings_nothing))
            return
        first = companions[0].tags.number
        bucket = self._waiting.setdefault(first, Bucket(brings_nothing=self._brings_nothing))
        bucket.handles.add(handle)
        if len(bucket.handles) == len(companions):
            self._start(self._waiting.pop(first))

    def drain(self) -> None:
        """Wait for all reductions; reductions whose next stage other ranks may already await are advanced first."""
        while self._in_flight:
            for reduction in sorted(self._in_flight, key=lambda one: one[0].steps):
                self._advance(reduction)

    def release(self) -> None:
        """Release unsharded gradients except the last, while ranks run different modules.

        Each rank starts a later stage after awaiting the first stage, so only `drain` waits for later stages.
        """
        for reduction in self._in_flight[:-1]:
            if reduction[0].steps == 1:
                self._advance(reduction)

    def finish(self) -> None:
        """Send the remaining gradients, and wait until the gradients of all shards are complete."""
        for first in sorted(self._waiting):
            self._start(self._waiting.pop(first))
        self.drain()

    def abandon(self) -> None:
        """After a failed backward: wait for reductions in flight, and discard their results and waiting buckets."""
        self._waiting.clear()
        for bucket, _ in self._in_flight:
            bucket.is_abandoned = True  # gradients may have been zeroed since
        self.drain()

    def _start(self, bucket: Bucket) -> None:
        # The new reduction starts before older reductions are awaited, so that the network is not idle. Of the older,
        # only the youngest can hold a unit's unsharded gradient, and its replica stage runs meanwhile: it is first.
        count = 0 if self._keeps else max(0, len(self._in_flight) + 1 - self._most_in_flight)
        older, started = self._in_flight[:count][::-1], (bucket, bucket.reduce())
        self._in_flight.append(started)
        for reduction in (started, *older):
            self._advance(reduction)

    def _advance(self, reduction: tuple[Bucket, Stages]) -> None:
        place = self._in_flight.index(reduction)
        del self._in_flight[place]  # also if it raises
        bucket, stages = reduction
        bucket.steps += 1
        if next(stages, stages) is not stages:
            self._in_flight.insert(place, reduction)
