"""The norm of gradients that are spread over ranks, and clipping by it.

With tensor parallelism, gradients are spread over the ranks of the `DTensor`s' meshes as well, and those of parameters
that are no `DTensor`s, or replicated ones, are found on each of them. All ranks add what they have, divided by the
number of ranks that have it too; so they all come to the same norm, to the bit, and scale alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor, nn

from fsdp._collect import is_ours
from fsdp._comm import Communicator, communicator
from fsdp._dtensors import MeshGroups, MeshPart, settled_gradient
from fsdp._handle import FlatParamHandle
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

    Sums of powers are taken per shard in float32 or wider and added over the ranks once; with `DTensor`s once more over
    each dimension of their mesh. Of ignored parameters, which every rank has for itself, the mean over ranks of these
    sums is taken: all ranks find the same norm, and the right one where their gradients are alike. A unit with ranks of
    its own counts once for each group of ranks that shares (or replicates) it, since each group trains its own.

    Returns:
        The norm before clipping.

    Raises:
        RuntimeError: if gradients are not reduced yet, or, if that is asked for, the norm is not finite; no gradient is
            changed then.
        ValueError: for a norm that is none, or if a unit spans ranks that the root does not.
        NotImplementedError: if meshes of `DTensor`s overlap in part.
    """
    beyond = [unit.name for unit in units if root.ranks and not unit.ranks <= root.ranks]
    if beyond:
        raise ValueError(
            f"clip_grad_norm_ adds up what the ranks of the outermost wrapper have ({sorted(root.ranks)}), and inner "
            f"ones are spread over more ({', '.join(beyond)}). Wrap the outermost module with a process_group of all "
            "these ranks."
        )
    if not norm_type > 0:
        raise ValueError(f"norm_type must be positive, or inf for the largest absolute value; got {norm_type}")
    grads, unsharded = _reduced_gradients(units), _ignored_gradients(root)
    ours = [part for unit in units for handle in unit.handles for part in handle.flat_param.parts]
    parallel = MeshGroups.of([*ours, *map(MeshPart.of, root.module.parameters())])
    # Parameters of one handle are spread over the same ranks.
    shares = [
        (grad, parallel.copies(handle.flat_param.parts[0]) * handle.replicas.world_size)
        for handle, grad in grads.items()
    ]
    every = math.prod(comm.world_size for comm in root.everyone)
    shares += [(grad, parallel.copies(MeshPart.of(param)) * every) for param, grad in unsharded.items()]
    comms = [*root.everyone, *(communicator(group, device) for group in parallel.groups.values())]
    norm = _total(comms, _local_total(shares, norm_type, device, _ignored_dtype(root)), norm_type)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"the norm of the gradients is {norm.item()} (of order {norm_type}), so they cannot be clipped; they are "
            "left as they are, on every rank. Pass error_if_nonfinite=False to clip all the same."
        )
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    # Also where the scale is 1: deciding on the host would make it wait for the device.
    for grad, _ in shares:
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
    for grad in (*_reduced_gradients(units).values(), *_ignored_gradients(root).values()):
        grad.clamp_(-clip_value, clip_value)


def _reduced_gradients(units: Sequence[Unit]) -> dict[FlatParamHandle, Tensor]:
    handles = [handle for unit in units for handle in unit.handles]
    for handle in handles:
        handle.home.check(handle.name)
        if handle.pieces is not None:
            handle.pieces.collect_gradients()  # what users zeroed or replaced
        handle.flat_param.bring_gradient()
        if handle.flat_param.has_unreduced:
            raise RuntimeError(
                f"cannot clip: the gradients of {handle.name} accumulated under no_sync() are not reduced over the "
                "ranks yet. Run the last backward of the step outside no_sync()."
            )
    return {handle: handle.flat_param.grad for handle in handles if handle.flat_param.grad is not None}


def _ignored(root: Unit) -> list[nn.Parameter]:
    return [param for param in root.module.parameters() if not is_ours(param)]


def _ignored_gradients(root: Unit) -> dict[nn.Parameter, Tensor]:
    grads = {param: settled_gradient(param) for param in _ignored(root)}
    return {param: grad for param, grad in grads.items() if grad is not None}


def _ignored_dtype(root: Unit) -> torch.dtype:
    # By what could have gradients: one rank may have some that others have not, and sums must be of one dtype on all.
    wide = any(param.requires_grad and param.real.dtype is torch.float64 for param in _ignored(root))
    return torch.float64 if wide else torch.float32


def _total(comms: Sequence[Communicator], local: Tensor, norm_type: float) -> Tensor:
    if not math.isinf(norm_type):
        return _over_all(comms, local, "sum").pow(1.0 / norm_type)
    # A maximum over ranks drops NaN on some backends: whether there was one travels beside it.
    is_nan = local.isnan()
    both = _over_all(comms, torch.stack([local.masked_fill(is_nan, 0.0), is_nan.to(local.dtype)]), "max")
    return both[0].masked_fill(both[1] > 0, math.nan)


def _over_all(comms: Sequence[Communicator], tensor: Tensor, op: str) -> Tensor:
    for comm in comms:
        tensor = comm.all_reduce(tensor, op, "the norm of gradients").wait()
    return tensor


def _local_total(
    shares: Sequence[tuple[Tensor, int]], norm_type: float, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """This rank's contribution, from gradients with the number of ranks that contribute the same.

    At least in `dtype`.
    """
    total_dtype = reduce(torch.promote_types, (grad.dtype.to_real() for grad, _ in shares), dtype)
    norms = [_norm(grad, norm_type).to(device, total_dtype) for grad, _ in shares if grad.numel()]
    if not norms:
        return torch.zeros((), dtype=total_dtype, device=device)
    stacked = torch.stack(norms)
    if math.isinf(norm_type):
        return stacked.max()
    copies = [count for grad, count in shares if grad.numel()]
    powers = stacked.pow(norm_type)
    return powers.sum() if set(copies) == {1} else (powers / powers.new_tensor(copies)).sum()


def _norm(grad: Tensor, norm_type: float) -> Tensor:
    # In its own dtype if that is wide enough: one for all would drop imaginary parts, or digits of what is real.
    return torch.linalg.vector_norm(grad.to(torch.promote_types(grad.dtype, torch.float32)), norm_type)
