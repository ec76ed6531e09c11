"""All communication between ranks, as pending work with the same interface on every backend.

`communicator` chooses between three implementations, by the group's backend and the device of the tensors:

- `TorchCollectives` calls `torch.distributed` asynchronously. This class is used for NCCL, torch's fake group and all
  other backends. CUDA needs no separate stream: a collective that is *issued* from the compute stream runs on the
  backend's stream after the work queued so far, and ``wait()`` makes the compute stream wait for it. Buffers are
  therefore allocated, used and freed in the order of a single stream, without ``record_stream``. Communication
  overlaps with computation because the next gather is issued before this unit's computation is queued.
- `DirectExchange` is used for gloo on CPU: every rank sends point-to-point messages to its peers, which receive them
  directly into the final memory. gloo's own reduce-scatter sends as many bytes as an all-reduce, twice the required
  number. gloo's transport thread processes point-to-point messages while Python computes.
- `StagedExchange` is used for CUDA tensors on a gloo group (multiple ranks on one GPU); it copies through the host.

A group of a single rank uses `LoneRank`, which does not require `torch.distributed`.

Every message on gloo, including control messages, has a tag, computed from its kind (for example, a gather),
its subject (a handle), its length and its dtype. Ranks that run different operations therefore time out with an error
about the awaited operation, instead of receiving wrong bytes. gloo's own collectives are not used: they are
matched only by order, and matched collectives of different lengths end the process.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp.distributed.communicator import LONE_RANK as LONE_RANK
from fsdp.distributed.communicator import Communicator as Communicator
from fsdp.distributed.communicator import (
    DifferentCallsError,
    Group,
    Messages,
    after_use_of,
    backend_names,
    behind,
    communicators,
    finish,
    forget_destroyed_groups,
    incomplete,
    of_destroyed,
    present_call,
    watch_process,
)
from fsdp.distributed.communicator import MissingRanks as MissingRanks
from fsdp.distributed.communicator import Pending as Pending
from fsdp.distributed.communicator import Tag as Tag
from fsdp.distributed.communicator import during as during
from fsdp.distributed.consensus import new_group
from fsdp.distributed.devices import HOST, is_host
from fsdp.distributed.messages import (
    Leaving,
    Receiving,
    Sending,
    as_bytes,
    as_tensor,
    blank,
    checked,
    give_up,
    wire_tag,
)

if TYPE_CHECKING:
    from fsdp.distributed.shared_memory import SharedMemory

if dist.is_available():
    # The functions of this module use the default group at import time as their default argument. torch imports it
    # lazily, and would keep that group until interpreter shutdown (see `made_once_for_groups`). Now no group exists.
    import torch.distributed.nn.functional

# torch 2.12 renamed these functions. They are looked up at each call, because tools count collectives by patching them.
_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"

# The first message of `all_gather_bytes`: the length of the payload, the current public call of the rank, and the
# beginning of the payload.
_LENGTH_BYTES, _CALL_BYTES, _BEGIN_BYTES = 8, 56, 448
_TRAINING = "forward or backward"
_TALK = "an exchange of messages"

_only_torch = False


def use_torch_collectives(enabled: bool = True) -> None:
    """Use the collectives of `torch.distributed` for all communication, on gloo too.

    This setting is intended for tools that count or trace collectives by patching these functions, and for
    comparisons. Communication becomes slower: gloo's reduce-scatter sends twice the bytes. NCCL always uses these
    collectives, with or without this setting. Call this function on all ranks with the same argument, before wrapping;
    models that are already wrapped do not change. ``enabled=False`` restores the default.
    """
    global _only_torch
    _only_torch = enabled


def _as_sent(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor, or its bytes: backends support the dtypes of gradients, but not all other dtypes."""
    is_known = tensor.is_floating_point() and tensor.itemsize > 1
    return tensor if is_known else tensor.view(-1).view(torch.uint8)


