"""Optimizer state as a stream of (name, key, tensor): whole tensors, one at a time, from which all else is built.

First ranks tell each other what they have: the keys, the dtypes of what follows the parameter's elements, and all that
is small. Then each tensor's parts go from their owners straight into their places in the whole one, on the ranks that
want it. Others need no memory for that.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsdp.distributed.collectives import Communicator, Pending
from fsdp.distributed.consensus import agree_on_outcome, done_by_all, number_among
from fsdp.distributed.dtensor import whole
from fsdp.engine.offload import DiskStorage
from fsdp.optim_utils.params import Listed, Original, OwnState, Parameters

# Bytes of whole tensors that may be on their way at once; one tensor may, however large.
WINDOW = 2**25


class Elements(NamedTuple):
    """State with a value for each element of the parameter."""

    dtype: torch.dtype


class Number(NamedTuple):
    """State that is a 0-d tensor."""

    value: Any
    dtype: torch.dtype

    def tensor(self) -> Tensor:
        """It, as the optimizer has it."""
        return torch.tensor(self.value, dtype=self.dtype)


class Value(NamedTuple):
    """State that is no tensor."""

    value: Any


Kind = Elements | Number | Value
Kinds = dict[str, Kind]  # by the key of the state


@dataclass(frozen=True, eq=False)
class Shared:
    """What all ranks have of the state of one parameter that an optimizer sees.

    Attributes:
        kinds: by key; numbers and values are those of the first rank that has them.
        numbers: by key of a `Number`, that of each rank.
    """

    kinds: Kinds
    numbers: Mapping[str, list[Number]]


class Window:
    """What is on its way, in its order: not more than so many bytes at once."""

    def __init__(self) -> None:
        self._bytes = 0
        self._ahead: deque[tuple[Callable[[], Any], int]] = deque()

    def has_room(self, nbytes: int) -> bool:
        """Whether something may be sent before the first one has arrived."""
        return not self._ahead or self._bytes + nbytes <= WINDOW

    def add(self, finish: Callable[[], Any], nbytes: int) -> None:
        self._ahead.append((finish, nbytes))
        self._bytes += nbytes

    def first(self) -> Any:
        """Wait for the first one."""
        finish, nbytes = self._ahead.popleft()
        self._bytes -= nbytes
        return finish()

    def __bool__(self) -> bool:
        return bool(self._ahead)


class OptimStream:
    """Collective. What there is of an optimizer's state, to be fetched once.

    Args:
        params: of the model.
        own: what this rank has.
        recipient: the number of the rank that wants it, among those of the root; None for all of them.

    Raises:
        ValueError: on a rank whose state cannot be put together, or if ranks have different states; RuntimeError on the
            other ranks.
    """

    def __init__(self, params: Parameters, own: OwnState, recipient: int | None) -> None:
        self.params, self.own = params, own
        self._everyone = params.root.everyone
        self.is_wanted = recipient is None or number_among(self._everyone) == recipient
        self.shared: dict[Listed, Shared] = {}
        self._receivers: dict[Communicator, list[int]] = {}
        self._members: dict[Communicator, list[Listed]] = {}
        for one in params.listed:
            self._members.setdefault(one.comm, []).append(one)
        payloads = done_by_all(
            [self._everyone], _WHAT, lambda: {comm: self._payload(members) for comm, members in self._members.items()}
        )
        problems = [problem for comm, payload in payloads.items() for problem in self._hear(comm, payload)]
        agree_on_outcome([self._everyone], _WHAT, ValueError(problems[0]) if problems else None)

    def _payload(self, members: Sequence[Listed]) -> bytes:
        states = self.own.states
        described = [_described(one, states[one]) if one in states else None for one in members]
        return pickle.dumps((self.is_wanted, described))

    def _hear(self, comm: Communicator, payload: bytes) -> list[str]:
        """What the ranks that share some parameters have of their state; and what is wrong with it."""
        heard = [pickle.loads(other) for other in comm.all_gather_bytes(payload)]
        self._receivers[comm] = [rank for rank, (is_wanted, _) in enumerate(heard) if is_wanted]
        problems = []
        for number, one in enumerate(self._members[comm]):
            kinds = [every[number] for _, every in heard]
            if any(kinds) and not (one.is_uncollected and comm.world_size > 1):
                problems += _differences(one, kinds)
                self.shared[one] = _shared(one, kinds)
        return problems

    @property
    def sizes(self) -> Iterator[tuple[Listed, Original, str, Elements]]:
        """All that will be streamed, in its order."""
        for one, original in self.params.numbered:
            if one in self.shared:
                for key, kind in self.shared[one].kinds.items():
                    if isinstance(kind, Elements):
                        yield one, original, key, kind

    def tensors(self) -> Iterator[tuple[Original, str, Tensor]]:
        """Collective: to be gone through on every rank; if it is left early, the rest is received and dropped.

        Yields:
            Parameter, key, and the tensor in the parameter's shape: on the host, in memory of its own, on ranks that
            want it; elsewhere on the meta device.
        """
        window, left = Window(), deque(self.sizes)

        def next_one() -> tuple[Original, str, Tensor]:
            while left and window.has_room(_nbytes(left[0])):
                window.add(self._post(*left[0]), _nbytes(left[0]))
                left.popleft()
            return window.first()

        try:
            while left or window:
                yield next_one()
        except GeneratorExit:  # the other ranks wait for what this one has or wants
            while left or window:
                next_one()
            raise
        finally:
            self._settle()

    def _post(self, one: Listed, original: Original, key: str, kind: Elements) -> Callable[[], Any]:
        """Begin to send and receive the parts of one tensor."""
        comm, shape = one.comm, one.kept_shape(original)
        receivers = self._receivers[comm]
        mine = one.interval(original, comm.rank)
        part = None
        if mine is not None and receivers:
            value = self.own.states[one][key].detach().reshape(-1)
            part = value[mine.offset : mine.offset + mine.numel].to(one.device).contiguous()
        if not self.is_wanted:
            made = torch.empty(original.shape, dtype=kind.dtype, device="meta")
            sending = self._exchange(one, {}, {rank: [part] for rank in receivers} if part is not None else {})
            return lambda: self._sent(one, sending, (original, key, made))
        made = torch.empty(shape, dtype=kind.dtype, device=one.device)
        flat = made.view(-1)
        incoming = {
            rank: [flat[there.start : there.stop]]
            for rank in range(comm.world_size)
            if rank != comm.rank and (there := one.interval(original, rank)) is not None
        }
        others = [rank for rank in receivers if rank != comm.rank] if part is not None else []
        pending = self._exchange(one, incoming, {rank: [part] for rank in others})
        if part is not None and mine is not None:
            flat[mine.start : mine.stop].copy_(part)

        def finish() -> tuple[Original, str, Tensor]:
            if pending is not None:
                pending.wait()
            tensor = made if original.part is None else whole(original.part.dtensor(made))
            return original, key, tensor.cpu()

        return finish

    @staticmethod
    def _sent(one: Listed, pending: Pending | None, result: Any) -> Any:
        if pending is not None:
            pending.wait()
            if one.device.type != "cpu":
                one.comm.settle()  # what was copied only to be sent can go
        return result

    @staticmethod
    def _exchange(one: Listed, incoming: Any, outgoing: Any) -> Pending | None:
        if one.handle is None or not (incoming or outgoing):
            return None
        what, tag = f"gather of the optimizer state of {one.name}", ("optimizer", one.handle.tag)
        return one.comm.exchange(incoming, outgoing, what, tag)

    def _settle(self) -> None:
        """Block until the state may be changed: all that was sent of it has arrived."""
        for comm in self._receivers:
            comm.settle()
        release(self.params)


_WHAT = "gather its optimizer state"


def release(params: Parameters) -> None:
    """What was read of state on disk is not wanted soon."""
    for one in params.listed:
        if one.handle is not None:
            one.handle.storage.release()
    for files in {
        one.handle.storage.files for one in params.listed if one.handle and isinstance(one.handle.storage, DiskStorage)
    }:
        files.release()


def _nbytes(entry: tuple[Listed, Original, str, Elements]) -> int:
    return entry[1].shape.numel() * entry[3].dtype.itemsize


# --- what there is --------------------------------------------------------------------------------------------------


def _described(one: Listed, state: Mapping[str, Any]) -> Kinds:
    """What this rank has of one parameter's state.

    Raises:
        TypeError: for state that is no mapping.
        ValueError: for a tensor that is neither of the shard's shape nor a number.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"the optimizer's state of {one.name} is a {type(state).__name__} and no mapping")
    if one.handle is not None:
        one.handle.storage.check(f"gathering the optimizer state of {one.name}", state.values())
    return {key: _kind(one, key, value) for key, value in state.items()}


