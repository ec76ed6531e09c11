"""States of random number generators: each rank has its own again, and they are looked at before they are set."""

from __future__ import annotations

import random
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp
from fsdp import FullyShardedDataParallel, ShardingStrategy
from fsdp.checkpoint.generators import GeneratorStates, generator_states
from tests.helpers.on_ranks import on_ranks


@pytest.mark.parametrize(
    "state", [torch.zeros(16), torch.zeros(2, 8, dtype=torch.uint8), b""], ids=["floats", "rows", "bytes"]
)
@pytest.mark.parametrize("name", ["torch", "cuda"])
def test_what_is_no_row_of_bytes_is_refused(name: str, state: Any) -> None:
    with pytest.raises(ValueError, match="random number generator cannot be set: it is no tensor of bytes"):
        GeneratorStates({**generator_states(), name: state})


@on_ranks(4)
def test_each_rank_has_its_own_again_in_other_process_groups(tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    strategies = [(None, None), (mesh, ShardingStrategy.HYBRID_SHARD_OPTIM), (mesh, ShardingStrategy.HYBRID_SHARD)]
    for saved, loaded in permutations(strategies, 2):
        random.seed(dist.get_rank())
        models = [
            FullyShardedDataParallel(nn.Linear(3, 3), process_group=group, sharding_strategy=strategy)
            for group, strategy in (saved, loaded)
        ]
        fsdp.save(tmp_path / "run", models[0])
        expected = random.random()
        assert fsdp.load(tmp_path / "run", models[1]).has_generators
        assert random.random() == expected
