"""Muon of whole matrices under expert parallelism, and AdamW of all other parameters.

    torchrun --nproc-per-node 4 -m examples.compositions.muon

The rows of a matrix are on several ranks, so its owner steps the whole matrix. Experts
are divided along the dimension of experts: a rank has whole matrices, and steps them.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

import fsdp
from examples.compositions.expert_parallel import WIDTH, Block, divide, loss_of, mesh_of
from examples.compositions.loop import run
from examples.compositions.routing import local

__all__ = ["loss_of"]


class StackedMuon(torch.optim.Optimizer):
    """Muon of stacks of matrices, [matrices, rows, columns], which may be divided."""

    def __init__(self, params: Any, lr: float = 0.02, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in [each for each in group["params"] if each.grad is not None]:
                state = self.state[param]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(param)
                buffer = local(state["momentum_buffer"])
                buffer.lerp_(local(param.grad), 1 - group["momentum"])
                local(param).sub_(orthogonal(buffer), alpha=group["lr"])


def orthogonal(matrices: Tensor, steps: int = 5) -> Tensor:
    """Return a batch of matrices with singular values near 1 (Newton-Schulz)."""
    found = matrices / matrices.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-7)
    for _ in range(steps):
        square = found @ found.mT
        found = 3.4445 * found + (2.0315 * square @ square - 4.7750 * square) @ found
    return found


def build() -> nn.Module:
    dense = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
    return nn.Sequential(dense[0], Block(), dense[1], Block(), dense[2]).double()


def shard(model: Any, ep: int = 2) -> Any:
    mesh = mesh_of(ep)
    for block in (model[1], model[3]):
        divide(block.experts, mesh)
        fsdp.fully_shard(block)
    return fsdp.fully_shard(model)


def is_matrix(name: str, shape: torch.Size) -> bool:
    return shape == (WIDTH, WIDTH)


def is_expert(name: str, shape: torch.Size) -> bool:
    return ".experts." in name


def make_optimizer(model: nn.Module) -> list[torch.optim.Optimizer]:
    experts = [each for name, each in model.named_parameters() if ".experts." in name]
    muon = {"params": is_matrix, "optimizer": torch.optim.Muon, "lr": 0.02}
    adamw = {"optimizer": torch.optim.AdamW, "sharded": True, "lr": 0.01}
    left = {"params": is_expert, "optimizer": None}  # to the second optimizer
    groups: list[Any] = [muon, left, adamw]
    return [fsdp.OwnedOptimizer(model, groups), StackedMuon(experts)]


if __name__ == "__main__":
    run(sys.modules[__name__])
