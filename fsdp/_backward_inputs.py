"""``loss.backward(inputs=...)`` with parameters that sharded models list.

A training loop names so what is to get a gradient: all of a model's parameters, or those of one of two models. Autograd
knows the leaves that modules compute with, and not the shards that they list, so it would find nothing to do.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from fsdp._collect import owner_of
from fsdp._handle import FlatParamHandle
from fsdp._runtime import runtimes


@cache
def let_backward_find_leaves() -> None:
    """Have ``backward`` take a shard, or a piece of one, for the leaves in its place from now on."""
    torch.autograd.backward = _with_leaves(torch.autograd.backward)


def _with_leaves(torchs: Callable[..., None]) -> Callable[..., None]:
    arguments = inspect.signature(torchs)

    @wraps(torchs)
    def backward(*args: Any, **kwargs: Any) -> None:
        given = arguments.bind(*args, **kwargs)
        inputs = given.arguments.get("inputs")
        if inputs is not None:
            given.arguments["inputs"] = _leaves_of_all(inputs)
        torchs(*given.args, **given.kwargs)

    return backward


def _leaves_of_all(inputs: Any) -> Any:
    listed: list[Any]
    if isinstance(inputs, (Tensor, GradientEdge)):  # the latter is a tuple
        listed = [inputs]
    else:
        listed = list(inputs.values() if isinstance(inputs, Mapping) else inputs)
    owners = [owner_of(one) if isinstance(one, Tensor) else None for one in listed]
    if not any(owner is not None for owner in owners):
        return inputs
    handles: dict[Any, FlatParamHandle] = {one.flat_param: one for runtime in runtimes() for one in runtime.handles}
    found: list[Any] = []
    for one, owner in zip(listed, owners, strict=True):
        found += handles[owner].leaves_of(one) if owner in handles else [one]
    return found
