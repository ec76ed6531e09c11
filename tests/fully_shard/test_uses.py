"""Unusual uses of modules under `fully_shard`: each trains as the plain model does on the ranks' batches together."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp.engine.placeholder import Placeholder
from tests.helpers.dtensor_twins import (
    Plan,
    assert_at_rest,
    assert_side_by_side,
    assert_trains_as_plain,
    is_whole,
    local,
    ours,
    seeded,
    torchs,
    trained_twins,
    uneven,
    units,
)
from tests.helpers.equality import assert_same
from tests.helpers.models import Net, Wrap, keep
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.ranks import RankPool
from tests.helpers.twins import STEPS, Step, backward_twice, in_eval_mode, score, two_forwards_then_backwards

OPTIONS: list[dict[str, Any]] = [{}, {"reshard_after_forward": False}]
NEARBY = {"reshard_after_forward": 2}


@pytest.mark.parametrize(("world_size", "options"), [*((2, each) for each in OPTIONS), (3, {}), (4, NEARBY)], ids=str)
def test_ways_to_step_in_turn(ranks: RankPool, world_size: int, options: dict[str, Any]) -> None:
    ranks(world_size).run(assert_trains_as_plain, uneven, *STEPS, in_eval_mode, **options)


# Which parameters are used


class Choosing(nn.Module):
    """Uses its parts as it is told: once, twice, or not at all."""

    def __init__(self, wrap: Wrap, *, nested: bool = True) -> None:
        super().__init__()
        self.parts = nn.ModuleList((wrap if nested else keep)(nn.Linear(5, 5)) for _ in range(3))
        self.exit = nn.Linear(5, 2)
        self.spare = nn.Parameter(torch.ones(3))

    def forward(self, inputs: Tensor, order: tuple[int, ...] = (0, 1, 2)) -> Tensor:
        for number in order:
            inputs = torch.tanh(self.parts[number](inputs))
        return self.exit(inputs)


def _in_order(order: tuple[int, ...], model: Any, inputs: Tensor) -> None:
    score(model(inputs, order)).backward()


@parametrize_pairs(options=OPTIONS, nested=[True, False])
@on_ranks(2)
def test_parameters_may_be_used_twice_or_not_at_all(nested: bool, options: dict[str, Any]) -> None:
    steps = [partial(_in_order, order) for order in [(0, 1, 2), (0, 0, 2), (2, 1, 2, 1), (1,)]]
    twins = trained_twins(partial(seeded, partial(Choosing, nested=nested)), *steps, **options)
    assert twins.sharded.get_parameter("spare").grad is None


def test_unused_parameters_have_no_gradient_as_with_torchs(ranks: RankPool) -> None:
    ranks(2).run(assert_side_by_side, Plan(make_model=partial(seeded, Choosing)))


def test_a_parameter_may_be_called_for_outside_of_its_modules_forward(ranks: RankPool) -> None:
    ranks(2).run(assert_trains_as_plain, partial(seeded, borrowing))


def borrowing(wrap: Wrap) -> nn.Module:
    """The root uses a parameter of its own in a module that is not called."""
    return Net(
        lambda net, x: net.inner(x @ net.holder.weight.t()) + net.holder.bias.sum(),
        holder=nn.Linear(5, 5),
        inner=wrap(nn.Linear(5, 3)),
    )


# What modules return


class Detached(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs).detach()


@on_ranks(2)
def test_units_whose_outputs_need_no_gradient() -> None:
    twins = trained_twins(partial(seeded, masking))
    assert twins.sharded.get_parameter("mask.weight").grad is None


def masking(wrap: Wrap) -> nn.Module:
    """A unit's output is used without its gradient: nothing of the unit gets one, and its memory is given back."""
    return Net(
        lambda net, x: net.exit(torch.tanh(net.inner(x)) * net.mask(x).sigmoid()),
        mask=wrap(Detached(5, 4)),
        inner=wrap(nn.Linear(5, 4)),
        exit=nn.Linear(4, 1),
    )


@on_ranks(2)
def test_a_loss_that_leaves_by_an_attribute_as_with_torchs() -> None:
    found, expected = seeded(Aside, ours()), seeded(Aside, torchs())
    for model in (found, expected):
        _step_aside(model, torch.ones(2, 5))
    for name, param in expected.named_parameters():
        assert_same(local(found.get_parameter(name).grad), local(param.grad), name)
    assert_at_rest(found)


