"""Gradients on their way from flat buffers to shards: bounded in flight, small ones together."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fsdp._comm import Pending
from fsdp._handle import FlatParamHandle

# Each holds a unit's whole gradient: one in flight keeps the wire busy while the next gradient fills.
_MAX_IN_FLIGHT = 1

# A reduction above this is limited by bandwidth, not by latency: it gains nothing from waiting for company.
_SMALL_BYTES = 1 << 20


@dataclass
class Bucket:
    """Gradients that are reduced at one time: their handles, and what to divide the sums by.

    By one collective, or, with a hook, by one call of it for each, in an order that is the same on all ranks.
    """

    divisors: dict[FlatParamHandle, float] = field(default_factory=dict)

    def send(self) -> Callable[[], None]:
        """Start the reduction; what is returned finishes it and gives each shard its gradient."""
        handles = sorted(self.divisors, key=lambda handle: handle.tag)  # alike on all ranks, however they arrived
        if len(handles) == 1 or handles[0].comm_hook is not None:
            each = [handle.reduce() for handle in handles]
            return lambda: self._accept(handles, [pending.wait() for pending in each])
        together, sizes = _reduce_together(handles), [handle.layout.shard_numel for handle in handles]
        return lambda: self._accept(handles, together.wait().split(sizes))

    def _accept(self, handles: Sequence[FlatParamHandle], pieces: Sequence[Tensor]) -> None:
        for handle, piece in zip(handles, pieces, strict=True):
            divisor = self.divisors[handle]
            handle.accept(piece if divisor == 1.0 else piece.div_(divisor))


def _reduce_together(handles: Sequence[FlatParamHandle]) -> Pending:
    first, *_, last = handles
    # Row r is what rank r receives: the r-th piece of every gradient, one after the other.
    rows = [handle.gradients.take().view(first.reduce_comm.world_size, -1) for handle in handles]
    what = f"reduce-scatter of {first.name} to {last.name}"
    return first.reduce_comm.reduce_scatter(torch.cat(rows, dim=1).view(-1), what, first.tag, first.flat_param.dtype)


class Reductions:
    """The reductions of each backward, started as gradients complete and finished as late as memory allows.

    Which small gradients go together is settled when a backward begins: ranks may complete them in different orders (a
    parameter that one rank did not use is complete at the end only), and must send the same bucket all the same.

    Args:
        bucket_bytes: small gradients go together up to this much; 0 sends each by itself.
    """

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._in_flight: deque[Callable[[], None]] = deque()
        self._companions: dict[FlatParamHandle, list[FlatParamHandle]] = {}
        self._waiting: dict[int, Bucket] = {}  # by the tag of the first companion

    def begin(self, handles: Iterable[FlatParamHandle]) -> None:
        """A backward starts, which may bring gradients of these handles, in about this order."""
        self._companions.clear()
        filling: dict[tuple[Any, ...], tuple[list[FlatParamHandle], int]] = {}
        for handle in handles:
            nbytes = handle.reduced_nbytes
            if nbytes > min(_SMALL_BYTES, self._bucket_bytes) or not handle.is_sharded or not handle.requires_grad:
                continue
            key = (handle.reduce_comm, handle.gradients.dtype, handle.flat_param.dtype, handle.comm_hook is None)
            companions, filled = filling.pop(key, ([], 0))
            companions.append(handle)
            self._companions[handle] = companions
            if filled + nbytes < self._bucket_bytes:
                filling[key] = (companions, filled + nbytes)

    def submit(self, handle: FlatParamHandle, divisor: float, *, keep: bool = False) -> None:
        """Sum what the handle has accumulated over the ranks, now or with others, and divide it by `divisor`.

        Args:
            handle: whose gradient.
            divisor: of the sum.
            keep: don't wait for older ones, however many, before `drain`: other ranks may be about to do something in
                which they need this one, before they send theirs.
        """
        companions = self._companions.get(handle)
        if companions is None:
            self._start(Bucket({handle: divisor}), keep)
            return
        name = companions[0].tag
        bucket = self._waiting.setdefault(name, Bucket())
        bucket.divisors[handle] = divisor
        if len(bucket.divisors) == len(companions):
            self._start(self._waiting.pop(name), keep)

    def drain(self) -> None:
        """Wait for all but as many as may be in flight."""
        self._drain(leave=_MAX_IN_FLIGHT)

    def finish(self) -> None:
        """Send what still waits, and wait until every shard has its gradient."""
        for name in sorted(self._waiting):
            self._start(self._waiting.pop(name))
        self._drain(leave=0)

    def abandon(self) -> None:
        """After a failed backward: let what is in flight end, and forget what waits."""
        self._waiting.clear()
        self._drain(leave=0)

    def _start(self, bucket: Bucket, keep: bool = False) -> None:
        # The new one is on its way before an older one is awaited, so the wire is not idle.
        self._in_flight.append(bucket.send())
        if not keep:
            self.drain()

    def _drain(self, leave: int) -> None:
        while len(self._in_flight) > leave:
            self._in_flight.popleft()()
