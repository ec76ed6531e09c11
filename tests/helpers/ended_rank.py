"""A rank of a training in which rank 1 ends in the middle, for tests of what the others say.

python -m tests.helpers.ended_rank RANK FOLDER
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel
from fsdp.distributed.watchdog import watchdogs


def await_addresses() -> None:
    """Collective. Return when the watchdogs of all ranks know each other's addresses."""
    while watchdogs[dist.group.WORLD]._unknown:
        time.sleep(0.05)
    dist.barrier()


def load_batch() -> Tensor:
    await_addresses()
    if dist.get_rank() == 1:
        raise ValueError("a bad batch")
    return torch.ones(2, 4)


def main(rank: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    torch.manual_seed(0)
    model = FullyShardedDataParallel(nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    model(load_batch()).sum().backward()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
