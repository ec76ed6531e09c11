"""A mixture of experts: the experts over an axis of ranks, all else over all ranks.

    torchrun --nproc-per-node 4 -m examples.compositions.expert_parallel

Each token is sent to the rank of the axis `ep` that has its expert, and back.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import fsdp
from examples.compositions.gpt import ranks_of_rest
from examples.compositions.loop import run
from examples.compositions.routing import local, routed

WIDTH, HIDDEN, EXPERTS, TOKENS = 8, 12, 4, 32  # TOKENS of all ranks together


class Experts(nn.Module):
    group: Any = None  # of the ranks that the experts are divided over

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 4)

    def forward(self, rows: Tensor, choice: Tensor) -> Tensor:
        return routed(self.compute, rows, choice, EXPERTS, self.group)

    def compute(self, rows: Tensor, counts: list[int]) -> Tensor:
        parts = zip(rows.split(counts), local(self.up), local(self.down), strict=True)
        return torch.cat([(part @ up).relu() @ down for part, up, down in parts])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, EXPERTS), Experts()

    def forward(self, rows: Tensor) -> Tensor:
        weight, choice = self.gate(rows).softmax(-1).max(-1)
        return rows + weight[:, None] * self.experts(rows, choice)


def build() -> nn.Module:
    return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 1)).double()


def loss_of(model: nn.Module, part: int, parts: int) -> Tensor:
    rows = torch.randn(TOKENS, WIDTH, dtype=torch.double).chunk(parts)[part]
    return (model(rows).squeeze(1) - rows.sin().sum(1)).square().mean()


def divide(experts: Any, mesh: DeviceMesh) -> None:
    """Collective. Divide experts over `ep`, and shard a rank's over `dp_mod_ep`."""
    for name, param in list(experts.named_parameters()):
        part = distribute_tensor(param.detach(), mesh["ep"], [Shard(0)])
        setattr(experts, name, nn.Parameter(part))
    fsdp.fully_shard(experts, mesh=mesh["dp_mod_ep"])
    # Gradients of experts are sums over the tokens of all ranks, including `ep`.
    experts.set_gradient_divide_factor(mesh.size())
    experts.group = mesh["ep"].get_group()


def mesh_of(ep: int) -> DeviceMesh:
    shape = ranks_of_rest(ep), ep
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp_mod_ep", "ep"))


def shard(model: Any, ep: int = 2) -> Any:
    mesh = mesh_of(ep)
    for block in model[:-1]:
        divide(block.experts, mesh)
        fsdp.fully_shard(block)
    return fsdp.fully_shard(model)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


if __name__ == "__main__":
    run(sys.modules[__name__])
