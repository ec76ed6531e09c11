"""Shared code of benchmarks of states on rank 0: the model, the cost of saving and loading, and the output."""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import _fairscale
from benchmarks._contestants import CONTESTANTS, OURS, Policy
from benchmarks._measure import bytes_sent, meter_of, ratio, rotated, settle, synchronize, table
from benchmarks._ranks import this_device
from examples.gpt.model import GPT, GPTConfig, count_units

SLACK = 32e6  # bytes that Python and the backend take at the first large exchange
BYTES = 4  # of a float32
TINY = GPTConfig(num_layers=1, num_heads=1, width=8)

Make = Callable[[str, GPTConfig], tuple[Any, ...]]  # what a contestant of a name works on


@dataclass(frozen=True)
class Way:
    """How a library saves on rank 0, and loads from rank 0, given the contestant's objects and the state."""

    save: Callable[..., Any]
    load: Callable[..., None]


@dataclass(frozen=True)
class Cost:
    """The cost of a save and a load on a rank."""

    save_growth: int  # bytes of the host, or of the accelerator, at the highest, above those before
    load_growth: int
    sent: int  # bytes, of both


def parser_of(
    name: str, what: str, gigabytes: float, ways: Mapping[str, Any], devices: Sequence[str] = ()
) -> argparse.ArgumentParser:
    """The command line of `benchmarks.<name>`; `devices` are the choices of ``--device``, if it has this option."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}", description=f"{what}: time, memory and bytes."
    )
    add = parser.add_argument
    add("--gigabytes", type=float, default=gigabytes, help="size of the model in float32 (%(default)s)")
    add("--ranks", type=int, default=2, help="processes (%(default)s)")
    add("--rounds", type=int, default=5, help="times that each is saved and loaded (%(default)s)")
    add("--no-memory", action="store_true", help="times only")
    add("--only", nargs="+", choices=sorted(ways), default=list(ways), help="contestants")
    if devices:
        add("--device", choices=devices, default="cpu", help="of the models, and of the measured memory")
    return parser


def config_of(gigabytes: float, width: int = 1024) -> GPTConfig:
    per_block = (12 * width * width + 13 * width) * BYTES
    return GPTConfig(num_layers=max(1, round(gigabytes * 1e9 / per_block)), num_heads=16, width=width)


def sizes_of(config: GPTConfig) -> tuple[int, int]:
    """Bytes of the whole state, and of the largest unit."""
    with torch.device("meta"):
        units = count_units(GPT(config))
    return sum(units) * BYTES, max(units) * BYTES


def print_costs(costs: Mapping[str, Sequence[Cost]], nbytes: int) -> None:
    """Memory and bytes, of each rank, for a state of so many bytes."""
    if not costs:
        return
    rows = [_row(name, rank, cost, nbytes) for name, found in costs.items() for rank, cost in enumerate(found)]
    print(table(["", "rank", "save MB", "load MB", "sent by both/state"], rows), flush=True)


def print_times(times: Mapping[str, Sequence[Sequence[float]]], jobs: Sequence[str] = ("save", "load")) -> None:
    """Seconds of each job in each round, and their ratios to ours in the same round."""
    print()
    header = ["", *(f"{job} s" for job in jobs), *(f"{job}/{OURS}" for job in jobs)]
    print(table(header, [_times(name, times) for name in times]), flush=True)


def _row(name: str, rank: int, cost: Cost, full: int) -> list[str]:
    growths = [f"{growth / 1e6:.0f}" for growth in (cost.save_growth, cost.load_growth)]
    return [name, str(rank), *growths, f"{cost.sent / full:.2f}"]


def _times(name: str, times: Mapping[str, Sequence[Sequence[float]]]) -> list[str]:
    own, ours = (list(zip(*times[each], strict=True)) for each in (name, OURS if OURS in times else name))
    medians = [f"{sorted(values)[len(values) // 2]:.2f}" for values in own]
    return [name, *medians, *(ratio(values, others) for values, others in zip(own, ours, strict=True))]


# --- on a rank


def measure(way: Way, make: Make, name: str, config: GPTConfig) -> Cost:
    """Return the cost of a save and a load."""
    made = make(name, TINY)  # what is loaded at first use is not the model's
    way.load(*made, way.save(*made))
    made = make(name, config)
    sent = bytes_sent() or 0
    state, save_growth = growth(lambda: way.save(*made))
    _, load_growth = growth(lambda: way.load(*made, state))
    return Cost(save_growth, load_growth, (bytes_sent() or 0) - sent)


def growth(job: Callable[[], Any]) -> tuple[Any, int]:
    """Collective. Return the result of a job, and the increase of peak memory of this rank's device in bytes.

    On the CPU this is resident memory, and on accelerators allocated memory.
    """
    settle()
    synchronize(this_device())
    dist.barrier()
    meter = meter_of(this_device())
    result = job()
    synchronize(this_device())
    dist.barrier()
    _, peak = meter.peaks()
    return result, peak


def time_all(
    ways: Mapping[str, Way], make: Make, names: Sequence[str], config: GPTConfig, rounds: int
) -> dict[str, list[list[float]]]:
    """Seconds of saving and loading, in each round by all."""
    made = {name: make(name, config) for name in names}

    def measured(name: str) -> list[float]:
        state, saving = seconds(functools.partial(ways[name].save, *made[name]))
        _, loading = seconds(functools.partial(ways[name].load, *made[name], state))
        return [saving, loading]

    return interleaved(measured, names, rounds)


def interleaved(
    measured: Callable[[str], list[float]], names: Sequence[str], rounds: int
) -> dict[str, list[list[float]]]:
    """Return the measurements of each contestant in each round, with a rotating order."""
    found: dict[str, list[list[float]]] = {name: [] for name in names}
    for number, order in enumerate(rotated(names, rounds + 1)):
        for name in order:
            values = measured(name)
            if number:  # the first time connects, and fills caches
                found[name].append(values)
    return found


def seconds(job: Callable[[], Any]) -> tuple[Any, float]:
    """Collective. Return the result of a job, and the time until all ranks have finished."""
    synchronize(this_device())
    dist.barrier()
    began = time.perf_counter()
    result = job()
    synchronize(this_device())
    dist.barrier()
    return result, time.perf_counter() - began


def wrapped(name: str, config: GPTConfig) -> nn.Module:
    """Collective. A GPT, wrapped by a contestant block by block."""
    torch.manual_seed(0)
    gpt = GPT(config).to(this_device())
    if name != _fairscale.FAIRSCALE:
        return CONTESTANTS[name].wrap(gpt, gpt.blocks, this_device(), Policy())
    model = _fairscale.wrapped(gpt, gpt.blocks)
    with torch.no_grad():
        model(tokens())  # before which it cannot load
    return model


def stepped(name: str, config: GPTConfig) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Collective. The same, with Adam that has stepped."""
    model = wrapped(name, config)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, foreach=False)
    model(tokens()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def tokens() -> torch.Tensor:
    """Return a short batch: only the state matters."""
    return torch.zeros(1, 2, dtype=torch.long, device=this_device())
