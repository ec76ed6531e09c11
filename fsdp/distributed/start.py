"""The start of a program under torchrun: its process group and its device."""

from __future__ import annotations

import os
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from fsdp.distributed.devices import HOST, accelerator, current_device

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_starts = count()  # calls in this process; the calls are collective, so the numbers are equal on all ranks


def init_distributed(backend: str | None = None, timeout: timedelta | None = None) -> torch.device:
    """Collective. Create the process group of the ranks started by torchrun, and return the device of this rank.

    The device is the accelerator with index ``LOCAL_RANK``, which becomes the current device of this process, or the
    CPU if there is no accelerator. Ranks that torchrun restarts on a single machine (``--max-restarts``) do not read
    the addresses of the previous ranks. At the end of the program, call `torch.distributed.destroy_process_group`.

    Args:
        backend: the optional backend of the process group (default: NCCL for CUDA devices, gloo for CPUs).
        timeout: an optional timeout, see `torch.distributed.init_process_group`.

    Raises:
        RuntimeError: if the environment does not define the ranks, or if a machine has more ranks than accelerators.
    """
    absent = [name for name in _VARIABLES if name not in os.environ]
    if absent:
        raise RuntimeError(
            f"fsdp.init_distributed() needs {', '.join(absent)} in the environment, where torchrun sets them. Start "
            "the program with: torchrun --nproc-per-node 2 train.py. With other launchers, set them for each process."
        )
    rank, ranks = os.environ["RANK"], os.environ["WORLD_SIZE"]
    if not (rank.isdecimal() and ranks.isdecimal() and int(rank) < int(ranks)):
        raise RuntimeError(
            f"fsdp.init_distributed() found RANK={rank} and WORLD_SIZE={ranks} in the environment. Each process needs "
            "a different RANK from 0 to WORLD_SIZE - 1."
        )
    device = _device_of_this_rank()
    dist.init_process_group(backend, timeout=timeout, **_store_of_this_start(timeout or default_pg_timeout))
    return device


def _store_of_this_start(timeout: timedelta) -> dict[str, Any]:
    """Return the store, rank and world size, if torchrun keeps its store across restarts on a single machine.

    The store still contains the addresses from before a restart, and from earlier starts in this process. Each start
    therefore uses a separate prefix. On multiple machines, agents count restarts differently, so the result is empty
    and torch selects the store.
    """
    environment = os.environ
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or environment.get("GROUP_WORLD_SIZE") != "1":
        return {}
    place = {"rank": int(environment["RANK"]), "world_size": int(environment["WORLD_SIZE"])}
    kept = dist.TCPStore(environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), timeout=timeout)
    prefix = f"start_{environment['TORCHELASTIC_RESTART_COUNT']}_{next(_starts)}"
    return {"store": dist.PrefixStore(prefix, kept), **place}


def _device_of_this_rank() -> torch.device:
    found = accelerator()
    if found is None:
        return HOST
    local_rank, count = os.environ.get("LOCAL_RANK"), torch.accelerator.device_count()
    if local_rank is None or int(local_rank) >= count:
        raise RuntimeError(
            f"fsdp.init_distributed() uses the {found.type} device with the number LOCAL_RANK, which is {local_rank}, "
            f"and torch sees {count} here. Start a process for each device: torchrun --nproc-per-node {count} train.py."
        )
    torch.accelerator.set_device_index(int(local_rank))
    return current_device(found.type)
