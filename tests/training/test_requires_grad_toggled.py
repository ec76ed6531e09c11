"""`requires_grad` changed while graphs exist: it decides about the next forward, and about what backward accumulates.

As in adversarial training (the discriminator is frozen for the generator's pass), in preference training with adapters
(frozen for the reference's pass), and wherever a part of a model is frozen for a while.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.helpers.forms import FORMS, Beside, assert_trains, inside, sharded
from tests.helpers.module_kinds import seeded
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import Case, parametrize_cases, parametrize_pairs
from tests.helpers.ranks import RankPool


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + torch.tanh(self.second(torch.tanh(self.first(inputs))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.exit = nn.Linear(5, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return self.exit(inputs)


def _block(model: Any, number: int = 0) -> Any:
    return inside(model).blocks[number]


def _toggle_block(model: Any, is_trained: bool) -> None:
    _block(model).requires_grad_(is_trained)


# Steps: each is called with a model, this rank's batch and the number of the step.


def frozen_for_a_second_forward(
    model: Any, inputs: Tensor, order: str, toggle: Callable[[Any, bool], None] = _toggle_block
) -> Tensor:
    first = model(inputs).sin().mean()
    toggle(model, False)
    second = model(inputs + 1).sin().mean()
    toggle(model, True)
    if order == "together":
        (first + 2 * second).backward()
    for loss in {"first": [first, second], "second": [second, first], "dropped": [first]}.get(order, []):
        loss.backward()
    return first


def everything_frozen_for_a_reference(model: Any, inputs: Tensor, grad: bool) -> Tensor:
    loss = model(inputs)
    model.requires_grad_(False)
    with torch.set_grad_enabled(grad):
        reference = model(inputs * 2).detach()
    model.requires_grad_(True)
    loss = (loss - reference).square().mean()
    loss.backward()
    return loss


def frozen_before_backward(model: Any, inputs: Tensor) -> Tensor:
    loss = model(inputs).square().mean()
    _block(model, 1).requires_grad_(False)
    loss.backward()
    _block(model, 1).requires_grad_(True)
    return loss


def thawed_before_backward(model: Any, inputs: Tensor) -> Tensor:
    _block(model, 1).requires_grad_(False)
    loss = model(inputs).square().mean()
    _block(model, 1).requires_grad_(True)
    loss.backward()
    return loss


def frozen_in_every_second_step(model: Any, inputs: Tensor, step: int) -> Tensor:
    first = model(inputs)
    _block(model, step % 2).requires_grad_(step == 1)
    loss = (first + model(inputs - 1)).square().mean()
    loss.backward()
    return loss


def _each(body: Callable[..., Any], **settings: Any) -> Any:
    return partial(_without_number, partial(body, **settings))


def _without_number(body: Any, model: Any, inputs: Tensor, step: int) -> Any:
    return body(model, inputs)


STEPS: dict[str, Any] = {
    **{
        f"second_forward_{order}": _each(frozen_for_a_second_forward, order=order)
        for order in ("first", "second", "together", "dropped")
    },
    "reference_without_gradients": _each(everything_frozen_for_a_reference, grad=False),
    "reference_with_gradients": _each(everything_frozen_for_a_reference, grad=True),
    "before_backward": _each(frozen_before_backward),
    "thawed_before_backward": _each(thawed_before_backward),
    "in_turn": frozen_in_every_second_step,
}
RESHARD: list[dict[str, Any]] = [{}, {"reshard_after_forward": False}]


@pytest.mark.parametrize("step", STEPS)
@parametrize_pairs(at_most=3, form=FORMS, options=RESHARD, world_size=[2, 3])
def test_units_are_frozen_and_thawed_while_graphs_exist(
    ranks: RankPool, step: str, form: str, options: dict[str, Any], world_size: int
) -> None:
    ranks(world_size).run(_train, STEPS[step], form, **options)


def _train(step: Any, form: str, **options: Any) -> None:
    assert_trains(Net, form, step, (Block,), **options)


@pytest.mark.parametrize("form", ["flat", "orig"])
def test_units_on_disk_are_frozen_and_thawed(ranks: RankPool, tmp_path: Path, form: str) -> None:
    for order in ("first", "together"):
        ranks(2).run(_train, STEPS[f"second_forward_{order}"], form, offload="disk", offload_folder=str(tmp_path))


# Parts of a unit


class Scaled(nn.Module):
    """A unit with parameters of two dtypes, which are frozen independently in each form."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.full((1,), 1.5, dtype=torch.float32)), nn.Linear(5, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear((inputs * self.scale).tanh())


def _toggle_dtype(dtype: torch.dtype, model: Any, is_trained: bool) -> None:
    for param in model.parameters():
        if param.dtype is dtype:
            param.requires_grad_(is_trained)


@parametrize_pairs(
    at_most=9,
    form=FORMS,
    order=["first", "second", "together"],
    dtype=[torch.float32, torch.float64],
    world_size=[2, 3],
)
@on_ranks("world_size")
def test_parameters_of_a_dtype_are_frozen_for_a_second_forward(form: str, order: str, dtype: torch.dtype) -> None:
    step = _each(frozen_for_a_second_forward, order=order, toggle=partial(_toggle_dtype, dtype))
    assert_trains(lambda: nn.Sequential(nn.Linear(5, 5), Scaled()), form, step, (Scaled,))


