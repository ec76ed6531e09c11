"""A program written for torch's fully_shard (FSDP2), with a single changed import.

    torchrun --nproc-per-node 2 examples/from_fsdp2/train.py

Before: `from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard`.
Parameters are still `DTensor`s, and checkpoints still use
`torch.distributed.checkpoint`.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import functional as F

from fsdp import MixedPrecisionPolicy, fully_shard

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


def shard(plain: Model) -> nn.Module:
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
    for block in plain.blocks:
        fully_shard(block, mp_policy=policy)
    return fully_shard(plain, mp_policy=policy)


def train(device: torch.device, folder: Path, steps: int = 100) -> list[float]:
    """Collective. Train, resuming from a checkpoint if there is one, and return the
    losses of the steps.
    """
    torch.manual_seed(0)  # the same weights on every rank
    model = shard(Model().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first = 0
    if folder.exists():
        weights, state = get_state_dict(model, optimizer)
        saved: dict[str, Any] = {"model": weights, "optimizer": state, "step": 0}
        dcp.load(saved, checkpoint_id=folder)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=saved["model"],
            optim_state_dict=saved["optimizer"],
        )
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
        tokens = sequences(step, device)
        loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean(loss))
        if step % 20 == 19 and dist.get_rank() == 0:
            print(f"step {step}: loss {losses[-1]:.3f}", flush=True)
    weights, state = get_state_dict(model, optimizer)
    dcp.save(
        {"model": weights, "optimizer": state, "step": steps - 1}, checkpoint_id=folder
    )
    return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--steps", type=int, default=100, help="earlier runs included [%(default)s]"
    )
    steps = parser.parse_args().steps
    train(join(), Path("runs/from_fsdp2"), steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
