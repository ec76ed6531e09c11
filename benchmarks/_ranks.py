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


DEVICES = ("cpu", "cuda", "sim")  # "sim" is the simulated accelerator of the tests, whose times mean nothing


_device = torch.device("cpu")  # of this process: set once, when a rank starts


def this_device() -> torch.device:
    """The device this rank computes on, of the type that `run_ranks` was given; GPUs are shared if ranks are more."""
    return _device


def backend_of(kind: str) -> str:
    """Return the backends of ranks on a type of device; an accelerator's ranks use gloo for tensors on the CPU.

    Raises:
        RuntimeError: if `kind` is "cuda" and there is no GPU.
    """
    if kind == "cpu":
        return "gloo"
    if kind == "sim":
        return "cpu:gloo,sim:simulated"
    if not torch.cuda.is_available():
        raise RuntimeError("--device cuda: torch sees no GPU here. Leave the option out to use the CPU.")
    return "cpu:gloo,cuda:nccl"


def share_gpus(rank: int) -> None:
    """Let NCCL connect ranks that share a GPU, by sockets: it refuses that only for ranks of the same host."""
    os.environ |= {"NCCL_HOSTID": f"rank {rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


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
        device: one of `DEVICES`.
        environment: variables for these processes only, for example glibc's `MALLOC_*`.
        machines: the machines of the ranks, in turn; by default all ranks run on this machine.

    Returns:
        The results of `job`, in rank order.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank failed; carries that rank's traceback.
    """
    return _spawn(world_size, world_size, device, backend_of(device), job, args, environment or {}, machines)


def run_fake_rank(job: Callable[..., Any], world_size: int, *args: Any, device: str = "cpu") -> Any:
    """Run `job(*args)` in a new process as rank 0 of `world_size`, without communication; `device`: "cpu" or "cuda"."""
    (result,) = _spawn(1, world_size, device, "fake", job, args, {})
    return result


def _spawn(
    num_processes: int,
    world_size: int,
    device: str,
    backend: str,
    job: Callable[..., Any],
    args: tuple[Any, ...],
    environment: Mapping[str, str],
    machines: Sequence[Machine] = (),
) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        with _environment({**_ENVIRONMENT, **environment}):
            mp.spawn(_rank_main, args=(world_size, device, backend, folder, machines, job, args), nprocs=num_processes)
        return [pickle.loads(_result_file(folder, rank).read_bytes()) for rank in range(num_processes)]


def _rank_main(
    rank: int,
    world_size: int,
    device: str,
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
    _use_device(device, rank)
    if backend.endswith("nccl") and world_size > torch.cuda.device_count():
        share_gpus(rank)
    dist.init_process_group(
        backend,
        # A file instead of a port: no collisions, and no TCP traffic other than the collectives.
        store=FakeStore() if backend == "fake" else dist.FileStore(f"{folder}/rendezvous", world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(minutes=5),
        device_id=_device if backend.endswith("nccl") else None,  # NCCL connects at once, and barriers need no guess
    )
    result = job(*args)
    _result_file(folder, rank).write_bytes(pickle.dumps(result))
    dist.barrier()  # a rank that leaves first would cut off a peer's last collective
    dist.destroy_process_group()


def _use_device(kind: str, rank: int) -> None:
    """Make a rank's accelerator the current device of this process."""
    global _device
    if kind == "cpu":
        return
    if kind == "sim":
        from tests import simulated  # only where it is asked for: it is part of the tests

        simulated.install()
    module = torch.get_device_module(kind)
    _device = torch.device(kind, rank % module.device_count())
    module.set_device(_device)


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
