"""Gradients that a function of a user's gives as None, though autograd has said that they would come."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.helpers.dtensor_twins import (
    ROUNDING,
    Plan,
    adamw_one_by_one,
    assert_side_by_side,
    assert_within,
    ours,
    seeded,
    whole,
)
from tests.helpers.models import Wrap, keep
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs

Gives = tuple[bool, bool]  # a gradient for the weight, and one for the bias


class Product(torch.autograd.Function):
    """A linear layer, of which some parameters get no gradient."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor, gives: Gives) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.gives = gives
        return inputs @ weight.T + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        inputs, weight = ctx.saved_tensors
        of_weight, of_bias = ctx.gives
        return grad @ weight, grad.T @ inputs if of_weight else None, grad.sum(0) if of_bias else None, None


class Partly(nn.Linear):
    """Gives what is next in `turns` in each forward."""

    turns: list[Gives]

    def forward(self, inputs: Tensor) -> Tensor:
        self.turns = [*self.turns[1:], self.turns[0]]
        return Product.apply(inputs, self.weight, self.bias, self.turns[-1])


def partly(wrap: Wrap, turns: list[Gives]) -> nn.Module:
    layers = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), Partly(9, 8), nn.Tanh(), nn.Linear(8, 1))
    layers[2].turns = turns
    wrap(layers[2])
    return layers


def plan_of(turns: list[Gives], **what: Any) -> Plan:
    make_model = partial(seeded, partial(partly, turns=turns))
    return Plan(make_model=make_model, make_optimizer=adamw_one_by_one, **what)


@parametrize_pairs(at_most=3, gives=[(True, False), (False, True), (False, False)], mesh=[(2,), (2, 1), (2, 2)])
@on_ranks(lambda mesh: 4 if mesh == (2, 2) else 2)
def test_none_trains_as_with_torchs_and_does_not_travel(gives: Gives, mesh: tuple[int, ...]) -> None:
    turns = [gives]
    assert_side_by_side(plan_of(turns), mesh=mesh)
    assert_side_by_side(plan_of(turns, accumulate=2), mesh=mesh)


@pytest.mark.parametrize("mesh", [(2,), (2, 1)], ids=["sharded", "replicated"])
@on_ranks(2)
def test_none_now_and_then(mesh: tuple[int, ...]) -> None:
    turns = [(True, True), (False, True), (True, False), (True, True), (False, False), (False, True), (True, True)]
    # What comes again after a None is not known before it comes, nor that it does not come this time.
    assert_side_by_side(plan_of(turns, steps=len(turns), is_counted=False), mesh=mesh)


@on_ranks(2)
def test_none_on_one_rank() -> None:
    torch.set_default_dtype(torch.float64)
    rank = dist.get_rank()
    turns = [(rank == 0, True), (rank == 0, rank == 1), (True, rank == 0), (rank == 1, False)]
    model, plain = (seeded(partial(partly, turns=turns), wrap) for wrap in (ours(), keep))
    for step in range(2 * len(turns)):
        torch.manual_seed(2 * step + rank)
        inputs = torch.randn(3, 5)
        for each in (model, plain):
            each.zero_grad()
            each(inputs).square().sum().backward()
        for (name, param), own in zip(model.named_parameters(), plain.parameters(), strict=True):
            has = torch.tensor(own.grad is not None, dtype=torch.int)
            mean = torch.zeros_like(own) if own.grad is None else own.grad / 2
            dist.all_reduce(has)
            dist.all_reduce(mean)
            expected, found = mean if has else None, None if param.grad is None else whole(param.grad)
            assert_within(f"gradient of {name} in step {step}", found, expected, ROUNDING)