class TorchCollectives(Communicator):
    """The collectives of `torch.distributed`, on any backend.

    Args:
        group: the process group.
        device: a device of the tensors' type.
    """

    def __init__(self, group: Any, device: torch.device = HOST) -> None:
        super().__init__(group.rank(), group.size())
        self.group = group  # also if it is a user's object, for all-gathers and reductions
        self._apart: Communicator | None = None
        names = backend_names(group)
        self.peers_answer = "fake" not in names.values()
        self._serves_host = "cpu" in names or not names
        self._on_host: Communicator | None = None
        self._device = device
        self._is_connected = is_host(device)
        self._order = 0

    @property
    def _known(self) -> Any:
        """The process group of torch."""
        return behind(self.group)

    @property
    def on_host(self) -> Communicator:
        if self._serves_host:
            return self
        if self._on_host is None:
            self._on_host = TorchCollectives(self._new_group())
        return self._on_host

    def for_device(self, device: torch.device) -> Communicator:
        return communicator(self.group, device)

    def apart(self) -> Communicator:
        if self._apart is None:
            self._apart = communicator(self._new_group(), HOST)
        return self._apart

    def _new_group(self) -> Any:
        return new_group([self], dist.get_process_group_ranks(self._known), "gloo")

    def give_up(self) -> None:
        if "gloo" in backend_names(self._known).values():
            give_up(self._known)

    def take_order(self) -> int:
        order, self._order = self._order, 0
        return order

    def note_order(self, tag: Tag) -> None:
        self._order = zlib.crc32(repr(tag).encode(), self._order)

    def all_gather(self, full: Tensor, shard: Tensor, what: str, tag: Tag) -> Pending:
        self._is_connected = True
        self.note_order(tag)
        work = getattr(dist, _ALL_GATHER)(_as_sent(full), _as_sent(shard), group=self.group, async_op=True)
        return Pending(what, (work,), lambda: after_use_of(shard, full))

    def reduce_scatter(self, full: Tensor, what: str, tag: Tag, dtype: torch.dtype | None = None) -> Pending:
        out, kind = full.new_empty(full.numel() // self.world_size), dtype or full.dtype
        self._is_connected = True
        # NCCL does not support complex numbers. In other collectives, torch itself views them as pairs.
        summed, added = (torch.view_as_real(each).view(-1) if each.is_complex() else each for each in (out, full))
        work = getattr(dist, _REDUCE_SCATTER)(summed, added, group=self.group, async_op=True)
        return Pending(what, (work,), lambda: after_use_of(full, out).to(kind))

    def all_reduce(self, tensor: Tensor, op: str = "sum", what: str = "all-reduce") -> Pending:
        self._is_connected = True
        work = dist.all_reduce(tensor, op=_OPS[op], group=self.group, async_op=True)
        return Pending(what, (work,), lambda: tensor)

    def broadcast(self, tensor: Tensor) -> Pending:
        self._is_connected = True
        first = dist.get_global_rank(self._known, 0)
        work = dist.broadcast(tensor, src=first, group=self._known, async_op=True)
        return Pending("broadcast", (work,), lambda: tensor)

    def exchange(self, incoming: Messages, outgoing: Messages, what: str, tag: Tag) -> Pending:
        if not self._is_connected:
            # NCCL connects all ranks of a group at the first operation, and waits for ranks without messages too.
            self.all_reduce(torch.zeros(1, device=self._device), what=what).wait()
        operations = [
            dist.P2POp(way, _as_sent(tensor), group=self._known, group_peer=peer)
            for way, messages in ((dist.irecv, incoming), (dist.isend, outgoing))
            for peer, tensors in messages.items()
            for tensor in tensors
        ]
        works = dist.batch_isend_irecv(operations) if operations else []
        return Pending(what, works, lambda: after_use_of(operations, torch.empty(0, device=HOST)))

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        payloads: list[Any] = [None] * self.world_size
        work = SimpleNamespace(wait=lambda *_: dist.all_gather_object(payloads, payload, group=self._known))
        finish((work,), _TALK)  # reports this wait to the watchdog
        return payloads


class DirectExchange(TorchCollectives):
    """Collectives by point-to-point messages on gloo, for tensors on the CPU."""

    sends_pieces = True
    shares_from = 1 << 19  # bytes: larger messages are faster through shared memory than through sockets

    def __init__(self, group: Any) -> None:
        super().__init__(group)
        self._talk = _TALK if behind(group) is group else f"{_TALK}, with checksums"
        # Part of all tags: handles on different device types may have equal numbers, and settings of ranks may differ.
        self._way = f"{type(self).__name__} by {self._talk}"
        self._peers = [(self.rank + step) % self.world_size for step in range(1, self.world_size)]
        self._sent: deque[Sending] = deque()
        self._answered: Sending | None = None
        self._shared: SharedMemory | None = None  # after `share_memory`
        self._was_asked = False  # True after `share_memory` was negotiated

    def share_memory(self, nbytes: int) -> None:
        # Messages with checksums are sent through the group.
        if self._was_asked or nbytes < self.shares_from or not isinstance(self.group, dist.ProcessGroup):
            return
        from fsdp.distributed.shared_memory import SharedMemory  # not required for small models

        self._was_asked = True
        self._shared = SharedMemory.among(self.group, self.all_gather_bytes, self.shares_from)
        if self._shared is not None:
            self._way += " through shared memory"

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        found, shared = None, self._shared
        if shared is not None and is_host(device) and numel * dtype.itemsize >= self.shares_from * self.world_size:
            found = shared.empty(numel, dtype)
        return super().empty(numel, dtype, device) if found is None else found

    def is_read_in_place(self, tensor: Tensor) -> bool:
        return self._shared is not None and self._shared.holds(tensor)

    def restart_tags(self) -> None:
        super().restart_tags()
        if self._shared is not None:
            self._shared.forget()

    def for_device(self, device: torch.device) -> Communicator:
        return communicator(self._known, device)

    def all_gather(self, full: Tensor, shard: Tensor, what: str, tag: Tag) -> Pending:
        pieces = full.view(self.world_size, -1)
        incoming = {peer: [pieces[peer]] for peer in self._peers}
        outgoing = {peer: [shard] for peer in self._peers}
        received, works = self._post(what, "gather", tag, incoming, outgoing)
        self._sent.append(sending := Sending(works, what))
        pieces[self.rank].copy_(shard)
        return Pending(what, received, lambda: self._answer(sending, full))

    def _post(
        self, what: str, kind: str, tag: Tag, incoming: Messages, outgoing: Messages, *, is_lent: bool = False
    ) -> tuple[list[Any], list[Any]]:
        receive: Callable[[Tensor, int, int], Any] = partial(Receiving, self.group)
        send: Callable[[Tensor, int, int], Any] = self._send
        if (shared := self._shared) is not None:
            receive, send = shared.lend if is_lent else shared.receive, shared.sender(outgoing)
        errors: list[RuntimeError] = []

        def begin(start: Callable[[Tensor, int, int], Any], messages: Messages) -> list[Any]:
            begun = []
            for peer, tensors in messages.items():
                for each in tensors:
                    try:
                        begun.append(start(each, peer, wire_tag(self._way, kind, tag, each.numel(), each.dtype)))
                    except RuntimeError as error:  # this peer has ended, but other peers may wait for this rank
                        errors.append(error)
            return begun

        asked, works = begin(receive, incoming), begin(send, outgoing)
        if errors:
            self._sent.append(Sending(works, what))
            raise incomplete(what, errors[0]) from errors[0]
        return asked, works

    def _send(self, tensor: Tensor, peer: int, number: int) -> Any:
        return self.group.send([tensor], peer, number)

    def exchange(self, incoming: Messages, outgoing: Messages, what: str, tag: Tag) -> Pending:
        asked, works = self._post(what, "exchange", tag, incoming, outgoing)
        self._sent.append(Sending(works, what))
        return Pending(what, asked, lambda: torch.empty(0, device=HOST))

    def _answer(self, sending: Sending, full: Tensor) -> Tensor:
        # Release a shard that was cast for sending after it was sent. Peers request our shard before they send
        # their shards, so the messages of the previous gather are complete.
        if self._answered is not None:
            self._answered.finish()
        self._answered = sending
        self._forget_finished()
        return full

    def _forget_finished(self) -> None:
        while self._sent and self._sent[0].is_finished:
            self._sent.popleft()

    def reduce_scatter(self, full: Tensor, what: str, tag: Tag, dtype: torch.dtype | None = None) -> Pending:
        kind, pieces = dtype or full.dtype, list(full.view(self.world_size, -1))
        if self._shared is None or pieces[0].nbytes < self.shares_from:
            return self.swap(pieces, what, tag, lambda received: self._sum_in_rank_order(received, kind))
        others = {peer: [pieces[peer]] for peer in self._peers}
        lent, sent = self._post(what, "reduction", tag, others, others, is_lent=True)
        self._sent.append(Sending(sent, what))

        def total() -> Tensor:
            for peer, each in zip(self._peers, lent, strict=True):
                pieces[peer] = each.value
            first, second, *others = pieces
            found = torch.add(first.to(torch.promote_types(first.dtype, kind)), second)
            for other in others:
                found.add_(other)
            for each in lent:
                each.give_back()
            return found.to(kind)

        return Pending(what, lent, total)

    def swap(self, outgoing: Sequence[Tensor], what: str, tag: Tag, then: Callable[[list[Tensor]], Tensor]) -> Pending:
        works, received = self._swap(what, "reduction", tag, outgoing)
        return Pending(what, works, lambda: then(received))

    def _swap(self, what: str, kind: str, tag: Tag, outgoing: Sequence[Tensor]) -> tuple[list[Any], list[Tensor]]:
        """Start to send a tensor to each rank, and to receive a tensor of the same size from each, in rank order."""
        received = [each if rank == self.rank else torch.empty_like(each) for rank, each in enumerate(outgoing)]
        incoming = {peer: [received[peer]] for peer in self._peers}
        asked, sent = self._post(what, kind, tag, incoming, {peer: [outgoing[peer]] for peer in self._peers})
        return [*asked, *(Leaving(self.group, work) for work in sent)], received

    def _sum_in_rank_order(self, pieces: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        # Add in rank order, so that runs are reproducible to the bit. A received piece becomes the result: it
        # uses separate memory, while this rank's piece is part of a buffer that the caller will free.
        first, *others = (1, 0, *range(2, self.world_size)) if self.rank == 0 else range(self.world_size)
        total = pieces[first].to(torch.promote_types(pieces[first].dtype, dtype))
        for rank in others:
            total.add_(pieces[rank])
        return total.to(dtype)

    def all_reduce(self, tensor: Tensor, op: str = "sum", what: str = "all-reduce") -> Pending:
        works, received = self._swap(what, op, what, [tensor.cpu().contiguous()] * self.world_size)

        def combined() -> Tensor:
            total, *others = [received[0].clone(), *received[1:]]  # this rank's entry may be `tensor` itself
            for other in others:
                total.add_(other) if op == "sum" else torch.maximum(total, other, out=total)
            return tensor.copy_(total)

        return Pending(what, works, combined)

    def broadcast(self, tensor: Tensor) -> Pending:
        return Pending("broadcast", (), lambda: self._pass_on(tensor))

    def _pass_on(self, tensor: Tensor) -> Tensor:
        """Broadcast along a binomial tree: each round doubles the number of ranks with the tensor."""
        reach = 1
        while reach < self.world_size and not self.rank & reach:
            reach *= 2
        host = tensor.cpu()

        def through(incoming: Messages, outgoing: Messages) -> None:
            asked, sent = self._post("broadcast", "broadcast", 0, incoming, outgoing)
            finish(asked + sent, "broadcast")

        if self.rank:
            through({self.rank - reach: [host]}, {})
        receivers = [self.rank + (reach >> shift) for shift in range(1, reach.bit_length())]
        through({}, {peer: [host] for peer in receivers if peer < self.world_size})
        return tensor if host is tensor else tensor.copy_(host)

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """See `Communicator`. Uses a single exchange if all payloads are short; long payloads require a second one."""
        own_call = present_call().encode()[:_CALL_BYTES].ljust(_CALL_BYTES)
        begin = payload[:_BEGIN_BYTES].ljust(_BEGIN_BYTES, b"\0")
        header = as_tensor(len(payload).to_bytes(_LENGTH_BYTES, "little") + own_call + begin)
        works, received = self._swap(self._talk, "header", "", [header] * self.world_size)
        finish(works, self._talk)
        headers = list(map(as_bytes, received))
        self._require_one_call(each[_LENGTH_BYTES:-_BEGIN_BYTES] for each in headers)
        lengths = [int.from_bytes(each[:_LENGTH_BYTES], "little") for each in headers]
        rests = [blank(max(0, length - _BEGIN_BYTES)) for length in lengths]
        rests[self.rank] = as_tensor(payload[_BEGIN_BYTES:])
        incoming = {peer: [rests[peer]] for peer in self._peers if len(rests[peer])}
        outgoing = {peer: [rests[self.rank]] for peer in self._peers if len(rests[self.rank])}
        if incoming or outgoing:
            asked, sent = self._post(self._talk, "body", "", incoming, outgoing)
            finish(asked + sent, self._talk)
        begins = (each[-_BEGIN_BYTES:][:length] for each, length in zip(headers, lengths, strict=True))
        return [begin + as_bytes(rest) for begin, rest in zip(begins, rests, strict=True)]

    def _require_one_call(self, encoded: Iterable[bytes]) -> None:
        """Raise an error if ranks are in different calls of this library, because their payloads differ in meaning."""
        calls = [each.decode(errors="replace").strip() or _TRAINING for each in encoded]
        for number, call in enumerate(calls):
            if call != calls[0]:
                ranks = dist.get_process_group_ranks(self._known)
                raise DifferentCallsError(
                    f"the ranks are in different calls, rank {ranks[0]} in {calls[0]} and rank "
                    f"{ranks[number]} in {call}. Make the same calls on every rank, in the same order."
                )

    def meet(self, what: str, tag: Tag) -> None:
        works, _ = self._swap(what, "meeting", tag, [blank(1)] * self.world_size)
        finish(works, what)

    def settle(self) -> None:
        self._answered = None
        while self._sent:  # a signal handler that runs during a wait may settle all of them
            self._sent[0].finish()
            self._forget_finished()


class StagedExchange(DirectExchange):
    """Collectives of CUDA tensors on a gloo group, through host memory: for tests with multiple ranks on one GPU."""

    def all_gather(self, full: Tensor, shard: Tensor, what: str, tag: Tag) -> Pending:
        host = torch.empty(full.shape, dtype=full.dtype, device="cpu")
        arrived = super().all_gather(host, shard.cpu(), what, tag)
        return Pending(what, (), lambda: full.copy_(arrived.wait()))

    def swap(self, outgoing: Sequence[Tensor], what: str, tag: Tag, then: Callable[[list[Tensor]], Tensor]) -> Pending:
        arrived = super().swap([each.cpu() for each in outgoing], what, tag, then)
        return Pending(what, (), lambda: arrived.wait().to(outgoing[0].device))

    def exchange(self, incoming: Messages, outgoing: Messages, what: str, tag: Tag) -> Pending:
        hosts = {
            peer: [torch.empty(each.shape, dtype=each.dtype, device="cpu") for each in tensors]
            for peer, tensors in incoming.items()
        }
        sent = {peer: [each.cpu() for each in tensors] for peer, tensors in outgoing.items()}
        arrived = super().exchange(hosts, sent, what, tag)

        def deliver() -> Tensor:
            arrived.wait()
            for peer, tensors in incoming.items():
                for each, host in zip(tensors, hosts[peer], strict=True):
                    each.copy_(host)
            return torch.empty(0, device=HOST)

        return Pending(what, (), deliver)


_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX} if dist.is_available() else {}


def communicator(group: Group, device: torch.device) -> Communicator:
    """Return the communicator of `group` for tensors on `device`; there is one for each device type of a group."""
    if group.size() == 1:
        _watch()  # other ranks may expect this rank in a larger group, and wait for it
        return LONE_RANK
    backends = backend_names(group)
    is_gloo = backends.get(device.type) == "gloo" and hasattr(group, "send")
    # Users wrap a group in an object in order to observe the collectives of torch.
    is_ours = is_gloo and not _only_torch and behind(group) is group
    if is_ours and "cpu" not in backends:
        raise ValueError(
            f"the process group uses gloo for {device.type} only, which requires gloo for host memory as well. Create "
            f"the group with backend='cpu:gloo,{device.type}:gloo'"
        )
    known = checked(group, is_ours)
    key = (group, device.type, type(known), is_ours)
    found: Communicator | None = communicators.get(key) or of_destroyed.get(key)
    if found is None:
        if is_ours:
            found = DirectExchange(known) if is_host(device) else StagedExchange(known)
        else:
            found = TorchCollectives(known, device)
        watch_process()
        communicators[key] = found
        _watch()
        forget_destroyed_groups()
    return found


def _watch() -> None:
    from fsdp.distributed.watchdog import watch  # imports sockets and threads, which collectives do not require

    watch()