def _kind(one: Listed, key: str, value: Any) -> Kind:
    if not isinstance(value, Tensor):
        return Value(value)
    if value.shape == one.param.shape and value.dim() > 0:
        return Elements(value.dtype)
    if value.dim() == 0 and (one.param.dim() > 0 or is_number(key)):
        return Number(value.item(), value.dtype)
    if value.dim() == 0:
        return Elements(value.dtype)
    raise ValueError(odd_shape(one, key, value.shape, f"this rank's shard of it has shape {tuple(one.param.shape)}"))


def odd_shape(one: Listed, key: str, shape: Sequence[int], wanted: str) -> str:
    """What to say of state that can be neither cut nor put together."""
    return (
        f"the optimizer's state '{key}' of {one.name} has shape {tuple(shape)}, and {wanted}: what is neither of the "
        "parameter's shape nor a number cannot be put together or cut. Use an optimizer that works element by element "
        "(Adam, AdamW, SGD, ...), or leave these parameters whole with ignored_parameters."
    )


# 0-d state of torch's optimizers that is about a parameter as a whole; any other is about the element of a 0-d one.
def is_number(key: str) -> bool:
    """Whether 0-d state under this key is about the parameter as a whole, even if that is 0-d."""
    return key in ("step", "eta", "mu", "mu_product")


