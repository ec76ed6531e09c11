"""What all clients train: a few blocks, on batches that every world size sees alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

WIDTH, CLASSES, ROWS, STEPS = 6, 3, 12, 3

Wrap = Callable[[nn.Module], nn.Module]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.down(torch.tanh(self.up(self.norm(inputs))))


class Net(nn.Module):
    """Blocks, each in what `wrap` makes of it, and a head."""

    def __init__(self, wrap: Wrap = lambda module: module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([wrap(Block()) for _ in range(2)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return self.head(inputs)


def global_batches() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        yield torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, CLASSES, generator=generator)


def own_batches() -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's rows of each."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for inputs, targets in global_batches():
        yield inputs[rank::world_size], targets[rank::world_size]


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(inputs).float(), targets)


def mean_over_ranks(loss: Tensor) -> float:
    mean = loss.detach().clone() / dist.get_world_size()
    dist.all_reduce(mean)
    return float(mean)


def trained_alone(model: nn.Module, optimizer: Any, max_norm: float | None = None) -> dict[str, Any]:
    """What each client should come to: one process, all rows."""
    losses = []
    for inputs, targets in global_batches():
        optimizer.zero_grad()
        loss = loss_of(model, inputs, targets)
        loss.backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        losses.append(float(loss.detach()))
    return {"losses": losses, "state": model.state_dict()}
