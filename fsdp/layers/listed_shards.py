"""Functions that find shards among the parameters of an optimizer, or in the arguments of a torch function."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fsdp.distributed.dtensor import is_dtensor, is_on_many_ranks
from fsdp.engine.originals import is_ours


def params_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def named_shards(model: nn.Module) -> dict[str, Any]:
    """Return the listed parameters of modules, by name.

    Under `fully_shard`, a module's own ``named_parameters()`` lists unsharded parameters while modules are unsharded.
    """
    list(model.parameters())  # stores tensors that were assigned to parameters in their shards
    return dict(nn.Module.named_parameters(model))


def shards_among(params: Iterable[Any]) -> list[Any]:
    """Return the parameters that are shards; other ranks may have different shards of them."""
    return [p for p in params if is_ours(p) and p.owner._is_managed]


def is_spread(param: Any) -> bool:
    """Return whether other ranks have different shards of a parameter, in a form that torch does not know."""
    return not is_dtensor(param) and (param.owner._is_sharded or is_on_many_ranks(param.owner.parts))


def shapes_in(param: Any) -> tuple[torch.Size, ...]:
    return param._shapes if param is param.owner else (param.unsharded_shape,)


def names_in(param: Any) -> tuple[str, ...]:
    return param._names if param is param.owner else (param.fqn,)


def name_of(param: Any) -> str:
    """Return the name of a sharded parameter, or a text with the first name in a flat parameter."""
    return str(getattr(param, "fqn", None) or f"the flat parameter with {param.owner._names[0]}")
