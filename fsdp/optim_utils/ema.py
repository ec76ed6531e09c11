"""`EMA` computes an exponential moving average of a model's weights. Each rank averages only its shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fsdp.distributed.dtensor import local_part
from fsdp.engine.runtime import runtimes
from fsdp.engine.unit import unit_of_wrapper, units_of
from fsdp.layers.deferred_init import require_values
from fsdp.layers.listed_shards import named_shards


class EMA(AveragedModel):
    """An exponential moving average of a model: ``average = decay * average + (1 - decay) * weight``.

    This class is `torch.optim.swa_utils.AveragedModel` over a copy of the wrapped model. Updates require no
    all-gather, and each rank needs memory for an additional shard. ``ema.module`` is a wrapped model like the
    original: call it for evaluation, and save ``ema.module.state_dict()``. The average is computed in the dtype of the
    shards. In bfloat16 a decay close to 1 has no effect, so train with float32 shards (``mixed_precision``).

    Args:
        model: a wrapped model, or any module. The first `update_parameters` copies its weights.
        decay: the weight of the previous average in each update, between 0 and 1.
        use_buffers: If True, average buffers as well. By default, buffers are copied at every update.

    Raises:
        ValueError: if `decay` is out of range.
        RuntimeError: if the model has parameters without values (meta device): initialize them first.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999, *, use_buffers: bool = False) -> None:
        if not 0.0 <= decay <= 1.0:
            raise ValueError(f"decay must be between 0 and 1, got {decay}")
        require_values(model, "make an EMA")
        super().__init__(model, multi_avg_fn=partial(_average, decay), use_buffers=use_buffers)
        self.module.requires_grad_(False)

    def update_parameters(self, model: nn.Module) -> None:
        """Update the average with the model's weights, after each optimizer step. Not collective.

        Raises:
            ValueError: if `model` has different parameters than the copied model, or was cast since.
            RuntimeError: if the average or `model` is parked; inside `fsdp.join` without ``after_step``, because
                finished ranks would not update their average.
        """
        self._pairs(model, "EMA.update_parameters()")
        unit = unit_of_wrapper(model)
        if not all(each.participation.repeats_steps for each in runtimes() if each.root is unit):
            raise RuntimeError(
                "EMA.update_parameters() inside fsdp.join: ranks that have finished step their shards, but would not "
                "update the average. Pass fsdp.join(..., after_step=lambda _: ema.update_parameters(model)) as well, "
                "which they call"
            )
        super().update_parameters(nn.ModuleList([model]))  # its parameters() are shards, also under `fully_shard`

    @contextmanager
    def applied_to(self, model: nn.Module) -> Iterator[None]:
        """Replace the model's weights by the average inside the context, and restore them afterwards. Not collective.

        Use this context for code that holds a reference to the model. Do not enter the context between a forward and
        its backward, and do not step an optimizer in it. The average keeps its values, so it can be called and saved
        inside. The model's weights are copied meanwhile, which requires memory for another shard per rank, also if
        shards are on disk.

        Raises:
            ValueError: if `model` has different parameters than the copied model, or was cast since.
            RuntimeError: if the average or `model` is parked.
        """
        kept: list[tuple[Tensor, Tensor]] = []
        try:
            for average, param in self._pairs(model, "EMA.applied_to()"):
                kept.append((param, param.detach().clone()))
                _write(param, average)
            yield
        finally:
            for param, weight in kept:
                _write(param, weight)

    def _pairs(self, model: nn.Module, what: str) -> list[tuple[Tensor, Tensor]]:
        ours, theirs = (list(named_shards(each).values()) for each in (self.module, model))
        if [(average.shape, average.dtype) for average in ours] != [(param.shape, param.dtype) for param in theirs]:
            raise ValueError(
                f"this average belongs to another model: it has {len(ours)} parameters on this rank, the "
                f"{type(model).__name__} has {len(theirs)}, or they differ in shape or dtype. Create a new EMA of this "
                "model."
            )
        for unit in units_of([*self.module.modules(), *model.modules()]):
            for handle in unit.owned_handles:
                handle.storage.check(what)  # torch's update writes to detached tensors, which a parked model ignores
        return list(zip(ours, theirs, strict=True))


@torch.no_grad()
def _average(decay: float, averages: Sequence[Tensor], weights: Sequence[Tensor], count: Any) -> None:
    # torch's foreach functions do not accept `DTensor`s mixed with plain tensors (buffers, ignored parameters).
    averages, weights = [*map(local_part, averages)], [*map(local_part, weights)]
    if (averages[0].is_floating_point() and averages[0].itemsize > 1) or averages[0].is_complex():
        get_ema_multi_avg_fn(decay)(averages, weights, count)
    else:  # integers, bytes, and 8-bit floats of quantised parameters are copied, because they have no average
        torch._foreach_copy_(averages, weights)


@torch.no_grad()
def _write(param: Tensor, value: Tensor) -> None:
    param.copy_(value)
