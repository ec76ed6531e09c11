"""The gradients of unsharded parameters, shown to users and taken back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fsdp.engine.handle import FlatParamHandle


def full_gradients(handle: FlatParamHandle) -> list[Tensor | None]:
    """Collective. Return the unsharded reduced gradients, with memory of their own; None for parameters without."""
    if handle.has_unreduced:
        raise RuntimeError(
            f"the gradients of {handle.name} accumulated under no_sync() are not reduced over the ranks yet, so none "
            "can be shown. Run the last backward of the step outside no_sync()."
        )
    if handle.orig_params is not None:
        handle.orig_params.collect_gradients()
    handle.flat_param.bring_gradient()
    grad = handle.flat_param.grad
    if grad is None:
        return [None] * len(handle.places)
    shard = grad.detach().view(-1).to(handle.storage.device)
    full = shard.new_empty(handle.layout.padded_numel)
    handle.comm.all_gather(full, shard, f"all-gather of the gradient of {handle.name}", ("gradient", handle.tag)).wait()
    handle.comm.settle()
    shown: list[Tensor | None] = []
    for slot, (view, part) in enumerate(zip(handle.layout.unpack(full), handle.flat_param.parts, strict=True)):
        has_none = handle.orig_params is not None and handle.orig_params.params[slot].grad is None
        shown.append(None if has_none else part.dtensor(view.clone()) if part else view.clone())
    return shown


def keep_gradients(handle: FlatParamHandle, gradients: Sequence[Tensor | None]) -> None:
    """Have this rank's shards of unsharded gradients, in the place of those that it has."""
    handle.zero_grad()
    handle.flat_param.forget_gradient()
    if all(gradient is None for gradient in gradients):
        return
    dtype = handle.gradients.dtype if handle.precision.keeps_low_gradients else handle.flat_param.dtype
    shard = torch.zeros(handle.layout.shard_numel, dtype=dtype, device=handle.storage.device)
    for slot, gradient in enumerate(gradients):
        if gradient is not None:
            part, local = handle.flat_param.parts[slot], gradient.detach()
            local = local if part is None else part.to_local(handle.layout.slots[slot].name, local)
            handle.layout.shard_of(slot, local, shard, handle.comm.rank)
    handle.storage.accept(handle.flat_param, shard)
    if handle.orig_params is not None:
        handle.storage.copy_stream.settle()
        handle.orig_params.show_gradients([gradient is not None for gradient in gradients])
