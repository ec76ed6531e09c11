"""What a way to other ranks offers, whatever the backend; and the two ways that need no `torch.distributed`.

The ways that do are in `_comm`.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# By rank, one tensor after the other.
Messages = Mapping[int, Sequence[Tensor]]

# What a message is about: the number of a handle (`Communicator.new_tag`), a word, or both. It is alike on all ranks,
# while texts for people need not be.
Tag = int | str | tuple[int | str, ...]

# The public call that this thread is in, as users write it; empty in forward and backward.
_call: ContextVar[str] = ContextVar("_call", default="")


class Pending:
    """A collective in flight; `wait` is the only way to its result."""

    def __init__(self, what: str, works: Sequence[Any], result: Callable[[], Tensor]) -> None:
        self._what = what
        self._works = works
        self._result: Callable[[], Tensor] | None = result
        self._arrived: Tensor
        self._failure: str | None = None

    def after(self, work: Any) -> Pending:
        """The same, which besides waits for `work`."""
        self._works = [work, *self._works]
        return self

    def wait(self) -> Tensor:
        if self._failure is not None:
            raise RuntimeError(self._failure)  # what is there is not all of it
        if self._result is not None:
            works, self._works = self._works, ()  # gloo would wait for another message the second time
            try:
                for work in works:
                    finish(work, self._what)
                # What was sent is held by this until now, and not a moment longer.
                result, self._result = self._result, None
                self._arrived = result()
            except RuntimeError as error:
                self._failure = str(error)
                raise
        return self._arrived


class Communicator(ABC):
    """The ranks of one group. Every method is collective over them."""

    peers_answer = True  # False where the other ranks are only simulated, so comparing with them means nothing.
    sends_pieces = False  # True where it is up to us what goes from rank to rank, under the tag.

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._tags = itertools.count()

    def new_tag(self) -> int:
        """A tag for one handle. Every rank of the group must ask equally often."""
        return next(self._tags)

    @property
    def talk_device(self) -> torch.device:
        """Where short messages should be: on the host where that can be, so that nobody waits for the device."""
        return torch.device("cpu")

    def for_device(self, device: torch.device) -> Communicator:
        """The way to the same ranks for tensors on another device."""
        return self

    def apart(self) -> Communicator:
        """A way to the same ranks for CPU tensors that nobody else uses, for a thread; collective the first time."""
        return self

    def ensure_connected(self) -> None:  # noqa: B027 (there always is, but after unpickling)
        """Raise RuntimeError if there is no way to the ranks."""

    def __deepcopy__(self, memo: Any) -> Communicator:
        return self  # the ranks are the same ones

    def __reduce__(self) -> tuple[Any, ...]:
        return MissingRanks, (self.rank, self.world_size)

    @abstractmethod
    def all_gather(self, full: Tensor, shard: Tensor, what: str, tag: Tag) -> Pending:
        """Fill `full` ``[world_size * n]`` with every rank's `shard` ``[n]``, which must not change until `settle`.

        Both are of one dtype.
        """

    @abstractmethod
    def reduce_scatter(self, full: Tensor, what: str, tag: Tag, dtype: torch.dtype | None = None) -> Pending:
        """Sum `full` ``[world_size * n]`` over the ranks; the result of `wait` is this rank's ``[n]`` of it.

        It is sent in its own dtype. The result is of `dtype` (None: the same), in which we sum where that is up to us.
        `full` must be left alone until `wait` has returned, and may share memory with the result.
        """

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: str = "sum", what: str = "all-reduce") -> Pending:
        """Reduce `tensor` in place by "sum" or "max".

        It is small. What it is, `what`, is written alike on all ranks.
        """

    @abstractmethod
    def broadcast(self, tensor: Tensor, source: int = 0) -> Pending:
        """Overwrite `tensor` in place with that of the group's rank `source`."""

    def meet(self, what: str, tag: Tag) -> None:  # noqa: B027 (without tags there is nothing that ranks could tell)
        """Block until all ranks come to the same, before they communicate in a way that does not say what it is."""

    @abstractmethod
    def exchange(self, incoming: Messages, outgoing: Messages, what: str, tag: Tag) -> Pending:
        """Send tensors to some ranks and receive others from some, which may be all there is to it for them.

        Not collective: two ranks take part that name each other, with tensors of equal sizes in the same order. All
        are contiguous. The result of `wait` means nothing; what is sent must not change until `settle`.

        Args:
            incoming, outgoing: by rank of the group; this rank itself is not among them.
            what: it is, for errors.
            tag: what it is about.
        """

    @abstractmethod
    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        """Every rank's payload, of any length, in rank order; blocks.

        Raises:
            RuntimeError: on every rank, if they are in different public calls (`during`) and the backend has tags.
        """

    def settle(self) -> None:  # noqa: B027 (where sending is part of the collective nothing is left to settle)
        """Block until peers have taken all that this rank sent, so that shards may be written again."""


