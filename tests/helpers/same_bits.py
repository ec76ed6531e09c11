"""What tests of `SameBits`, fingerprints and recordings share: a model with dropout, its forms, and a training."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import fsdp
from fsdp import FullyShardedDataParallel, SameBits
from tests.helpers.models import Wrap, keep, seeded
from tests.helpers.owned import under_fully_shard

MICRO_BATCHES = 12
FORMS: dict[str, Wrap] = {
    "flat": FullyShardedDataParallel,
    "orig_params": partial(FullyShardedDataParallel, use_orig_params=True),
    "fully_shard": under_fully_shard,
}


class Writer(nn.Module):
    """An embedding, blocks with dropout and sizes that no number of ranks divides, a buffer, a scalar, and no use."""

    def __init__(self, wrap: Wrap, width: int = 7) -> None:
        super().__init__()
        self.entry = nn.Embedding(13, width)
        self.blocks = nn.ModuleList(
            wrap(nn.Sequential(nn.Linear(width, 11), nn.GELU(), nn.Dropout(0.3), nn.Linear(11, width))) for _ in "ab"
        )
        self.scale = nn.Parameter(torch.tensor(0.75))
        self.register_buffer("shift", torch.linspace(-1, 1, width))
        self.unused = nn.Linear(3, 4)
        self.head = nn.Linear(width, 13)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.entry(tokens)
        hidden = hidden + self.shift.to(hidden.dtype)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden * self.scale)


def writer(wrap: Wrap = keep) -> Any:
    """The same weights on every call."""
    return seeded(Writer, wrap)


def tokens_of(step: int, number: int) -> Tensor:
    return torch.randint(0, 13, (4, 5), generator=torch.Generator().manual_seed(1000 * step + number))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    tokens = tokens.to(next(model.parameters()).device)
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1).flatten())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    """By owners, beside AdamW on shards. The wrapper needs its original parameters for that."""
    return fsdp.OwnedOptimizer(
        model,
        [
            {
                "params": lambda name, shape: "blocks" in name and len(shape) == 2,
                "optimizer": torch.optim.Muon,
                "lr": 0.02,
            },
            {"optimizer": torch.optim.AdamW, "sharded": True, "lr": 1e-2},
        ],
    )


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {"AdamW": adamw, "Muon": muon}


# A flat parameter of matrices and biases has one optimizer.
FORMS_AND_OPTIMIZERS = [
    (form, optimizer) for form in FORMS for optimizer in OPTIMIZERS if (form, optimizer) != ("flat", "Muon")
]


def train_same_bits(
    model: nn.Module, optimizer: torch.optim.Optimizer, bits: SameBits, steps: Iterable[int]
) -> list[str]:
    """Collective. Train, and return what must be the same at every number of ranks, of each step."""
    found = []
    for step in steps:
        optimizer.zero_grad()
        losses = []
        for number in bits.step(step):
            loss = loss_of(model, tokens_of(step, number))
            loss.backward()
            losses.append(loss)
        norm = bits.clip_grad_norm_(0.5).item()
        optimizer.step()
        found.append(f"{bits.mean(losses).hex()} {norm.hex()} {fsdp.fingerprint(model, optimizer)}")
    return found
