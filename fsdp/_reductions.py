"""Gradients on their way from flat buffers to shards: bounded in flight, small ones together."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fsdp._comm import Communicator, Pending
from fsdp._handle import FlatParamHandle

# Each holds a unit's whole gradient: one in flight keeps the wire busy while the next gradient fills.
_MAX_IN_FLIGHT = 1

# A reduction above this is limited by bandwidth, not by latency: it gains nothing from waiting for company.
_SMALL_BYTES = 1 << 20


@dataclass
class Bucket:
    """Gradients that are reduced by one collective: their handles, and what to divide the sums by."""

    divisors: dict[FlatParamHandle, float] = field(default_factory=dict)
    nbytes: int = 0

    def add(self, handle: FlatParamHandle, divisor: float) -> None:
        if handle not in self.divisors:  # else a second round was added to a gradient that waits
            self.divisors[handle] = divisor
            self.nbytes += handle.reduced_nbytes

    def send(self) -> Callable[[], None]:
        """Start the collective; what is returned finishes it and gives each shard its gradient."""
        first, *others = self.divisors
        pending = first.reduce() if not others else self._reduce_together(first.reduce_comm)
        return lambda: self._accept(pending.wait())

    def _reduce_together(self, comm: Communicator) -> Pending:
        first, *_, last = self.divisors
        # Row r is what rank r receives: the r-th piece of every gradient, one after the other.
        rows = [handle.gradients.take().view(comm.world_size, -1) for handle in self.divisors]
        what = f"reduce-scatter of {first.name} to {last.name}"
        return comm.reduce_scatter(torch.cat(rows, dim=1).view(-1), what, first.tag, first.flat_param.dtype)

    def _accept(self, reduced: Tensor) -> None:
        if len(self.divisors) == 1:
            pieces: Sequence[Tensor] = [reduced]
        else:
            pieces = reduced.split([handle.layout.shard_numel for handle in self.divisors])
        for (handle, divisor), piece in zip(self.divisors.items(), pieces, strict=True):
            handle.accept(piece if divisor == 1.0 else piece.div_(divisor))


class Reductions:
    """The reductions of one backward, started as gradients complete and finished as late as memory allows.

    Args:
        bucket_bytes: small gradients wait until this much has come together; 0 sends each by itself.
    """

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._in_flight: deque[Callable[[], None]] = deque()
        self._waiting: dict[tuple[Communicator, torch.dtype, torch.dtype], Bucket] = {}

    def submit(self, handle: FlatParamHandle, divisor: float) -> None:
        """Sum what the handle has accumulated over the ranks, now or with others, and divide it by `divisor`."""
        if handle.reduced_nbytes > min(_SMALL_BYTES, self._bucket_bytes) or not handle.is_sharded:
            self._start(Bucket({handle: divisor}))
            return
        key = (handle.reduce_comm, handle.gradients.dtype, handle.flat_param.dtype)
        bucket = self._waiting.setdefault(key, Bucket())
        bucket.add(handle, divisor)
        if bucket.nbytes >= self._bucket_bytes:
            self._start(self._waiting.pop(key))

    def finish(self) -> None:
        """Send what still waits, and wait until every shard has its gradient."""
        while self._waiting:
            _, bucket = self._waiting.popitem()
            self._start(bucket)
        self._drain(leave=0)

    def abandon(self) -> None:
        """After a failed backward: let what is in flight end, and forget what waits."""
        self._waiting.clear()
        self._drain(leave=0)

    def _start(self, bucket: Bucket) -> None:
        # The new one is on its way before an older one is awaited, so the wire is not idle.
        self._in_flight.append(bucket.send())
        self._drain(leave=_MAX_IN_FLIGHT)

    def _drain(self, leave: int) -> None:
        while len(self._in_flight) > leave:
            self._in_flight.popleft()()
