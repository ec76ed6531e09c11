"""Terms of a loss that use the listed parameters directly, outside of the forward: penalties, distances, sums."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp import ShardingStrategy
from tests.helpers.forms import FORMS, Beside, assert_trains, sharded
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Sequential(nn.Tanh(), nn.Linear(7, 5)), nn.Linear(5, 3))


def full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def squares(params: list[Any]) -> Any:
    return full(sum(param.square().sum() for param in params))


def total(params: list[Any]) -> Any:
    """Its gradients are replicated `DTensor`s."""
    return full(sum(param.sum() for param in params))


Term = Callable[[list[Any]], Any]


def before_forward(term: Term, model: Any, inputs: Tensor) -> Tensor:
    penalty = term(list(model.parameters()))
    loss: Tensor = model(inputs).square().mean()
    (penalty + loss).backward()
    return loss


def after_forward(term: Term, model: Any, inputs: Tensor) -> Tensor:
    params = list(model.parameters())
    loss: Tensor = model(inputs).square().mean()
    (loss + term(params)).backward()
    return loss


def by_itself(term: Term, model: Any, inputs: Tensor) -> Tensor:
    loss: Tensor = model(inputs).square().mean()
    loss.backward()
    term(list(model.parameters())).backward()
    return loss


ORDERS = [before_forward, after_forward, by_itself]
REPLICATED = {"sharding_strategy": ShardingStrategy.NO_SHARD}
FORMS_AND_OPTIONS = [*((form, {}) for form in FORMS), ("orig", REPLICATED)]


@parametrize_pairs(
    at_most=12,
    form_and_options=FORMS_AND_OPTIONS,
    order=ORDERS,
    units=[(), (nn.Sequential,)],
    world_size=[1, 2, 3],
)
@on_ranks("world_size")
def test_gradients_of_the_term_and_of_the_forward_add_up(form_and_options: Any, order: Any, units: Any) -> None:
    form, options = form_and_options
    assert_trains(net, form, lambda model, inputs, step: order(squares, model, inputs), units, **options)


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.__name__)
@on_ranks(3)
def test_the_sum_of_parameters_is_a_term(order: Any) -> None:
    assert_trains(net, "rows", lambda model, inputs, step: order(total, model, inputs), (nn.Sequential,))


@parametrize_pairs(at_most=5, form=FORMS, order=ORDERS)
@on_ranks(2)
def test_terms_of_several_backwards_add_up(form: str, order: Any) -> None:
    both = Beside(net, form, (nn.Sequential,))
    both.start()
    for step in range(2):
        for micro in range(3):
            both.backward(lambda model, inputs, step: order(squares, model, inputs), 3 * step + micro)
        for optimizer in both.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step == 0)
    both.assert_equal()


@pytest.mark.parametrize("form", ["flat", "orig"])
@on_ranks(2)
def test_a_method_that_sees_this_rank_s_shard_only_warns(form: str) -> None:
    for method in ("norm", "mean", "std", "var", "max", "min", "median"):
        _require_warnings(sharded(net(), form), sharded(net(), form, **REPLICATED), method)


def _require_warnings(model: Any, whole: nn.Module, method: str) -> None:
    for param in model.parameters():
        if param.numel() > 1:  # `LocalShard`s may be empty
            with pytest.warns(UserWarning, match=rf"^{method}\(\) of a parameter .* this rank's shard"):
                found = getattr(param, method)()
            assert torch.equal(found, getattr(param.detach().as_subclass(Tensor), method)())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for param in whole.parameters():
            getattr(param, method)()
        with model.summon_full_params():
            for param in model.parameters():
                getattr(param, method)()
        for param in model.parameters():
            param.square().sum()
