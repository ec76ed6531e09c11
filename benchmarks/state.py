"""Full state dicts on rank 0, saved and loaded: time, memory and bytes, compared to FSDP1, FSDP2 and FairScale.

    python -m benchmarks.state
    python -m benchmarks.state --gigabytes 0.25 --ranks 2 --rounds 3

A GPT is wrapped block by block. `save` gathers the state on rank 0, in separate tensors on the host; `load` distributes
such a state from rank 0 to all ranks. Times are interleaved in the same run. Memory is the increase of peak resident
memory (with ``--device cuda``, of the GPU's memory), in separate processes for each contestant. Exits with 1 if `ours`
needs more than the state and the largest unit on rank 0, or more than the largest unit on other ranks, by more than 5 %
of the unit and 32 MB. On a GPU the state is not included.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP1

if not __package__:  # run as a file: the folder above has `benchmarks` and `fsdp`
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import _fairscale
from benchmarks._contestants import FSDP1_FLAT, FSDP2, OURS
from benchmarks._measure import NOTHING_KEPT, warn_if_busy
from benchmarks._ranks import DEVICES, run_ranks, this_device
from benchmarks._states import (
    SLACK,
    Cost,
    Way,
    config_of,
    measure,
    parser_of,
    print_costs,
    print_times,
    sizes_of,
    time_all,
    wrapped,
)
from examples.gpt.model import GPTConfig


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser_of("state", "Full state dicts on the first rank", 1.0, WAYS, DEVICES).parse_args(arguments)
    config = config_of(options.gigabytes)
    full, unit = sizes_of(config)
    print(f"A GPT of {config.num_layers} blocks, {full / 1e9:.2f} GB in float32, largest unit {unit / 1e6:.0f} MB.")
    warn_if_busy()
    measured = [] if options.no_memory else options.only
    costs = {
        name: run_ranks(_measure, options.ranks, name, config, device=options.device, environment=NOTHING_KEPT)
        for name in measured
    }
    print_costs(costs, full)
    print_times(run_ranks(_time, options.ranks, options.only, config, options.rounds, device=options.device)[0])
    beside = full if options.device == "cpu" else 0  # the first rank's state is in the host's memory
    holds = OURS not in costs or all(_holds(rank, cost, beside, unit) for rank, cost in enumerate(costs[OURS]))
    if not holds:
        print("Ours needs more memory than the state and the largest unit, or on other ranks than the largest unit.")
    return 0 if holds else 1


def _holds(rank: int, cost: Cost, beside: int, unit: int) -> bool:
    # While it loads, the first rank has the state already.
    allowed = 1.05 * unit + SLACK
    return cost.save_growth <= allowed + (beside if rank == 0 else 0) and cost.load_growth <= allowed


# --- on a rank


def _measure(name: str, config: GPTConfig) -> Cost:
    return measure(WAYS[name], _wrapped, name, config)


def _time(names: Sequence[str], config: GPTConfig, rounds: int) -> dict[str, list[list[float]]]:
    return time_all(WAYS, _wrapped, names, config, rounds)


def _wrapped(name: str, config: GPTConfig) -> tuple[nn.Module]:
    return (wrapped(name, config),)


def _save_fsdp1(model: nn.Module) -> Any:
    # offload_to_cpu=True fails where parameters are on the CPU already.
    settings = FullStateDictConfig(offload_to_cpu=this_device().type != "cpu", rank0_only=True)
    with TorchFSDP1.state_dict_type(model, StateDictType.FULL_STATE_DICT, settings):
        return model.state_dict()


_FROM_FIRST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def _load(model: nn.Module, state: Any) -> None:
    set_model_state_dict(model, state, options=_FROM_FIRST)


def _save_fsdp2(model: nn.Module) -> Any:
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def _save_fairscale(model: Any) -> Any:
    return model.state_dict()


def _load_fairscale(model: Any, state: Any) -> None:
    model.load_state_dict(_fairscale.from_first(state))


def _save_ours(model: Any) -> Any:
    return model.state_dict(rank0_only=True)


def _load_ours(model: Any, state: Any) -> None:
    model.load_state_dict(state, rank0_only=True)


WAYS: dict[str, Way] = {
    OURS: Way(_save_ours, _load_ours),
    FSDP1_FLAT: Way(_save_fsdp1, _load),
    FSDP2: Way(_save_fsdp2, _load),
}
if _fairscale.is_installed():
    WAYS[_fairscale.FAIRSCALE] = Way(_save_fairscale, _load_fairscale)


if __name__ == "__main__":
    sys.exit(main())