class MissingRanks(Communicator):
    """What was a group before it was pickled: its size and this rank are known, the way there is not."""

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"this model was unpickled as rank {self.rank} of {self.world_size}, and groups of ranks cannot be "
            "pickled: assign `process_group` on every FullyShardedDataParallel in it (fsdp.get_fsdp_instances(model)) "
            "before use"
        )

    all_gather = reduce_scatter = all_reduce = broadcast = exchange = all_gather_bytes = ensure_connected = _refuse


class LoneRank(Communicator):
    """A world of one: what is gathered and reduced is already here."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _lone_rank, ()

    def __init__(self) -> None:
        super().__init__(rank=0, world_size=1)

    def all_gather(self, full: Tensor, shard: Tensor, what: str, tag: Tag) -> Pending:
        if full.data_ptr() != shard.data_ptr():
            full.copy_(shard, non_blocking=True)
        return Pending(what, (), lambda: full)

    def reduce_scatter(self, full: Tensor, what: str, tag: Tag, dtype: torch.dtype | None = None) -> Pending:
        return Pending(what, (), lambda: full.to(dtype or full.dtype))

    def all_reduce(self, tensor: Tensor, op: str = "sum", what: str = "all-reduce") -> Pending:
        return Pending(what, (), lambda: tensor)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Pending:
        return Pending("broadcast", (), lambda: tensor)

    def exchange(self, incoming: Messages, outgoing: Messages, what: str, tag: Tag) -> Pending:
        return Pending(what, (), lambda: torch.empty(0))

    def all_gather_bytes(self, payload: bytes) -> list[bytes]:
        return [payload]


LONE_RANK = LoneRank()


def _lone_rank() -> LoneRank:
    return LONE_RANK


def finish(work: Any, what: str) -> None:
    if work is None:
        return
    try:
        work.wait()
    except RuntimeError as error:
        raise incomplete(what, error) from error


def incomplete(what: str, error: RuntimeError) -> RuntimeError:
    call = _call.get()
    if call:
        remedy = f"This rank is in {call}: make the same call on every rank of the group"
    else:
        remedy = (
            "This rank is in forward or backward. Every rank of the group must run the same units in every step, in "
            "evaluation too, and make the same collective calls (state_dict, clip_grad_norm_, fsdp.save). Where ranks "
            "have different numbers of batches use fsdp.join, and where not every rank runs a module fsdp.cond"
        )
    return RuntimeError(
        f"rank {own_rank()}: {what} did not complete: {error}. {remedy}; look at what the other ranks were doing, one "
        "may have failed or taken another path."
    )


@contextmanager
def during(call: str) -> Iterator[None]:
    """Have errors inside say that this rank is in a public call: in the outermost one, which the user has made.

    Args:
        call: as users write it, alike on all ranks.
    """
    token = _call.set(_call.get() or call)
    try:
        yield
    finally:
        _call.reset(token)


def present_call() -> str:
    """The public call that this thread is in."""
    return _call.get()


def own_rank() -> int:
    """This rank's number among all, for errors."""
    return dist.get_rank() if dist.is_initialized() else 0
