"""The ratio of a step on a slow link to the physical bound."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

import torch

from benchmarks._contestants import CONTESTANTS, Kind
from benchmarks._figures import Figures, floor_of
from benchmarks._measure import Spread, table
from benchmarks._training import Setup
from examples.gpt.model import count_units

_BYTES = 4  # of a float32 parameter


def least_bytes(name: str, setup: Setup, world_size: int) -> float:
    """Return the minimum of bytes that a rank sends in a step with the contestant's strategy.

    A gather or reduction moves (W - 1) / W of its bytes. Sharded: all units are gathered for forward, all units except
    the kept ones are gathered again for backward, and all units are reduced. `ours` keeps the root and the last block,
    the peers keep the root. Replicated: the sum is reduced and gathered.
    """
    with torch.device("meta"):
        root, *blocks = count_units(setup.model(setup.config))
    total = root + sum(blocks)
    if CONTESTANTS[name].kind is Kind.REPLICATED:
        moved = 2 * total
    else:
        moved = 3 * total - root - (blocks[-1] if CONTESTANTS[name].kind is Kind.OURS else 0)
    return moved * _BYTES * (world_size - 1) / world_size


def bounds(figures: Mapping[str, Figures], name: str, wire_seconds: float) -> list[float]:
    """Return the minimum time of a step for each round: its computation, or its bytes on the wire."""
    return [max(compute, wire_seconds) for compute in figures[floor_of(name)].seconds]


def of_the_bound(figures: Mapping[str, Figures], name: str, wire_seconds: float) -> Spread:
    """Which part of its own least time a contestant's step time would be: 1 is all that can be had."""
    return Spread.of_ratios(bounds(figures, name, wire_seconds), figures[name].seconds)


def report_bounds(figures: Mapping[str, Figures], setup: Setup, bandwidth: float, world_size: int) -> None:
    """Print the table; `bandwidth` is the measured bandwidth in bytes per second."""
    rows = []
    for name, figure in figures.items():
        if CONTESTANTS[name].kind is Kind.FLOOR:
            continue
        least = least_bytes(name, setup, world_size)
        wire = least / bandwidth
        rows.append(
            [
                name,
                str(of_the_bound(figures, name, wire)),
                f"{figure.sent / least:.2f}" if figure.sent is not None else "-",
                *(f"{1000 * statistics.median(each):.0f}" for each in (figures[floor_of(name)].seconds, [wire])),
                str(Spread.of([1000 * seconds for seconds in figure.seconds])),
            ]
        )
    print("\nThe physical bound: the larger of computing alone and of the least bytes at the measured bandwidth.")
    print(table(["", "bound / step", "sent / least", "compute ms", "wire ms", "step ms"], rows), flush=True)
