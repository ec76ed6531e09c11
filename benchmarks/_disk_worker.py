"""A rank of `benchmarks.disk_offload`: build a GPT layer by layer, train it, and report the results.

Reads its `Job` from the command line and prints a line of JSON after each operation, so that the parent process knows
its progress if the system kills it.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks._disk import moved_bytes
from examples.gpt.model import GPT, SIZES, GPTConfig, init_weights, next_byte_loss
from fsdp import FlatParameter, FullyShardedDataParallel, enable_wrap, wrap
from fsdp.engine.names import clean_name


@dataclass(frozen=True)
class Job:
    """The model to train and its settings.

    Args:
        size: a key of `SIZES`.
        folder: the folder of shards, gradients and optimizer state; None keeps them in memory.
        store: the file of the store for the rendezvous of the ranks.
    """

    size: str
    batch: int
    context: int
    steps: int
    threads: int
    folder: str | None
    store: str
    rank: int
    world_size: int

    def to_argument(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of_argument(cls, text: str) -> Job:
        return cls(**json.loads(text))

    @property
    def config(self) -> GPTConfig:
        return SIZES[self.size]

    def windows(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * step + self.rank)
        return torch.randint(self.config.vocab, (self.batch, self.context + 1), generator=generator)


def build(config: GPTConfig) -> nn.Module:
    """Build a GPT whose layers are each wrapped (inside `enable_wrap`) before the next layer has values."""
    with torch.device("meta"):
        model = GPT(config)
    torch.manual_seed(0)
    for number, block in enumerate(model.blocks):
        model.blocks[number] = wrap(_with_values(block, config))
    for name, part in model.named_children():
        if name != "blocks":
            _with_values(part, config)
    return wrap(model)


def _with_values(part: nn.Module, config: GPTConfig) -> nn.Module:
    part.to_empty(device="cpu")
    init_weights(part, config)
    return part


def train(job: Job, model: nn.Module, folder: Path) -> Iterator[dict[str, Any]]:
    """Train, and tell of each step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    before = moved_bytes(folder)
    for step in range(job.steps):
        times = [time.perf_counter()]
        loss = next_byte_loss(model, job.windows(step))
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter())
        after = moved_bytes(folder)
        moved = None if before is None or after is None else [after[0] - before[0], after[1] - before[1]]
        before = after
        forward, backward, update = (stop - start for start, stop in itertools.pairwise(times))
        yield {"loss": loss.item(), "forward": forward, "backward": backward, "optimizer": update, "moved": moved}


def digests(model: nn.Module) -> dict[str, str]:
    """Collective. SHA-256 of every whole parameter's bytes, gathered unit by unit."""
    found = {}
    units = {name: unit for name, unit in model.named_modules() if isinstance(unit, FullyShardedDataParallel)}
    for path, unit in units.items():
        with unit.summon_full_params(recurse=False, volatile=True):
            for name, param in unit.named_parameters():
                if not isinstance(param, FlatParameter):  # else it belongs to a unit inside
                    found[clean_name(f"{path}.{name}".lstrip("."))] = _sha256(param.detach())
    return found


def _sha256(tensor: Tensor) -> str:
    dense = tensor.contiguous()
    view = (ctypes.c_char * (dense.numel() * dense.element_size())).from_address(dense.data_ptr())
    return hashlib.sha256(view).hexdigest()


def say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


def main(job: Job) -> None:
    torch.set_num_threads(job.threads)
    store = dist.FileStore(job.store, job.world_size)
    dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.world_size)
    settings: dict[str, Any] = {} if job.folder is None else {"offload": "disk", "offload_folder": job.folder}
    with enable_wrap(wrapper_cls=FullyShardedDataParallel, **settings):
        model = build(job.config)
    say({"event": "built"})
    for step in train(job, model, Path(job.store).parent):
        say({"event": "step", **step})
    say({"event": "trained", "digests": digests(model)})
    dist.barrier()  # a rank that leaves first would cut off a peer's last collective
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Job.of_argument(sys.argv[1]))
