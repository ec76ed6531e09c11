"""The norm of gradients that are spread over ranks, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fsdp._placeholder import Placeholder
from fsdp._unit import Unit


def clip_grad_norm(
    root: Unit, units: Sequence[Unit], max_norm: float, norm_type: float, device: torch.device
) -> Tensor:
    """Collective. Scale all gradients so that their norm over all ranks is at most `max_norm`.

    Sums of powers are taken per shard in float32 or wider and added over the ranks once.

    Returns:
        The norm before clipping.

    Raises:
        RuntimeError: if gradients are not reduced yet.
        NotImplementedError: if a unit shards over other ranks than the root.
    """
    others = [unit.name for unit in units if unit.comm is not root.comm and unit.comm.world_size > 1]
    if others:
        raise NotImplementedError(
            f"clip_grad_norm_ over units with process groups of their own ({', '.join(others)}) is not built yet"
        )
    handles = [handle for unit in units for handle in unit.handles]
    grads = [handle.flat_param.grad for handle in handles if handle.flat_param.grad is not None]
    for handle in handles:
        if isinstance(handle.flat_param.grad, Placeholder):
            raise RuntimeError(f"cannot clip: {handle.flat_param.grad._message}")
    total = _local_total(grads, norm_type, device)
    root.comm.all_reduce(total, "max" if math.isinf(norm_type) else "sum")
    norm = total if math.isinf(norm_type) else total.pow(1.0 / norm_type)
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    # Also where the scale is 1: deciding on the host would make it wait for the device.
    for grad in grads:
        grad.mul_(scale.to(grad.device, grad.dtype))
    return norm


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
