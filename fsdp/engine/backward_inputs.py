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

from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.managed_params import owner_of
from fsdp.engine.runtime import runtimes


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
        found += _leaves_of(one, handles[owner]) if owner in handles else [one]
    return found


def _leaves_of(param: Any, handle: FlatParamHandle) -> list[Tensor]:
    """Return what autograd knows in the place of a shard, or of a piece of it, for each dtype of computation."""
    listed = [handle.flat_param] * len(handle.layout.slots) if handle.pieces is None else handle.pieces.params
    slots = [slot for slot, each in enumerate(listed) if each is param]
    return [form.leaves[slot] for form in handle.forms for slot in slots]
