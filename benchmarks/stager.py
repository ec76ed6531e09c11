"""Copies of a state in host memory: their properties, their memory, and how long training waits for a copy.

    python benchmarks/stager.py
    python benchmarks/stager.py --size 17M --rounds 30

`fsdp.StateDictStager`, torch's `StateDictStager` and `copy.deepcopy`, interleaved in the same process. Every property
is tested. Exits with 1 if `ours` lacks a property, grows, or makes training wait longer than torch's stager.
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

from benchmarks._measure import Spread, ratio, resident_bytes, rotated, settle, synchronize, table, warn_if_busy
from benchmarks._stager_properties import PROPERTIES, Copy, tried
from examples.gpt.model import GPT, SIZES
from fsdp import StateDictStager

OURS, TORCH, DEEPCOPY = "ours", "torch's", "deepcopy"
_CALLS = 1000
_MAY_GROW = 1 << 20  # bytes over all calls
_KINDS = ("again", "first")  # into memory that is there, and by a new stager

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
    kept = {name: make() for name, make in makers.items()}
    for stage in kept.values():
        stage(state)
    taken: dict[tuple[str, str], list[tuple[float, float]]] = {(kind, name): [] for kind in _KINDS for name in makers}
    for order in rotated(list(makers), rounds):
        for kind in _KINDS:
            for name in order:
                stage = kept[name] if kind == "again" else makers[name]()
                taken[kind, name].append(_timed(stage, state, device))
    print(f"\nTime of a copy of {size / 1e6:.0f} MB, {len(state)} tensors; ratios to torch's, {rounds} rounds\n")
    columns = [(kind, unit) for kind in _KINDS for unit in (0, 1)]
    times = {(kind, name, unit): [pair[unit] for pair in taken[kind, name]] for kind, name in taken for unit in (0, 1)}
    header = ["", *(f"{kind}{', CPU' * unit}" for kind, unit in columns), *(f"{kind} ms" for kind in _KINDS)]
    rows = []
    for name in makers:
        ratios = [ratio(times[kind, name, unit], times[kind, TORCH, unit]) for kind, unit in columns]
        rows.append([name, *ratios, *(f"{1e3 * Spread.of(times[kind, name, 0]).median:.1f}" for kind in _KINDS)])
    print(table(header, rows), flush=True)
    return all(Spread.of_ratios(times[kind, OURS, 0], times[kind, TORCH, 0]).low <= 1 for kind in _KINDS)


def _timed(stage: Copy, state: dict[str, Any], device: torch.device) -> tuple[float, float]:
    """Return elapsed seconds, and CPU seconds of this thread, which other processes affect less."""
    synchronize(device)
    began, began_cpu = time.perf_counter(), time.thread_time()
    copied = stage(state)
    taken = time.perf_counter() - began, time.thread_time() - began_cpu
    del copied  # outside of what is timed, as whoever writes a checkpoint does
    return taken


if __name__ == "__main__":
    sys.exit(main())
