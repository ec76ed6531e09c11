"""A rank whose last collective is still being tidied away by a thread of gloo when the process ends."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from fsdp import FullyShardedDataParallel
from tests.helpers.process_end import end_process


class SlowEnd:
    """Goes when the interpreter is torn down, and takes its time."""

    def __init__(self) -> None:
        self._sleep: Callable[[float], None] = time.sleep  # modules are gone by then

    def __del__(self) -> None:
        self._sleep(2)


slow_end = SlowEnd()


def main(folder: Path) -> None:
    """Collective. Train, and end the process."""
    _train(folder)
    end_process()


def _train(folder: Path) -> None:
    rank, store = int(os.environ["RANK"]), dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    torch.manual_seed(0)
    model = FullyShardedDataParallel(nn.Linear(4, 4))  # not `fully_shard`: torch caches DTensors' meshes, and so groups
    model(torch.ones(2, 4)).sum().backward()
    last = torch.ones(4)
    weakref.finalize(last, time.sleep, 1).atexit = False  # the thread of gloo that frees it sleeps, and wants the GIL
    dist.barrier()
    time.sleep(0.2 * rank)  # so that the other rank lets go of the tensor before the collective is done
    dist.all_reduce(last, async_op=True)
    del last
    time.sleep(0.5)
    dist.destroy_process_group()
