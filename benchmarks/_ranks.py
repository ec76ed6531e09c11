"""Starts the ranks of a measurement as fresh processes and collects their results."""

from __future__ import annotations

import contextlib
import os
import pickle
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.testing._internal.distributed.fake_pg import FakeStore  # the only way to a fake group

from benchmarks._machines import Machine

# A single thread each, set before the ranks import torch; kineto would log every profile to stderr.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "99"}


def this_device(kind: str) -> torch.device:
    """The device this rank computes on: the CPU, or the GPU that has the rank's number."""
    return torch.device("cpu") if kind == "cpu" else torch.device(kind, dist.get_rank())


def run_ranks(
    job: Callable[..., Any],
    world_size: int,
    *args: Any,
    device: str = "cpu",
    environment: Mapping[str, str] | None = None,
    machines: Sequence[Machine] = (),
) -> list[Any]:
    """Run `job(*args)` on `world_size` new processes with a process group between them.

    Args:
        job: a module-level function, because the processes are spawned, not forked: the heap of an earlier measurement
            must not be inherited.
        world_size: number of ranks.
        *args: arguments of `job`; must be picklable, like the result.
        device: "cpu" (gloo) or "cuda" (NCCL, one GPU a rank).
        environment: variables for these processes only, for example glibc's `MALLOC_*`.
        machines: the machines of the ranks, in turn; by default all ranks run on this machine.

    Returns:
        The results of `job`, in rank order.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank failed; carries that rank's traceback.
    """
    backend = "gloo" if device == "cpu" else "nccl"
    return _spawn(world_size, world_size, backend, job, args, environment or {}, machines)


def run_fake_rank(job: Callable[..., Any], world_size: int, *args: Any) -> Any:
    """Run `job(*args)` in a new process as rank 0 of `world_size`, without communication."""
    (result,) = _spawn(1, world_size, "fake", job, args, {})
    return result


def _spawn(
    num_processes: int,
    world_size: int,
    backend: str,
    job: Callable[..., Any],
    args: tuple[Any, ...],
    environment: Mapping[str, str],
    machines: Sequence[Machine] = (),
) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        with _environment({**_ENVIRONMENT, **environment}):
            mp.spawn(_rank_main, args=(world_size, backend, folder, machines, job, args), nprocs=num_processes)
        return [pickle.loads(_result_file(folder, rank).read_bytes()) for rank in range(num_processes)]


def _rank_main(
    rank: int,
    world_size: int,
    backend: str,
    folder: str,
    machines: Sequence[Machine],
    job: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    if machines:
        machines[rank % len(machines)].enter()
    _ignore_peer_warnings()
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        # A file instead of a port: no collisions, and no TCP traffic other than the collectives.
        store=FakeStore() if backend == "fake" else dist.FileStore(f"{folder}/rendezvous", world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(minutes=5),
    )
    result = job(*args)
    _result_file(folder, rank).write_bytes(pickle.dumps(result))
    dist.barrier()  # a rank that leaves first would cut off a peer's last collective
    dist.destroy_process_group()


def _ignore_peer_warnings() -> None:
    """Ignore torch's warnings about its deprecated parts, which the peers use and this benchmark calls for them."""
    for module in (r"torch\.", r"fairscale\.", r"benchmarks\."):
        warnings.filterwarnings("ignore", category=FutureWarning, module=module)
        warnings.filterwarnings("ignore", category=UserWarning, module=module)


def _result_file(folder: str, rank: int) -> Path:
    return Path(folder) / f"result-{rank}"


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
