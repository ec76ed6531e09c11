"""Functions of state trees: gather, offload, copy, stage, compare, broadcast, distribute, flatten.

The functions are independent of sharding. A *state tree* is any nested structure of mappings, lists and tuples
(including named tuples) whose leaves are tensors, `DTensor`s, numbers, strings, bytes, `io.BytesIO` or None. For
example, the state dict of a model or an optimizer is a state tree. Containers keep their types. A leaf of any other
type raises a TypeError that names its path, unless ``type_check=False``. In this case leaves of unknown types,
including tensors inside them, are passed unchanged if the result shares memory with its source, and deep-copied
otherwise. Tensors that are not dense (sparse, quantized, nested, wrappers of other tensors) have unknown types.

An error names the path, and is raised before any value is changed. In collective functions, every rank raises an
error: ranks with valid trees raise a RuntimeError that contains the error of another rank.

Names and arguments are the same as in torch's private `torch.distributed._state_dict_utils`.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Collection
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp.distributed.collectives import LONE_RANK, Communicator, communicator, during
from fsdp.distributed.communicator import Group, backend_names, own_rank
from fsdp.distributed.consensus import done_by_all, from_everyone
from fsdp.distributed.devices import HOST, byte_view, finish_queued
from fsdp.distributed.dtensor import arrived, is_dtensor, local_part
from fsdp.state_dict_utils.gather import Gathering, odd_parts
from fsdp.state_dict_utils.host_memory import require_pinning
from fsdp.state_dict_utils.stager import PendingCopy, StateDictStager, origins, restore
from fsdp.state_dict_utils.tree import (
    CompanionMismatch,
    Comparison,
    FlatMapping,
    Path,
    cannot,
    check_leaves,
    check_types,
    differ_as_parts,
    differ_as_values,
    differ_in_form,
    emptied,
    flatten_state_dict,
    has_part,
    host_twin,
    is_tensor,
    leaves,
    mapped,
    placed,
    spelled,
    unflatten_state_dict,
    why_unknown,
    with_own_leaves,
    without_values,
    written,
)

__all__ = [
    "CompanionMismatch",
    "FlatMapping",
    "PendingCopy",
    "StateDictStager",
    "broadcast_state_dict",
    "check_state_dict_similarity",
    "copy_state_dict",
    "create_cpu_state_dict",
    "distribute_state_dict",
    "flatten_state_dict",
    "gather_state_dict",
    "offload_state_dict_to_cpu",
    "origins",
    "restore",
    "unflatten_state_dict",
]

_ALIGNMENT = 16  # bytes, for the widest dtype, so that a part of a buffer can have any dtype


@torch.no_grad()
@during("gather_state_dict()")
def gather_state_dict(
    state_dict: Any,
    *,
    pg: Group | None = None,
    device: torch.device | str | None = None,
    cpu_offload: bool = False,
    ranks_only: Collection[int] = (),
    type_check: bool = True,
) -> Any:
    """Collective. Return a tree in which every `DTensor` is replaced by an unsharded, plain tensor.

    All ranks of the tensors' meshes call this function, with the same `DTensor`s in the same order; `Partial` tensors
    are reduced. The ranks first exchange whether their trees can be gathered: if any tree cannot, every rank raises an
    error. The tensors are gathered sequentially. A rank with a result holds the result and at most one additional
    tensor. Other ranks only send their parts, if `pg` contains all ranks of the mesh. (Sums over the mesh are unsharded
    on every rank, and released immediately.)

    Plain and replicated tensors are not copied and share memory with the result, unless they are moved to another
    device. Each entry is gathered separately, including tied entries.

    Args:
        state_dict: the tree; it is not changed.
        pg: the ranks that `ranks_only` refers to; None means all ranks. The tensors define the ranks of the shards.
        device: the device of the result. None uses the device of each tensor's local part.
        cpu_offload: equivalent to ``device="cpu"``: each tensor is copied to the host before the next is gathered.
        ranks_only: the ranks of `pg` that receive the result; other ranks receive an empty container. If empty, all
            ranks receive the result. Must be equal on every rank.
        type_check: see the module.

    Raises:
        TypeError: for a leaf of an unknown type.
        ValueError: for a rank that `pg` does not contain, a tensor without values, or a required `DTensor` on a mesh
            without this rank; for a local part whose size or place differs from torch's; for both `cpu_offload` and a
            different `device`; if ranks of a mesh have different `DTensor`s or `ranks_only`.
        RuntimeError: if another rank did not answer.
    """
    home = None if device is None else torch.device(device)
    if cpu_offload:
        if home not in (None, HOST):
            raise ValueError(f"cpu_offload=True and device={str(home)!r} exclude each other: pass one of them")
        home = HOST
    gathering = Gathering(_group_of(pg), ranks_only)

    def check() -> None:
        _require_same_gather(told)
        check_types(state_dict, type_check)
        check_leaves(state_dict, without_values)
        for path, leaf in tensors:
            if gathering.is_wanted and not has_part(leaf):
                raise ValueError(
                    f"{spelled(path)}: a DTensor on a mesh that this rank is not in, so this rank cannot get the "
                    "result. Pass the ranks that get it as ranks_only."
                )
            if difference := odd_parts(leaf):
                raise ValueError(f"{spelled(path)}: {difference}. Create it with distribute_tensor.")
            if is_dtensor(leaf) and not is_tensor(leaf):
                raise TypeError(f"{spelled(path)}: {why_unknown(leaf)}")

    tensors = [(path, leaf) for path, leaf in leaves(state_dict) if isinstance(leaf, Tensor)]
    ways = gathering.ways(leaf for _, leaf in tensors)
    told = [(own, other) for comm, own in ways for other in from_everyone((comm,), own)]
    done_by_all([(comm,) for comm, _ in ways], f"gather a state dict (on global rank {own_rank()})", check)

    def whole(path: Path, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not has_part(leaf):
            return leaf
        tensor = gathering.whole(leaf)
        return tensor if home is None or tensor is None else tensor.to(home)

    result = mapped(whole, state_dict)
    return result if gathering.is_wanted else emptied(state_dict)


def _require_same_gather(told: list[tuple[str, str]]) -> None:
    for own, other in told:
        if own != other:
            raise ValueError(
                "the ranks of a mesh gather different DTensors, or to different ranks. ranks_only and the digest of "
                f"the DTensors are {own} here, and {other} on another rank. Every rank must pass the same DTensors in "
                "the same order, and the same ranks_only"
            )


@torch.no_grad()
def offload_state_dict_to_cpu(state_dict: Any, *, ranks_only: Collection[int] = (), type_check: bool = True) -> Any:
    """Return a tree with all tensors on CPU; `DTensor`s have local parts on CPU.

    Copies from a device are queued, on CUDA into pinned memory, and awaited once at the end. Tensors on CPU are
    **not** copied: they share memory with the result. To create a tree with separate memory, use
    `create_cpu_state_dict` and `copy_state_dict`.

    Args:
        state_dict: the tree; it is not changed.
        ranks_only: the ranks that receive the result; other ranks receive an empty container. If empty, all ranks.
        type_check: see the module.

    Raises:
        TypeError: for a leaf of an unknown type.
        ValueError: for a rank that does not exist, or a tensor on the meta device.
    """
    check_types(state_dict, type_check)
    check_leaves(state_dict, without_values)
    if not Gathering(_group_of(None), ranks_only).is_wanted:
        return emptied(state_dict)

    result = mapped(
        lambda _, leaf: leaf.detach().to(HOST, non_blocking=True) if isinstance(leaf, Tensor) else leaf, state_dict
    )
    for device in {leaf.device for _, leaf in leaves(state_dict) if isinstance(leaf, Tensor)} - {HOST}:
        finish_queued(device)
    return result


@torch.no_grad()
def copy_state_dict(source: Any, into: Any, *, non_blocking: bool = False, type_check: bool = True) -> Any:
    """Copy all values of a tree into another tree with the same structure, without communication.

    Tensors of `into` keep their memory, device and dtype. Each rank copies its part of a `DTensor` into a `DTensor`
    with the same mesh and placements. Other leaves are replaced by copies. If the trees do not match, no value is
    changed.

    Args:
        source: the tree to copy; it is not changed.
        into: the tree to write.
        non_blocking: if True, queue copies between a device and pinned memory and return. Synchronize with the device
            before reading `into` on the host, or changing `source` on another stream.
        type_check: see the module.

    Returns:
        `into`, or a new object if its outermost container cannot be changed in place, like a tuple.

    Raises:
        CompanionMismatch: for different keys, lengths, kinds of containers, shapes or placements, for a cast that
            would lose values (float to int), or a tensor on the meta device.
        TypeError: for a leaf of an unknown type in either tree.
    """
    check_types(source, type_check)
    check_types(into, type_check)
    Comparison(("the source", "the target"), differ_as_parts).check(source, into)

    def copied(path: Path, leaf: Any, target: Any) -> Any:
        if not is_tensor(leaf):
            return leaf
        local_part(target).detach().copy_(local_part(leaf).detach(), non_blocking=non_blocking)
        return target

    return written(with_own_leaves(source), into, copied)


@torch.no_grad()
def create_cpu_state_dict(
    state_dict: Any, *, pin_memory: bool = False, share_memory: bool = False, type_check: bool = True
) -> Any:
    """Return a tree of the same structure with new, contiguous CPU tensors, which `copy_state_dict` can fill.

    The tensors' values are undefined. `DTensor`s have local parts on CPU. Other leaves are copied.

    Args:
        state_dict: the tree; it is not changed, and its tensors may be on the meta device.
        pin_memory: if True, allocate pinned memory, for asynchronous copies with CUDA. Tensors without elements have no
            memory, and are not pinned.
        share_memory: if True, allocate separate shared memory for each tensor (see `torch.multiprocessing`). With
            `pin_memory`, the shared memory is also registered with CUDA in this process, and unregistered after all
            views were deleted; registration takes longer and is useful for long-lived trees.
        type_check: see the module.

    Raises:
        RuntimeError: for `pin_memory` without CUDA, or if the system grants no more shared or pinned memory.
        TypeError: for a leaf of an unknown type.
    """
    if pin_memory:
        require_pinning()
    check_types(state_dict, type_check)

    def twin(path: Path, leaf: Any) -> Any:
        if not is_tensor(leaf):
            return leaf
        try:
            return host_twin(leaf, pin_memory, share_memory)
        except RuntimeError as error:
            raise RuntimeError(f"{spelled(path)}: {error}") from error

    return mapped(twin, with_own_leaves(state_dict))


def check_state_dict_similarity(
    state_dict: Any, compared_state_dict: Any, *, raise_error: bool = False, type_check: bool = True
) -> bool:
    """Return True if two trees have equal structures, shapes and dtypes, without communication.

    The order of keys, devices, values, and the types of mappings, lists and tuples are not compared. `DTensor`s must
    have equal meshes and placements, and other leaves must have the same type.

    Args:
        raise_error: if True, raise CompanionMismatch with the path and the difference instead of returning False.
        type_check: see the module.

    Raises:
        CompanionMismatch: if they differ, with `raise_error`.
        TypeError: for a leaf of an unknown type in either tree.
    """
    check_types(state_dict, type_check)
    check_types(compared_state_dict, type_check)
    try:
        Comparison(("the first tree", "the second"), differ_in_form).check(state_dict, compared_state_dict)
    except CompanionMismatch:
        if raise_error:
            raise
        return False
    return True


@torch.no_grad()
@during("broadcast_state_dict()")
def broadcast_state_dict(
    full: Any,
    local: Any,
    device: torch.device | str,
    pg: Group | None = None,
    *,
    strict: bool = False,
    cpu_offload: bool = False,
    max_coalesced_bytes: int = 0,
    type_check: bool = True,
) -> Any:
    """Collective over `pg`. Write the values of rank 0's tree into the trees of all ranks.

    Tensors of `local` keep their memory, device and dtype; a `DTensor` receives this rank's part of the values. A
    plain tensor of the same dtype on `device` is received in place. New tensors are created for tensors on the meta
    device, missing keys of `local`, and None values. Other leaves are replaced by rank 0's.

    The ranks compare their trees before the first tensor is sent: if any tree does not match, every rank raises an
    error, and no value is changed. In addition to its result a rank holds a single tensor at a time, or
    `max_coalesced_bytes`.

    Args:
        full: on rank 0 of `pg`, the tree of unsharded tensors, on any device; ignored on other ranks.
        local: the tree to write, on every rank.
        device: the device for communication and for new tensors; the group's backend must support it.
        pg: the ranks; None means all ranks, or only this process without torch.distributed.
        strict: if True, reject keys in only one of the trees. By default, keys of rank 0 are added, and
            other keys are kept.
        cpu_offload: if True, create new tensors on CPU.
        max_coalesced_bytes: send adjacent tensors in a single message up to this size, which is faster for small
            tensors. 0 sends each tensor separately.
        type_check: see the module. Unknown leaves are sent by `torch.save`.

    Returns:
        `local`, or a new object if its outermost container cannot be changed in place, like a tuple.

    Raises:
        CompanionMismatch: for trees that do not match: kinds of containers, shapes, a cast that would lose values, a
            `DTensor` with Partial placements, and keys if `strict`.
        TypeError: for a leaf of an unknown type, a `DTensor` in `full`, or a `pg` that is not a group of this rank.
        ValueError: for a tensor on the meta device in `full`, a device that `pg` does not support, or a negative
            budget.
    """
    if max_coalesced_bytes < 0:
        raise ValueError(f"max_coalesced_bytes is a number of bytes, got {max_coalesced_bytes}")
    device = torch.device(device)
    home = HOST if cpu_offload else device
    comm = _ranks_of(pg, device)
    what = "broadcast a state dict"

    def pack() -> bytes:
        return _packed(_description(full, type_check)) if comm.rank == 0 else b""

    letter = comm.all_gather_bytes(done_by_all([(comm,)], what, pack))[0]

    def check() -> Any:
        described = torch.load(io.BytesIO(letter), map_location=home, weights_only=False)  # unknown leaves go to `home`
        _check_local(described, local, strict, type_check)
        return described

    described = done_by_all([(comm,)], what, check)
    arrivals = _Arrivals(comm, device, described, full, max_coalesced_bytes)

    def put(path: Path, info: Any, target: Any) -> Any:
        if not is_tensor(info):
            return info
        return placed(arrivals.take(target), target, home)

    return written(described, local, put)


@torch.no_grad()
def distribute_state_dict(
    full: Any,
    local: Any,
    device: torch.device | str,
    pg: Group | None = None,
    *,
    strict: bool = False,
    cpu_offload: bool = False,
    type_check: bool = True,
) -> Any:
    """Write the values of an unsharded tree, which every rank has, into this rank's tree, without sending tensors.

    Like `broadcast_state_dict`, but each rank reads its own `full`: slices are copied directly into the local parts of
    `DTensor`s, also from host to device, and only tensors that are missing in `local` are allocated.

    Args:
        full: the tree of unsharded tensors, on any device; it is not changed and shares no memory with the result.
        local: the tree to write.
        device: the device of new tensors.
        pg: the ranks that exchange whether their trees match, so that all of them raise an error before any value is
            changed (collective). By default, this rank checks only its own trees.
        strict, cpu_offload, type_check: as in `broadcast_state_dict`.

    Returns:
        `local`, or a new object if its outermost container cannot be changed in place, like a tuple.

    Raises:
        CompanionMismatch, TypeError, ValueError: as `broadcast_state_dict`.
    """
    home = HOST if cpu_offload else torch.device(device)

    def check() -> Any:
        _check_local(_description(full, type_check), local, strict, type_check)
        return with_own_leaves(full)

    comm = LONE_RANK if pg is None else _ranks_of(pg, torch.device(device))
    whole = done_by_all([(comm,)], "distribute a state dict", check)

    def put(path: Path, value: Any, target: Any) -> Any:
        return placed(value.detach(), target, home) if is_tensor(value) else value

    return written(whole, local, put)


def _ranks_of(pg: Group | None, device: torch.device) -> Communicator:
    """Return the communicator of a group for tensors on a device, which the group's backend must support."""
    group = _group_of(pg)
    if group is None:
        return LONE_RANK
    served = backend_names(group)
    if served and device.type not in served:
        raise ValueError(f"device={str(device)!r}: the group sends tensors on {' and '.join(served)} only")
    return communicator(group, device)


