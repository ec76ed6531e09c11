"""A program written for torch's FullyShardedDataParallel (FSDP1).

    torchrun --nproc-per-node 2 examples/from_fsdp1/train.py

Only the imports, `shard`, and saving and loading checkpoints have changed.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import fsdp
from fsdp import FullyShardedDataParallel, MixedPrecision

VOCABULARY, LENGTH, BATCH = 64, 16, 24  # of all ranks together


class Model(nn.Module):
    """A small model that learns to repeat its input."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 64)
        self.blocks = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
                for _ in range(2)
            )
        )
        self.head = nn.Linear(64, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.tokens(tokens)))


def sequences(step: int, device: torch.device) -> Tensor:
    """This rank's part of a step's batch, [BATCH / ranks, LENGTH]."""
    tokens = torch.randint(
        VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step)
    )
    return tokens.chunk(dist.get_world_size())[dist.get_rank()].to(device)


def mean(loss: Tensor) -> float:
    """Collective. The mean of every rank's loss."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def join() -> torch.device:
    """Collective. Initialize the process group and return the device of this rank."""
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    return torch.accelerator.current_accelerator(check_available=True) or torch.device(
        "cpu"
    )


def shard(plain: Model, device: torch.device) -> FullyShardedDataParallel:
    return fsdp.shard(
        plain,
        units={nn.TransformerEncoderLayer},
        mixed_precision=MixedPrecision(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        ),
        compute_device=device,
        use_orig_params=True,
    )


def train(device: torch.device, folder: Path, steps: int = 100) -> list[float]:
    """Collective. Train, resuming from the newest checkpoint if there is one, and
    return the losses.
    """
    torch.manual_seed(0)  # the same weights on every rank
    model = shard(Model(), device)
    groups: list[dict[str, Any]] = [{"params": []}, {"params": [], "weight_decay": 0.0}]
    for name, param in model.named_parameters():
        groups[name.endswith("bias")]["params"].append(param)
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    newest = fsdp.checkpoint.newest(folder)
    first = 0 if newest is None else (fsdp.load(newest, model, optimizer).step or 0) + 1

    if first >= steps:
        if dist.get_rank() == 0:
            print(
                f"{folder} has all of {first} steps; to go on: --steps {first + 100}",
                flush=True,
            )
        return []

    losses = []
    for step in range(first, steps):
        tokens = sequences(step, device)
        loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean(loss))
        if step % 20 == 19 and dist.get_rank() == 0:
            print(f"step {step}: loss {losses[-1]:.3f}", flush=True)
    fsdp.save(folder, model, optimizer, step=steps - 1)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--steps", type=int, default=100, help="earlier runs included [%(default)s]"
    )
    steps = parser.parse_args().steps
    train(join(), Path("runs/from_fsdp1"), steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
