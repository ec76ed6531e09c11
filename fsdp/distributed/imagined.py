"""Ranks that are imagined: a rank communicates with them as with others, and counts instead of sending.

They are for planning. What a collective allocates and how much it sends is that of the real way, since it is the real
one's code that runs; only the messages are left out. What would be received is undefined, so the tensors are on the
meta device, and where ranks compare words, all others say what this one says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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
    """One collective of a rank.

    Attributes:
        kind: "all-gather", "reduce-scatter", "all-reduce" or "exchange".
        what: what errors would call it.
        tag: of what it is; the number of a handle's tag is in it.
        nbytes: of parameters and gradients, sent by this rank.
    """

    kind: str
    what: str
    tag: Tag
    nbytes: int


@dataclass(eq=False)
class ImaginedGroup:
    """A process group of which only one rank exists.

    Args:
        number: the rank that exists.
        ranks: how many there would be.
        sends_pieces: they would communicate as on gloo, by messages from rank to rank; False: by the backend's own
            collectives, as on NCCL, which are taken to send as little as rings do.

    Attributes:
        sent: what the rank has communicated, in order; words of ranks about each other are not in it.
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
        """Let models be sharded over the group inside."""
        way = (_ImaginedExchange if self.sends_pieces else _ImaginedCollectives)(self)
        keys = [(self, device.type, type(checked(self, False)), False) for device in (HOST, META)]
        communicators.update(dict.fromkeys(keys, way))
        try:
            yield
        finally:
            for key in keys:
                del communicators[key]

    def note(self, kind: str, what: str, tag: Tag, nbytes: float) -> None:
        """Count a collective."""
        self.sent.append(Message(kind, what, tag, round(nbytes)))


class _Sent:
    """Messages that hold what is sent until they are awaited, as gloo's do."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def wait(self, *limit: Any) -> None:
        """They have left at once."""


class _ImaginedExchange(DirectExchange):
    """Pieces from rank to rank, which nobody receives."""

    def __init__(self, group: ImaginedGroup) -> None:
        super().__init__(group)
        self.peers_answer = False
        self._note = group.note

    def for_device(self, device: torch.device) -> Communicator:
        return self

    def _post(
        self, what: str, kind: str, tag: Tag, incoming: Messages, outgoing: Messages
    ) -> tuple[list[Any], list[Any]]:
        names = {"gather": "all-gather", "reduction": "reduce-scatter"}
        sent = [each for tensors in outgoing.values() for each in tensors]
        self._note(names.get(kind, kind), what, tag, sum(each.nbytes for each in sent))
        return [], [_Sent(sent)]

    def all_reduce(self, tensor: Tensor, op: str = "sum", what: str = "all-reduce") -> Pending:
        return Pending(what, (), lambda: tensor)  # only words are reduced like this


class _ImaginedCollectives(TorchCollectives):
    """The collectives of a backend, none of which takes place; the tensors are those of `TorchCollectives`."""

    def __init__(self, group: ImaginedGroup) -> None:
        super().__init__(group)
        self.peers_answer = False
        self._note = group.note

    def for_device(self, device: torch.device) -> Communicator:
        return self

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
