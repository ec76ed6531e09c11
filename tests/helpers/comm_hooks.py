"""Communication hooks that tests register, and models that have one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp.distributed.comm_hooks import reduce_scatter
from tests.helpers.models import Wrap, keep

CommHook = Callable[[Any, Tensor, Tensor], None]
MakeModel = Callable[[Wrap], nn.Module]


def average(state: Any, gradient: Tensor, shard: Tensor) -> None:
    """What the library does without a hook; in the dtype of the reduction."""
    shard.copy_(reduce_scatter(gradient)).div_(gradient.numel() // shard.numel())


def average_in_float32(state: Any, gradient: Tensor, shard: Tensor) -> None:
    """What the library does without a hook for float32 shards, whatever is sent: the result has another dtype."""
    shard.data = reduce_scatter(gradient, dtype=torch.float32).div_(gradient.numel() // shard.numel())


def torchs(name: str) -> CommHook:
    """A hook of torch's, for its FSDP1."""
    from torch.distributed.algorithms._comm_hooks import default_hooks

    return getattr(default_hooks, name)


def torchs_state(name: str) -> Any:
    """The state that it needs."""
    from torch.distributed.algorithms._comm_hooks import default_hooks

    assert dist.group.WORLD is not None
    is_plain = name == "reduce_scatter_hook"
    return (default_hooks.DefaultState if is_plain else default_hooks.LowPrecisionState)(dist.group.WORLD)


def torchs_reduce_scatter(state: Any, gradient: Tensor, shard: Tensor) -> None:
    """torch's own hook for what the library does, made ready at each call; for models that are made on the ranks."""
    torchs("reduce_scatter_hook")(torchs_state("reduce_scatter_hook"), gradient, shard)


def with_hook(make_model: MakeModel, hook: CommHook, wrap: Wrap, state: Any = None) -> nn.Module:
    """The model with a hook, if it is wrapped at all."""
    model: Any = make_model(wrap)
    if wrap is not keep:
        model.register_comm_hook(state, hook)
    return model
