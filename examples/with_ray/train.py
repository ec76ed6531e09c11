"""A sharded model on two workers of Ray Train, one of which is killed; Ray restarts
them and training continues.

    python examples/with_ray/train.py

Ray creates the process group, so the function on each worker does not call
`init_process_group`. The model learns to repeat its input.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import ray.train
import torch
import torch.distributed as dist
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device
from torch import Tensor, nn
from torch.nn import functional as F

import fsdp
from fsdp import FullyShardedDataParallel

VOCABULARY, LENGTH, BATCH = 64, 16, 24  # of all workers together


def build() -> FullyShardedDataParallel:
    """Collective. Create a unit for each layer, and a unit for all other parameters."""
    torch.manual_seed(0)  # the same weights on every worker
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    plain = nn.Sequential(
        nn.Embedding(VOCABULARY, 64),
        nn.TransformerEncoder(layer, num_layers=2),
        nn.Linear(64, VOCABULARY),
    ).to(get_device())
    return fsdp.shard(plain, units={nn.TransformerEncoderLayer})


def sequences(step: int) -> Tensor:
    """This worker's part of a step's batch, [BATCH / workers, LENGTH]."""
    tokens = torch.randint(
        VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step)
    )
    return tokens.chunk(dist.get_world_size())[dist.get_rank()].to(get_device())


def train_on_worker(config: dict[str, Any]) -> None:
    """Collective. Train, starting from the last reported checkpoint if there is one."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            first = fsdp.load(folder, model, optimizer).values["step"] + 1

    for step in range(first, config["steps"]):
        tokens = sequences(step)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == config["killed_at"] and first == 0 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)  # as where a machine fails
        if step % 10 == 9:
            saved = fsdp.save(
                Path(config["folder"], "newest"),
                model,
                optimizer,
                values={"step": step},
            )
            report(saved.path, {"step": step, "first": first, "loss": loss.item()})


def report(path: Path, metrics: dict[str, Any]) -> None:
    """Collective. Report a checkpoint to Ray, which copies the folder to its storage
    before this function returns.

    Every worker has written its part of the folder, so a single worker reports it. If
    workers do not share a file system, `fsdp.save` has sent all parts to rank 0.
    """
    ray.train.report(
        metrics,
        checkpoint=Checkpoint.from_directory(path) if dist.get_rank() == 0 else None,
    )


def train(
    folder: Path, steps: int = 100, killed_at: int | None = 55, workers: int = 2
) -> ray.train.Result:
    trainer = TorchTrainer(
        train_on_worker,
        train_loop_config={
            "steps": steps,
            "killed_at": killed_at,
            "folder": str(folder.absolute()),
        },
        scaling_config=ScalingConfig(
            num_workers=workers, use_gpu=torch.cuda.is_available()
        ),
        run_config=RunConfig(
            storage_path=str(folder.absolute()),
            failure_config=FailureConfig(max_failures=1),
        ),
    )
    return trainer.fit()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100, help="[%(default)s]")
    found = train(Path("runs/with_ray"), parser.parse_args().steps).metrics
    print(
        f"step {found['step']}: loss {found['loss']:.3f}; the last start was at step "
        f"{found['first']}"
    )


if __name__ == "__main__":
    main()
