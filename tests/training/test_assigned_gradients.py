"""Gradients that a model's own code assigns to the parameters of its modules in backward, as hand-written layers do."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fsdp
from fsdp import FullyShardedDataParallel, ShardingStrategy
from tests.helpers.forms import FORMS, Body, assert_trains
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.twins import score


def add_gradient(param: Any, gradient: Tensor) -> None:
    param.grad = gradient if param.grad is None else param.grad + gradient


class Product(torch.autograd.Function):
    """A product with a module's weight, which autograd does not know as an input."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, module: Any) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(inputs)
        return F.linear(inputs, module.weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        (inputs,) = ctx.saved_tensors
        if not ctx.module.skips or gradient.sum() > 0:  # on some ranks only
            add_gradient(ctx.module.weight, gradient.T @ inputs)
        return gradient @ ctx.module.weight, None


class ByFunction(nn.Linear):
    """Assigns the gradient in the backward of a function."""

    skips = False

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = Product.apply(inputs, self)
        return outputs


class OnSomeRanks(ByFunction):
    """Assigns a gradient in some backwards."""

    skips = True


class ByHook(nn.Linear):
    """Assigns the gradient in a hook of the output."""

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = F.linear(inputs, self.weight.detach())
        outputs.register_hook(lambda gradient: add_gradient(self.weight, gradient.T @ inputs.detach()))
        return outputs


class Layer(nn.Module):
    """A unit with such a layer, and with parameters that autograd knows."""

    def __init__(self, kind: type[nn.Linear]) -> None:
        super().__init__()
        self.linear, self.norm = kind(5, 5, bias=False), nn.LayerNorm(5)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.norm(self.linear(torch.tanh(inputs)))


def layers(kind: type[nn.Linear]) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 5), Layer(kind), Layer(kind), kind(5, 5, bias=False))


def once(model: Any, inputs: Tensor, step: int) -> Tensor:
    loss = score(model(inputs))
    loss.backward()
    return loss.detach()


def accumulating(model: Any, inputs: Tensor, step: int) -> Tensor:
    with model.no_sync() if isinstance(model, FullyShardedDataParallel) else nullcontext():
        if isinstance(model, fsdp.FSDPModule):
            model.set_requires_gradient_sync(False)
        once(model, inputs.neg(), step)
        if isinstance(model, fsdp.FSDPModule):
            model.set_requires_gradient_sync(True)
    return once(model, inputs, step)


def two_calls(model: Any, inputs: Tensor, step: int) -> Tensor:
    loss = score(model(inputs)) + score(model(inputs.neg()))
    loss.backward()
    return loss.detach()


@parametrize_pairs(
    at_most=12, form=FORMS, body=[once, accumulating, two_calls], kind=[ByFunction, ByHook], world_size=[2, 1]
)
@on_ranks("world_size")
def test_they_are_reduced_with_those_of_autograd(form: str, kind: type[nn.Linear], body: Body) -> None:
    assert_trains(lambda: layers(kind), form, body, (Layer,))


@pytest.mark.parametrize("body", [once, accumulating, two_calls])
@pytest.mark.parametrize("form", ["orig", "rows"])  # in a flat parameter the momentum of others goes on
@on_ranks(2)
def test_they_may_be_assigned_on_some_ranks(form: str, body: Body) -> None:
    assert_trains(lambda: layers(OnSomeRanks), form, body, (Layer,), steps=4)


@pytest.mark.parametrize("strategy", ["SHARD_OPTIM", "SHARD_OPTIM_GRADS", "SHARD_GRAD_OP", "NO_SHARD"])
@on_ranks(2)
def test_they_are_reduced_under_other_strategies(strategy: str) -> None:
    for kind in (ByFunction, OnSomeRanks):
        assert_trains(
            lambda kind=kind: layers(kind), "orig", once, (Layer,), sharding_strategy=ShardingStrategy[strategy]
        )
