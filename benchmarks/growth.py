"""How the cost of a unit grows with the number of units, and of ranks: wrapping, first step, later steps, objects.

    python -m benchmarks.growth
    python -m benchmarks.growth --units 100 10000 --only ours fsdp2

The units are tiny and the ranks are torch's fake group, so all time is bookkeeping of rank 0. `docs/benchmarks.md`
explains the columns. Exits with 1 if the time of a unit of `ours` is more than 1.5 times that with the fewest units.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

if not __package__:  # run as a file: the folder above has `benchmarks` and `fsdp`
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._contestants import CONTESTANTS, FSDP2, OURS, OURS_ORIG, OURS_ROWS, Policy, choose
from benchmarks._measure import settle, table, warn_if_busy
from benchmarks._ranks import run_fake_rank, this_device
from benchmarks.overhead import WIDTH, TinyUnits, optimizer_of, train_step

AMONG = (OURS, OURS_ORIG, OURS_ROWS, FSDP2)
MOST_GROWTH = 1.5
_STEPS = 3  # after the first; the fastest counts


@dataclass(frozen=True)
class Costs:
    """CPU seconds, and bytes of Python's objects, of a unit."""

    wrap: float
    first_step: float
    step: float
    nbytes: float

    @property
    def start(self) -> float:
        """Wrapping and the first step together: libraries divide the same work between the two in different ways."""
        return self.wrap + self.first_step


def measure(name: str, num_units: int) -> Costs:
    """Wrap and train a model of a contestant, in a process in which a smaller one was trained before."""
    _train_step(_wrap(name, TinyUnits(5)))
    plain = TinyUnits(num_units)
    settle()
    start = time.process_time()
    module = _wrap(name, plain)
    wrap = time.process_time() - start
    first, *steps = (_train_step(module) for _ in range(1 + _STEPS))
    del module
    plain = TinyUnits(num_units)
    settle()
    tracemalloc.start()
    module = _wrap(name, plain)
    _train_step(module)
    gc.collect()
    nbytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return Costs(*(value / num_units for value in (wrap, first, min(steps), nbytes)))


def _wrap(name: str, plain: TinyUnits) -> nn.Module:
    return CONTESTANTS[name].wrap(plain, plain.units, this_device(), Policy())


def _train_step(module: nn.Module) -> float:
    """Return the CPU seconds of a step."""
    optimizer = optimizer_of(module, lr=0.0)  # results of the fake group are undefined
    batch = torch.zeros(1, WIDTH)
    start = time.process_time()
    train_step(module, optimizer, batch)
    return time.process_time() - start


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    names = choose(options.only, among=AMONG, always=(OURS, FSDP2))
    print(f"Units of Linear({WIDTH}, {WIDTH}), torch {torch.__version__}", flush=True)
    warn_if_busy()
    sizes = [(num, options.ranks[0]) for num in options.units] + [(options.units[0], num) for num in options.ranks[1:]]
    found = {size: {name: run_fake_rank(measure, size[1], name, size[0]) for name in names} for size in sizes}
    rows = [
        [str(num_units), str(num_ranks), name, *_columns(each, costs[FSDP2])]
        for (num_units, num_ranks), costs in found.items()
        for name, each in costs.items()
    ]
    head = ["units", "ranks", "", "start / fsdp2", "step / fsdp2", "bytes / fsdp2"]
    print("\nCosts of a unit.")
    print(table([*head, "wrap us", "first step us", "step us", "KiB"], rows))
    # With more ranks, the fake group's own collectives take longer.
    fewest, ours = found[sizes[0]], [name for name in names if name != FSDP2]
    growth = max(found[size][name].start / fewest[name].start for size in sizes[: len(options.units)] for name in ours)
    print(f"\n{growth:.2f} times the time until the first step with more units, at most {MOST_GROWTH:.1f} wanted")
    return 0 if growth <= MOST_GROWTH else 1


def _columns(each: Costs, peer: Costs) -> list[str]:
    ratios = each.start / peer.start, each.step / peer.step, each.nbytes / peer.nbytes
    times = [f"{1e6 * seconds:.0f}" for seconds in (each.wrap, each.first_step, each.step)]
    return [*(f"{ratio:.2f}" for ratio in ratios), *times, f"{each.nbytes / 1024:.1f}"]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.growth", description="Costs of a unit with more units, and with more ranks."
    )
    parser.add_argument("--units", type=int, nargs="+", default=[100, 1000, 3000], help="on the first number of ranks")
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 512, 4096], help="of the fake group")
    parser.add_argument("--only", nargs="+", choices=AMONG, metavar="NAME", help=f"of {', '.join(AMONG)}")
    options = parser.parse_args(arguments)
    if min(*options.units, *options.ranks) < 1:
        parser.error("--units and --ranks must be at least 1")
    return options


if __name__ == "__main__":
    sys.exit(main())
