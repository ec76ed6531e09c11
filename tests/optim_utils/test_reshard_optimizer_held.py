"""Which parameters an optimizer may hold when it is handed over, and what of it stays as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fsdp.layers.listed_shards import params_of
from tests.helpers.copied_twins import every_form
from tests.helpers.models import keep, nested_mlp
from tests.helpers.on_ranks import on_ranks
from tests.helpers.optimizers import stepped
from tests.helpers.parity import alone, fully_sharded
from tests.optim_utils.test_reshard_optimizer import adamw, sgd


@every_form
def test_an_optimizer_that_took_no_step_has_the_parameters_of_the_wrapped_model(options: dict[str, Any]) -> None:
    model = nested_mlp(keep)
    optimizer = adamw(model)
    wrapped = alone(model, **options)
    wrapped.reshard_optimizer(optimizer)
    assert list(map(id, params_of(optimizer))) == list(map(id, wrapped.parameters()))
    assert not optimizer.state


@every_form
def test_handing_over_twice_changes_nothing(options: dict[str, Any]) -> None:
    model, optimizer = stepped(adamw)
    wrapped = alone(model, **options)
    wrapped.reshard_optimizer(optimizer)
    before = inside(optimizer)
    wrapped.reshard_optimizer(optimizer)
    assert inside(optimizer) == before


def inside(optimizer: torch.optim.Optimizer) -> Any:
    """The very objects of which an optimizer consists."""
    groups = [(id(group), id(group["params"]), list(map(id, group["params"]))) for group in optimizer.param_groups]
    return groups, {id(p): {k: id(value) for k, value in state.items()} for p, state in optimizer.state.items()}


@every_form
def test_names_are_those_of_an_optimizer_made_afterwards(options: dict[str, Any]) -> None:
    model, optimizer = stepped(lambda model: torch.optim.SGD(model.named_parameters(), lr=0.1))
    wrapped = alone(model, **options)
    wrapped.reshard_optimizer(optimizer)
    assert optimizer.param_groups[0]["param_names"] == [name for name, _ in wrapped.named_parameters()]


def test_lists_and_groups_of_parameters_stay_the_same_objects() -> None:
    model, optimizer = stepped(adamw)
    group, params, defaults = optimizer.param_groups[0], optimizer.param_groups[0]["params"], optimizer.defaults
    alone(model).reshard_optimizer(optimizer)
    assert optimizer.param_groups[0] is group
    assert group["params"] is params
    assert optimizer.defaults is defaults


@every_form
def test_parameters_that_are_not_wrapped_stay_with_their_state(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    beside = nn.Linear(5, 5)
    model, optimizer = stepped(adamw, nn.Sequential(beside, nested_mlp(keep)))
    before = {param: dict(optimizer.state[param]) for param in beside.parameters()}
    alone(model[1], **options).reshard_optimizer(optimizer)  # type: ignore[index]
    assert [id(param) for param in params_of(optimizer)[:2]] == [id(param) for param in beside.parameters()]
    for param, state in before.items():
        assert all(optimizer.state[param][key] is value for key, value in state.items())


@every_form
def test_several_optimizers_of_one_model_are_handed_over_one_by_one(options: dict[str, Any]) -> None:
    first, second = nn.Linear(5, 5), nn.Linear(5, 1)
    optimizers = [sgd(first), adamw(second)]
    wrapped = alone(nn.Sequential(alone(first, **options), alone(second, **options)))
    for optimizer in optimizers:
        wrapped.reshard_optimizer(optimizer)
    together = [param for optimizer in optimizers for param in params_of(optimizer)]
    assert list(map(id, together)) == list(map(id, wrapped.parameters()))


@pytest.mark.parametrize("is_held", [True, False])
@every_form
def test_frozen_parameters_may_be_in_it_or_not(options: dict[str, Any], is_held: bool) -> None:
    model = nested_mlp(keep)
    model.entry.requires_grad_(False)  # type: ignore[union-attr]
    held = [param for param in model.parameters() if param.requires_grad or is_held]
    model, optimizer = stepped(lambda _: torch.optim.AdamW(held), model)
    wrapped = alone(model, **options)
    wrapped.reshard_optimizer(optimizer)
    expected = [id(param) for param in wrapped.parameters() if param.requires_grad or is_held]
    assert sorted(map(id, params_of(optimizer))) == sorted(expected)
    assert all(param.requires_grad for param in optimizer.state)


@on_ranks(2)
def test_a_gradient_that_is_there_already_is_stepped_with() -> None:
    torch.set_default_dtype(torch.float64)
    weights = []
    for early in (True, False):
        model, optimizer = stepped(adamw)
        wrapped = fully_sharded()(model)
        if early:
            wrapped.reshard_optimizer(optimizer)  # type: ignore[operator]
        wrapped(torch.ones(3, 5)).sum().backward()
        wrapped.reshard_optimizer(optimizer)  # type: ignore[operator]
        optimizer.step()
        weights.append(wrapped.state_dict())
    for name, value in weights[0].items():
        assert torch.equal(weights[1][name], value), name


@every_form
def test_its_own_state_dict_is_loaded_into_one_made_afterwards(options: dict[str, Any]) -> None:
    model, optimizer = stepped(adamw)
    wrapped = alone(model, **options)
    wrapped.reshard_optimizer(optimizer)
    made_after = adamw(wrapped)
    made_after.load_state_dict(optimizer.state_dict())
    for param in wrapped.params:
        for key, value in optimizer.state[param].items():
            assert torch.equal(made_after.state[param][key], value)
