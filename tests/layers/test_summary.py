"""`print(model)` says of each unit what it shards, in which dtypes, and how much of it this rank holds."""

from __future__ import annotations

import copy

import torch
from torch import nn

from fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from tests.helpers.ranks import RankPool


def test_a_wrapper_shows_its_shards(ranks: RankPool) -> None:
    text = ranks(2).run(_printed_wrapper)[0]
    assert "  (0): FullyShardedDataParallel(" in text
    assert "  2 parameters, float32, computed in float16, 136 B of 272 B on this rank\n" in text
    assert "  1 parameter, float32, frozen, 16 B of 32 B on this rank\n" in text
    assert "  1 parameter, float32, 4 B of 8 B on this rank\n" in text


def _printed_wrapper() -> str:
    model = nn.Sequential(nn.Linear(16, 4), nn.Linear(4, 2))
    model[0] = FullyShardedDataParallel(model[0], mixed_precision=True)
    model[1].weight.requires_grad_(False)
    return repr(FullyShardedDataParallel(model))


def test_a_module_of_fully_shard_shows_its_shards_beside_its_own_options(ranks: RankPool) -> None:
    text, within, copied = ranks(2).run(_printed_module)[0]
    shards = "sharded: 2 parameters, float32, computed in bfloat16, 2.1 KiB of 4.1 KiB on this rank"
    assert text == f"FSDPLinear(in_features=32, out_features=32, bias=True, {shards})"
    assert within == f"FSDPSequential(\n  (0): {text}\n  (1): ReLU()\n)"
    assert copied == text


def _printed_module() -> tuple[str, str, str]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU())
    fully_shard(model[0], mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return repr(model[0]), repr(model), repr(copy.deepcopy(model[0]))


def test_one_rank_alone_holds_all(ranks: RankPool) -> None:
    assert "sharded: 2 parameters, float32, 4.0 MiB)" in ranks(1).run(_printed_alone)[0]


def _printed_alone() -> str:
    with torch.device("meta"):
        model = nn.Linear(1023, 1024)
    return repr(fully_shard(model))
