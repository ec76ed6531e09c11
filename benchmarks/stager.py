"""Copies of a state in host memory: what they keep, what they hold, and how long training waits for one.

    python benchmarks/stager.py
    python benchmarks/stager.py --size 17M --rounds 30

`fsdp.StateDictStager`, torch's own `StateDictStager` and `copy.deepcopy`, interleaved in one process. Every property is
tried. Exits with 1 if ours lacks one, grows, or makes training wait longer than torch's does.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._state_dict_stager import StateDictStager as TorchStager

if not __package__:  # run as a file: the folder above has `benchmarks` and `fsdp`
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._measure import Spread, ratio, resident_bytes, settle, synchronize, table, warn_if_busy
from benchmarks._stager_properties import PROPERTIES, Copy, tried
from benchmarks.gpt import GPT, SIZES
from fsdp import StateDictStager

OURS, TORCH, DEEPCOPY = "ours", "torch's", "deepcopy"
_CALLS = 1000
_MAY_GROW = 1 << 20  # bytes over all calls

MAKERS: dict[str, Callable[[], Copy]] = {
    OURS: lambda: StateDictStager().stage,
    TORCH: lambda: TorchStager().stage,
    DEEPCOPY: lambda: copy.deepcopy,
}


def main() -> int:
    options = _parse()
    warn_if_busy()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    print(f"torch {torch.__version__}, {options.device}, threads: {options.threads}\n")
    warnings.filterwarnings("ignore", "Sparse", UserWarning)
    answers = {name: [tried(probe, make()) for name, make in MAKERS.items()] for name, probe in PROPERTIES.items()}
    print(table(["property", *MAKERS], [[name, *cells] for name, cells in answers.items()]), flush=True)
    holds = all(cells[0] in ("yes", "no CUDA here") for cells in answers.values())
    holds &= _print_memory()
    holds &= _print_times(_state(options.size, device), options.rounds, device, options.pin)
    if not holds:
        print("Ours lacks a property, grows, or takes longer than torch's.")
    return 0 if holds else 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition(chr(10))[0] if __doc__ else None)
    add = parser.add_argument
    add("--size", choices=sorted(SIZES), default="46M", help="the model whose state is copied (%(default)s)")
    add("--rounds", type=int, default=20, help="copies by each (%(default)s)")
    add("--device", choices=["cpu", "cuda"], default="cpu", help="where the state is")
    add("--threads", type=int, default=1, help="that copy (%(default)s)")
    add("--pin", action="store_true", help="pinned memory, for both stagers")
    return parser.parse_args()


def _state(size: str, device: torch.device) -> dict[str, Any]:
    return dict(GPT(SIZES[size]).to(device).state_dict())


# --- memory


def _print_memory() -> bool:
    rows = []
    holds = True
    for name, make in MAKERS.items():
        same, new = _growth(make(), False), _growth(make(), True)
        held, released = _held(make())
        holds &= name != OURS or max(same, new) <= _MAY_GROW
        rows.append([name, *(f"{count / 1e6:.1f}" for count in (same, new, held, released))])
    print(f"\nMB of memory: growth over {_CALLS} calls, and what is kept of a copy of 100 MB once it was dropped\n")
    print(table(["", "same tensors", "new tensors", "copy dropped", "and the originals"], rows), flush=True)
    return holds


def _growth(stage: Copy, is_new: bool) -> int:
    tree = _tree()
    for call in range(_CALLS + 100):
        if call == 100:
            settle()
            before = resident_bytes()
        stage(_tree() if is_new else tree)
    settle()
    return max(0, resident_bytes() - before)


def _tree() -> dict[str, Any]:
    return {"weights": [torch.ones(1000) for _ in range(8)], "step": torch.tensor(1.0)}


def _held(stage: Copy) -> tuple[int, int]:
    tree = [torch.ones(25_000_000 // 10) for _ in range(10)]
    settle()
    before = resident_bytes()
    stage(tree)
    settle()
    held = resident_bytes() - before
    size = sum(each.nbytes for each in tree)
    tree.clear()
    settle()
    return max(0, held), max(0, resident_bytes() + size - before)


# --- time


def _print_times(state: dict[str, Any], rounds: int, device: torch.device, pin: bool) -> bool:
    makers = dict(MAKERS)
    if pin:
        makers[OURS] = lambda: StateDictStager(pin_memory=True).stage
        makers[TORCH] = lambda: TorchStager(pin_memory=True).stage
    size = sum(value.nbytes for value in state.values())
    first: dict[str, list[float]] = {name: [] for name in makers}
    again: dict[str, list[float]] = {name: [] for name in makers}
    kept = {name: make() for name, make in makers.items()}
    for stage in kept.values():
        stage(state)
    for number in range(rounds):
        for name in _turned(list(makers), number):
            first[name].append(_timed(makers[name](), state, device))
        for name in _turned(list(makers), number):
            again[name].append(_timed(kept[name], state, device))
    print(f"\nTime of a copy of {size / 1e6:.0f} MB in {len(state)} tensors; {rounds} rounds, ratios within each\n")
    rows = [
        [
            name,
            ratio(again[name], again[TORCH]),
            ratio(first[name], first[TORCH]),
            f"{1e3 * Spread.of(again[name]).median:.1f}",
            f"{1e3 * Spread.of(first[name]).median:.1f}",
        ]
        for name in makers
    ]
    print(table(["", "again / torch's", "first / torch's", "again ms", "first ms"], rows), flush=True)
    ours = [Spread.of_ratios(times[OURS], times[TORCH]) for times in (again, first)]
    return all(spread.low <= 1 for spread in ours)


def _turned(names: list[str], number: int) -> list[str]:
    start = number % len(names)
    return names[start:] + names[:start]


def _timed(stage: Copy, state: dict[str, Any], device: torch.device) -> float:
    synchronize(device)
    began = time.perf_counter()
    copied = stage(state)
    taken = time.perf_counter() - began
    del copied  # outside of what is timed, as whoever writes a checkpoint does
    return taken


if __name__ == "__main__":
    sys.exit(main())
