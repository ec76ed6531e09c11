"""What is done with one tensor of a state tree, plain or a `DTensor`: placed, compared, given host memory."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fsdp.distributed.dtensor import MeshPart, is_dtensor, local_part, set_local_part
from fsdp.state_dict_utils.gather import has_only_usual_placements, odd_local_part, usual_part
from fsdp.state_dict_utils.host_memory import allocate
from fsdp.state_dict_utils.kinds import casts, described, is_tensor, not_writable, without_values
from fsdp.state_dict_utils.tree import Path, spelled


def has_part(tensor: Tensor) -> bool:
    """Whether this rank holds something of a tensor: not of a `DTensor` on other ranks' mesh."""
    part = MeshPart.of(tensor)
    return part is None or part.mesh.get_coordinate() is not None


# Whole values into trees


def own_part(value: Tensor, target: Tensor) -> Tensor:
    """Of a whole value, what this rank holds in `target`. Without communication; shares memory where it can."""
    part = MeshPart.of(target)
    if part is None:
        return value
    if has_only_usual_placements(part):
        return usual_part(value, part)
    # Interleaved shards (fully_shard over tensor parallelism): torch knows which indices are ours, for each dimension.
    for dim in sorted({each.dim for each in part.placements if hasattr(each, "dim")}):
        size = part.shape[dim]
        indices = torch.arange(size, device=part.mesh.device_type)
        indices = indices.view([size if number == dim else 1 for number in range(len(part.shape))])
        ours = _redistributed(indices, part, dim)
        value = value.index_select(dim, ours.flatten().to(value.device))
    return value


def _redistributed(indices: Tensor, part: MeshPart, dim: int) -> Tensor:
    from torch.distributed.tensor import DTensor, Replicate

    nowhere = [Replicate()] * part.mesh.ndim
    there = [each if getattr(each, "dim", None) == dim else Replicate() for each in part.placements]
    return local_part(DTensor.from_local(indices, part.mesh, nowhere, run_check=False).redistribute(placements=there))


def placed(value: Tensor, target: Tensor | None, home: torch.device, is_ours: bool = False) -> Tensor:
    """Store a whole value in `target`, or in a new tensor at `home` where there is none or it is on the meta device.

    Args:
        is_ours: nobody else has the memory of `value`, so it may become the new tensor.
    """
    if target is None:
        return value.to(home, copy=not is_ours)
    if not has_part(target):
        return target
    part = own_part(value, target)
    if not target.is_meta:
        local_part(target).detach().copy_(part)
        return target
    if is_ours and part is value and not is_dtensor(target):
        return value.to(home, target.dtype)
    new = torch.empty_like(target.detach(), device=home, memory_format=torch.contiguous_format)
    local_part(new).copy_(part)
    return new


# Comparing leaves


def differ_as_values(full: Any, local: Any) -> str | None:
    """Why a whole value cannot be stored in a leaf; None if it can."""
    difference = _differ_in_kind(full, local, casting=True)
    if difference is not None or not is_tensor(local):
        return difference
    part = MeshPart.of(local)
    if part is not None and not has_part(local):
        return None
    if part is not None and any(placement.is_partial() for placement in part.placements):
        return f"placements {list(part.placements)}: a Partial has no part of a whole value"
    return odd_local_part(local) or (None if local.is_meta else not_writable(local))


def differ_as_parts(source: Any, into: Any) -> str | None:
    """Why a leaf cannot be copied into another one, each rank its part; None if it can."""
    difference = _differ_in_kind(source, into, casting=True) or _differ_in_spread(source, into)
    if difference is not None or not is_tensor(source):
        return difference
    for name, tensor in (("source", source), ("target", into)):
        if missing := without_values(tensor):
            return f"the {name} is {missing}"
    return not_writable(into)


def differ_in_form(first: Any, second: Any) -> str | None:
    """What two leaves differ in beside their values; None if in nothing."""
    if not isinstance(first, Tensor) and not isinstance(second, Tensor):
        return None if type(first) is type(second) else f"{described(first)} and {described(second)}"
    return _differ_in_kind(first, second, casting=False) or _differ_in_spread(first, second)


def _differ_in_kind(first: Any, second: Any, casting: bool) -> str | None:
    """Where one of them is a tensor of any kind."""
    if not is_tensor(first) or not is_tensor(second):
        special = isinstance(first, Tensor) or isinstance(second, Tensor) or is_tensor(first)
        names = described(first), described(second)
        return f"{names[0]} and {names[1]}" if special and names[0] != names[1] else None
    if first.shape != second.shape:
        return f"{described(first)} and {described(second)}"
    fits = casts(first.dtype, second.dtype) if casting else first.dtype == second.dtype
    return None if fits else f"dtypes {first.dtype} and {second.dtype}" + ", which loses values" * casting


def _differ_in_spread(first: Any, second: Any) -> str | None:
    if not is_tensor(first):
        return None
    ours, theirs = MeshPart.of(first), MeshPart.of(second)
    if ours != theirs:
        return f"{'a plain tensor' if ours is None else ours} and {'a plain tensor' if theirs is None else theirs}"
    shapes = local_part(first).shape, local_part(second).shape
    return None if shapes[0] == shapes[1] else f"local parts {list(shapes[0])} and {list(shapes[1])}"


def copied(path: Path, leaf: Any, into: Any, non_blocking: bool) -> Any:
    """`into` with the values of `leaf`, or a leaf that is no tensor."""
    if not is_tensor(leaf):
        return leaf
    local_part(into).detach().copy_(local_part(leaf).detach(), non_blocking=non_blocking)
    return into


# Host memory


def host_twin(path: Path, tensor: Tensor, pin_memory: bool, share_memory: bool) -> Tensor:
    """A tensor of the same shape, dtype and placements in new host memory, its values undefined."""
    local = local_part(tensor)
    new = host_memory(path, local.shape, local.dtype, pin_memory, share_memory)
    if not is_dtensor(tensor):
        return new
    twin = torch.empty_like(tensor.detach(), device="cpu")
    set_local_part(twin, new)
    return twin


def host_memory(path: Path, shape: torch.Size, dtype: torch.dtype, pin_memory: bool, share_memory: bool) -> Tensor:
    """A new tensor on the host. Without elements it has no memory, so there is nothing to pin.

    Raises:
        RuntimeError: if the system grants no more shared or pinned memory.
    """
    strides = torch.empty(shape, device="meta").stride()
    nbytes = math.prod(shape) * dtype.itemsize
    if not share_memory:
        return torch.empty(shape, dtype=dtype, pin_memory=pin_memory and nbytes > 0)
    if nbytes == 0:
        return torch.empty(shape, dtype=dtype).share_memory_()
    try:
        storage = allocate(nbytes, pin_memory, share=True)
    except RuntimeError as error:
        raise RuntimeError(f"{spelled(path)}: {error}") from error
    return torch.empty(0, dtype=dtype).set_(storage, 0, shape, strides)