# The two forms with a parameter each can freeze single ones


def part_frozen_before_backward(model: Any, inputs: Tensor, part: str) -> Tensor:
    loss = model(inputs).square().mean()
    getattr(_block(model, 1), part).requires_grad_(False)
    loss.backward()
    getattr(_block(model, 1), part).requires_grad_(True)
    return loss


def part_frozen_between(model: Any, inputs: Tensor, part: str) -> Tensor:
    first = model(inputs)
    for block in inside(model).blocks:
        getattr(block, part).requires_grad_(False)
    with torch.no_grad():
        reference = model(inputs)
    third = model(inputs.neg())
    for block in inside(model).blocks:
        getattr(block, part).requires_grad_(True)
    loss = (first - 0.5 * reference).square().mean() + third.square().mean()
    loss.backward()
    return loss


def weights_frozen_between(model: Any, inputs: Tensor, part: str) -> Tensor:
    """By the attributes of modules, as `peft` freezes the items of a `ParameterDict`."""
    weights = [partial(getattr, getattr(block, part), "weight") for block in inside(model).blocks]
    first = model(inputs)
    for weight in weights:
        weight().requires_grad_(False)
    second = model(inputs.neg())
    for weight in weights:
        assert not weight().requires_grad
        weight().requires_grad = True
    loss = (first - 0.5 * second).square().mean()
    loss.backward()
    return loss


@parametrize_cases(
    form=["orig", "rows"],
    options=RESHARD,
    world_size=[2, 3],
    step=[part_frozen_before_backward, part_frozen_between, weights_frozen_between],
    part=["first", "second"],
)
def test_parts_of_units_are_frozen_and_thawed_while_graphs_exist(ranks: RankPool, world_size: int, case: Case) -> None:
    # The other part's gradients are complete first, when backward still needs the frozen weights.
    ranks(world_size).run(_train, _each(case.step, part=case.part), case.form, **case.options)


@on_ranks(2)
def test_the_listed_parameter_is_frozen_by_the_attribute_of_its_module() -> None:
    model = sharded(seeded(Net), "orig", (Block,))
    weight, listed = _block(model).first.weight, next(model.parameters())
    for needs in (False, True):
        assert weight.requires_grad_(needs) is weight
        assert weight.requires_grad is listed.requires_grad is needs
    listed.requires_grad = False
    assert not weight.requires_grad


def more_frozen_before_backward(model: Any, inputs: Tensor) -> Tensor:
    _block(model).first.requires_grad_(False)
    loss = model(inputs).square().mean()
    _block(model).second.requires_grad_(False)
    _block(model, 1).requires_grad_(False)
    loss.backward()
    for block in inside(model).blocks:
        block.requires_grad_(True)
    return loss


@parametrize_pairs(form=["orig", "rows"], world_size=[2, 3])
@on_ranks("world_size")
def test_more_of_a_unit_is_frozen_before_backward(form: str) -> None:
    # The inputs need no gradient, whose arrival would tell that the graph of the forward is at its end.
    assert_trains(Net, form, _each(more_frozen_before_backward))


@pytest.mark.parametrize("form", ["orig", "rows"])
@on_ranks(2)
def test_parts_of_one_unit_are_frozen_while_gradients_accumulate(form: str) -> None:
    both = Beside(Net, form)
    both.start()
    for step, frozen in enumerate([False, True, False]):
        for model in (both.model, both.plain):
            _block(model).first.requires_grad_(not frozen)
        both.backward(_each(lambda model, inputs: model(inputs).square().mean().backward()), step)
    for optimizer in both.optimizers:
        optimizer.step()
    both.assert_equal()


# In a forward


class Freezing(nn.Module):
    """Freezes a part for one of two uses, in its own forward."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.block, self.exit, self.how = Block(), nn.Linear(5, 1), how

    def forward(self, inputs: Tensor) -> Tensor:
        first = self.block(inputs)
        part = self.block if self.how == "block" else self.exit
        before = self.exit(first)
        part.requires_grad_(False)
        frozen = self.exit(self.block(inputs.neg()))
        part.requires_grad_(True)
        return before + 2 * frozen


@parametrize_pairs(form=["orig", "rows"], how=["block", "own"], units=[(Block,), ()], world_size=[2, 3])
@on_ranks("world_size")
def test_a_forward_freezes_and_thaws_its_own_parts(form: str, how: str, units: Any) -> None:
    assert_trains(partial(Freezing, how), form, _each(_square), units)


def _square(model: Any, inputs: Tensor) -> Tensor:
    loss = model(inputs).square().mean()
    loss.backward()
    return loss


class Recomputed(Net):
    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = checkpoint(block, inputs, use_reentrant=False)
        return self.exit(inputs)


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_recomputed_units_are_frozen_for_a_second_forward(form: str) -> None:
    assert_trains(Recomputed, form, STEPS["reference_without_gradients"], (Block,))


# Flat parameters


@on_ranks(2)
def test_parts_of_flat_parameters_list_no_parameters_and_say_so() -> None:
    model = sharded(seeded(Net), "flat", (Block,))
    with pytest.warns(UserWarning, match="lists no parameters.*use_orig_params=True"):
        assert not list(_block(model).first.parameters())
