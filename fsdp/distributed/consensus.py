"""Ranks exchange values or outcomes, to continue together or to raise an error together.

These functions compare values of ranks, and run operations that may fail on a rank. All ranks receive all outcomes, so
no rank raises an error while other ranks wait for it in a collective until they time out.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp.distributed.communicator import (
    Communicator,
    DifferentCallsError,
    OtherRankError,
    number_of_groups,
    own_rank,
    timeout_of,
)

_T = TypeVar("_T")
_Told = TypeVar("_Told")
# Over each in turn, all that hold a shard of something are reached: those that share it, and then their replicas.
Ranks = Sequence[Communicator]


def peers_answer(ranks: Ranks) -> bool:
    """Return whether other ranks exist; they may only be simulated."""
    return all(comm.peers_answer for comm in ranks)


def size_of(ranks: Ranks) -> int:
    """Return the number of ranks."""
    return math.prod(comm.world_size for comm in ranks)


def number_among(ranks: Ranks) -> int:
    """Return which of the values of `from_everyone` is this rank's."""
    number = 0
    for comm in reversed(ranks):
        number = number * comm.world_size + comm.rank
    return number


def from_everyone(ranks: Ranks, value: _T) -> list[_T]:
    """Collective. Return the pickled values of all ranks that `ranks` reach in turn; the first varies fastest.

    Ranks that are only simulated have the value of this rank.

    Raises:
        DifferentCallsError: on all these ranks, if any of them are in different calls.
    """
    if not peers_answer(ranks):
        return [value] * size_of(ranks)
    values: list[_T] = [value]
    different: DifferentCallsError | None = None
    for comm in ranks:
        try:
            heard = [pickle.loads(each) for each in comm.all_gather_bytes(pickle.dumps(different or values))]
        except DifferentCallsError as error:
            different = different or error  # passed on to the next communicator, whose ranks wait for this rank
        except RuntimeError:
            if different is None:
                raise
        else:
            different = different or next((each for each in heard if isinstance(each, DifferentCallsError)), None)
            values = [each for other in heard for each in other] if different is None else values
    if different is not None:
        raise different
    return values


def new_group(ranks: Ranks, members: Sequence[int], backend: str | None = None) -> Any:
    """Collective over `ranks`. Return a new group of those of them that are `members`, which must include this rank.

    torch names a group that only its members create by a number of groups, and ranks with different names would wait
    for each other. So ranks with a smaller number than others first create groups of their own.
    """
    own, timeout = number_of_groups(), next(filter(None, (timeout_of(comm.group) for comm in ranks)), None)
    for _ in range(max(from_everyone(ranks, own)) - own):
        dist.new_group([own_rank()], backend="gloo", use_local_synchronization=True)
    with _without_device(dist.group.WORLD):
        return dist.new_group(list(members), timeout, backend, use_local_synchronization=True)


@contextmanager
def _without_device(world: Any) -> Iterator[None]:
    """Let new groups connect by themselves.

    If the group of all ranks was made with a ``device_id``, torch (seen in 2.11 to 2.15) splits its NCCL communicator
    for each new group. All ranks must take part in that, and members of the new group would wait for the others.
    """
    device, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = device


def numbers_of(ranks: Ranks) -> list[int]:
    """Collective. Return the ranks' numbers among all, for messages, in the order of `from_everyone`."""
    return from_everyone(ranks, own_rank())


def sent_by_first(ranks: Ranks, tensor: Tensor) -> Tensor:
    """Collective. Overwrite a contiguous tensor with the tensor of the first rank of `ranks`, and return it."""
    for comm in reversed(ranks):  # so that the first rank of each group has it when it sends its own
        if comm.world_size > 1 and tensor.numel():
            comm.broadcast(tensor.view(-1).view(torch.uint8)).wait()
    return tensor


def agree_on(ranks: Ranks, things: str, name: str, shown: str = "") -> None:
    """Collective. Raise RuntimeError if the ranks have different `things`, compared by name.

    The error includes the first rank that differs from rank 0, and the things of both ranks, as `shown` or else as the
    name.
    """
    require_same(ranks, things, from_everyone(ranks, (name, shown or name)))


def require_same(ranks: Ranks, things: str, heard: Sequence[tuple[str, str]]) -> None:
    """Raise as `agree_on`, given the names and texts of all ranks. Collective only if they differ."""
    for number, (other, text) in enumerate(heard):
        if other != heard[0][0]:
            numbers = numbers_of(ranks)  # all ranks are here
            raise RuntimeError(
                f"rank {own_rank()}: the ranks have different {things}: rank {numbers[0]} has {heard[0][1]} and rank "
                f"{numbers[number]} has {text}. Every rank must have the same."
            )


def agree_on_outcome(everyone: Iterable[Ranks], what: str, error: Exception | None) -> None:
    """Collective. Return only if the operation has succeeded on all ranks.

    A rank that has an `error` raises it, and the other ranks raise a RuntimeError that contains the first of these
    ranks. With several communicators in `everyone`, outcomes are passed from each to the next.
    """
    heard = ""
    for ranks in everyone:
        # also told by ranks that have heard of an error: the others wait for them
        heard = next(filter(None, from_everyone(ranks, heard if error is None else _text_of(error, what))), "")
    _raise(error, heard)


def _text_of(error: Exception, what: str) -> str:
    return f"rank {own_rank()} could not {what}. {type(error).__name__}: {error}"


def _raise(error: Exception | None, heard: str) -> None:
    if error is not None:
        raise error
    if heard:
        raise OtherRankError(f"rank {own_rank()}: {heard}")


def done_by_all(everyone: Iterable[Ranks], what: str, job: Callable[[], _T]) -> _T:
    """Collective. Return the result of `job` if it raises on no rank; otherwise raise as `agree_on_outcome`."""
    try:
        result = job()
    except Exception as error:
        agree_on_outcome(everyone, what, error)
        raise
    agree_on_outcome(everyone, what, None)
    return result


def told_by_all(ranks: Ranks, what: str, job: Callable[[], tuple[_T, _Told]]) -> tuple[_T, list[_Told]]:
    """Collective. Return a first result of `job`, and the second result on all ranks, in the order of `from_everyone`.

    Outcomes and results are exchanged at once; if `job` raises on a rank, all ranks raise as `agree_on_outcome`.
    """
    error, text, result, pickled = None, "", None, b""
    try:
        result, told = job()
        pickled = pickle.dumps(told)
    except Exception as caught:  # noqa: BLE001 (all ranks raise it)
        error, text = caught, _text_of(caught, what)
    heard = from_everyone(ranks, (text, pickled))
    _raise(error, next((text for text, _ in heard if text), ""))
    return cast(_T, result), [pickle.loads(other) for _, other in heard]