def _differences(one: Listed, kinds: Sequence[Kinds | None]) -> list[str]:
    """What ranks that hold something of it have in other forms."""
    holders = [rank for rank in range(len(kinds)) if one.has_part(rank)]
    forms = [{key: _form(kind) for key, kind in (kinds[rank] or {}).items()} for rank in holders]
    return [
        f"rank {rank} has the state {_listing(form)} of {one.name}, and rank {holders[0]} has {_listing(forms[0])}. "
        "Every rank must have stepped the same parameters with the same optimizer."
        for rank, form in zip(holders, forms, strict=True)
        if form != forms[0]
    ][:1]


def _form(kind: Kind) -> str:
    return type(kind).__name__.lower() if isinstance(kind, Value) else f"{type(kind).__name__.lower()} of {kind.dtype}"


def _listing(form: Mapping[str, str]) -> str:
    return ", ".join(f"'{key}' ({what})" for key, what in sorted(form.items())) or "none"


def _shared(one: Listed, kinds: Sequence[Kinds | None]) -> Shared:
    """What all say together; ranks that hold nothing of it may have no state."""
    ranked = sorted((rank for rank in range(len(kinds)) if kinds[rank]), key=lambda rank: not one.has_part(rank))
    first = kinds[ranked[0]] or {}
    numbers: dict[str, list[Number]] = {}
    for key, kind in first.items():
        if isinstance(kind, Number):
            said = [(other or {}).get(key, kind) for other in kinds]
            numbers[key] = [other if isinstance(other, Number) else kind for other in said]
    return Shared(first, numbers)
