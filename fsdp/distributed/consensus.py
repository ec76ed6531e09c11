"""Ranks exchange values or outcomes, so that all ranks continue or all ranks raise an error.

These functions compare values across ranks, and run operations that may fail on a rank. All ranks receive all outcomes.
Therefore a rank never raises an error while other ranks wait for this rank in a collective until a timeout.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

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
from fsdp.distributed.devices import byte_view

_T = TypeVar("_T")
_Told = TypeVar("_Told")
# Communicators that together reach all ranks with a shard of a unit: first the ranks of a replica, then the replicas.
Ranks = Sequence[Communicator]


def peers_answer(ranks: Ranks) -> bool:
    """Return whether the other ranks exist, instead of being only simulated."""
    return all(comm.peers_answer for comm in ranks)


def size_of(ranks: Ranks) -> int:
    """Return the number of ranks."""
    return math.prod(comm.world_size for comm in ranks)


def number_among(ranks: Ranks) -> int:
    """Return the index of this rank's value in the result of `from_everyone`."""
    number = 0
    for comm in reversed(ranks):
        number = number * comm.world_size + comm.rank
    return number


def from_everyone(ranks: Ranks, value: _T) -> list[_T]:
    """Collective. Return the values of all ranks; the index in the first communicator of `ranks` varies fastest.

    Values are pickled. Simulated ranks have the value of this rank.

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
            different = different or error  # sent over the next communicator, whose ranks wait for this rank
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
    """Collective over `ranks`. Return a new group of `members`, a subset of `ranks` including this rank.

    torch names such a group, which only its members create, by a count of groups. Ranks with different names would wait
    for each other. Ranks with smaller counts therefore first create groups of a single rank.
    """
    own, timeout = number_of_groups(), next(filter(None, (timeout_of(comm.group) for comm in ranks)), None)
    for _ in range(max(from_everyone(ranks, own)) - own):
        dist.new_group([own_rank()], backend="gloo", use_local_synchronization=True)
    with _without_device(dist.group.WORLD):
        return dist.new_group(list(members), timeout, backend, use_local_synchronization=True)


@contextmanager
def _without_device(world: Any) -> Iterator[None]:
    """Create new groups in this context with separate connections.

    If the group of all ranks was created with a ``device_id``, torch (seen in 2.11 to 2.15) splits its NCCL
    communicator for each new group. All ranks must take part in a split, so members would wait for all other ranks.
    """
    device, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = device


def numbers_of(ranks: Ranks) -> list[int]:
    """Collective. Return the global rank of each rank, for error messages, in the order of `from_everyone`."""
    return from_everyone(ranks, own_rank())


def sent_by_first(ranks: Ranks, tensor: Tensor) -> Tensor:
    """Collective. Overwrite a contiguous tensor with the tensor of the first rank of `ranks`, and return it."""
    for comm in reversed(ranks):  # so that the first rank of each group receives the tensor before sending it
        if comm.world_size > 1 and tensor.numel():
            comm.broadcast(byte_view(tensor)).wait()
    return tensor


def agree_on(ranks: Ranks, things: str, name: str, shown: str = "") -> None:
    """Collective. Raise RuntimeError if the ranks have different `things`, compared by `name`.

    The error contains the first rank that differs from the first of all ranks, and `shown` (default: `name`) of both.
    """
    require_same(ranks, things, from_everyone(ranks, (name, shown or name)))


def require_same(ranks: Ranks, things: str, heard: Sequence[tuple[str, str]]) -> None:
    """Raise an error like `agree_on`, given the names and texts of all ranks. Collective only if they differ."""
    for number, (other, text) in enumerate(heard):
        if other != heard[0][0]:
            numbers = numbers_of(ranks)  # all ranks detect the same difference, and make this call
            raise RuntimeError(
                f"rank {own_rank()}: the ranks have different {things}: rank {numbers[0]} has {heard[0][1]} and rank "
                f"{numbers[number]} has {text}. Every rank must have the same."
            )


def agree_on_outcome(everyone: Iterable[Ranks], what: str, error: Exception | None) -> None:
    """Collective. Return only if the operation succeeded on all ranks.

    A rank with an `error` raises this error; all other ranks raise an OtherRankError with the text of the first error.
    `everyone` may contain multiple groups of ranks: an outcome of one group is sent to the next.
    """
    heard = ""
    for ranks in everyone:
        # also after an error in an earlier group, because the ranks of this group wait for this rank
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
    """Collective. Return the result of `job` if no rank raises an error; otherwise raise like `agree_on_outcome`."""
    try:
        result = job()
    except Exception as error:
        agree_on_outcome(everyone, what, error)
        raise
    agree_on_outcome(everyone, what, None)
    return result


def told_by_all(ranks: Ranks, what: str, job: Callable[[], tuple[_T, _Told]]) -> tuple[_T, list[_Told]]:
    """Collective. Return the first result of `job`, and the second results of all ranks, as ordered by `from_everyone`.

    A single exchange sends outcomes and results; if `job` raises on a rank, all ranks raise like `agree_on_outcome`.
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