class Aside(nn.Module):
    """Its loss leaves by an attribute; what it returns needs no gradient."""

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.inner = wrap(nn.Linear(5, 4))
        self.exit = nn.Linear(4, 1)
        self.loss: list[Tensor] = []

    def forward(self, inputs: Tensor) -> Tensor:
        found = self.exit(torch.tanh(self.inner(inputs)))
        self.loss = [score(found)]
        return found.detach()


def _step_aside(model: Any, inputs: Tensor) -> None:
    assert not model(inputs).requires_grad
    model.loss.pop().backward()


class Silent(Aside):
    """Returns None besides."""

    def forward(self, inputs: Tensor) -> None:  # type: ignore[override]
        super().forward(inputs)


@on_ranks(2)
def test_a_module_that_returns_nothing_is_called_while_an_exception_is_handled() -> None:
    model, expected = seeded(Silent, ours()), seeded(Aside, ours())
    _step_aside(expected, torch.ones(2, 5))
    try:
        raise ValueError("try again")
    except ValueError:
        model(torch.ones(2, 5))
    model.loss.pop().backward()
    for name, param in expected.named_parameters():
        assert_same(local(model.get_parameter(name).grad), local(param.grad), name)
    assert_at_rest(model)


@on_ranks(2)
def test_inner_modules_are_not_left_whole_by_forwards_without_backward() -> None:
    model: Any = uneven(ours())
    for with_gradients in (False, True, False):
        with torch.set_grad_enabled(with_gradients):
            model(torch.ones(2, 5))
    assert [unit.module for unit in units(model) if is_whole(unit.module)] == [model]
    model.reshard()
    assert_at_rest(model)


# Which modules have a forward


class Stack(nn.ModuleList):
    """A list that can be called."""

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self:
            inputs = torch.tanh(layer(inputs))
        return inputs


class Table(nn.ModuleDict):
    """A dictionary that can be called."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self["exit"](torch.tanh(self["entry"](inputs)))
        return hidden


class Assigned(nn.Module):
    """A module whose class defines no forward: each instance has its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)
        self.forward = self.forward_train

    def forward_train(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.layer(inputs)
        return hidden


class Replaced(nn.Linear):
    """A module whose instances have another forward than the class."""

    def __init__(self) -> None:
        super().__init__(5, 5)
        self.forward = self.forward_doubled  # type: ignore[method-assign]

    def forward_doubled(self, inputs: Tensor) -> Tensor:
        return 2 * super().forward(inputs)


def _stack() -> nn.Module:
    return Stack(nn.Linear(5, 5) for _ in range(2))


def _table() -> nn.Module:
    return Table({"entry": nn.Linear(5, 4), "exit": nn.Linear(4, 5)})


def _as_root(make: Callable[[], nn.Module], wrap: Wrap) -> nn.Module:
    return seeded(lambda _: make(), wrap)


def _inside(make: Callable[[], nn.Module], wrap: Wrap) -> nn.Module:
    return seeded(lambda inner: nn.Sequential(inner(make()), nn.Linear(5, 2)), wrap)


@pytest.mark.parametrize("make", [_stack, _table, Assigned, Replaced], ids=["list", "dict", "assigned", "replaced"])
@on_ranks(2)
def test_any_module_that_can_be_called_is_sharded(make: Callable[[], nn.Module]) -> None:
    for place in (_as_root, _inside):
        assert_trains_as_plain(partial(place, make))


# As torch's


@on_ranks(2, 3)
def test_accumulation_keeps_whole_gradients_until_they_are_reduced() -> None:
    model: Any = uneven(ours())
    inputs = torch.ones(2, 5) * (dist.get_rank() + 1)
    model.set_requires_gradient_sync(False)
    model(inputs).sum().backward()
    # Not there yet, and an optimizer that steps now hears why.
    assert all(isinstance(param.grad, Placeholder) for param in model.parameters())
    model.set_requires_gradient_sync(True)
    model(inputs).sum().backward()
    assert all(isinstance(param.grad, DTensor) for param in model.parameters())


@pytest.mark.parametrize("step", [two_forwards_then_backwards, backward_twice], ids=lambda step: step.__name__)
@on_ranks(2)
def test_what_backwards_leave_is_freed(step: Step) -> None:
    model = uneven(ours())
    step(model, torch.ones(2, 5))
    assert_at_rest(model)
