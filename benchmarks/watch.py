"""The cost of the watchdog: steps with and without it, in turn, in the same run.

    python -m benchmarks.watch
    python -m benchmarks.watch --rounds 40 --seconds 5 --ranks 4

A model of 30 units is trained by AdamW on gloo. In half of the rounds the watchdog is off, and the steps are not
recorded (`docs/troubleshooting.md`); the other rounds use the default. In addition to the ratios, the hooks on a step,
the threads, and the bytes sent are measured separately. Exits with 1 if the median processor time of a step is more
than 1.01 times as long.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

if not __package__:  # run as a file: the folder above has `benchmarks` and `fsdp`
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._measure import Spread, table, warn_if_busy
from benchmarks._ranks import run_ranks
from fsdp import FullyShardedDataParallel
from fsdp.distributed import watchdog
from fsdp.engine.runtime import runtimes
from fsdp.layers.steps import Steps

ALLOWED = 1.01
_WIDTH, _BATCH = 256, 256


@dataclass
class Measured:
    """The measurements of a rank: seconds of a step for each round, and the sums of the watched rounds."""

    cpu: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})  # by whether it is watched
    wall: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})
    steps: int = 0
    seconds: float = 0.0
    in_hooks: float = 0.0
    in_threads: dict[str, float] = field(default_factory=dict)
    messages: int = 0
    bytes: int = 0
    sockets: int = 0  # open with the watchdog, and not without


class Watching:
    """The watchdog of a model, which can be switched on and off."""

    def __init__(self, measured: Measured) -> None:
        self._measured = measured
        self._steps = next(iter(runtimes())).steps
        self._journal = self._steps._journal
        tell = watchdog._tell

        def counted(addresses: Mapping[int, watchdog.Address], message: dict[str, Any]) -> Any:
            measured.messages += len(addresses)
            measured.bytes += sum(
                len(json.dumps({**message, "secret": each.secret})) + 1 for each in addresses.values()
            )
            return tell(addresses, message)

        watchdog._tell = counted
        for name in ("begin", "end", "end_backward"):
            setattr(Steps, name, self._timed(getattr(Steps, name)))

    def _timed(self, method: Callable[..., None]) -> Callable[..., None]:
        def timed(steps: Steps, *args: Any) -> None:
            start = time.thread_time()
            method(steps, *args)
            if steps._journal is not None:
                self._measured.in_hooks += time.thread_time() - start

        return timed

    def switch(self, is_on: bool) -> None:
        """Collective. Begin to watch, or end it."""
        watchdog.stop()
        dist.barrier()  # nobody finds an address of before
        before = _sockets()
        if is_on:
            watchdog.watch()
            self._measured.sockets = _sockets() - before
        self._steps._journal = self._journal if is_on else None
        dist.barrier()

    def note_threads(self) -> None:
        """Add the time that the threads have used since they began."""
        for thread in threading.enumerate():
            if thread.name.startswith("fsdp ") and thread.ident is not None:
                taken = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
                self._measured.in_threads[thread.name] = self._measured.in_threads.get(thread.name, 0.0) + taken


def _sockets() -> int:
    paths = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return sum(path.is_symlink() and os.readlink(path).startswith("socket:") for path in paths)


def train(units: int, rounds: int, seconds: float) -> Measured:
    """Train with and without watching in turn; runs on every rank."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh()) for _ in range(units)]
    model = FullyShardedDataParallel(nn.Sequential(*map(FullyShardedDataParallel, blocks)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = torch.randn(_BATCH, _WIDTH)

    def timed_steps(count: int) -> tuple[float, float]:
        cpu, wall = time.process_time(), time.perf_counter()
        for _ in range(count):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return time.process_time() - cpu, time.perf_counter() - wall

    timed_steps(3)
    number = torch.tensor(seconds * 5 / timed_steps(5)[1]).ceil()
    dist.broadcast(number, 0)
    count = int(number)
    measured = Measured()
    watching = Watching(measured)
    for is_on in [True, False, False, True] * rounds:
        watching.switch(is_on)
        cpu, wall = timed_steps(count)
        measured.cpu[is_on].append(cpu / count)
        measured.wall[is_on].append(wall / count)
        if is_on:
            measured.steps += count
            measured.seconds += wall
            watching.note_threads()
    watchdog.stop()
    return measured


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.watch", description="The cost of watching the ranks.")
    parser.add_argument("--units", type=int, default=30, help="of 65,792 parameters (%(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=10, help="of four: on, off, off, on (%(default)s)")
    parser.add_argument("--seconds", type=float, default=3.0, help="of steps in a quarter of a round (%(default)s)")
    options = parser.parse_args(arguments)
    print(
        f"{options.units} units, {options.ranks} ranks on gloo, AdamW, {4 * options.rounds} times {options.seconds:g} "
        f"s of steps, torch {torch.__version__}",
        flush=True,
    )
    warn_if_busy()
    return report(run_ranks(train, options.ranks, options.units, options.rounds, options.seconds))


def report(ranks: Sequence[Measured]) -> int:
    rows = []
    for rank, each in enumerate(ranks):
        threads = [f"{100 * taken / each.seconds:.3f}" for _, taken in sorted(each.in_threads.items())]
        rows.append(
            [
                f"rank {rank}",
                str(Spread.of_ratios(each.cpu[True], each.cpu[False])),
                str(Spread.of_ratios(each.wall[True], each.wall[False])),
                f"{1000 * statistics.median(each.cpu[False]):.1f}",
                f"{1e6 * each.in_hooks / each.steps:.0f}",
                " + ".join(threads),
                f"{each.messages / each.seconds:.2f}",
                f"{each.bytes / each.seconds:.0f}",
                str(len(each.in_threads)),
                str(each.sockets),
            ]
        )
    header = ["", "CPU on / off", "step on / off", "CPU ms", "hooks us", "threads %", "messages/s", "bytes/s"]
    print(table([*header, "threads", "sockets"], rows))
    found = statistics.median([value for each in ranks for value in _ratios(each.cpu)])
    print(
        f"\n{found:.4f} times the processor time of a step, at most {ALLOWED} wanted: "
        f"{'met' if found <= ALLOWED else 'MISSED'}"
    )
    return int(found > ALLOWED)


def _ratios(times: dict[bool, list[float]]) -> list[float]:
    return [on / off for on, off in zip(times[True], times[False], strict=True)]


if __name__ == "__main__":
    sys.exit(main())
