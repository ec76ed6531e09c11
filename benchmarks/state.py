"""Full state dicts on the first rank, saved and loaded: time, memory and bytes, beside torch's FSDP1 and FSDP2.

    python -m benchmarks.state
    python -m benchmarks.state --gigabytes 0.25 --ranks 2 --rounds 3

A GPT is wrapped block by block. `save` gives the first rank the whole state, in tensors of its own; `load` starts from
such a state on the first rank only, and every rank gets its part. Times are taken in one run, interleaved; memory is
measured in processes of its own for each contestant, as what is resident at the highest above what was before. Exits
with 1 when ours needs more than the state and the largest unit on the first rank, or more than the largest unit on
others, by more than 5 % of the unit and 32 MB.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP1

if not __package__:  # run as a file: the folder above has `benchmarks` and `fsdp`
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._contestants import CONTESTANTS, FSDP1_FLAT, FSDP2, OURS, Policy
from benchmarks._measure import (
    NOTHING_KEPT,
    bytes_sent,
    forget_peak,
    peak_resident_bytes,
    ratio,
    resident_bytes,
    settle,
    table,
    warn_if_busy,
)
from benchmarks._ranks import run_ranks
from benchmarks.gpt import GPT, GPTConfig

_WIDTH = 1024
_BYTES = 4  # of a float32
_TINY = GPTConfig(num_layers=1, num_heads=1, width=8)
_SLACK = 32e6  # what Python and the backend take at the first large exchange


@dataclass(frozen=True)
class Way:
    """How one library saves on the first rank, and loads from it."""

    save: Callable[[Any], Any]
    load: Callable[[Any, Any], None]


@dataclass(frozen=True)
class Cost:
    """What saving and loading once has cost one rank."""

    save_growth: int  # bytes resident at the highest, above those before
    load_growth: int
    sent: int  # bytes, of both


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    config = _config(options.gigabytes)
    full, unit = _sizes(config)
    print(f"A GPT of {config.num_layers} blocks, {full / 1e9:.2f} GB in float32, largest unit {unit / 1e6:.0f} MB.")
    warn_if_busy()
    costs = {name: run_ranks(_measure, options.ranks, name, config, environment=NOTHING_KEPT) for name in options.only}
    rows = [_row(name, rank, cost, full) for name in options.only for rank, cost in enumerate(costs[name])]
    print(table(["", "rank", "save MB", "load MB", "sent by both/state"], rows), flush=True)
    times = run_ranks(_time, options.ranks, options.only, config, options.rounds)[0]
    print()
    print(table(["", "save s", "load s", f"save/{OURS}", f"load/{OURS}"], [_times(n, times) for n in options.only]))
    holds = OURS not in costs or all(_holds(rank, cost, full, unit) for rank, cost in enumerate(costs[OURS]))
    if not holds:
        print("Ours needs more memory than the state and the largest unit, or on other ranks than the largest unit.")
    return 0 if holds else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.state", description="Full state dicts on the first rank: time, memory and bytes."
    )
    add = parser.add_argument
    add("--gigabytes", type=float, default=1.0, help="size of the model in float32 (%(default)s)")
    add("--ranks", type=int, default=2, help="processes (%(default)s)")
    add("--rounds", type=int, default=5, help="times that each is saved and loaded (%(default)s)")
    add("--only", nargs="+", choices=sorted(WAYS), default=list(WAYS), help="contestants")
    return parser.parse_args(arguments)


def _config(gigabytes: float) -> GPTConfig:
    per_block = (12 * _WIDTH * _WIDTH + 13 * _WIDTH) * _BYTES
    return GPTConfig(num_layers=max(1, round(gigabytes * 1e9 / per_block)), num_heads=16, width=_WIDTH)


def _sizes(config: GPTConfig) -> tuple[int, int]:
    """Bytes of the whole state, and of the largest unit."""
    with torch.device("meta"):
        model = GPT(config)
    blocks = [sum(param.numel() for param in block.parameters()) for block in model.blocks]
    total = sum(param.numel() for param in model.parameters())
    return total * _BYTES, max(*blocks, total - sum(blocks)) * _BYTES


def _holds(rank: int, cost: Cost, full: int, unit: int) -> bool:
    # While it loads, the first rank has the state already.
    allowed = 1.05 * unit + _SLACK
    return cost.save_growth <= allowed + (full if rank == 0 else 0) and cost.load_growth <= allowed


def _row(name: str, rank: int, cost: Cost, full: int) -> list[str]:
    growths = [f"{growth / 1e6:.0f}" for growth in (cost.save_growth, cost.load_growth)]
    return [name, str(rank), *growths, f"{cost.sent / full:.2f}"]


def _times(name: str, times: dict[str, list[tuple[float, float]]]) -> list[str]:
    own, ours = (list(zip(*times[each], strict=True)) for each in (name, OURS if OURS in times else name))
    medians = [f"{sorted(values)[len(values) // 2]:.2f}" for values in own]
    return [name, *medians, *(ratio(values, others) for values, others in zip(own, ours, strict=True))]


# --- on a rank


def _measure(name: str, config: GPTConfig) -> Cost:
    way = WAYS[name]
    model = _wrapped(name, _TINY)  # what is loaded at first use is not the model's
    way.load(model, way.save(model))
    model = _wrapped(name, config)
    sent = bytes_sent() or 0
    state, save_growth = _growth(lambda: way.save(model))
    _, load_growth = _growth(lambda: way.load(model, state))
    return Cost(save_growth, load_growth, (bytes_sent() or 0) - sent)


def _growth(job: Callable[[], Any]) -> tuple[Any, int]:
    settle()
    dist.barrier()
    before = resident_bytes()
    forget_peak()
    result = job()
    dist.barrier()
    return result, peak_resident_bytes() - before


def _time(names: Sequence[str], config: GPTConfig, rounds: int) -> dict[str, list[tuple[float, float]]]:
    models = {name: _wrapped(name, config) for name in names}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for number in range(rounds + 1):
        for name in [*names[number % len(names) :], *names[: number % len(names)]]:
            state, saving = _seconds(functools.partial(WAYS[name].save, models[name]))
            _, loading = _seconds(functools.partial(WAYS[name].load, models[name], state))
            if number:  # the first time connects, and fills caches
                times[name].append((saving, loading))
    return times


def _seconds(job: Callable[[], Any]) -> tuple[Any, float]:
    dist.barrier()
    began = time.perf_counter()
    result = job()
    dist.barrier()
    return result, time.perf_counter() - began


def _wrapped(name: str, config: GPTConfig) -> nn.Module:
    torch.manual_seed(0)
    model = GPT(config)
    return CONTESTANTS[name].wrap(model, model.blocks, torch.device("cpu"), Policy())


def _save_fsdp1(model: nn.Module) -> Any:
    # offload_to_cpu=True fails where parameters are on the CPU already.
    settings = FullStateDictConfig(offload_to_cpu=False, rank0_only=True)
    with TorchFSDP1.state_dict_type(model, StateDictType.FULL_STATE_DICT, settings):
        return model.state_dict()


_FROM_FIRST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def _load(model: nn.Module, state: Any) -> None:
    set_model_state_dict(model, state, options=_FROM_FIRST)


def _save_fsdp2(model: nn.Module) -> Any:
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def _save_ours(model: Any) -> Any:
    return model.state_dict(rank0_only=True)


def _load_ours(model: Any, state: Any) -> None:
    model.load_state_dict(state, rank0_only=True)


WAYS: dict[str, Way] = {
    OURS: Way(_save_ours, _load_ours),
    FSDP1_FLAT: Way(_save_fsdp1, _load),
    FSDP2: Way(_save_fsdp2, _load),
}


if __name__ == "__main__":
    sys.exit(main())
