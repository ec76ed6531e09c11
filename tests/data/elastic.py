"""A training for `torchrun --nnodes=1:2 --max-restarts=3`, which goes on with the ranks that are left."""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import fsdp
from fsdp import FullyShardedDataParallel


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)).double()
    for number in (0, 2):
        model[number] = FullyShardedDataParallel(model[number])
    model = FullyShardedDataParallel(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def batch(step):
    """The same twelve samples at every number of ranks, of which each takes its part."""
    inputs = torch.randn(12, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return inputs.chunk(dist.get_world_size())[dist.get_rank()]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=4, help="steps from one checkpoint to the next")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between steps")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    model, optimizer = build()
    newest = fsdp.checkpoint.newest(options.folder / "steps")  # None at the very beginning
    first = 0 if newest is None else fsdp.load(newest, model, optimizer).step
    log = options.folder / f"rank-{dist.get_rank()}-of-{dist.get_world_size()}.txt"
    for step in range(first, options.steps):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % options.every == 0:
            fsdp.save(options.folder / "steps", model, optimizer, step=step + 1, keep=2)
        with log.open("a") as lines:
            print(step, os.getpid(), file=lines)
        time.sleep(options.pause)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
