"""Modules whose class overrides `__setattr__` are told of every tensor that takes a parameter's place; and modules that
hold the original parameters elsewhere are refused, because they would compute with what nothing trains."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.forms import FORMS, Beside, assert_trains, batch, sharded
from tests.helpers.module_kinds import seeded
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs


class Cached(nn.Module):
    """Keeps what is assigned to it in a cache, and computes with that."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.__dict__["kind"], self.__dict__["cache"] = kind, [None, None] if kind == "list" else {}
        self.weight, self.bias = nn.Parameter(torch.randn(5, 5) / 2), nn.Parameter(torch.zeros(5))

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("weight", "bias"):
            if self.kind == "computed" and name == "weight":
                self.__dict__["shown_shape"] = (value + 0).shape  # not of a placeholder
            self.cache[("weight", "bias").index(name) if self.kind == "list" else name] = value
        super().__setattr__(name, value)

    def forward(self, inputs: Tensor) -> Tensor:
        weight, bias = self.cache if self.kind == "list" else self.cache.values()
        return torch.tanh(inputs @ weight.t() + bias)


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Cached(kind) for _ in range(2))
        self.exit = nn.Linear(5, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return self.exit(inputs)


def _loss(model: Any, inputs: Tensor, step: int) -> Tensor:
    loss: Tensor = model(inputs).square().mean()
    loss.backward()
    return loss


@parametrize_pairs(form=FORMS, kind=["list", "dict", "computed"], units=[(), (Cached,)], world_size=[2, 3])
@on_ranks("world_size")
def test_a_cache_that_follows_assignments_is_computed_with(form: str, kind: str, units: Any) -> None:
    assert_trains(partial(Net, kind), form, _loss, units)


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_a_cache_is_filled_after_a_load_and_a_summoning(form: str) -> None:
    both = Beside(partial(Net, "list"), form)
    both.start()
    both.step(_loss, 0)
    other = seeded(partial(Net, "list"), 1).state_dict()
    for model in (both.model, both.plain):
        model.load_state_dict(other)
    both.step(_loss, 1)
    if form != "rows":
        with both.model.summon_full_params(), torch.no_grad():
            layer = both.model.module.layers[0]
            assert layer.cache[0] is layer.weight
            layer.cache[0].mul_(2)
        with torch.no_grad():
            both.plain.layers[0].weight.mul_(2)
    both.step(_loss, 2)
    both.assert_equal()


class Holding(nn.Module):
    """Computes with parameters that it has put elsewhere when it was made."""

    def __init__(self, where: str, *, registers: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 1)
        held = {"list": [self.layer.weight], "nested": {"a": ([self.layer.weight],)}, "attribute": None}.get(where)
        self.__dict__["held"] = self.layer.weight if where == "attribute" else held

    def forward(self, inputs: Tensor) -> Tensor:
        held = self.held
        while not isinstance(held, Tensor):
            held = next(iter(held.values())) if isinstance(held, dict) else held[0]
        return inputs @ held.t() + self.layer.bias


@parametrize_pairs(form=FORMS, where=["list", "nested", "attribute"])
@on_ranks(2)
def test_a_module_that_holds_an_original_parameter_is_refused(form: str, where: str) -> None:
    model = sharded(seeded(partial(Holding, where)), form)
    with pytest.raises(RuntimeError, match=r"held holds the original parameter layer\.weight.*__setattr__"):
        model(torch.ones(3, 5))


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_a_distributed_data_parallel_that_is_sharded_is_told_to_be_left_out(form: str) -> None:
    model = sharded(nn.parallel.DistributedDataParallel(nn.Linear(5, 5)), form)
    with pytest.raises(RuntimeError, match=r"shard the model inside it \(its attribute `module`\)"):
        model(torch.ones(3, 5))


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_a_gradient_of_an_original_parameter_is_an_error(form: str) -> None:
    plain = seeded(partial(nn.Linear, 5, 1)).double()
    weight = plain.weight  # in a closure, where no module shows it
    model = sharded(plain, form)
    with pytest.raises(RuntimeError, match=r"original parameter weight of Linear has received a gradient"):
        (model(batch(0, 0)).sum() + weight.square().sum()).backward()
    assert weight.grad is None
    model(batch(0, 0)).sum().backward()


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_an_original_parameter_may_be_held_where_nothing_computes_with_it(form: str) -> None:
    both = Beside(partial(nn.Linear, 5, 1), form)
    both.start()
    held = list(seeded(partial(nn.Linear, 5, 1)).parameters())
    both.step(_loss, 0)
    both.assert_equal()
    assert all(param.grad is None for param in held)