def _group_of(pg: Group | None) -> Group | None:
    """Return the process group, by default the group of all ranks; None without torch.distributed."""
    if pg is None:
        return cast(Group, dist.group.WORLD) if dist.is_available() and dist.is_initialized() else None
    if not callable(getattr(pg, "rank", None)) or not callable(getattr(pg, "size", None)):
        raise TypeError(f"pg must be a process group that this rank is in, got {pg!r}")
    return pg


def _description(tree: Any, type_check: bool) -> Any:
    """Return the tree with a meta tensor for each tensor."""
    check_types(tree, type_check)
    return mapped(_info, tree)


def _info(path: Path, leaf: Any) -> Any:
    if is_dtensor(leaf):
        raise TypeError(f"{spelled(path)}: a DTensor instead of an unsharded tensor: use gather_state_dict first")
    if missing := without_values(leaf):
        raise ValueError(f"{spelled(path)}: {missing}")
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") if is_tensor(leaf) else leaf


def _packed(described: Any) -> bytes:
    for path, leaf in leaves(described):
        if isinstance(leaf, torch.UntypedStorage):
            reason = TypeError("torch.load returns it as another class; send a tensor that views it")
            raise TypeError(f"{spelled(path)}: {cannot(leaf, 'be sent', reason)}")
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
    file = io.BytesIO()
    torch.save(value, file)  # not pickle, which restores tensors to their original device
    return file.getvalue()


