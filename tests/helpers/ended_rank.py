"""A rank of a training in which rank 1 ends in the middle, for tests of what the others say."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel, set_watchdog
from fsdp.distributed.watchdog import Watchdog, watchdogs
from tests.helpers.process_end import end_process


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


def main(folder: Path) -> None:
    """Collective. Train, and end the process with the error that comes."""
    try:
        # As where the store was in the process that has ended.
        with mock.patch.object(Watchdog, "_last_word", return_value=""):
            _train(folder)
    except Exception as error:  # noqa: BLE001 (whatever it is)
        end_process(error)


def _train(folder: Path) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(str(folder / "store"), size)
    set_watchdog(reports=folder / "reports")
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    torch.manual_seed(0)
    model = FullyShardedDataParallel(nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    model(load_batch()).sum().backward()
