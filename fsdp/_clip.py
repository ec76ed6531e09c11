"""The norm of gradients that are spread over ranks, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fsdp._collect import is_ours
from fsdp._comm import Communicator
from fsdp._unit import Unit


def clip_grad_norm(
    root: Unit,
    units: Sequence[Unit],
    max_norm: float,
    norm_type: float,
    device: torch.device,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Collective. Scale all gradients so that their norm over all ranks is at most `max_norm`.

    Sums of powers are taken per shard in float32 or wider and added over the ranks once. Of ignored parameters, which
    every rank has for itself, the mean over ranks of these sums is taken: all ranks find the same norm, and the right
    one where their gradients are alike.

    Returns:
        The norm before clipping.

    Raises:
        RuntimeError: if gradients are not reduced yet, or, if that is asked for, the norm is not finite; no gradient is
            changed then.
        ValueError: for a norm that is none.
        NotImplementedError: if a unit shards over other ranks than the root.
    """
    others = [unit.name for unit in units if unit.comm is not root.comm and unit.comm.world_size > 1]
    if others:
        raise NotImplementedError(
            f"clip_grad_norm_ over units with process groups of their own ({', '.join(others)}) is not built yet"
        )
    if not norm_type > 0:
        raise ValueError(f"norm_type must be positive, or inf for the largest absolute value; got {norm_type}")
    grads, unsharded = _reduced_gradients(units), _ignored_gradients(root)
    local = _local_total(grads, norm_type, device)
    theirs = _local_total(unsharded, norm_type, device).to(_ignored_dtype(root))
    local = torch.maximum(local, theirs) if math.isinf(norm_type) else local + theirs / root.comm.world_size
    norm = _total(root.comm, local, norm_type)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"the norm of the gradients is {norm.item()} (of order {norm_type}), so they cannot be clipped; they are "
            "left as they are, on every rank. Pass error_if_nonfinite=False to clip all the same."
        )
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    # Also where the scale is 1: deciding on the host would make it wait for the device.
    for grad in (*grads, *unsharded):
        grad.mul_(scale.to(grad.device, grad.dtype))
    return norm


def clip_grad_value(root: Unit, units: Sequence[Unit], clip_value: float) -> None:
    """Clamp every element of the gradients to ``[-clip_value, clip_value]``.

    Raises:
        RuntimeError: if gradients are not reduced yet.
        ValueError: for a negative value.
    """
    if not clip_value >= 0:
        raise ValueError(f"clip_value must not be negative, got {clip_value}")
    for grad in (*_reduced_gradients(units), *_ignored_gradients(root)):
        grad.clamp_(-clip_value, clip_value)


def _reduced_gradients(units: Sequence[Unit]) -> list[Tensor]:
    handles = [handle for unit in units for handle in unit.handles]
    for handle in handles:
        handle.home.check(handle.name)
        if handle.pieces is not None:
            handle.pieces.collect_gradients()  # what users zeroed or replaced
        handle.flat_param.bring_gradient()
        if handle.flat_param._has_unreduced and handle.flat_param.grad is not None:
            raise RuntimeError(
                f"cannot clip: the gradients of {handle.name} accumulated under no_sync() are not reduced over the "
                "ranks yet. Run the last backward of the step outside no_sync()."
            )
    return [handle.flat_param.grad for handle in handles if handle.flat_param.grad is not None]


def _ignored(root: Unit) -> list[Tensor]:
    return [param for param in root.module.parameters() if not is_ours(param)]


def _ignored_gradients(root: Unit) -> list[Tensor]:
    return [param.grad for param in _ignored(root) if param.grad is not None]


def _ignored_dtype(root: Unit) -> torch.dtype:
    # By what could have gradients: one rank may have some that others have not, and sums must be of one dtype on all.
    wide = any(param.requires_grad and param.real.dtype is torch.float64 for param in _ignored(root))
    return torch.float64 if wide else torch.float32


def _total(comm: Communicator, local: Tensor, norm_type: float) -> Tensor:
    if not math.isinf(norm_type):
        return comm.all_reduce(local, "sum").wait().pow(1.0 / norm_type)
    # A maximum over ranks drops NaN on some backends: whether there was one travels beside it.
    is_nan = local.isnan()
    both = comm.all_reduce(torch.stack([local.masked_fill(is_nan, 0.0), is_nan.to(local.dtype)]), "max").wait()
    return both[0].masked_fill(both[1] > 0, math.nan)


def _local_total(grads: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    wide = max((torch.promote_types(grad.dtype, torch.float32) for grad in grads), key=_width, default=torch.float32)
    zero = torch.zeros((), dtype=wide.to_real(), device=device)
    norms = [torch.linalg.vector_norm(grad.to(wide), norm_type).to(device) for grad in grads if grad.numel()]
    if not norms:
        return zero
    stacked = torch.stack(norms).to(zero.dtype)
    return stacked.max() if math.isinf(norm_type) else stacked.pow(norm_type).sum()


def _width(dtype: torch.dtype) -> int:
    return torch.empty(0, dtype=dtype).element_size()
