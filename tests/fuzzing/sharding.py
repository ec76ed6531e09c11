"""The model of a case with some of its blocks as units."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.fuzzing.case import Case
from tests.fuzzing.models import (
    Around,
    Bare,
    Chain,
    Convolution,
    Leaf,
    Lookup,
    Model,
    Optional,
    Penalty,
    Scale,
    Tied,
)

UNITS = (Leaf, Bare, Scale, Convolution, Lookup, Tied, Optional, Penalty, Chain, Around)


def shard(case: Case, model: Model, again: int = 0) -> Any:
    """The model with some of its blocks as units (others, with other numbers `again`), and itself as the outermost."""
    rng = random.Random(f"units {case.seed}" + (f" {again}" if again else ""))
    wrap = front_door(case)

    def inside(module: nn.Module) -> None:
        for name, child in module.named_children():
            inside(child)
            # Each is called whenever what is around it is, so all ranks run the same units.
            is_unit = isinstance(child, UNITS) or isinstance(module, (Leaf, Bare))
            if is_unit and rng.random() < case.wrapped and any(True for _ in _untaken(child)):
                setattr(module, name, wrap(child))

    inside(model)
    return wrap(model)


def _untaken(module: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters that no unit inside has taken, as far as modules show them."""
    from fsdp import FSDPModule, FullyShardedDataParallel

    yield from module.parameters(recurse=False)
    for child in module.children():
        if not isinstance(child, (FSDPModule, FullyShardedDataParallel)):
            yield from _untaken(child)


_MESHES: dict[Any, Any] = {}


def _mesh(device: str) -> Any:
    """Two replicas of two shards; made once, because process groups are kept."""
    from torch.distributed.device_mesh import init_device_mesh

    if dist.group.WORLD not in _MESHES:
        _MESHES[dist.group.WORLD] = init_device_mesh(device, (2, 2), mesh_dim_names=("replicate", "shard"))
    return _MESHES[dist.group.WORLD]


GROUPS = {"dimensions": lambda name, param: param.dim(), "name": lambda name, param: name.split(".")[0]}


def front_door(case: Case) -> Callable[[nn.Module], Any]:
    from fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, ShardingStrategy, fully_shard

    options = dict(case.options)
    in_float32, sharding = options.pop("computes_in_float32", False), options.pop("sharding", None)
    if case.door == "fully_shard":
        if in_float32:
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.float32)
        if sharding == "hybrid":
            options["mesh"] = _mesh(case.device)
        return partial(fully_shard, **options)
    if in_float32:
        options["mixed_precision"] = MixedPrecision(param_dtype=torch.float32)
    if sharding == "replicated":
        options["sharding_strategy"] = ShardingStrategy.NO_SHARD
    elif sharding == "hybrid":
        options["process_group"] = _mesh(case.device)
    if "group_by" in options:
        options["group_by"] = GROUPS[options["group_by"]]
    return partial(FullyShardedDataParallel, **options)
