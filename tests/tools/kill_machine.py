"""Kills one of two machines in the middle of a training, brings it back, and compares with an undisturbed training.

    python -m tests.tools.kill_machine

The machines are network namespaces, which need Linux, root and iproute2; elsewhere it says what is missing and exits
with 0. Torchrun on the surviving machine waits for the other one, and both go on from the newest checkpoint. Exits with
1 unless all losses are, to the bit, those of the undisturbed training.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from benchmarks._machines import Machine, NotAllowedError, on_cable, two_machines
from tests.helpers.paths import ROOT
from tests.tools.kill_machine_worker import Job

_PORT = 29400  # of the rendezvous; the first machine's own, so nobody else's
_PATIENCE = 180.0  # seconds for each thing that is waited for
# A machine counts as dead after three seconds of silence, not fifteen: this one's neighbour is on the same board.
_KEEP_ALIVE = "keep_alive_interval=1,keep_alive_max_attempt=3"
# By default torchrun (seen in 2.13) tells where its store is in the first round only: a machine that joins a survivor
# waits for the answer until it gives up.
_ELASTIC = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class RecoveryError(RuntimeError):
    """Training did not go on as it should have after a machine died."""


@dataclass(frozen=True)
class Recovery:
    """What happened.

    Args:
        killed_at: the step that rank 1's machine was in, or a little before.
        resumed_at: the step that training went on from.
        error: the line with which the surviving rank gave up the step it was in; empty if none was found.
        seconds: from the death until training went on.
        losses: how many losses were compared with the undisturbed run's, of both ranks and of steps done twice too.
    """

    killed_at: int
    resumed_at: int
    error: str
    seconds: float
    losses: int

    def __str__(self) -> str:
        return (
            f"the second machine died in step {self.killed_at} or the next; training went on from the checkpoint after "
            f"step {self.resumed_at}, {self.seconds:.1f} s later. All {self.losses} losses are, to the bit, those of "
            f"an undisturbed run.\nThe survivor said: {self.error or '(no error of ours in its output)'}"
        )


def recover(machines: tuple[Machine, Machine], job: Job) -> Recovery:
    """Train twice, undisturbed and with a death in the middle, and compare; needs an empty `job.folder`.

    Raises:
        RecoveryError: training failed, hung, did not begin from a checkpoint, or has other losses.
    """
    undisturbed, disturbed = (replace(job, folder=f"{job.folder}/{name}") for name in ("undisturbed", "disturbed"))
    with _torchrun(machines, undisturbed) as agents:
        _finish(agents, undisturbed)
    # In the middle between two checkpoints, so that there are steps to do again.
    kill_at = job.every + job.every // 2
    with _torchrun(machines, disturbed) as agents:
        _until(lambda: _last_step(disturbed, rank=1) >= kill_at, agents, f"step {kill_at}")
        machines[1].kill()
        killed_at, died = _last_step(disturbed, rank=1), time.perf_counter()
        # As whoever starts machines does: the same command again. The first machine's torchrun waits for it.
        agents[1] = _start(machines, 1, disturbed)
        _until(lambda: len(_begins(disturbed, rank=1)) == 2, agents, "the second machine's return")
        seconds = time.perf_counter() - died
        _finish(agents, disturbed)
        error = _survivors_error(disturbed)
    resumed_at = _begins(disturbed, rank=1)[-1]
    if not 0 < resumed_at <= killed_at:
        raise RecoveryError(f"training began anew at step {resumed_at}, after a death in step {killed_at}")
    return Recovery(killed_at, resumed_at, error, seconds, _compare(disturbed, undisturbed))


# --- torchrun


@contextlib.contextmanager
def _torchrun(machines: tuple[Machine, Machine], job: Job) -> Iterator[list[subprocess.Popen[bytes]]]:
    """A torchrun on each machine, which trains `job`; nothing of either is left behind."""
    Path(job.folder).mkdir(parents=True)
    try:
        yield [_start(machines, index, job) for index in range(2)]
    finally:
        for machine in machines:
            machine.kill()


def _start(machines: tuple[Machine, Machine], index: int, job: Job) -> subprocess.Popen[bytes]:
    first, machine = machines[0], machines[index]
    # Both are said because names do not help: the two have one host name.
    places = ["--rdzv-endpoint", f"{first.address}:{_PORT}", "--local-addr", machine.address]
    elastic = ["--rdzv-backend", "c10d", "--rdzv-conf", f"is_host={int(index == 0)},{_KEEP_ALIVE}", "--max-restarts=3"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", *places, *elastic]
    worker = ["-m", "tests.tools.kill_machine_worker", *job.to_arguments()]
    environment = {**os.environ, **on_cable(), **_ELASTIC, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with _output(job, index).open("ab") as output:
        return _popen(machine.command([*torchrun, *worker]), environment, output)


def _popen(command: list[str], environment: dict[str, str], output: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT)


def _output(job: Job, index: int) -> Path:
    return Path(job.folder) / f"machine-{index}.output"


def _until(happened: Callable[[], bool], agents: list[subprocess.Popen[bytes]], what: str) -> None:
    """Wait for something that the machines do, as long as they run and have time."""
    give_up = time.perf_counter() + _PATIENCE
    while not happened():
        ended = [index for index, agent in enumerate(agents) if agent.poll() is not None]
        if ended and not happened():
            raise RecoveryError(f"waiting for {what}: torchrun on machine {ended[0]} has ended")
        if time.perf_counter() > give_up:
            raise RecoveryError(f"waiting for {what}: nothing for {_PATIENCE:.0f} s")
        time.sleep(0.02)


def _finish(agents: list[subprocess.Popen[bytes]], job: Job) -> None:
    for index, agent in enumerate(agents):
        try:
            status = agent.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            raise RecoveryError(f"torchrun on machine {index} has not ended after {_PATIENCE:.0f} s") from None
        if status:
            last = _output(job, index).read_text(errors="replace")[-2000:]
            raise RecoveryError(f"torchrun on machine {index} ended with status {status}:\n{last}")


# --- what the ranks left behind


def _entries(job: Job, rank: int) -> list[dict[str, float]]:
    path = job.losses(rank)
    # The last line may be cut off: its writer was killed.
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def _begins(job: Job, rank: int) -> list[int]:
    return [int(entry["begins at"]) for entry in _entries(job, rank) if "begins at" in entry]


def _last_step(job: Job, rank: int) -> int:
    return max((int(entry["step"]) for entry in _entries(job, rank) if "step" in entry), default=-1)


def _compare(disturbed: Job, undisturbed: Job) -> int:
    """Check every loss of one against the other's of the same rank and step; return how many there were."""
    compared = 0
    for rank in range(2):
        wanted = {entry["step"]: entry["loss"] for entry in _entries(undisturbed, rank) if "step" in entry}
        found = [(entry["step"], entry["loss"]) for entry in _entries(disturbed, rank) if "step" in entry]
        if missing := set(range(undisturbed.steps)) - {step for step, _ in found}:
            raise RecoveryError(f"rank {rank} has no losses of steps {sorted(missing)}")
        for step, loss in found:
            if loss != wanted[step]:
                raise RecoveryError(f"rank {rank}, step {step}: the loss is {loss}, undisturbed it was {wanted[step]}")
        compared += len(found)
    return compared


def _survivors_error(job: Job) -> str:
    text = _output(job, 0).read_text(errors="replace")
    found = re.search(r"Error: (rank \d+: .* did not complete.*)", text)
    return found.group(1) if found else ""


def main() -> int:
    try:
        with two_machines() as machines, tempfile.TemporaryDirectory(prefix="fsdp-recovery-") as folder:
            print(recover(machines, Job(folder=folder)))
    except NotAllowedError as reason:
        print(f"skipped, this system makes no two machines: {reason}")
    except RecoveryError as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
