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

import sys
from collections.abc import Sequence
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
from benchmarks._measure import NOTHING_KEPT, warn_if_busy
from benchmarks._ranks import run_ranks
from benchmarks._states import (
    SLACK,
    Cost,
    Way,
    config_of,
    measure,
    options_of,
    print_costs,
    print_times,
    sizes_of,
    time_all,
)
from benchmarks.gpt import GPT, GPTConfig
from fsdp import optim_utils


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(arguments, "optim_state", "Full optimizer states", 0.4, WAYS)
    config = config_of(options.gigabytes)
    model, _ = sizes_of(config)
    print(f"Adam on a GPT of {config.num_layers} blocks: {2 * model / 1e9:.2f} GB of state in float32.")
    warn_if_busy()
    costs = {name: run_ranks(_measure, options.ranks, name, config, environment=NOTHING_KEPT) for name in options.only}
    print_costs(costs, 2 * model)
    print_times(run_ranks(_time, options.ranks, options.only, config, options.rounds)[0])
    holds = OURS not in costs or all(_holds(rank, cost, model) for rank, cost in enumerate(costs[OURS]))
    if not holds:
        print("Ours needs more memory than it should.")
    return 0 if holds else 1


def _holds(rank: int, cost: Cost, model: int) -> bool:
    # While it loads, the first rank has the state already, and all ranks write into the optimizer's.
    allowed = 0.1 * model + SLACK
    return cost.save_growth <= allowed + (2 * model if rank == 0 else 0) and cost.load_growth <= allowed


# --- on a rank


def _measure(name: str, config: GPTConfig) -> Cost:
    return measure(WAYS[name], _stepped, name, config)


def _time(names: Sequence[str], config: GPTConfig, rounds: int) -> dict[str, list[tuple[float, float]]]:
    return time_all(WAYS, _stepped, names, config, rounds)


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