def _check_local(full: Any, local: Any, strict: bool, type_check: bool) -> None:
    check_types(local, type_check)
    names = "the full tree", "the local one"
    Comparison(names, differ_as_values, strict=strict, fills=True).check(full, local)


class _Arrivals:
    """Collective. Receives the unsharded tensors of rank 0's tree, in the order of the description.

    Multiple tensors are sent in a message of at most `budget` bytes. The tree itself is used on rank 0 only.
    """

    def __init__(self, comm: Communicator, device: torch.device, described: Any, full: Any, budget: int) -> None:
        # Compared by the device of a tensor, because "cuda" means the current CUDA device.
        self._comm, self._device = comm, torch.empty(0, device=device).device
        self._sources: deque[Tensor] | None = None
        if comm.rank == 0:
            self._sources = deque(arrived(leaf) for _, leaf in leaves(full) if is_tensor(leaf))
        self._messages = deque(_messages([leaf for _, leaf in leaves(described) if is_tensor(leaf)], budget))
        self._unpacked: deque[Tensor] = deque()

    def take(self, target: Tensor | None) -> Tensor:
        """Return the next tensor. On ranks other than 0, it is received into `target` if dtype and device match."""
        if not self._unpacked:
            message = self._messages.popleft()
            if len(message) == 1:
                return self._alone(message[0], target)
            self._unpacked.extend(self._together(message))
        return self._unpacked.popleft()

    def _alone(self, info: Tensor, target: Tensor | None) -> Tensor:
        if self._sources is not None:
            tensor = self._sources.popleft().detach().resolve_conj().resolve_neg().to(self._device).contiguous()
        elif target is not None and _is_plain(target) and (target.dtype, target.device) == (info.dtype, self._device):
            tensor = target.detach()
        else:
            tensor = torch.empty(info.shape, dtype=info.dtype, device=self._device)
        if info.nbytes:
            self._comm.broadcast(byte_view(tensor)).wait()
        return tensor

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
    """Group adjacent tensors into messages of at most `budget` bytes."""
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
