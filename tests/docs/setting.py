"""What the code on the pages takes for granted: a small model, its batches, and how it is trained and evaluated."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fsdp
from fsdp import FullyShardedDataParallel

WIDTH, WORDS = 8, 16


class Rotary(nn.Module):
    inv_freq: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.empty(WIDTH), persistent=False)
        self.reset_parameters()

    def frequencies(self) -> Tensor:
        return 1.0 / (1 + torch.arange(WIDTH))

    def reset_parameters(self) -> None:
        self.inv_freq = self.frequencies()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.value, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.out(torch.relu(self.query(inputs)) * self.key(inputs) + self.value(inputs))


class Model(nn.Module):
    """Tokens in, [batch, length], logits out; of a pair of inputs and targets it takes the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.rotary = nn.Embedding(WORDS, WIDTH), Rotary()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.adapter, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)
        self.temperature = nn.Parameter(torch.ones(1))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.temperature)

    def forward(self, tokens: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        hidden = self.embedding(tokens if isinstance(tokens, Tensor) else tokens[0]) * self.rotary.inv_freq
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.adapter(hidden)) / self.temperature


def sharded(**options: object) -> tuple[FullyShardedDataParallel, torch.optim.Optimizer]:
    """Collective. A model with a unit for each block, and its optimizer."""
    torch.manual_seed(0)
    model = fsdp.shard(Model(), units={Block}, **options)
    return model, torch.optim.AdamW(model.parameters())


def batches_of(rank: int) -> list[tuple[Tensor, Tensor]]:
    tokens = torch.randint(WORDS, (2, 3, 5), generator=torch.Generator().manual_seed(rank))
    return [(inputs, inputs) for inputs in tokens]


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())


def loss(output: Tensor) -> Tensor:
    return output.square().mean()


# Run at the beginning of each page, whose model and optimizer may be other ones later.
PRELUDE = """
import functools, itertools, os
import torch
import torch.distributed as dist
from torch import nn
import fsdp
from fsdp import *
from tests.docs.setting import Block, Model, Rotary, batches_of, loss, loss_of, sharded

rank, world_size = dist.get_rank(), dist.get_world_size()
model, optimizer = sharded()
batches = batches_of(rank)
batch = inputs, targets = batches[0]
criterion, step = loss, 100

def train(batch):
    loss(model(batch)).backward()
    optimizer.step()
    optimizer.zero_grad()

def evaluate(model):
    return loss(model(batch))
"""
