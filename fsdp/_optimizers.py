"""Mistakes with optimizers that would otherwise pass in silence are noticed when one steps."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp._collect import taken_by
from fsdp._flat_param import FlatParameter


@cache
def watch_optimizers() -> None:
    """Check every torch optimizer at its steps from now on."""
    register_optimizer_step_pre_hook(_check)


def _check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for param in params:
        if isinstance(param, FlatParameter) and param._has_unreduced and param.grad is not None:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step(): gradients that were accumulated under no_sync() are not reduced "
                "over the ranks yet and would be left out. Run the last backward of the step outside no_sync()."
            )
    _refuse_original_parameters(optimizer, params)


def _refuse_original_parameters(optimizer: torch.optim.Optimizer, params: list[Any]) -> None:
    names = [taken_by(param) for param in params]
    stale = [name for name in names if name is not None]
    if stale:
        listing = ", ".join(stale[:5]) + (f" and {len(stale) - 5} more" if len(stale) > 5 else "")
        raise RuntimeError(
            f"this {type(optimizer).__name__} was made before the model was wrapped: it holds original parameters that "
            f"get no gradients any more ({listing}). Make it after wrapping, from the wrapped model's parameters()."
        )
