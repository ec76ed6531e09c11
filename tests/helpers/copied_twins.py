"""What tests of copies share: twins that are copied together, and a check that a copy goes on as its original would.

`CopiedTwins` are a wrapped model with its optimizer and the same model plain, in float64 so that nothing is hidden by
rounding. Copying them copies both; what is trained afterwards must stay the same in each pair.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import get_fsdp_instances
from tests.helpers.equality import assert_same_state
from tests.helpers.memory import handles_of
from tests.helpers.models import NestedMlp, Wrap, keep, seeded
from tests.helpers.module_kinds import FLAT, FORMS, ORIGINAL, UNFLATTENED  # noqa: F401 - tests of copies import them
from tests.helpers.parity import MakeOptimizer
from tests.helpers.twins import Twins, batch, score

Travel = Callable[[Any], Any]


def through_pickle(item: Any) -> Any:
    """Pickled and unpickled, with its ranks given back to every wrapper."""
    return connected(pickle.loads(pickle.dumps(item)))


def connected(item: Any) -> Any:
    """The same item, after what is missing in its models was assigned as FairScale's users do it."""
    models = [each for each in (item if isinstance(item, tuple) else (item,)) if isinstance(each, nn.Module)]
    for wrapper in (wrapper for model in models for wrapper in wrappers_in(model)):
        wrapper.process_group = dist.group.WORLD
        wrapper.process_group_reduce_scatter = dist.group.WORLD
    return item


every_form = pytest.mark.parametrize("options", FORMS, ids=["flat", "original", "unflattened"])
every_travel = pytest.mark.parametrize("travel", [copy.deepcopy, through_pickle])


# Models, all for `batch`: they take [4, 5]


class TiedAndFrozen(nn.Module):
    """A root with tied weights, and a unit whose bias is frozen."""

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.entry = nn.Linear(5, 7, bias=False)
        block = nn.Sequential(nn.Linear(7, 7), nn.Tanh())
        block[0].bias.requires_grad_(False)
        self.block = wrap(block)
        self.exit = nn.Linear(5, 7, bias=False)
        self.exit.weight = self.entry.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.block(torch.tanh(self.entry(inputs))) @ self.exit.weight


class Recurrent(nn.Module):
    """Recurrent modules keep lists of their weights, and references to them, beside their attributes."""

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.memory = wrap(nn.LSTM(5, 3, num_layers=2))
        self.exit = nn.GRU(3, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.exit(self.memory(inputs)[0])[0]


class Normed(nn.Module):
    """Buffers of two kinds: running statistics, which training writes, and a table that 16 bits cannot hold."""

    table: Tensor

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.block = wrap(nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh()))
        self.register_buffer("table", torch.linspace(0, 1, 7) / 3)
        self.exit = nn.Linear(7, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.exit((hidden := self.block(inputs)) + self.table.to(hidden.dtype))


def nested(wrap: Wrap = keep) -> Any:
    return seeded(NestedMlp, wrap)


def tied_and_frozen(wrap: Wrap = keep) -> Any:
    return seeded(TiedAndFrozen, wrap)


def recurrent(wrap: Wrap = keep) -> Any:
    return seeded(Recurrent, wrap)


def normed(wrap: Wrap = keep) -> Any:
    return seeded(Normed, wrap)


# CopiedTwins


class CopiedTwins(Twins):
    """Twins that can be copied with their optimizers."""

    def copied(self, travel: Travel = copy.deepcopy) -> CopiedTwins:
        """Both with their optimizers, copied at once so that they stay together."""
        sharded, optimizer = travel((self.sharded, self.optimizers[0]))
        plain, plain_optimizer = copy.deepcopy((self.plain, self.optimizers[1]))
        return CopiedTwins(sharded, plain, (optimizer, plain_optimizer))

    def train(self, *numbers: int) -> None:
        """Collective. One step with each of these batches."""
        for number in numbers:
            self.step(number)


# One model, of any precision


def train(model: nn.Module, optimizer: torch.optim.Optimizer, *numbers: int) -> None:
    """Collective. One step with each of these batches, of the dtype of the model's shards."""
    for number in numbers:
        optimizer.zero_grad()
        inputs = batch(number, dist.get_rank()).to(next(model.parameters()).dtype)
        score(model(inputs).float()).backward()
        optimizer.step()
    optimizer.zero_grad()


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_goes_on_alike(model: Any, make_optimizer: MakeOptimizer, travel: Travel) -> Any:
    """Collective. A copy made after two steps ends up as its original does after two more, and neither minds the other.

    Returns:
        The copy.
    """
    optimizer = make_optimizer(model.parameters())
    train(model, optimizer, 0, 1)
    before = state_of(model)
    copied, its_optimizer = travel((model, optimizer))
    assert_same_state(state_of(copied), before)
    train(copied, its_optimizer, 2, 3)
    after = state_of(copied)
    assert any(not torch.equal(value, before[name]) for name, value in after.items())
    assert_same_state(state_of(model), before)
    train(model, optimizer, 2, 3)
    assert_same_state(state_of(model), after)
    assert_same_state(state_of(copied), after)
    return copied


# Memory


def shard_bytes(model: nn.Module) -> int:
    return sum(handle.flat_param.numel() * handle.flat_param.element_size() for handle in handles_of(model))


def wrappers_in(model: nn.Module) -> list[Any]:
    return list(get_fsdp_instances(model))
