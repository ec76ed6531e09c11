"""Optimizer state as a stream of (name, key, tensor): unsharded tensors, one at a time, from which all else is built.

First ranks tell each other what kinds of state they have, and all that is small. Then each tensor's shards go straight
into their places in the unsharded one, on the ranks that want it. Others need no memory for that.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fsdp.distributed.collectives import Communicator, Pending
from fsdp.distributed.dtensor import whole
from fsdp.engine.agreement import agree_on_outcome, done_by_all, number_among
from fsdp.optim_utils.params import OwnState, Parameters
from fsdp.optim_utils.state import (
    Elements,
    OptimParam,
    Original,
    SharedKinds,
    gather_kinds,
    is_alike,
    own_kinds,
    release,
)

# Bytes of unsharded tensors that may be on their way at once; one tensor may, however large.
WINDOW = 2**25


class Window:
    """A queue of tensors that are on their way, of at most `WINDOW` bytes together."""

    def __init__(self) -> None:
        self._bytes = 0
        self._ahead: deque[tuple[Callable[[], Any], int]] = deque()

    def has_room(self, nbytes: int) -> bool:
        """Return whether something may be sent before the first one has arrived."""
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
    """An optimizer's state on all ranks, to be fetched once. Making it is a collective.

    Args:
        params: of the model.
        own: what this rank has.
        recipient: the number of the rank that wants it, among those of the root; None for all of them.

    Attributes:
        is_wanted: on this rank.
        shared: what the ranks have of each parameter that has state.

    Raises:
        ValueError: on a rank whose state cannot be put together, or if ranks have different states; RuntimeError on the
            other ranks.
    """

    def __init__(self, params: Parameters, own: OwnState, recipient: int | None) -> None:
        self.params, self.own = params, own
        self._everyone = params.root.everyone
        self.is_wanted = recipient is None or number_among(self._everyone) == recipient
        members: dict[Communicator, list[OptimParam]] = {}
        for one in params.listed:
            members.setdefault(one.comm, []).append(one)
        pickled = done_by_all(
            [self._everyone],
            _WHAT,
            lambda: {comm: pickle.dumps(own_kinds(held, own.states, "gathering")) for comm, held in members.items()},
        )
        gathered = {comm: zip(held, gather_kinds([comm], pickled[comm]), strict=True) for comm, held in members.items()}
        found = [
            (one, shared)
            for comm, each in gathered.items()
            for one, shared in each
            if shared.kinds and not (one.is_uncollected and comm.world_size > 1)
        ]
        self.shared: dict[OptimParam, SharedKinds] = dict(found)
        problems = [problem for _, shared in found for problem in shared.problems(is_alike)]
        agree_on_outcome([self._everyone], _WHAT, ValueError(problems[0]) if problems else None)
        self._receivers = {
            comm: [rank for rank, said in enumerate(comm.all_gather_bytes(bytes([self.is_wanted]))) if said[0]]
            for comm in members
        }

    @property
    def sizes(self) -> Iterator[tuple[OptimParam, Original, str, Elements]]:
        """All tensors of the stream, in its order."""
        for one, original in self.params.by_number.values():
            if one in self.shared:
                for key, kind in self.shared[one].kinds.items():
                    if isinstance(kind, Elements):
                        yield one, original, key, kind

    def tensors(self) -> Iterator[tuple[Original, str, Tensor]]:
        """Collective. Go through it on every rank; if it is left early, the rest is received and dropped.

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

    def _post(self, one: OptimParam, original: Original, key: str, kind: Elements) -> Callable[[], Any]:
        """Begin to send and receive the shards of one tensor."""
        comm, shape = one.comm, one.local_shape(original)
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
    def _sent(one: OptimParam, pending: Pending | None, result: Any) -> Any:
        if pending is not None:
            pending.wait()
            if one.device.type != "cpu":
                one.comm.settle()  # what was copied only to be sent can go
        return result

    @staticmethod
    def _exchange(one: OptimParam, incoming: Any, outgoing: Any) -> Pending | None:
        if one.handle is None or not (incoming or outgoing):
            return None
        what, tag = f"gather of the optimizer state of {one.name}", ("optimizer", one.handle.tag)
        return one.comm.exchange(incoming, outgoing, what, tag)

    def _settle(self) -> None:
        """Block until the state may be changed: all that was sent of it has arrived."""
        for comm in self._receivers:
            comm.settle()
        release(self.params.listed)


_WHAT = "gather its optimizer state"


def _nbytes(entry: tuple[OptimParam, Original, str, Elements]) -> int:
    return entry[1].shape.numel() * entry[3].dtype.itemsize
