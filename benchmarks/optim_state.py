"""Full optimizer states on the first rank, saved and loaded: time, memory and bytes, beside torch's FSDP1 and FSDP2.

    python -m benchmarks.optim_state
    python -m benchmarks.optim_state --gigabytes 0.25 --ranks 2 --rounds 3

Adam has stepped a GPT that is wrapped block by block; its state is twice as large as the model. `save` gives the first
rank all of it, in tensors of its own; `load` starts from such a state on the first rank only, and every rank gets its
part. Times are taken in one run, interleaved; memory is measured in processes of its own for each contestant, as what
is resident at the highest above what was before. Exits with 1 when ours needs more than a tenth of the model, besides
the state on the first rank while it saves.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP1

if not __package__:  # run as a file: the folder above has `benchmarks` and `fsdp`
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._contestants import CONTESTANTS, FSDP1_FLAT, FSDP2, OURS, Policy
from benchmarks._measure import NOTHING_KEPT, bytes_sent, ratio, table, warn_if_busy
from benchmarks._ranks import run_ranks
from benchmarks.gpt import GPT, GPTConfig
from benchmarks.state import _TINY, Cost, _config, _growth, _seconds, _sizes
from fsdp import optim_utils

_SLACK = 32e6  # what Python and the backend take at the first large exchange


@dataclass(frozen=True)
class Way:
    """How one library saves an optimizer's state on the first rank, and loads from it."""

    save: Callable[[Any, torch.optim.Optimizer], Any]
    load: Callable[[Any, torch.optim.Optimizer, Any], None]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    config = _config(options.gigabytes)
    model, _ = _sizes(config)
    print(f"Adam on a GPT of {config.num_layers} blocks: {2 * model / 1e9:.2f} GB of state in float32.")
    warn_if_busy()
    costs = {name: run_ranks(_measure, options.ranks, name, config, environment=NOTHING_KEPT) for name in options.only}
    rows = [_row(name, rank, cost, 2 * model) for name in options.only for rank, cost in enumerate(costs[name])]
    print(table(["", "rank", "save MB", "load MB", "sent by both/state"], rows), flush=True)
    times = run_ranks(_time, options.ranks, options.only, config, options.rounds)[0]
    print()
    print(table(["", "save s", "load s", f"save/{OURS}", f"load/{OURS}"], [_times(n, times) for n in options.only]))
    holds = OURS not in costs or all(_holds(rank, cost, model) for rank, cost in enumerate(costs[OURS]))
    if not holds:
        print("Ours needs more memory than it should.")
    return 0 if holds else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.optim_state",
        description="Full optimizer states on the first rank: time, memory and bytes.",
    )
    add = parser.add_argument
    add("--gigabytes", type=float, default=0.4, help="size of the model in float32 (%(default)s)")
    add("--ranks", type=int, default=2, help="processes (%(default)s)")
    add("--rounds", type=int, default=5, help="times that each is saved and loaded (%(default)s)")
    add("--only", nargs="+", choices=sorted(WAYS), default=list(WAYS), help="contestants")
    return parser.parse_args(arguments)


def _holds(rank: int, cost: Cost, model: int) -> bool:
    # While it loads, the first rank has the state already, and all ranks write into the optimizer's.
    allowed = 0.1 * model + _SLACK
    return cost.save_growth <= allowed + (2 * model if rank == 0 else 0) and cost.load_growth <= allowed


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
    model, optimizer = _stepped(name, _TINY)  # what is loaded at first use is not the model's
    way.load(model, optimizer, way.save(model, optimizer))
    model, optimizer = _stepped(name, config)
    sent = bytes_sent() or 0
    state, save_growth = _growth(lambda: way.save(model, optimizer))
    _, load_growth = _growth(lambda: way.load(model, optimizer, state))
    return Cost(save_growth, load_growth, (bytes_sent() or 0) - sent)


def _time(names: Sequence[str], config: GPTConfig, rounds: int) -> dict[str, list[tuple[float, float]]]:
    made = {name: _stepped(name, config) for name in names}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for number in range(rounds + 1):
        for name in [*names[number % len(names) :], *names[: number % len(names)]]:
            state, saving = _seconds(functools.partial(WAYS[name].save, *made[name]))
            _, loading = _seconds(functools.partial(WAYS[name].load, *made[name], state))
            if number:  # the first time connects, and fills caches
                times[name].append((saving, loading))
    return times


def _stepped(name: str, config: GPTConfig) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    gpt = GPT(config)
    model: nn.Module = CONTESTANTS[name].wrap(gpt, gpt.blocks, torch.device("cpu"), Policy())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, foreach=False)
    # Short: only the state counts.
    tokens = torch.zeros(1, 2, dtype=torch.long)
    model(tokens).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _save_fsdp1(model: Any, optimizer: torch.optim.Optimizer) -> Any:
    return TorchFSDP1.full_optim_state_dict(model, optimizer, rank0_only=True)


def _load_fsdp1(model: Any, optimizer: torch.optim.Optimizer, state: Any) -> None:
    optimizer.load_state_dict(TorchFSDP1.scatter_full_optim_state_dict(state or None, model, optim=optimizer))


def _save_fsdp2(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def _load_fsdp2(model: nn.Module, optimizer: torch.optim.Optimizer, state: Any) -> None:
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(model, optimizer, state, options=options)


def _save_ours(model: Any, optimizer: torch.optim.Optimizer) -> Any:
    return model.gather_full_optim_state_dict(optimizer)


def _load_ours(model: Any, optimizer: torch.optim.Optimizer, state: Any) -> None:
    optim_utils.load_full_optim_state_dict(model, optimizer, state, rank0_only=True)


WAYS: dict[str, Way] = {
    OURS: Way(_save_ours, _load_ours),
    FSDP1_FLAT: Way(_save_fsdp1, _load_fsdp1),
    FSDP2: Way(_save_fsdp2, _load_fsdp2),
}


if __name__ == "__main__":
    sys.exit(main())
