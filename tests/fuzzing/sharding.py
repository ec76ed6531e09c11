"""The model of a case with some of its blocks as units."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    Placements,
    ShardingStrategy,
    fully_shard,
)
from tests.fuzzing.case import Case
from tests.fuzzing.models import BLOCKS, Bare, Leaf, Model


def shard(case: Case, model: Model, again: int = 0) -> Any:
    """The model with some of its blocks as units (others, with other numbers `again`), and itself as the outermost."""
    rng = random.Random(f"units {case.seed}" + (f" {again}" if again else ""))
    wrap = front_door(case)

    def inside(module: nn.Module) -> None:
        for name, child in module.named_children():
            inside(child)
            # Each is called whenever what is around it is, so all ranks run the same units.
            is_unit = isinstance(child, BLOCKS) or isinstance(module, (Leaf, Bare))
            if is_unit and rng.random() < case.wrapped and any(True for _ in _untaken(child)):
                setattr(module, name, wrap(child))

    inside(model)
    return wrap(model)


def _untaken(module: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters that no unit inside has taken, as far as modules show them."""
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


# Strategies by which not all of a step's collectives are in each forward and backward.
BY_STEPS = {name: ShardingStrategy[name] for name in ("SHARD_OPTIM", "SHARD_OPTIM_GRADS", "HYBRID_SHARD_OPTIM")}
GROUPS = {"dimensions": lambda name, param: param.dim(), "name": lambda name, param: name.split(".")[0]}


def front_door(case: Case) -> Callable[[nn.Module], Any]:
    options = dict(case.options)
    in_float32, sharding = options.pop("computes_in_float32", False), options.pop("sharding", None)
    if sharding in ("hybrid", "HYBRID_SHARD_OPTIM"):
        options["mesh" if case.door == "fully_shard" else "process_group"] = _mesh(case.device)
    if case.door == "fully_shard":
        return _by_rows(case.seed, options, in_float32, sharding)
    if in_float32:
        options["mixed_precision"] = MixedPrecision(param_dtype=torch.float32)
    if sharding != "hybrid":
        options["sharding_strategy"] = {None: None, "replicated": ShardingStrategy.NO_SHARD, **BY_STEPS}[sharding]
    if "group_by" in options:
        options["group_by"] = GROUPS[options["group_by"]]
    return partial(FullyShardedDataParallel, **options)


def _by_rows(seed: int, options: dict[str, Any], in_float32: bool, sharding: str | None) -> Callable[[nn.Module], Any]:
    if in_float32:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.float32)
    if sharding in BY_STEPS:
        options["placements"] = Placements.from_strategy(BY_STEPS[sharding])
    if options.pop("columns", False):
        options["shard_placement_fn"] = partial(_last_dimension, seed)
    if options.pop("offload", False):
        options["offload_policy"] = CPUOffloadPolicy()
    return partial(fully_shard, **options)


def _last_dimension(seed: int, param: nn.Parameter) -> Any:
    from torch.distributed.tensor import Shard

    return Shard(param.dim() - 1) if param.dim() > 1 and (sum(param.shape) + seed) % 2 else None
