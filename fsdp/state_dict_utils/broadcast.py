"""Broadcast of a state tree: its description first, then its tensors one by one, or several in one buffer.

Everyone knows the description before the first tensor travels, and the ranks tell each other whether their trees fit.
So a tree that does not fit on one rank is an error on all, and nothing has been changed by then.
"""

from __future__ import annotations

import io
import pickle
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp.distributed.collectives import LONE_RANK, Communicator, communicator
from fsdp.distributed.communicator import Group, backend_names
from fsdp.distributed.dtensor import arrived, is_dtensor
from fsdp.state_dict_utils.gather import as_bytes
from fsdp.state_dict_utils.tensors import cannot, is_tensor, without_values
from fsdp.state_dict_utils.tree import CompanionMismatch, Path, check_types, leaves, mapped, spelled

Result = TypeVar("Result")
_ALIGNMENT = 16  # bytes; that of the widest dtype, so that a part of a buffer can be seen as any


def ranks_of(pg: Group | None, device: torch.device) -> Communicator:
    """Return the way to the ranks of `group_of` for tensors on a device, which the group must serve."""
    group = group_of(pg)
    if group is None:
        return LONE_RANK
    served = backend_names(group)
    if served and device.type not in served:
        raise ValueError(f"device={str(device)!r}: the group sends tensors on {' and '.join(served)} only")
    return communicator(group, device)


def group_of(pg: Group | None) -> Group | None:
    """Return the ranks that are meant, where None means all; None where this process is alone."""
    if pg is None:
        return cast(Group, dist.group.WORLD) if dist.is_available() and dist.is_initialized() else None
    if not callable(getattr(pg, "rank", None)) or not callable(getattr(pg, "size", None)):
        raise TypeError(f"pg must be a process group that this rank is in, got {pg!r}")
    return pg


def place_in(comm: Communicator) -> str:
    """Return what other ranks of a group call this one."""
    return f"rank {comm.rank} of the group"


# What will be sent


def description(tree: Any, type_check: bool) -> Any:
    """Return the tree with one on the meta device for each tensor."""
    check_types(tree, type_check)
    return mapped(_info, tree)


def _info(path: Path, leaf: Any) -> Any:
    if is_dtensor(leaf):
        raise TypeError(f"{spelled(path)}: a DTensor, where a whole tensor is expected: gather_state_dict makes one")
    if missing := without_values(leaf):
        raise ValueError(f"{spelled(path)}: {missing}")
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") if is_tensor(leaf) else leaf


def shared_description(comm: Communicator, full: Any, type_check: bool) -> bytes:
    """Collective. Return the description of rank 0's tree, or what is wrong with it, for `unpacked`."""
    letter = b""
    if comm.rank == 0:
        try:
            letter = _packed(description(full, type_check))
        except Exception as error:  # noqa: BLE001 - all ranks are told of it
            letter = _saved(_Failure(error, place_in(comm)))
    return comm.all_gather_bytes(letter)[0]


def _packed(described: Any) -> bytes:
    try:
        return _saved(described)
    except Exception as problem:
        for path, leaf in leaves(described):
            try:
                _saved(leaf)
            except Exception as error:  # noqa: BLE001 - users' classes may raise anything
                raise TypeError(f"{spelled(path)}: {cannot(leaf, 'be sent', error)}") from problem
        raise


def _saved(value: Any) -> bytes:
    if isinstance(value, torch.UntypedStorage):
        raise TypeError("torch.load makes a storage of another class of it. Send a tensor that views it")
    file = io.BytesIO()
    torch.save(value, file)  # and not pickle, which brings tensors to the device that they come from
    return file.getvalue()


def unpacked(letter: bytes, device: torch.device) -> Any:
    """Return the description that a letter has, with unknown leaves on `device`; raise what was wrong on rank 0."""
    described = torch.load(io.BytesIO(letter), map_location=device, weights_only=False)
    if isinstance(described, _Failure):
        described.raise_here()
    return described


class _Failure:
    """An error of one rank, for the others."""

    def __init__(self, error: Exception, where: str) -> None:
        self._path = error.path if isinstance(error, CompanionMismatch) else None
        kinds = (ValueError, NotImplementedError, TypeError)
        self._kind = next((kind for kind in kinds if isinstance(error, kind)), RuntimeError)
        text = error.difference if isinstance(error, CompanionMismatch) else str(error)
        self._text = f"on {where}, {text}"

    def raise_here(self) -> None:
        raise self._kind(self._text) if self._path is None else CompanionMismatch(self._path, self._text)


def agree(ways: Sequence[Communicator], where: str, check: Callable[[], Result]) -> Result:
    """Collective. Return the result of a check, or raise on all ranks the kind of error that it raises on one.

    What is heard on one of the `ways` to other ranks is told on the next; they call this one `where`.
    """
    problem, failed = b"", None
    try:
        result = check()
    except Exception as error:  # noqa: BLE001 - all ranks are told of it
        failed = error
        problem = pickle.dumps(_Failure(error, where))
    for comm in ways:
        answers = comm.all_gather_bytes(problem)
        problem = problem or next(filter(None, answers), b"")
    if failed is not None:
        raise failed
    if problem:
        pickle.loads(problem).raise_here()
    return result


# Sending it


class Arrivals:
    """Collective. The unsharded tensors of rank 0's tree, in the order of the description.

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
            self._sources = deque(arrived(leaf) for _, leaf in leaves(full) if is_tensor(leaf))
        self._messages = deque(_messages([leaf for _, leaf in leaves(described) if is_tensor(leaf)], budget))
        self._unpacked: deque[Tensor] = deque()

    def take(self, target: Tensor | None) -> tuple[Tensor, bool]:
        """Return the next tensor, and True if its memory is the caller's to keep.

        It is received into `target` itself, on ranks other than 0, where that is of the right kind.
        """
        if not self._unpacked:
            message = self._messages.popleft()
            if len(message) == 1:
                return self._alone(message[0], target)
            self._unpacked.extend(self._together(message))
        return self._unpacked.popleft(), False

    def _alone(self, info: Tensor, target: Tensor | None) -> tuple[Tensor, bool]:
        if self._sources is not None:
            tensor = self._sources.popleft().detach().resolve_conj().resolve_neg().to(self._device).contiguous()
        elif target is not None and _is_plain(target) and (target.dtype, target.device) == (info.dtype, self._device):
            tensor = target.detach()
        else:
            tensor = torch.empty(info.shape, dtype=info.dtype, device=self._device)
        if info.nbytes:
            self._comm.broadcast(as_bytes(tensor)).wait()
        return tensor, self._sources is None

    def _together(self, message: list[Tensor]) -> list[Tensor]:
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


def _is_plain(tensor: Tensor) -> bool:
    is_strided = not is_dtensor(tensor) and tensor.layout is torch.strided
    return is_strided and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def _messages(infos: list[Tensor], budget: int) -> list[list[Tensor]]:
    """Return what travels together: neighbours, as many as the budget has room for."""
    messages: list[list[Tensor]] = []
    room = 0
    for info in infos:
        if not messages or _padded(info) > room:
            messages.append([])
            room = budget
        messages[-1].append(info)
        room -= _padded(info)
    return messages


def _padded(info: Tensor) -> int:
    return -(-info.nbytes // _ALIGNMENT) * _ALIGNMENT
