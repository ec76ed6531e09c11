"""Lightning's precision plugins for sharded gradients: all ranks share their norm, and a scaler's decision.

The Trainer makes plugins of its own from its ``precision=``; the strategy puts these in their places, under the same
names, so that checkpoints of other strategies find their scaler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import plugins as stock
from torch import nn

import fsdp


class _Sharded(stock.Precision):
    """A plugin that clips by the norm of all ranks' gradients."""

    _wrapper: fsdp.FullyShardedDataParallel | None = None
    # The dtype in which units all-gather and compute, if that is not the dtype of their parameters.
    compute_dtype: torch.dtype | None = None

    def connect(self, model: nn.Module, optimizers: list[Any], lr_schedulers: list[Any]) -> Any:
        """Take the outermost wrapper from the strategy."""
        if not isinstance(model, fsdp.FullyShardedDataParallel):
            raise TypeError(
                f"{type(self).__module__}.{type(self).__name__} clips gradients of a FullyShardedDataParallel, and got "
                f"a {type(model).__name__}. Use it with Trainer(strategy=FullyShardedStrategy())."
            )
        self._wrapper = model
        return super().connect(model, optimizers, lr_schedulers)

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """Collective. Scale the optimizer's gradients so that their norm over all ranks is at most `clip_val`."""
        if self._wrapper is None:
            raise RuntimeError(
                "gradients are clipped while the Trainer runs: the strategy has not set up the model yet"
            )
        own = {id(param) for param in self.main_params(optimizer)}
        others = [param for param in self._wrapper.parameters() if param.grad is not None and id(param) not in own]
        hidden = [param.grad for param in others]
        for param in others:
            param.grad = None
        try:
            self._wrapper.clip_grad_norm_(clip_val)
        finally:
            for param, grad in zip(others, hidden, strict=True):
                param.grad = grad


class Precision(_Sharded):
    """``precision="32-true"``: in the parameters' own dtype."""


class HalfPrecision(_Sharded, stock.HalfPrecision):
    """``precision="bf16-true"`` and ``"16-true"``: parameters, optimizer and computation in 16 bits."""


class DoublePrecision(_Sharded, stock.DoublePrecision):
    """``precision="64-true"``: parameters, optimizer and computation in float64."""


class MixedPrecision(_Sharded, stock.MixedPrecision):
    """``precision="bf16-mixed"`` and ``"16-mixed"``: autocast, over parameters that are all-gathered in 16 bits.

    Shards stay as they are (float32), and so do buffers and what a step is given. Gradients are summed in 16 bits
    unless the strategy has ``fp32_reduce_scatter=True``.

    Args:
        precision: "bf16-mixed" or "16-mixed".
        device: of autocast, as a type: "cuda" or "cpu".
        scaler: with "16-mixed"; of one that is not sharded the settings are taken. None: with torch's defaults.
    """

    def __init__(self, precision: Any, device: str, scaler: torch.amp.GradScaler | None = None) -> None:
        if precision == "16-mixed" and not getattr(scaler, "agrees_over_ranks", False):
            like, scaler = scaler, fsdp.ShardedGradScaler(device=device, enabled=scaler is None or scaler.is_enabled())
            if like is not None and like.is_enabled():
                scaler.load_state_dict(like.state_dict())
        super().__init__(precision, device, scaler)
        self.compute_dtype = torch.bfloat16 if precision == "bf16-mixed" else torch.float16


_MAKERS: dict[type[stock.Precision], Callable[[Any], _Sharded]] = {
    stock.Precision: lambda plugin: Precision(),
    stock.HalfPrecision: lambda plugin: HalfPrecision(plugin.precision),
    stock.DoublePrecision: lambda plugin: DoublePrecision(),
    stock.MixedPrecision: lambda plugin: MixedPrecision(plugin.precision, plugin.device, plugin.scaler),
}


def sharded(plugin: stock.Precision | None) -> _Sharded:
    """Return the plugin for sharded gradients that does what the given one does."""
    if isinstance(plugin, _Sharded):
        return plugin
    make = _MAKERS.get(stock.Precision if plugin is None else type(plugin))
    if make is None:
        raise TypeError(
            f"FullyShardedStrategy cannot work with the precision plugin {type(plugin).__name__}: it would clip by "
            "this rank's part of the gradients. Choose precision= 32-true, bf16-true, 16-true, bf16-mixed, 16-mixed or "
            "64-true, or derive your plugin from one in fsdp.lightning."
        )
    return make(plugin)
