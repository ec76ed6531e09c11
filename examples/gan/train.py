"""A GAN: two sharded models with separate optimizers, saved and resumed as a single
checkpoint.

    torchrun --nproc-per-node 2 examples/gan/train.py

The generator learns to draw points on a circle. `--steps 800` continues from the newest
checkpoint.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import fsdp
from fsdp import FullyShardedDataParallel

NOISE, WIDTH, BATCH = 8, 64, 120  # the batch is the batch of all ranks together


def layers(inputs: int, outputs: int) -> nn.Sequential:
    hidden = [
        nn.Linear(inputs, WIDTH),
        nn.LeakyReLU(0.2),
        nn.Linear(WIDTH, WIDTH),
        nn.LeakyReLU(0.2),
    ]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, outputs))


def points(count: int, generator: torch.Generator) -> Tensor:
    """Points on a circle of radius 1, with a little noise, [count, 2]."""
    angles = 2 * torch.pi * torch.rand(count, generator=generator)
    return torch.stack([angles.cos(), angles.sin()], 1) + 0.05 * torch.randn(
        count, 2, generator=generator
    )


def judged(logits: Tensor, as_real: bool) -> Tensor:
    return F.binary_cross_entropy_with_logits(
        logits, torch.full_like(logits, float(as_real))
    )


def train(device: torch.device, folder: Path, steps: int = 400) -> list[float]:
    """Collective. Train both models, from the newest checkpoint if there is one.

    Returns: The mean distance of generated points from the circle, every 100 steps and
    at the end.
    """
    torch.manual_seed(0)  # the same weights on every rank
    generator = FullyShardedDataParallel(layers(NOISE, 2).to(device))
    discriminator = FullyShardedDataParallel(layers(2, 1).to(device))
    optimizers = [
        torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.99)),
        torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.99)),
    ]
    # A module with both models: its keys are `generator.0.weight`,
    # `discriminator.0.weight` and so on.
    both = nn.ModuleDict({"generator": generator, "discriminator": discriminator})
    newest = fsdp.checkpoint.newest(folder)
    first = 0 if newest is None else (fsdp.load(newest, both, optimizers).step or 0) + 1
    if first >= steps:
        if dist.get_rank() == 0:
            print(
                f"{folder} has all of {first} steps; to go on: --steps {first + 400}",
                flush=True,
            )
        return []

    distances = []
    for step in range(first, steps):
        # The same batch for any number of ranks, of which each takes its part.
        seeded = torch.Generator().manual_seed(step)
        batches = points(BATCH, seeded), torch.randn(BATCH, NOISE, generator=seeded)
        drawn, noise = (
            batch.chunk(dist.get_world_size())[dist.get_rank()].to(device)
            for batch in batches
        )
        generated = generator(noise)

        # The discriminator sees the generated points without their graph.
        loss = judged(discriminator(drawn), True) + judged(
            discriminator(generated.detach()), False
        )
        loss.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()

        # The generator's gradient passes through the discriminator, whose own gradients
        # are discarded.
        judged(discriminator(generated), True).backward()
        optimizers[0].step()
        for optimizer in optimizers:
            optimizer.zero_grad()

        if step % 100 == 99 or step == steps - 1:
            distance = (generated.detach().norm(dim=1) - 1).abs().mean()
            dist.all_reduce(distance)
            distances.append(distance.item() / dist.get_world_size())
            fsdp.save(folder, both, optimizers, step=step, keep=2)
            if dist.get_rank() == 0:
                print(
                    f"step {step}: distance from the circle {distances[-1]:.2f}",
                    flush=True,
                )
    return distances


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--steps", type=int, default=400, help="earlier runs included [%(default)s]"
    )
    steps = parser.parse_args().steps
    train(fsdp.init_distributed(), Path("runs/gan"), steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
