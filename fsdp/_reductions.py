"""Gradients on their way from flat buffers to shards: bounded in flight, small ones together."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable

import torch

from fsdp._comm import Communicator
from fsdp._handle import FlatParamHandle

# Each holds a unit's whole gradient: one in flight keeps the wire busy while the next gradient fills.
_MAX_IN_FLIGHT = 1

# A reduction above this is limited by bandwidth, not by latency: it gains nothing from waiting for company.
_SMALL_BYTES = 1 << 20

BucketKey = tuple[Communicator, torch.dtype, torch.device]


class Reductions:
    """The reductions of one backward, started as gradients complete and finished as late as possible.

    Args:
        bucket_bytes: small gradients wait until this much has come together and are reduced by one
            collective; 0 sends each by itself.
    """

    def __init__(self, bucket_bytes: int, postdivide: Callable[[FlatParamHandle], float]) -> None:
        self._bucket_bytes = bucket_bytes
        self._postdivide = postdivide
        self._in_flight: deque[Callable[[], None]] = deque()
        self._buckets: dict[BucketKey, list[FlatParamHandle]] = {}
        self._waiting_bytes: defaultdict[BucketKey, int] = defaultdict(int)

    def submit(self, handle: FlatParamHandle) -> None:
        """Reduce what the handle has accumulated, now or with others."""
        if handle.nbytes > min(_SMALL_BYTES, self._bucket_bytes) or not handle.is_sharded:
            pending = handle.reduce()
            self._start(lambda: self._accept(handle, pending.wait()))
            return
        key = (handle.reduce_comm, handle.full.dtype, handle.full.device)
        bucket = self._buckets.setdefault(key, [])
        if handle not in bucket:  # a second round of gradients was added to those that wait
            bucket.append(handle)
            self._waiting_bytes[key] += handle.nbytes
        if self._waiting_bytes[key] >= self._bucket_bytes:
            del self._waiting_bytes[key]
            self._send(self._buckets.pop(key))

    def finish(self) -> None:
        """Send what still waits, and wait until every shard has its gradient."""
        buckets, self._buckets = self._buckets, {}
        self._waiting_bytes.clear()
        for bucket in buckets.values():
            self._send(bucket)
        while self._in_flight:
            self._in_flight.popleft()()

    def abandon(self) -> None:
        """After a failed backward: let what is in flight end, and forget what waits."""
        self._buckets.clear()
        self._waiting_bytes.clear()
        while self._in_flight:
            self._in_flight.popleft()()

    def _start(self, finish: Callable[[], None]) -> None:
        # The new one is on its way before the older one is awaited, so the wire is not idle.
        self._in_flight.append(finish)
        while len(self._in_flight) > _MAX_IN_FLIGHT:
            self._in_flight.popleft()()

    def _accept(self, handle: FlatParamHandle, reduced: torch.Tensor) -> None:
        divisor = self._postdivide(handle)
        handle.accept(reduced if divisor == 1.0 else reduced.div_(divisor))

    def _send(self, handles: list[FlatParamHandle]) -> None:
        if len(handles) == 1:
            pending = handles[0].reduce()
            self._start(lambda: self._accept(handles[0], pending.wait()))
            return
        comm = handles[0].reduce_comm
        numels = [handle.layout.shard_numel for handle in handles]
        # Row r is what rank r receives: the r-th piece of every gradient, one after the other.
        rows = [handle.gradients.take().view(comm.world_size, -1) for handle in handles]
        names = f"reduce-scatter of {handles[0].name} to {handles[-1].name}"
        pending = comm.reduce_scatter(torch.cat(rows, dim=1).view(-1), names, handles[0].tag)

        def accept_all() -> None:
            for handle, reduced in zip(handles, pending.wait().split(numels), strict=True):
                self._accept(handle, reduced)

        self._start(accept_all)
