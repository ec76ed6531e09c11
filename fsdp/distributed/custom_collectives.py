"""`CustomAllGather` and `CustomReduceScatter` are communicators using a user's object for the collective.

The objects implement the interface of torch's ``AllGather`` and ``ReduceScatter`` (`torch.distributed.fsdp`): they
allocate the input and output tensors, and are then called with these tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp.distributed.communicator import Communicator, Messages, Pending, Tag, after_use_of


class Collective(Protocol):
    """A user's all-gather or reduce-scatter."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a tensor for sending or receiving."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **how: Any) -> Any:
        """Start the collective and return its work, or None if it is complete. `op` is passed to a reduce-scatter."""


class InFront(Communicator):
    """A communicator that forwards all calls to another communicator."""

    def __init__(self, behind: Communicator, collective: Any) -> None:
        super().__init__(behind.rank, behind.world_size)
        self._behind, self._collective = behind, collective
        self.peers_answer, self.sends_pieces = behind.peers_answer, behind.sends_pieces
        self.group = behind.group

    @classmethod
    def of(cls, comm: Communicator, collective: Any) -> Communicator:
        """Return a communicator that uses `collective`, and replaces a custom collective of the same class in `comm`.

        Raises:
            RuntimeError: if `comm` uses a custom collective of another class.
        """
        if isinstance(comm, InFront) and not isinstance(comm, cls):
            raise RuntimeError(
                f"{cls.__name__} conflicts with the {type(comm).__name__} that is set already. Omit one of them; "
                "fsdp.compress(model) without other arguments ends quantised communication."
            )
        return cls(_behind(comm), collective)

    def new_tag(self) -> int:
        return self._behind.new_tag()  # both communicators send to the same ranks

    def take_order(self) -> int:
        return self._behind.take_order()

    def note_order(self, tag: Tag) -> None:
        self._behind.note_order(tag)

    @property
    def on_host(self) -> Communicator:
        return self._behind.on_host

    def for_device(self, device: torch.device) -> Communicator:
        return type(self)(self._behind.for_device(device), self._collective)

    def apart(self) -> Communicator:
        return self._behind.apart()

    def ensure_connected(self) -> None:
        self._behind.ensure_connected()

    def all_gather(self, full: Tensor, shard: Tensor, what: str, tag: Tag) -> Pending:
        return self._behind.all_gather(full, shard, what, tag)

    def reduce_scatter(self, full: Tensor, what: str, tag: Tag, dtype: torch.dtype | None = None) -> Pending:
        return self._behind.reduce_scatter(full, what, tag, dtype)

    def all_reduce(self, tensor: Tensor, op: str = "sum", what: str = "all-reduce") -> Pending:
        return self._behind.all_reduce(tensor, op, what)

    def broadcast(self, tensor: Tensor) -> Pending:
        return self._behind.broadcast(tensor)

    def meet(self, what: str, tag: Tag) -> None:
        self._behind.meet(what, tag)

    def exchange(self, incoming: Messages, outgoing: Messages, what: str, tag: Tag) -> Pending:
        return self._behind.exchange(incoming, outgoing, what, tag)

    def swap(self, outgoing: Sequence[Tensor], what: str, tag: Tag, then: Callable[[list[Tensor]], Tensor]) -> Pending:
        return self._behind.swap(outgoing, what, tag, then)

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        return self._behind.all_gather_bytes(payload)

    def settle(self) -> None:
        self._behind.settle()


class CustomAllGather(InFront):
    """A communicator using a user's object for all-gathers."""

    def __init__(self, behind: Communicator, collective: Any) -> None:
        super().__init__(behind, collective)
        self.sends_pieces = False  # the object sends no tag

    def all_gather(self, full: Tensor, shard: Tensor, what: str, tag: Tag) -> Pending:
        self.note_order(tag)
        gathered = self._collective.allocate((full.numel(),), dtype=full.dtype, device=full.device)
        own = gathered.view(self.world_size, -1)[self.rank].copy_(shard)
        work = self._collective(output_tensor=gathered, input_tensor=own, group=self.group, async_op=True)
        return Pending(what, (work,), lambda: full.copy_(gathered))


class CustomReduceScatter(InFront):
    """A communicator using a user's object for reduce-scatters."""

    def reduce_scatter(self, full: Tensor, what: str, tag: Tag, dtype: torch.dtype | None = None) -> Pending:
        sent = self._collective.allocate((full.numel(),), dtype=full.dtype, device=full.device).copy_(full)
        size, kind = (full.numel() // self.world_size,), dtype or full.dtype
        shard = self._collective.allocate(size, dtype=full.dtype, device=full.device)
        work = self._collective(
            output_tensor=shard, input_tensor=sent, group=self.group, op=dist.ReduceOp.SUM, async_op=True
        )
        return Pending(what, (work,), lambda: after_use_of(sent, shard).to(kind))


def moved(comm: Communicator, to: Communicator) -> Communicator:
    """Return the communicator `to` with the custom collective of `comm`, if any."""
    return type(comm).of(_behind(to), comm._collective) if isinstance(comm, InFront) else _behind(to)


def _behind(comm: Communicator) -> Communicator:
    return comm._behind if isinstance(comm, InFront) else comm
