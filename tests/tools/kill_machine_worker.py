"""One rank of a training that survives the death of machines: torchrun starts it, and starts it again.

It begins where the newest complete checkpoint ends. FOLDER, which all machines must reach, gets

    step-8/model.pt        the whole model's state after 8 steps
    step-8/optimizer-R.pt  the state of rank R's optimizer, for its shards
    newest                 the name of the newest checkpoint that is complete
    losses-R.jsonl         a line when rank R begins, and one for each of its steps
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist
from torch import nn

from benchmarks._contestants import CONTESTANTS, OURS
from benchmarks._training import Setup, build, train_step
from examples.gpt.report import write_whole

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Job:
    """What to train, and how often to save it.

    Args:
        folder: for checkpoints and losses.
        size, batch: the model, a key of `SIZES`; sequences per rank and step.
        steps: in all.
        every: steps from one checkpoint to the next.
        timeout: seconds that a rank waits for another one before it gives up.
    """

    folder: str
    size: str = "small"
    batch: int = 4
    steps: int = 24
    every: int = 8
    timeout: float = 60.0

    def to_arguments(self) -> list[str]:
        return [f"--{name}={value}" for name, value in asdict(self).items()]

    @classmethod
    def parse(cls, arguments: Sequence[str] | None = None) -> Job:
        parser = argparse.ArgumentParser(prog="python -m tests.tools.kill_machine_worker", description=__doc__)
        parser.add_argument("--folder", required=True)
        for name in ("size", "batch", "steps", "every", "timeout"):
            default = getattr(cls, name)
            parser.add_argument(f"--{name}", type=type(default), default=default)
        return cls(**vars(parser.parse_args(arguments)))

    def losses(self, rank: int) -> Path:
        return Path(self.folder) / f"losses-{rank}.jsonl"


def train(job: Job) -> None:
    """Collective. Train from the newest checkpoint, if there is one, to the end."""
    setup = Setup(size=job.size, batch=job.batch)
    model = build(CONTESTANTS[OURS], setup, _CPU)
    optimizer = setup.adamw(model)
    first = _resume(model, optimizer, Path(job.folder))
    with job.losses(dist.get_rank()).open("a") as log:
        _write(log, {"begins at": first})
        for step in range(first, job.steps):
            loss = train_step(model, optimizer, setup.windows(step, _CPU))
            _write(log, {"step": step, "loss": loss.item()})
            if (step + 1) % job.every == 0:
                _save(model, optimizer, Path(job.folder), step + 1)


def _write(log: TextIO, entry: dict[str, float]) -> None:
    log.write(json.dumps(entry) + "\n")
    log.flush()  # whoever watches wants to know, and this process may be killed


def _save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, step: int) -> None:
    """Collective. A checkpoint counts when all of it is there: a machine may die while it is written."""
    checkpoint = folder / f"step-{step}"
    checkpoint.mkdir(exist_ok=True)
    state, rank = model.state_dict(), dist.get_rank()
    if rank == 0:
        torch.save(state, checkpoint / "model.pt")
    torch.save(optimizer.state_dict(), checkpoint / f"optimizer-{rank}.pt")
    dist.barrier()
    if rank == 0:
        write_whole(folder / "newest", checkpoint.name.encode())


def _resume(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> int:
    """Collective. Load the newest complete checkpoint; return how many steps are done."""
    # Rank 0's answer is everybody's: another one may be written by nobody now, but be seen late on some file systems.
    newest = [(folder / "newest").read_text() if dist.get_rank() == 0 and (folder / "newest").exists() else ""]
    dist.broadcast_object_list(newest)
    if not newest[0]:
        return 0
    checkpoint = folder / newest[0]
    model.load_state_dict(torch.load(checkpoint / "model.pt"))
    optimizer.load_state_dict(torch.load(checkpoint / f"optimizer-{dist.get_rank()}.pt"))
    return int(newest[0].removeprefix("step-"))


def main() -> None:
    job = Job.parse()
    dist.init_process_group("gloo", timeout=timedelta(seconds=job.timeout))
    train(job)
    dist.barrier()  # nobody is cut off who has not finished
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    main()
