"""Full optimizer states on rank 0, saved and loaded: time, memory and bytes, compared to FSDP1, FSDP2 and FairScale.

    python -m benchmarks.optim_state
    python -m benchmarks.optim_state --with-model --ranks 4 --rounds 3

Adam has stepped a GPT that is wrapped block by block; its state is twice as large as the model. `save` gathers the
state on rank 0, in separate tensors; `load` distributes such a state from rank 0 to all ranks. With ``--with-model``,
the model's state is also saved and loaded. Times are interleaved in the same run. Memory is the increase of peak
resident memory, in separate processes for each contestant. Exits with 1 if `ours` needs more than a tenth of the
model, in addition to the state on rank 0 during saving.

FairScale is included if it can be imported; its `get_shard_from_optim_state_dict` is timed separately, with the whole
state on each rank.
"""

from __future__ import annotations

import functools
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

from benchmarks import _fairscale, state
from benchmarks._contestants import FSDP1_FLAT, FSDP2, OURS
from benchmarks._fairscale import FAIRSCALE
from benchmarks._measure import NOTHING_KEPT, warn_if_busy
from benchmarks._ranks import run_ranks
from benchmarks._states import (
    SLACK,
    Cost,
    Way,
    config_of,
    interleaved,
    measure,
    parser_of,
    print_costs,
    print_times,
    seconds,
    sizes_of,
    stepped,
    time_all,
)
from examples.gpt.model import GPTConfig
from fsdp import optim_utils


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of("optim_state", "Full optimizer states on the first rank", 0.4, WAYS)
    parser.add_argument("--with-model", action="store_true", help="the model's state as well")
    options = parser.parse_args(arguments)
    config = config_of(options.gigabytes)
    model, _ = sizes_of(config)
    nbytes = (3 if options.with_model else 2) * model
    what = "Adam and its parameters" if options.with_model else "Adam"
    print(f"{what}, a GPT of {config.num_layers} blocks: {nbytes / 1e9:.2f} GB of state in float32.")
    warn_if_busy()
    measured = [] if options.no_memory else options.only
    costs = {
        name: run_ranks(_measure, options.ranks, name, config, options.with_model, environment=NOTHING_KEPT)
        for name in measured
    }
    print_costs(costs, nbytes)
    print_times(run_ranks(_time, options.ranks, options.only, config, options.with_model, options.rounds)[0])
    if {OURS, FAIRSCALE} <= set(options.only):
        print_times(run_ranks(_time_cuts, options.ranks, config, options.rounds)[0], ["cut"])
    holds = OURS not in costs or all(_holds(rank, cost, model, nbytes) for rank, cost in enumerate(costs[OURS]))
    if not holds:
        print("Ours needs more memory than it should.")
    return 0 if holds else 1


def _holds(rank: int, cost: Cost, model: int, nbytes: int) -> bool:
    # While it loads, the first rank has the state already, and all ranks write into the optimizer's.
    allowed = 0.1 * model + SLACK
    return cost.save_growth <= allowed + (nbytes if rank == 0 else 0) and cost.load_growth <= allowed


# --- on a rank


def _measure(name: str, config: GPTConfig, with_model: bool) -> Cost:
    return measure(ways(with_model)[name], stepped, name, config)


def _time(names: Sequence[str], config: GPTConfig, with_model: bool, rounds: int) -> dict[str, list[list[float]]]:
    return time_all(ways(with_model), stepped, names, config, rounds)


def ways(with_model: bool) -> dict[str, Way]:
    """Each contestant, for the optimizer's state or for both."""
    return {name: _with_model(way, state.WAYS[name]) if with_model else way for name, way in WAYS.items()}


def _with_model(way: Way, models: Way) -> Way:
    """Save and load both states sequentially."""

    def save(model: Any, optimizer: torch.optim.Optimizer) -> Any:
        return models.save(model), way.save(model, optimizer)

    def load(model: Any, optimizer: torch.optim.Optimizer, saved: Any) -> None:
        models.load(model, saved[0])
        way.load(model, optimizer, saved[1])

    return Way(save, load)


def _time_cuts(config: GPTConfig, rounds: int) -> dict[str, list[list[float]]]:
    """Seconds that ranks need for their parts of a state that all of them have."""
    made: dict[str, Any] = {name: stepped(name, config) for name in (OURS, FAIRSCALE)}
    full = _fairscale.from_first(made[OURS][0].gather_full_optim_state_dict(made[OURS][1]))

    def measured(name: str) -> list[float]:
        given = full | {"state": {number: dict(entry) for number, entry in full["state"].items()}}  # it is changed
        return [seconds(functools.partial(made[name][0].get_shard_from_optim_state_dict, given))[1]]

    return interleaved(measured, list(made), rounds)


def _save_fsdp1(model: Any, optimizer: torch.optim.Optimizer) -> Any:
    return TorchFSDP1.full_optim_state_dict(model, optimizer, rank0_only=True)


def _load_fsdp1(model: Any, optimizer: torch.optim.Optimizer, full: Any) -> None:
    optimizer.load_state_dict(TorchFSDP1.scatter_full_optim_state_dict(full or None, model, optim=optimizer))


def _save_fsdp2(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def _load_fsdp2(model: nn.Module, optimizer: torch.optim.Optimizer, full: Any) -> None:
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(model, optimizer, full, options=options)


def _save_fairscale(model: Any, optimizer: torch.optim.Optimizer) -> Any:
    with _fairscale.copying():
        return model.gather_full_optim_state_dict(optimizer)


def _load_fairscale(model: Any, optimizer: torch.optim.Optimizer, full: Any) -> None:
    optimizer.load_state_dict(model.get_shard_from_optim_state_dict(_fairscale.from_first(full)))


def _save_ours(model: Any, optimizer: torch.optim.Optimizer) -> Any:
    return model.gather_full_optim_state_dict(optimizer)


def _load_ours(model: Any, optimizer: torch.optim.Optimizer, full: Any) -> None:
    optim_utils.load_full_optim_state_dict(model, optimizer, full, rank0_only=True)


WAYS: dict[str, Way] = {
    OURS: Way(_save_ours, _load_ours),
    FSDP1_FLAT: Way(_save_fsdp1, _load_fsdp1),
    FSDP2: Way(_save_fsdp2, _load_fsdp2),
}
if _fairscale.is_installed():
    WAYS[FAIRSCALE] = Way(_save_fairscale, _load_fairscale)


if __name__ == "__main__":
    sys.exit(main())
