"""A program written for torch's DistributedDataParallel.

    torchrun --nproc-per-node 2 examples/from_ddp/before.py

`after.py` in the same folder is the same program with sharding.
"""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

VOCABULARY, LENGTH, BATCH, ACCUMULATE = 64, 16, 24, 2  # BATCH of all ranks together


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


def sequences(number: int, device: torch.device) -> Tensor:
    """This rank's part of a batch, [BATCH / ranks, LENGTH]."""
    tokens = torch.randint(
        VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(number)
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


@torch.no_grad()
def evaluate(model: nn.Module, device: torch.device) -> float:
    """The loss on a batch that is not trained on."""
    tokens = sequences(1_000_000, device)
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).item()


def train(
    device: torch.device, folder: Path, steps: int = 100, max_norm: float = 1.0
) -> list[float]:
    """Collective. Train, resuming from a checkpoint if there is one, and return the
    losses of the steps.
    """
    torch.manual_seed(
        dist.get_rank()
    )  # DistributedDataParallel takes the weights of the first rank
    model = DistributedDataParallel(Model().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    path, first = folder / "checkpoint.pt", 0
    if path.exists():
        saved = torch.load(path, map_location=device)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"] + 1

    if first >= steps:
        if dist.get_rank() == 0:
            print(
                f"{folder} has all of {first} steps; to go on: --steps {first + 100}",
                flush=True,
            )
        return []

    losses = []
    for step in range(first, steps):
        for part in range(ACCUMULATE):
            is_last = part == ACCUMULATE - 1
            with nullcontext() if is_last else model.no_sync():
                tokens = sequences(step * ACCUMULATE + part, device)
                loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
                (loss / ACCUMULATE).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean(loss))
        if step % 20 == 19 and dist.get_rank() == 0:
            print(
                f"step {step}: loss {losses[-1]:.3f}, on other data "
                f"{evaluate(model.module, device):.3f}",
                flush=True,
            )
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(
            {
                "model": model.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "step": steps - 1,
            },
            path,
        )
    dist.barrier()
    return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--steps", type=int, default=100, help="earlier runs included [%(default)s]"
    )
    steps = parser.parse_args().steps
    train(join(), Path("runs/from_ddp/before"), steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
