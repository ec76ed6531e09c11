"""The language model, the batches and the training loop of the recipes for a mesh."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fsdp

VOCABULARY, LENGTH, BATCH, WIDTH, HEAD, LAYERS = 19, 8, 8, 8, 2, 2
MAX_NORM = 0.5  # of the gradient of the whole model


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = WIDTH, WIDTH, False
        self.query, self.key, self.value = (nn.Linear(*sizes) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        # A rank of a tensor parallel group has some of the heads.
        parts = [part(hidden) for part in (self.query, self.key, self.value)]
        heads = (part.unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in parts)
        return self.out(self.attend(*heads).transpose(1, 2).flatten(2))

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Causal attention, of tensors [batch, heads, length, HEAD]."""
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(hidden)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention, self.mlp = Attention(), MLP()

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.norms[0](hidden))
        return hidden + self.mlp(self.norms[1](hidden))


class Embedding(nn.Module):
    start = 0  # the position of the first token

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device) + self.start
        return self.tokens(tokens) + self.positions(places)


class GPT(nn.Sequential):
    """The modules have the names "embedding", "0", "1" and so on, "norm" and "head"."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = Embedding()
        for number in range(LAYERS):
            self.add_module(str(number), Block())
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)


def build() -> Any:
    torch.manual_seed(0)  # the same weights on every rank
    return GPT().double()


def blocks(model: nn.Module) -> list[Any]:
    return [module for module in model.children() if isinstance(module, Block)]


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of all ranks, each [BATCH, LENGTH]: tokens that count."""
    generator = torch.Generator().manual_seed(step)
    first = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
    tokens = (first + torch.arange(LENGTH + 1)) % VOCABULARY
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def fit(
    model: nn.Module,
    step: Callable[..., Tensor],
    folder: Path,
    steps: int,
    clip: Callable[..., Any] = nn.utils.clip_grad_norm_,
) -> list[float]:
    """Collective. Train until `steps`, from the checkpoint in `folder` if there is one.

    `step` computes gradients from the batch of all ranks, and returns a loss whose mean
    over all ranks is the loss of the batch. These means are returned.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    losses, first = [], 0
    if folder.exists():
        first = fsdp.load(folder, model, optimizer).values
    for number in range(first, steps):
        loss = step(*batch(number)).detach().clone()
        clip(list(model.parameters()), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss)
        losses.append(loss.item() / dist.get_world_size())
    fsdp.save(folder, model, optimizer, values=steps)
    return losses


def ranks_of_rest(parts: int) -> int:
    """Return the size of an axis of a mesh, whose other axes have `parts` ranks."""
    ranks = dist.get_world_size()
    if ranks % parts:
        raise ValueError(f"{ranks} ranks: start a multiple of {parts} of them")
    return ranks // parts


def run(train: Callable[..., list[float]]) -> None:
    """Collective. Initialize the ranks of torchrun, train, and print losses."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    fsdp.init_distributed()
    losses = train(Path("runs") / Path(sys.argv[0]).stem, steps)
    if dist.get_rank() == 0 and losses:
        print(f"loss {losses[0]:.4f}, after {steps} steps {losses[-1]:.4f}", flush=True)
    dist.destroy_process_group()
