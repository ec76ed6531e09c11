"""A state tree from one rank to all: its description first, then its tensors one by one, or several in one buffer.

Everyone knows the description before the first tensor travels, and the ranks tell each other whether their trees fit.
So a tree that does not fit on one rank is an error on all, and nothing has been changed by then.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp._comm import LONE_RANK, Communicator, communicator
from fsdp._dtensors import is_dtensor
from fsdp._process_groups import Group, backend_names
from fsdp._state_tree import CompanionMismatch, Path, TensorInfo, check_types, leaves, mapped, spelled

_ALIGNMENT = 16  # bytes; that of the widest dtype, so that a part of a buffer can be seen as any


def ranks_of(pg: Group | None, device: torch.device) -> Communicator:
    """The way to the ranks of `group_of` for tensors on a device.

    Raises:
        ValueError: for a device that the group does not serve.
    """
    group = group_of(pg)
    if group is None:
        return LONE_RANK
    served = backend_names(group)
    if served and device.type not in served:
        raise ValueError(f"device={str(device)!r}: the group sends tensors on {' and '.join(served)} only")
    return communicator(group, device)


def group_of(pg: Group | None) -> Group | None:
    """The ranks that are meant: None means all. None is returned where this process is alone.

    Raises:
        TypeError: for something that is no group that this rank is in.
    """
    if pg is None:
        return cast(Group, dist.group.WORLD) if dist.is_available() and dist.is_initialized() else None
    if not callable(getattr(pg, "rank", None)) or not callable(getattr(pg, "size", None)):
        raise TypeError(f"pg must be a process group that this rank is in, got {pg!r}")
    return pg


# What will be sent


def description(tree: Any, type_check: bool = True) -> Any:
    """The tree with a `TensorInfo` for each tensor."""
    check_types(tree, type_check)
    return mapped(_info, tree)


def _info(path: Path, leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    if is_dtensor(leaf):
        raise TypeError(f"{spelled(path)}: a DTensor, where a whole tensor is expected: gather_state_dict makes one")
    if leaf.is_meta:
        raise ValueError(f"{spelled(path)}: on the meta device, where there are no values")
    return TensorInfo(leaf.shape, leaf.dtype)


def shared_description(comm: Communicator, full: Any, type_check: bool) -> Any:
    """Collective. The description of rank 0's tree; what is wrong with it is raised on every rank."""
    payload = b""
    if comm.rank == 0:
        try:
            payload = pickle.dumps(description(full, type_check))
        except (TypeError, ValueError, AttributeError, pickle.PicklingError) as error:
            payload = pickle.dumps(_Failure(error))
    described = pickle.loads(_broadcast_bytes(comm, payload))
    if isinstance(described, _Failure):
        described.raise_on(0)
    return described


def _broadcast_bytes(comm: Communicator, payload: bytes) -> bytes:
    if comm.world_size == 1:
        return payload
    device = comm.talk_device
    talk = comm.for_device(device)
    length = torch.tensor([len(payload)], device=device)
    talk.broadcast(length).wait()
    letter = torch.empty(int(length), dtype=torch.uint8, device=device)
    if comm.rank == 0:
        letter.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
    talk.broadcast(letter).wait()
    return letter.cpu().numpy().tobytes()


class _Failure:
    """What went wrong on one rank, for the others."""

    def __init__(self, error: Exception) -> None:
        self._path = error.path if isinstance(error, CompanionMismatch) else None
        self._kind = ValueError if isinstance(error, ValueError) else TypeError
        self._text = error.difference if isinstance(error, CompanionMismatch) else str(error)

    def raise_on(self, rank: int) -> None:
        text = f"on rank {rank} of the group, {self._text}"
        raise self._kind(text) if self._path is None else CompanionMismatch(self._path, text)


def agree(comm: Communicator, check: Callable[[], None]) -> None:
    """Collective. Run a check on every rank, and raise on all if it raises on one."""
    error: Exception | None = None
    try:
        check()
    except (TypeError, ValueError) as caught:
        error = caught
    answers = comm.all_gather_bytes(pickle.dumps(_Failure(error)) if error is not None else b"")
    if error is not None:
        raise error
    for rank, answer in enumerate(answers):
        if answer:
            pickle.loads(answer).raise_on(rank)


# Sending it


class Arrivals:
    """Collective. The whole tensors of rank 0's tree, in the order of the description.

    Args:
        device: where they travel.
        described: the description of the tree.
        full: the tree itself on rank 0; elsewhere not looked at.
        budget: bytes that may travel in one message of several tensors; 0 sends each by itself.
    """

    def __init__(self, comm: Communicator, device: torch.device, described: Any, full: Any, budget: int) -> None:
        # By the device that a tensor has, since "cuda" means that with the number of the current one.
        self._comm, self._device = comm, torch.empty(0, device=device).device
        self._sources: deque[Tensor] | None = None
        if comm.rank == 0:
            self._sources = deque(leaf for _, leaf in leaves(full) if isinstance(leaf, Tensor))
        self._messages = deque(
            _messages([leaf for _, leaf in leaves(described) if isinstance(leaf, TensorInfo)], budget)
        )
        self._unpacked: deque[Tensor] = deque()

    def take(self, target: Tensor | None) -> tuple[Tensor, bool]:
        """The next tensor, and whether its memory is the caller's to keep.

        It is received into `target` itself, on ranks other than 0, where that is of the right kind.
        """
        if self._unpacked:
            return self._unpacked.popleft(), False
        message = self._messages.popleft()
        if len(message) == 1:
            return self._alone(message[0], target)
        self._unpacked.extend(self._together(message))
        return self._unpacked.popleft(), False

    def _alone(self, info: TensorInfo, target: Tensor | None) -> tuple[Tensor, bool]:
        if self._sources is not None:
            tensor = self._sources.popleft().detach().resolve_conj().resolve_neg().to(self._device).contiguous()
        elif target is not None and self._can_receive(info, target):
            tensor = target.detach()
        else:
            tensor = torch.empty(info.shape, dtype=info.dtype, device=self._device)
        if info.nbytes:
            self._comm.broadcast(_as_bytes(tensor)).wait()
        return tensor, self._sources is None

    def _can_receive(self, info: TensorInfo, target: Tensor) -> bool:
        kind = not is_dtensor(target) and target.dtype == info.dtype and target.layout is torch.strided
        return (
            kind
            and target.device == self._device
            and target.is_contiguous()
            and not (target.is_conj() or target.is_neg())
        )

    def _together(self, message: list[TensorInfo]) -> list[Tensor]:
        buffer = torch.empty(sum(map(_padded, message)), dtype=torch.uint8, device=self._device)
        views, start = [], 0
        for info in message:
            views.append(buffer[start : start + info.nbytes].view(info.dtype).view(info.shape))
            start += _padded(info)
        if self._sources is not None:
            for view in views:
                view.copy_(self._sources.popleft().detach())
        self._comm.broadcast(buffer).wait()
        return views


def _messages(infos: list[TensorInfo], budget: int) -> list[list[TensorInfo]]:
    """What travels together: neighbours, as many as the budget has room for."""
    messages: list[list[TensorInfo]] = []
    room = 0
    for info in infos:
        if not messages or _padded(info) > room:
            messages.append([])
            room = budget
        messages[-1].append(info)
        room -= _padded(info)
    return messages


def _padded(info: TensorInfo) -> int:
    return -(-info.nbytes // _ALIGNMENT) * _ALIGNMENT


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
