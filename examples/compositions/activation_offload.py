"""Activations in host memory between forward and backward, beside units' all-gathers.

    torchrun --nproc-per-node 4 -m examples.compositions.activation_offload

`torch.autograd.graph.save_on_cpu` would copy unsharded parameters, too: all weights of
the model, on every rank. `Offload` skips tensors in the memory of a layer's parameters.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

import fsdp
from examples.compositions.loop import run
from examples.compositions.offload import Offload

WIDTH, BATCH = 32, 512  # BATCH of all ranks together


def build() -> nn.Module:
    def layer() -> nn.Module:
        modules = nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        return nn.Sequential(nn.LayerNorm(WIDTH), *modules)

    return nn.Sequential(*(layer() for _ in range(6)), nn.Linear(WIDTH, 1)).double()


def loss_of(model: nn.Module, part: int, parts: int) -> Tensor:
    rows = torch.randn(BATCH, WIDTH, dtype=torch.double).chunk(parts)[part]
    rows = rows.to(next(model.parameters()).device)
    return (model(rows).squeeze(1) - rows.sin().sum(1)).square().mean()


def shard(model: Any, offloads: bool = True) -> Any:
    for layer in model[:-1]:
        fsdp.fully_shard(layer)
    fsdp.fully_shard(model)
    if offloads and next(model.parameters()).device.type != "cpu":
        Offload(model[:-1])
    return model


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


if __name__ == "__main__":
    run(sys.modules[__name__])
