"""A model whose parameters, gradients and optimizer state are larger than memory: they
are kept on disk.

    torchrun --nproc-per-node 2 examples/larger_than_memory/train.py

To demonstrate this on any machine, each process limits itself to 192 MiB in addition to
the memory of Python and torch. Linux only. The model learns to reproduce its input.
"""

from __future__ import annotations

import argparse
import re
import resource
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp
from fsdp import FullyShardedDataParallel

WIDTH, LAYERS, BATCH = 512, 32, 32  # of each rank
LIMIT = 192 * 2**20


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.down(torch.relu(self.up(self.norm(inputs))))


def limit_memory(nbytes: int) -> None:
    """Limit this process to `nbytes` of additional private memory. Memory-mapped files
    do not count.
    """
    found = re.search(
        r"^VmData:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE
    )
    assert found
    resource.setrlimit(
        resource.RLIMIT_DATA, (int(found[1]) * 1024 + nbytes, resource.RLIM_INFINITY)
    )


def build(width: int, layers: int, **options: Any) -> FullyShardedDataParallel:
    """Collective. Make the model without values, and give them layer by layer: it is
    nowhere in memory as a whole.
    """
    with torch.device("meta"):
        plain = nn.Sequential(*(Layer(width) for _ in range(layers)))
    model = fsdp.shard(plain, units={Layer}, **options)
    fsdp.materialize(model, seed=0)
    return model


def train(model: FullyShardedDataParallel, width: int, steps: int = 5) -> list[float]:
    """Collective. Return this rank's losses."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, fused=True
    )  # parameter by parameter, without copies
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(
            step * dist.get_world_size() + dist.get_rank()
        )
        inputs = torch.randn(BATCH, width, generator=generator)
        loss = nn.functional.mse_loss(model(inputs), inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if dist.get_rank() == 0:
            print(f"step {step}: loss {losses[-1]:.4f}", flush=True)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5, help="[%(default)s]")
    steps = parser.parse_args().steps
    dist.init_process_group("gloo")
    limit_memory(LIMIT)
    folder = Path("runs/larger_than_memory")
    folder.mkdir(parents=True, exist_ok=True)  # on a local disk
    model = build(
        WIDTH,
        LAYERS,
        offload="disk",
        offload_folder=folder,
        compute_device="cpu",  # without it, on a GPU if there is one
    )
    state = (
        sum(param.numel() for param in model.parameters()) * 4 * 4
    )  # float32: itself, its gradient, two averages
    if dist.get_rank() == 0:
        print(
            f"each rank: {state / 2**20:.0f} MiB of state, {LIMIT / 2**20:.0f} MiB of "
            "memory",
            flush=True,
        )
    train(model, WIDTH, steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
