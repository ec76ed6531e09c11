"""`Receiver` receives streams of weights in a process without a process group, such as an inference engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fsdp.weights.changes import apply_changes
from fsdp.weights.links import CHANGES_BYTES, Kind, Link, accept, is_shared_memory, key_of, listening, text_of
from fsdp.weights.plan import WeightPlan, aligned

_HANDSHAKE = 10.0  # seconds to wait for a process that connects without sending data


class _Kept:
    """The weights that a receiver keeps for streams of changes."""

    def __init__(self) -> None:
        self.stream = ""
        self.buckets: list[Tensor] = []


class Update:
    """An update of weights that can be received once: by iteration, `buckets` or `state`.

    Attributes:
        plan: the names, dtypes and shapes of all tensors, and the content of the buckets.
    """

    def __init__(self, plan: WeightPlan, links: Sequence[Link], kept: _Kept | None, are_shared: bool) -> None:
        self.plan, self._links, self._kept, self._are_shared = plan, links, kept, are_shared
        self._is_over = False

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and tensors of each bucket; the tensors are views of memory that is reused.

        Raises:
            ValueError: if a tensor is divided among buckets; use `state` or `buckets` then.
        """
        if not self.plan.is_whole:
            self.stop("a tensor is larger than a bucket")
            raise ValueError("a tensor is larger than a bucket: send with larger buckets, or use state() or buckets()")
        for number, bucket in self.buckets():
            yield from self.plan.named(number, bucket).items()

    def state(self) -> dict[str, Tensor]:
        """Receive all weights, and return them by name, in new memory on the host. Tied names share a tensor."""
        made = [torch.empty(each.shape, dtype=each.dtype, device="cpu") for each in self.plan.tensors]
        for number, bucket in self.buckets():
            for piece in self.plan.buckets[number]:
                rows = made[piece.tensor].view(self.plan.tensors[piece.tensor].sizes)
                rows[piece.first : piece.first + piece.rows].copy_(self.plan.view(piece, bucket))
        return {name: tensor for each, tensor in zip(self.plan.tensors, made, strict=True) for name in each.names}

    def buckets(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the number and the bytes of each bucket ``[n]``, in order; the memory is reused.

        While the caller uses a bucket, the parts of the next bucket arrive. After the last bucket, the senders are
        notified that the weights are consumed. If the caller stops earlier, the stream fails on all ranks.

        Raises:
            ConnectionError: if a sender ends or reports an error.
            ValueError: if the weights differ from the sender's after changes have been applied.
            RuntimeError: if the weights were already received.
        """
        if self._is_over:
            raise RuntimeError("these weights were already received: use the next update of the receiver")
        self._is_over = True
        pool = ThreadPoolExecutor(len(self._links))
        try:
            yield from self._received(pool)
            for link in self._links:
                link.receive(Kind.END)
            if self._kept is not None:
                self._kept.stream = self.plan.stream
            for link in self._links:
                link.send(Kind.DONE)
            self.stop("")  # closes the links
        except BaseException as error:
            self.stop("the receiver has stopped" if isinstance(error, GeneratorExit) else text_of(error))
            raise
        finally:
            pool.shutdown(wait=True)

    def _received(self, pool: ThreadPoolExecutor) -> Iterator[tuple[int, Tensor]]:
        for link in self._links:
            link.send(Kind.ACCEPTED)
        kept = self._memory()
        most = 0 if self._are_shared else max(map(sum, self._sizes), default=0)
        staging = torch.empty(most, dtype=torch.uint8, device="cpu")
        arriving = self._start(pool, 0, staging)
        for number, nbytes in enumerate(self.plan.bucket_nbytes):
            bucket = kept[min(number, len(kept) - 1)][:nbytes]
            for rank, (link, future) in enumerate(zip(self._links, arriving, strict=True)):
                self._put(number, rank, future.result(), bucket)
                link.taken()
            arriving = self._start(pool, number + 1, staging)
            yield number, bucket

    def _memory(self) -> list[Tensor]:
        """Return memory for all buckets if they are kept, otherwise for the largest bucket."""
        if self._kept is None:
            return [torch.empty(max(self.plan.bucket_nbytes, default=0), dtype=torch.uint8, device="cpu")]
        self._kept.stream = ""  # until all new weights have arrived
        if not self.plan.base:
            self._kept.buckets = []  # released before the new buckets are allocated
            self._kept.buckets = [
                torch.empty(nbytes, dtype=torch.uint8, device="cpu") for nbytes in self.plan.bucket_nbytes
            ]
        return self._kept.buckets

    @cached_property
    def _sizes(self) -> list[list[int]]:
        """The maximum bytes that each rank sends for each bucket, aligned for all dtypes."""
        plan = self.plan
        return [
            [aligned(plan.packed_nbytes(plan.runs(number, part))) + CHANGES_BYTES for part in plan.parts]
            for number in range(len(plan.buckets))
        ]

    def _start(self, pool: ThreadPoolExecutor, number: int, staging: Tensor) -> list[Future[Tensor]]:
        """Start receiving the parts of a bucket from all ranks in parallel, so that no rank waits for another rank."""
        if number == len(self.plan.buckets):
            return []
        if self._are_shared:
            places = [staging] * len(self._links)
        else:
            places = staging[: sum(self._sizes[number])].split(self._sizes[number])
        return [pool.submit(link.receive_part, place) for link, place in zip(self._links, places, strict=True)]

    def _put(self, number: int, rank: int, received: Tensor, bucket: Tensor) -> None:
        runs = self.plan.runs(number, self.plan.parts[rank])
        nbytes = self.plan.packed_nbytes(runs)
        if self.plan.base:
            packed = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
            self.plan.pack(runs, bucket, packed)
            apply_changes(received, packed, f"bucket {number} of rank {rank}")
            received = packed
        if len(received) != nbytes:
            raise ConnectionError(f"rank {rank} has sent {len(received)} bytes of bucket {number} instead of {nbytes}")
        self.plan.unpack(runs, received, bucket)

    def stop(self, reason: str = "the receiver has stopped") -> None:
        """End the stream on all ranks, which raise an error with the reason, unless all weights were received."""
        self._is_over = True
        links, self._links = self._links, ()
        for link in links:
            link.end(reason)


class Receiver(AbstractContextManager["Receiver"]):
    """Listens for streams of weights, see `receive`. Each iteration waits for an `Update`.

    Attributes:
        address: the listening address, with the actual port if port 0 was requested.
    """

    def __init__(self, address: str, secret: str | bytes | None, timeout: float, keep: bool) -> None:
        self._key = key_of(secret, address)
        self._listener, self.address = listening(address)
        self._timeout, self._kept = timeout, _Kept() if keep else None
        self._waiting: dict[str, dict[int, tuple[Link, Any]]] = {}  # streams of which not all ranks have connected
        self._last: Update | None = None

    def __iter__(self) -> Iterator[Update]:
        while True:
            yield self.next()

    def next(self, timeout: float | None = None) -> Update:
        """Wait until all ranks of a sender have connected, and return the weights that they send.

        An earlier, incomplete update is stopped.

        Args:
            timeout: the number of seconds to wait for a connection; None waits forever.

        Raises:
            TimeoutError: if no rank has connected in this time.
        """
        self._stop_last()
        while True:
            self._listener.settimeout(timeout)
            try:
                connection, place = self._listener.accept()
            except TimeoutError:
                raise TimeoutError(f"no sender has connected to {self.address} for {timeout} s") from None
            link = Link(connection, f"the sender at {place or 'this host'}", min(_HANDSHAKE, self._timeout))
            try:
                found = self._greet(link)
            except (OSError, ValueError, KeyError, TypeError) as error:  # the process is not a sender, or has ended
                link.end(text_of(error))
                continue
            if found is not None:
                self._last = found
                return found

    def _stop_last(self) -> None:
        if self._last is not None:
            self._last.stop()
            self._last = None

    def _greet(self, link: Link) -> Update | None:
        """Accept a rank; return the update if this is the last rank to connect. Raise an error for invalid senders."""
        accept(link, self._key)
        hello = link.receive_json(Kind.STREAM)
        if is_shared_memory(self.address):
            link.map_shared()
        stream, rank, count = str(hello["stream"]), int(hello["rank"]), int(hello["ranks"])
        link.set_peer(f"rank {rank} of the sender", self._timeout)
        ranks = self._waiting.setdefault(stream, {})
        ranks[rank] = link, hello["plan"]
        if len(ranks) < count:
            return None
        self._drop(but=stream)
        del self._waiting[stream]
        links = [ranks[number][0] for number in range(count)]
        try:
            plan = WeightPlan.from_json(ranks[0][1])
            self._require_base(plan)
        except (ValueError, KeyError) as error:
            for each in links:
                each.end(text_of(error))
            return None
        return Update(replace(plan, stream=stream), links, self._kept, is_shared_memory(self.address))

    def _require_base(self, plan: WeightPlan) -> None:
        """Raise ValueError for changes to weights that this process does not have."""
        if plan.base and self._kept is None:
            raise ValueError("this receiver keeps no weights to which changes could apply: use receive(..., keep=True)")
        if plan.base and self._kept is not None and plan.base != self._kept.stream:
            raise ValueError(
                "this receiver does not have the weights to which the changes apply, for example because it was "
                "restarted: send all weights again"
            )

    def _drop(self, but: str) -> None:
        """Close the connections of all other streams of which not all ranks have connected."""
        for stream, ranks in list(self._waiting.items()):
            if stream != but:
                for link, _ in ranks.values():
                    link.end("another stream has begun")
                del self._waiting[stream]

    def close(self) -> None:
        """Stop listening, and stop an incomplete update."""
        self._stop_last()
        self._drop(but="")
        self._listener.close()

    def __exit__(self, *_: Any) -> None:
        self.close()


def receive(address: str, *, secret: str | bytes | None = None, timeout: float = 300.0, keep: bool = False) -> Receiver:
    """Listen for weights that the ranks of a sharded model send. No process group is required.

    The result is a context manager, and an iterator over updates: ``for update in receiver: ...``. During an update,
    at most two buckets are in memory, unless `keep` is True.

    Args:
        address: ``host:port`` for senders with a `SocketSink`, where port 0 chooses a free port; or a name without
            ``:`` for senders with a `SharedMemorySink` on the same host.
        secret: the secret of the senders; required for ``host:port``.
        timeout: the number of seconds to wait for data of a connected sender.
        keep: If True, keep a copy of all weights in host memory, which is required for streams of changes (``since=``).

    Raises:
        OSError: if the address is in use or not on this host.
        ValueError: if the address is not valid, or a required secret is missing.
    """
    return Receiver(address, secret, timeout, keep)
