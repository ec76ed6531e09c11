"""The norm of sharded gradients, and clipping by this norm.

With tensor parallelism, gradients are also sharded over the ranks of the `DTensor`s' meshes. Gradients of plain or
replicated parameters exist on each of these ranks. All ranks add their values, divided by the number of ranks with the
same values. The resulting norm is bitwise equal on all ranks, so they use the same scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from itertools import chain

import torch
from torch import Tensor, nn

from fsdp.distributed.collectives import communicator, during
from fsdp.distributed.communicator import some_of, uncompiled
from fsdp.distributed.consensus import from_everyone
from fsdp.distributed.dtensor import MeshGroups, MeshPart, settled_gradient
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.originals import is_ours, owner_of
from fsdp.engine.runtime import Runtime, runtime_of
from fsdp.engine.unit import Unit, own_modules
from fsdp.layers.exact_norm import maximum, over_all
from fsdp.layers.verify import require_sharded

# Gradients (or other values) with their parameters, which define how they are spread over the ranks.
Owned = Sequence[tuple[Tensor, nn.Parameter]]


@during("reduce_gradients()")
def reduce_gradients(model: nn.Module) -> None:
    """Collective. Reduce gradients accumulated without communication, for example to read them.

    Use this function for placements with PARTIAL gradients, or for gradients accumulated under `no_sync`.
    Optimizer steps, scalers and clipping functions reduce PARTIAL gradients automatically.

    Args:
        model: the outermost wrapper, or module under `fully_shard`.

    Raises:
        RuntimeError: inside a forward or backward, and inside `fsdp.join`.
        TypeError: if the model is not sharded.
    """
    runtime_of(require_sharded(model, "reduce_gradients")).reduce_all()


@during("clip_grad_norm_()")
def clip_by_norm(runtime: Runtime, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
    """Collective. Call `clip_grad_norm` for all gradients of a model, outside of forward and backward."""
    runtime.ensure_idle("clip gradients", is_served=True)
    runtime.reduce_deferred()
    runtime.participation.announce_clip_norm(max_norm, norm_type, error_if_nonfinite)
    return clip_grad_norm(runtime, max_norm, norm_type, error_if_nonfinite)


@uncompiled
def clip_by_value(runtime: Runtime, clip_value: float) -> None:
    """Call `clip_grad_value` for all gradients of a model, outside of forward and backward."""
    runtime.ensure_idle("clip gradients", is_served=True)
    runtime.reduce_deferred()
    runtime.participation.announce_clip_value(clip_value)
    clip_grad_value(runtime, clip_value)


def clip_grad_norm(runtime: Runtime, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
    """Collective. Scale all gradients to a norm over all ranks of at most `max_norm`; return the previous norm.

    If the norm is not finite and `error_if_nonfinite` is True, the error names the parameters with such gradients, and
    no gradient is changed. Gradients that are not reduced yet also raise an error.
    """
    root, reduced, beside = runtime.root, reduced_gradients(runtime), unsharded_parameters(runtime.units)
    owned: Owned = [(grad, handle.flat_param) for handle, grad in reduced.items()]
    owned = [*owned, *((grad, param) for param in beside if (grad := settled_gradient(param)) is not None)]
    norm = norm_over_ranks([runtime], owned, beside, norm_type, max_norm)
    where = _named_nonfinite(root, reduced) if error_if_nonfinite and not norm.isfinite() else ""
    scale_to([grad for grad, _ in owned], norm, max_norm, error_if_nonfinite, where)
    return norm


def _named_nonfinite(root: Unit, reduced: Mapping[FlatParamHandle, Tensor]) -> str:
    """Collective. Return a description of the parameters whose gradients are not finite on any rank."""
    own = [
        f"{slot.name} of unit '{handle.unit_name}'"
        for handle, grad in reduced.items()
        for slot, part in zip(
            handle.layout.slots, handle.layout.local_shards(grad.reshape(-1), handle.comm.rank), strict=True
        )
        if not part.isfinite().all()
    ]
    names = list(dict.fromkeys(chain(*from_everyone(root.everyone, own))))
    return f" (the gradient of {some_of(names, 3)})" if names else ""


def norm_over_ranks(
    runtimes: Sequence[Runtime],
    owned: Owned,
    beside: Iterable[nn.Parameter],
    norm_type: float,
    max_norm: float | None = None,
) -> Tensor:
    """Collective. Return the norm of the gradients on all ranks of models with the same ranks, in float32 or wider.

    Sums of powers are computed for each shard and added over the ranks, and with `DTensor`s also over each dimension of
    their mesh. For parameters that are not sharded, the mean of these sums over the ranks is used. So all ranks compute
    the same norm, which is correct if their gradients are equal. A unit with a separate process group counts once for
    each group of ranks, because each group trains different parameters.

    The `owned` tensors may belong to the units' parameters or to other parameters, and `beside` are the models'
    `unsharded_parameters`. With `max_norm`, the tensors are about to be clipped to this norm. Errors contain it, and
    the messages of ranks that clip to different norms do not match.

    Raises:
        ValueError: for an invalid norm type, or if a unit spans ranks outside the root.
        NotImplementedError: if meshes of `DTensor`s overlap in part.
    """
    root, units = runtimes[0].root, [unit for runtime in runtimes for unit in runtime.units]
    beyond = [unit.name for unit in units if root.ranks and not unit.ranks <= root.ranks]
    if beyond:
        raise ValueError(
            f"clip_grad_norm_ sums over the ranks of the outermost unit ({sorted(root.ranks)}), but inner units are "
            f"sharded over other ranks ({', '.join(beyond)}). Shard the outermost module over all these ranks."
        )
    if not norm_type > 0:
        raise ValueError(f"norm_type must be positive, or inf for the largest absolute value; got {norm_type}")
    handles = {id(handle.flat_param): handle for runtime in runtimes for handle in runtime.handles}
    others = [*beside, *(param for _, param in owned if owner_of(param) is None)]
    ours = [part for handle in handles.values() for part in handle.flat_param.parts]
    parallel = MeshGroups.of([*ours, *map(MeshPart.of, others)], root.ranks)
    every = math.prod(comm.world_size for comm in root.everyone)

    def copies(param: nn.Parameter) -> int:
        owner = owner_of(param)
        if owner is None:
            part = MeshPart.of(param)
            return parallel.copies(part) * every // parallel.inside_of(part)
        # Parameters of one handle are spread over the same ranks.
        return parallel.copies(owner.parts[0]) * handles[id(owner)].replicas.world_size

    shares = [(tensor, copies(param)) for tensor, param in owned]
    comms = [*root.everyone, *(communicator(group, root.device) for group in parallel.groups.values())]
    # From all trained parameters: ranks may have different gradients, but the dtype of sums must be the same.
    dtypes = {param.dtype for param in others if param.requires_grad}
    dtypes |= {handle.kept_grad_dtype for handle in handles.values() if handle.flat_param.requires_grad}
    dtype = torch.float64 if any(each.to_real() is torch.float64 for each in dtypes) else torch.float32
    local = _local_total(shares, norm_type, root.device, dtype)
    bound = "" if max_norm is None else f", max_norm={max_norm:g}"
    what = f"the norm of gradients (norm_type={norm_type:g}{bound})"
    if math.isinf(norm_type):
        return maximum(comms, local, what)
    return over_all(comms, local, "sum", what).pow(1.0 / norm_type)


def scale_to(grads: Iterable[Tensor], norm: Tensor, max_norm: float, error_if_nonfinite: bool, where: str = "") -> None:
    """Scale gradients with this norm over all ranks to at most `max_norm`; `where` describes nonfinite gradients."""
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"the norm of the gradients is {norm.item()} over all ranks{where}, so they cannot be clipped; they are "
            "unchanged on every rank. Pass error_if_nonfinite=False to clip anyway."
        )
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    # Also if the scale is 1: a decision on the host would require a synchronization with the device.
    for grad in grads:
        wide = torch.promote_types(grad.dtype, torch.float32)
        if wide == grad.dtype:
            grad.mul_(scale.to(grad.device, wide))
        else:  # a scale in 16 bits would lose digits, and become zero below 3e-8 in float16
            grad.copy_(grad.to(wide).mul_(scale.to(grad.device, wide)))


def clip_grad_value(runtime: Runtime, clip_value: float) -> None:
    """Clamp every element of the gradients, which must be reduced, to ``[-clip_value, clip_value]``."""
    if not clip_value >= 0:
        raise ValueError(f"clip_value must not be negative, got {clip_value}")
    beside = map(settled_gradient, unsharded_parameters(runtime.units))
    for grad in (*reduced_gradients(runtime).values(), *beside):
        if grad is not None:
            grad.clamp_(-clip_value, clip_value)


def require_reduced(handles: Iterable[FlatParamHandle], what: str = "clip") -> None:
    """Move the gradients of shards to their parameters' device; raise RuntimeError if they are not reduced yet."""
    for handle in handles:
        handle.storage.check(handle.name)
        handle.listed.collect_gradients()  # what users zeroed or replaced
        handle.flat_param.bring_gradient()
        if handle.flat_param.has_unreduced:
            raise RuntimeError(
                f"cannot {what}: the gradients of {handle.name} accumulated under no_sync() are not reduced over the "
                "ranks yet. Run the last backward of the step outside no_sync(). Or call fsdp.reduce_gradients(model), "
                "as with SHARD_OPTIM, which reduces gradients only at the step."
            )


