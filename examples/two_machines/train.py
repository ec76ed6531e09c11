"""Ranks on multiple machines: sharded within each machine, replicated across, with
checkpoints on a shared disk.

    bash examples/two_machines/here.sh

`here.sh` emulates two machines on this machine. On real machines, start torchrun on
each with the arguments in the README. The model learns to repeat its input.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import fsdp
from fsdp import FullyShardedDataParallel, ShardingStrategy

VOCABULARY, LENGTH, BATCH = 64, 16, 24  # of all ranks together


def build(device: torch.device) -> FullyShardedDataParallel:
    """Collective. All-gathers stay within a machine; between machines, a rank sends its
    shard's gradient only.
    """
    torch.manual_seed(0)  # the same weights on every rank
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    plain = nn.Sequential(
        nn.Embedding(VOCABULARY, 64),
        nn.TransformerEncoder(layer, num_layers=2),
        nn.Linear(64, VOCABULARY),
    ).to(device)
    return fsdp.shard(
        plain,
        units={nn.TransformerEncoderLayer},
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
    )


def sequences(step: int, device: torch.device) -> Tensor:
    """This rank's part of a step's batch, [BATCH / ranks, LENGTH]."""
    tokens = torch.randint(
        VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step)
    )
    return tokens.chunk(dist.get_world_size())[dist.get_rank()].to(device)


def train(device: torch.device, folder: Path, steps: int = 100) -> list[float]:
    """Collective. Train, resuming from the newest checkpoint if there is one, and
    return the losses.
    """
    model = build(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first = 0
    if newest := fsdp.checkpoint.newest(folder):
        first = 1 + (fsdp.load(newest, model, optimizer).step or 0)
        if dist.get_rank() == 0:
            print(
                f"resumed after step {first - 1}, on {dist.get_world_size()} ranks",
                flush=True,
            )

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
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 20 == 19:
            fsdp.save(folder, model, optimizer, step=step, keep=2)
            if dist.get_rank() == 0:
                print(f"step {step}: loss {losses[-1]:.3f}", flush=True)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--steps", type=int, default=100, help="earlier runs included [%(default)s]"
    )
    steps = parser.parse_args().steps
    device = fsdp.init_distributed()
    if int(os.environ["LOCAL_RANK"]) == 0:
        machine = int(os.environ.get("GROUP_RANK", "0"))
        print(
            f"machine {machine}: {os.environ['LOCAL_WORLD_SIZE']} of "
            f"{dist.get_world_size()} ranks",
            flush=True,
        )
    train(device, Path(os.environ.get("FOLDER", "runs/two_machines")), steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
