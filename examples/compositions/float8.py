"""Float8 matrix products of `torchao`, with weights all-gathered in float8 or not.

    torchrun --nproc-per-node 4 -m examples.compositions.float8

Dynamic scaling needs the largest absolute value of each unsharded weight. In forward, a
module sees its unsharded weight, so nothing needs to be done. With `gather`, each rank
casts its shard by the largest value of all ranks, and float8 is all-gathered.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torchao.float8 import (
    Float8LinearConfig,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
)

import fsdp
from examples.compositions.loop import run

WIDTH, BATCH = 16, 32  # BATCH of all ranks together


def build(gather: bool = True) -> nn.Module:
    layers = [
        nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, WIDTH))
        for _ in range(2)
    ]
    # `emulate` computes in the model's dtype, on any device; omit it on a GPU.
    config = Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=gather)
    hidden = convert_to_float8_training(nn.Sequential(*layers).double(), config=config)
    return nn.Sequential(*hidden, nn.Linear(WIDTH, 1).double())


def loss_of(model: nn.Module, part: int, parts: int) -> Tensor:
    rows = torch.randn(BATCH, WIDTH, dtype=torch.double).chunk(parts)[part]
    return (model(rows).squeeze(1) - rows.sin().sum(1)).square().mean()


def shard(model: Any) -> Any:
    for layer in model[:-1]:
        fsdp.fully_shard(layer)
    return fsdp.fully_shard(model)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9)
    # Optional: the scales of all weights in a single all-reduce.
    optimizer.register_step_post_hook(
        lambda *_: precompute_float8_dynamic_scale_for_fsdp(model)
    )
    return optimizer


if __name__ == "__main__":
    run(sys.modules[__name__])
