"""Simulated ranks for planning: a rank communicates with them as with real ranks, but only counts the bytes.

A collective allocates and counts the same amounts as a real collective, because the same code runs without the
messages. Received values would be undefined, so the tensors are on the meta device. If ranks compare values, all
simulated ranks have the values of this rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fsdp.distributed.collectives import DirectExchange, TorchCollectives
from fsdp.distributed.communicator import Communicator, Messages, Pending, Tag, after_use_of, communicators
from fsdp.distributed.devices import HOST
from fsdp.distributed.messages import checked

META = torch.device("meta")


@dataclass(frozen=True)
class Message:
    """A collective of a rank, without its data.

    Attributes:
        kind: "all-gather", "reduce-scatter", "all-reduce" or "exchange".
        what: the description for error messages.
        tag: the tag of the message, which contains a handle's tag.
        nbytes: the number of sent bytes of parameters and gradients.
    """

    kind: str
    what: str
    tag: Tag
    nbytes: int


@dataclass(eq=False)
class ImaginedGroup:
    """A process group in which only a single rank exists.

    Args:
        number: the number of the existing rank.
        ranks: the world size.
        sends_pieces: if True, communicate as on gloo, by point-to-point messages; if False, use a backend's
            collectives, as on NCCL, with the number of bytes of ring algorithms.

    Attributes:
        sent: the collectives of the rank, in order, without control messages.
    """

    number: int
    ranks: int
    sends_pieces: bool
    sent: list[Message] = field(default_factory=list)

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return self.ranks

    @contextmanager
    def reachable(self) -> Iterator[None]:
        """Allow models to be sharded over this group in the context."""
        way = (_ImaginedExchange if self.sends_pieces else _ImaginedCollectives)(self)
        keys = [(self, device.type, type(checked(self, False)), False) for device in (HOST, META)]
        communicators.update(dict.fromkeys(keys, way))
        try:
            yield
        finally:
            for key in keys:
                del communicators[key]

    def note(self, kind: str, what: str, tag: Tag, nbytes: float) -> None:
        """Append a collective to `sent`."""
        self.sent.append(Message(kind, what, tag, round(nbytes)))


class _Imagined(TorchCollectives):
    def __init__(self, group: ImaginedGroup) -> None:
        super().__init__(group)
        self.peers_answer = False
        self._note = group.note

    def for_device(self, device: torch.device) -> Communicator:
        return self


class _ImaginedExchange(_Imagined, DirectExchange):
    """Point-to-point messages, which are counted instead of sent."""

    def _post(
        self, what: str, kind: str, tag: Tag, incoming: Messages, outgoing: Messages, *, is_lent: bool = False
    ) -> tuple[list[Any], list[Any]]:
        names = {"gather": "all-gather", "reduction": "reduce-scatter"}
        sent = [each for tensors in outgoing.values() for each in tensors]
        self._note(names.get(kind, kind), what, tag, sum(each.nbytes for each in sent))
        return [], [SimpleNamespace(wait=lambda *_: None, sent=sent)]  # keeps `sent` alive until awaited, like gloo

    def all_reduce(self, tensor: Tensor, op: str = "sum", what: str = "all-reduce") -> Pending:
        return Pending(what, (), lambda: tensor)  # only control messages use this collective


class _ImaginedCollectives(_Imagined):
    """The collectives of a backend, without communication, with the same tensors as in `TorchCollectives`."""

    @property
    def _ring(self) -> float:
        return (self.world_size - 1) / self.world_size

    def all_gather(self, full: Tensor, shard: Tensor, what: str, tag: Tag) -> Pending:
        self._note("all-gather", what, tag, self._ring * full.nbytes)
        return Pending(what, (), lambda: after_use_of(shard, full))

    def reduce_scatter(self, full: Tensor, what: str, tag: Tag, dtype: torch.dtype | None = None) -> Pending:
        self._note("reduce-scatter", what, tag, self._ring * full.nbytes)
        out, kind = full.new_empty(full.numel() // self.world_size), dtype or full.dtype
        return Pending(what, (), lambda: after_use_of(full, out).to(kind))

    def all_reduce(self, tensor: Tensor, op: str = "sum", what: str = "all-reduce") -> Pending:
        if op == "sum":
            self._note("all-reduce", what, what, 2 * self._ring * tensor.nbytes)
        return Pending(what, (), lambda: tensor)
