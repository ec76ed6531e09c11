"""Records full optimizer states that FairScale itself makes, as test data, and has FairScale take ours.

    pip install wheel && pip install --no-deps --no-build-isolation fairscale==0.4.13    # in an environment with torch
    python -m tests.tools.record_fairscale_optim

For each case FairScale trains a small model on a few CPU ranks, and saves its full optimizer state and what each rank
would load of it, to ``tests/data/fairscale/<case>/``. Then the same model is trained by this package, and FairScale
must cut our full state for its own ranks just as it cuts its own. Exits with an error if not. FairScale gathers into a
buffer and counts on ``cpu()`` to copy from it, which it does not do on the CPU; so here it does.
"""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks._fairscale import copying, from_first
from fsdp import FullyShardedDataParallel
from tests.tools.record_fairscale_shards import Case, _theirs, make_wrapped, record_all

CASES = {
    "optim-flat-2": Case(2, {}, {}),
    "optim-flat-3": Case(3, {}, {}),
    "optim-alone-2": Case(2, {}, {}, is_alone=True),
    "optim-momentum-2": Case(2, {}, {}),
}


def make_optimizer(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    """The optimizer of a case."""
    if "momentum" in name:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Two steps."""
    inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(2):
        optimizer.zero_grad()
        model(inputs).float().square().sum().backward()
        optimizer.step()


class Scaled:
    """As clients' wrappers of optimizers: none of torch's, with a value of its own in the dictionary."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return {**self._optimizer.state_dict(), "loss_scale": 4.0}


def record(folder: str, name: str) -> None:
    """On each rank: train and save."""
    warnings.simplefilter("ignore")
    model = _theirs(CASES[name])
    optimizer = make_optimizer(name, model)
    train(model, optimizer)
    with copying():
        full = from_first(model.gather_full_optim_state_dict(Scaled(optimizer)))
    if dist.get_rank() == 0:
        torch.save(full, Path(folder) / "full.pt")
    torch.save(model.get_shard_from_optim_state_dict(copy.deepcopy(full)), Path(folder) / f"rank{dist.get_rank()}.pt")


def check_ours(name: str) -> None:
    """On each rank: FairScale cuts our full state as it cuts its own."""
    warnings.simplefilter("ignore")
    case = CASES[name]
    ours: Any = make_wrapped(FullyShardedDataParallel, case, case.ours)
    optimizer = make_optimizer(name, ours)
    train(ours, optimizer)
    full = from_first(ours.gather_full_optim_state_dict(Scaled(optimizer)))
    model = _theirs(case)
    model(torch.randn(4, 5))
    found = model.get_shard_from_optim_state_dict(copy.deepcopy(full))
    expected = ours.get_shard_from_optim_state_dict(full)
    for number, state in expected["state"].items():
        for key, value in state.items():
            if not torch.equal(torch.as_tensor(value), torch.as_tensor(found["state"][number][key])):
                raise AssertionError(f"{number}, {key}: {found['state'][number][key]} instead of {value}")
    if found["param_groups"][0]["params"] != expected["param_groups"][0]["params"] or found["loss_scale"] != 4.0:
        raise AssertionError(f"{found['param_groups']} instead of {expected['param_groups']}")


if __name__ == "__main__":
    record_all(__doc__, CASES, record, check_ours)
