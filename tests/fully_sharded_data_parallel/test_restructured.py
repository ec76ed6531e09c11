"""Weight norm, spectral norm and pruning replace a module's parameter by others: before wrapping, not after it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from fsdp import FullyShardedDataParallel, fully_shard
from tests.helpers.on_ranks import on_ranks

RESTRUCTURING: dict[str, Callable[[nn.Module], Any]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "old_weight_norm": nn.utils.weight_norm,
    "old_spectral_norm": nn.utils.spectral_norm,
    "prune": partial(prune.l1_unstructured, name="weight", amount=0.3),
}
DOORS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "flat": FullyShardedDataParallel,
    "original": partial(FullyShardedDataParallel, use_orig_params=True),
    "rows": fully_shard,
}


@on_ranks(1, 2)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
def test_restructuring_a_module_after_wrapping_is_an_error() -> None:
    for door, wrap in DOORS.items():
        for restructure in RESTRUCTURING.values():
            torch.manual_seed(0)
            model = wrap(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)))
            inner = model.module.module if door != "rows" else model
            before = model(torch.ones(2, 3))
            with pytest.raises((RuntimeError, ValueError)):
                restructure(inner[0])
            try:
                after = model(torch.ones(2, 3))
            except (RuntimeError, ValueError):
                continue  # torch had begun to replace the parameter
            assert torch.equal(after, before)


@on_ranks(2)
def test_a_parameter_that_is_sharded_cannot_be_removed() -> None:
    for door, wrap in DOORS.items():
        model = wrap(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)))
        inner = model.module.module if door != "rows" else model
        before = model(torch.ones(2, 3))
        with pytest.raises(RuntimeError, match=r"'weight' of this Linear is sharded.* before sharding"):
            del inner[0].weight
        assert torch.equal(model(torch.ones(2, 3)), before)


@on_ranks(1, 2)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
def test_modules_that_were_restructured_before_are_trained() -> None:
    for wrap in DOORS.values():
        for name in ("weight_norm", "old_weight_norm", "prune"):
            plain, sharded = _restructured(name), _restructured(name)
            model = wrap(sharded)
            for trained in (plain, model):
                optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
                for _ in range(2):
                    trained(torch.ones(2, 3)).square().sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            torch.testing.assert_close(model(torch.ones(2, 3)), plain(torch.ones(2, 3)))


def _restructured(name: str) -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    RESTRUCTURING[name](module[0])
    return module
