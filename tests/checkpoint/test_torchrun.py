"""The recipe of docs/troubleshooting.md, run by `torchrun`: of two machines one is lost, the other trains on."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from torch import nn

import fsdp
from fsdp import checkpoint
from tests.helpers.forked import Forked
from tests.helpers.forking_torchrun import TORCHRUN
from tests.helpers.paths import DATA, ROOT

SCRIPT = DATA / "elastic.py"
STEPS, EVERY = 20, 4
OPTIONS = ["--steps", str(STEPS), "--every", str(EVERY), "--pause", "0.1"]
PATIENCE = 240.0  # seconds for each thing that is waited for; it takes three


@pytest.mark.waiting
def test_a_training_that_loses_a_machine_goes_on_with_the_ranks_that_are_left(tmp_path: Path) -> None:
    with _two_machines(tmp_path) as machines:
        _until(lambda: any(len(steps) > EVERY for steps in _lives(tmp_path, "rank-1-of-2")), machines)
        _kill(machines[1])
        _until(lambda: machines[0].poll() is not None, machines[:1])
        assert machines[0].returncode == 0, (tmp_path / "machine-0.txt").read_text(errors="replace")[-3000:]
    # On a busy machine the first one may have begun before the other one was there, and gone on with it.
    together, alone = (_lives(tmp_path, name)[-1] for name in ("rank-0-of-2", "rank-0-of-1"))
    assert together == list(range(together[0], together[-1] + 1))
    assert alone == list(range(alone[0], STEPS))
    # From the newest checkpoint that was complete, not from an older one and not from the beginning.
    assert alone[0] > 0
    assert alone[0] % EVERY == 0
    assert together[-1] - EVERY < alone[0] <= together[-1] + 1

    saved, plain = _model(), _trained_alone()
    newest = checkpoint.newest(tmp_path / "steps")
    assert newest is not None
    assert fsdp.load(newest, saved).step == STEPS
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(saved.state_dict()[name], value, rtol=0, atol=1e-10)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)).double()


def _trained_alone() -> nn.Module:
    """The recipe's model after as many steps on the same batches, unsharded and undisturbed."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        inputs = torch.randn(12, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


# --- torchrun


@contextmanager
def _two_machines(folder: Path) -> Iterator[list[Forked]]:
    """A torchrun for each of two machines, which are processes here; nothing of them is left behind."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    machines: list[Forked] = []
    try:
        for number in range(2):
            machines.append(Forked(_run_torchrun, folder, port, number))
        yield machines
    except BaseException:
        for number in range(len(machines)):
            print((folder / f"machine-{number}.txt").read_text(errors="replace"))
        raise
    finally:
        for machine in machines:
            _kill(machine)


def _run_torchrun(folder: Path, port: int, number: int) -> None:
    os.setsid()
    output = os.open(folder / f"machine-{number}.txt", os.O_WRONLY | os.O_CREAT)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    warnings.simplefilter("default")
    os.chdir(ROOT)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    sys.argv = ["torchrun", *_settings(port, number), str(SCRIPT), "--folder", str(folder), *OPTIONS]
    exec(TORCHRUN, {"__name__": "__main__"})


def _settings(port: int, number: int) -> list[str]:
    # A machine counts as dead after eight seconds of silence, not fifteen (a busy one is silent for some). A second one
    # is waited for as long as it may take to start: torch's agents wait in vain for one that misses the first meeting.
    hurry = f"is_host={int(number == 0)},last_call_timeout=6,keep_alive_interval=1,keep_alive_max_attempt=8"
    places = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-conf={hurry}"]
    numbers = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--monitor-interval=0.1"]
    return [*numbers, *places]


def _kill(machine: Forked) -> None:
    for process in [machine.pid, *_children(machine.pid)]:  # torchrun's workers have sessions of their own
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    machine.wait()


def _children(process: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process)], capture_output=True, text=True, check=False)
    return [int(number) for number in found.stdout.split()]


def _until(happened: Callable[[], bool], machines: list[Forked]) -> None:
    give_up = time.monotonic() + PATIENCE
    while not happened():
        assert all(machine.poll() is None for machine in machines) or happened(), "torchrun has ended"
        assert time.monotonic() < give_up, "torchrun does not come to an end"
        time.sleep(0.02)


def _lines(folder: Path, name: str) -> list[list[str]]:
    path = folder / f"{name}.txt"
    # The last line may be cut off: its writer was killed.
    return [line.split() for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def _lives(folder: Path, name: str) -> list[list[int]]:
    """Return the steps that each process has noted which had this rank among so many, one process after the other."""
    steps: dict[str, list[int]] = {}
    for step, process in _lines(folder, name):
        steps.setdefault(process, []).append(int(step))
    return list(steps.values())