def reduced_gradients(runtime: Runtime) -> dict[FlatParamHandle, Tensor]:
    """Return the existing gradients of shards, by handle; raise an error as `require_reduced`."""
    require_reduced(runtime.handles)
    return {handle: handle.flat_param.grad for handle in runtime.handles if handle.flat_param.grad is not None}


def unsharded_parameters(units: Iterable[Unit]) -> list[nn.Parameter]:
    """Return the parameters in the units' modules that are not sharded, because the units ignore them."""
    modules = (module for unit in units for module in own_modules(unit.module))
    listed = (param for module in modules for param in module._parameters.values())
    return list(dict.fromkeys(param for param in listed if param is not None and not is_ours(param)))


def _local_total(
    shares: Sequence[tuple[Tensor, int]], norm_type: float, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Return this rank's contribution in `dtype` or wider; `shares` has the number of ranks with the same gradient."""
    total_dtype = reduce(torch.promote_types, (grad.dtype.to_real() for grad, _ in shares), dtype)
    shares = [(grad, copies) for grad, copies in shares if grad.numel()]
    if not shares:
        return torch.zeros((), dtype=total_dtype, device=device)
    # Each in its own dtype, at least float32: a common dtype would drop imaginary parts, or digits of real gradients.
    wide = ((grad, torch.promote_types(grad.dtype, torch.float32)) for grad, _ in shares)
    norms = [torch.linalg.vector_norm(grad, norm_type, dtype=each).to(device, total_dtype) for grad, each in wide]
    stacked = torch.stack(norms)
    if math.isinf(norm_type):
        return stacked.max()
    copies = [count for _, count in shares]
    powers = stacked.pow(norm_type)
    if set(copies) != {1}:  # not as a tensor, because a copy from the host would synchronize
        powers = torch.stack(torch._foreach_div(powers.unbind(), copies))
    return powers.sum()
