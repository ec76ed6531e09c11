"""Losses with gradients of outputs for inputs: penalties, forces, differential equations."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp
from fsdp.distributed.dtensor import local_part
from tests.helpers.dtensor_twins import assert_trains_as_plain, ours
from tests.helpers.models import Wrap, nested_mlp, seeded
from tests.helpers.on_ranks import on_ranks
from tests.helpers.parity import fully_sharded
from tests.helpers.twins import (
    OPTIONS,
    Step,
    Twins,
    assert_at_rest,
    assert_trains_like_plain,
    batch,
    once,
    score,
    toolbox,
)


def gradient_of(outputs: Tensor, inputs: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
    return gradient


def a_penalty_alone(model: nn.Module, inputs: Tensor) -> None:
    inputs = inputs.clone().requires_grad_()
    gradient_of(model(inputs), inputs).square().sum().backward()


def energy_and_forces(model: nn.Module, inputs: Tensor) -> None:
    inputs = inputs.clone().requires_grad_()
    energy = model(inputs)
    (score(energy) + score(gradient_of(energy, inputs))).backward()


def forwards_before_a_penalty(model: nn.Module, inputs: Tensor) -> None:
    between = inputs.clone().requires_grad_()
    real, fake, mixed = model(inputs), model(inputs.neg()), model(between)
    (score(real) - score(fake) + gradient_of(mixed, between).norm(dim=1).sub(1).square().mean()).backward()


def forwards_after_a_penalty(model: nn.Module, inputs: Tensor) -> None:
    between = inputs.clone().requires_grad_()
    penalty = gradient_of(model(between), between).norm(dim=1).sub(1).square().mean()
    (score(model(inputs)) - score(model(inputs.neg())) + penalty).backward()


def two_penalties(model: nn.Module, inputs: Tensor) -> None:
    first, second = inputs.clone().requires_grad_(), inputs.neg().requires_grad_()
    penalties = [gradient_of(model(each), each).square().mean() for each in (first, second)]
    sum(penalties, torch.zeros(())).backward()


def third_derivatives(model: nn.Module, inputs: Tensor) -> None:
    inputs = inputs.clone().requires_grad_()
    curvature = gradient_of(gradient_of(model(inputs), inputs), inputs)
    curvature.square().mean().backward()


def a_penalty_that_is_given_up(model: nn.Module, inputs: Tensor) -> None:
    inputs = inputs.clone().requires_grad_()
    assert gradient_of(model(inputs), inputs).requires_grad
    once(model, inputs)


def a_penalty_that_is_given_up_before_the_step(model: nn.Module, inputs: Tensor) -> None:
    once(model, inputs)
    inputs = inputs.clone().requires_grad_()
    assert gradient_of(model(inputs), inputs).requires_grad
    assert set(model.state_dict())


def a_forward_before_the_penalty_is_used(model: nn.Module, inputs: Tensor) -> None:
    inputs = inputs.clone().requires_grad_()
    gradient = gradient_of(model(inputs), inputs)
    model(inputs.neg())
    gradient.square().sum().backward()


def an_evaluation_before_the_penalty_is_used(model: nn.Module, inputs: Tensor) -> None:
    inputs = inputs.clone().requires_grad_()
    energy = model(inputs)
    gradient = gradient_of(energy, inputs)
    with torch.no_grad():
        model(inputs.neg())
    with torch.inference_mode():
        model.eval()(inputs.neg())
    model.train()
    (score(energy) + gradient.square().sum()).backward()


def a_product_with_the_hessian(model: nn.Module, inputs: Tensor) -> None:
    _, product = torch.autograd.functional.hvp(lambda given: score(model(given)), inputs, torch.ones_like(inputs))
    once(model, product)


def a_hessian(model: nn.Module, inputs: Tensor) -> None:
    """A backward for each row, of the same graph."""
    once(model, torch.autograd.functional.hessian(lambda given: score(model(given)), inputs[0]))


def a_penalty_in_parts(model: nn.Module, inputs: Tensor) -> None:
    inputs = inputs.clone().requires_grad_()
    gradient = gradient_of(model(inputs), inputs)
    for part in gradient.unbind(1):
        part.square().sum().backward(retain_graph=True)


def a_jacobian(model: nn.Module, inputs: Tensor) -> None:
    torch.func.jacrev(lambda given: model(given[None])[0])(inputs[0]).square().mean().backward()


def a_differential_equation(model: nn.Module, inputs: Tensor) -> None:
    slope = torch.func.jacrev(lambda given: model(given[None])[0].sum())
    laplacian = torch.func.jacrev(slope)(inputs[0]).diagonal().sum()
    (laplacian - model(inputs)).square().mean().backward()


STEPS: list[Step] = [
    a_penalty_alone,
    energy_and_forces,
    forwards_before_a_penalty,
    forwards_after_a_penalty,
    two_penalties,
    third_derivatives,
    a_penalty_that_is_given_up,
    a_penalty_that_is_given_up_before_the_step,
    a_forward_before_the_penalty_is_used,
    an_evaluation_before_the_penalty_is_used,
    a_product_with_the_hessian,
    a_hessian,
    a_penalty_in_parts,
    a_jacobian,
    a_differential_equation,
]
FLAT: list[dict[str, Any]] = [*OPTIONS, {"use_orig_params": True}, {"reshard_after_forward": 2}]


@pytest.mark.parametrize("options", FLAT, ids=str)
@on_ranks(2)
def test_a_wrapped_model_trains_like_the_plain_one(options: dict[str, Any]) -> None:
    assert_trains_like_plain(nested_mlp, *STEPS, options=options)


@on_ranks(1, 3)
def test_units_of_a_wrapped_model_run_in_all_steps() -> None:
    assert_trains_like_plain(toolbox, *STEPS)


@pytest.mark.parametrize(("make", "world_size"), [(nested_mlp, 2), (toolbox, 1), (toolbox, 3)])
@on_ranks("world_size")
def test_a_model_of_rows_trains_like_the_plain_one(make: Any) -> None:
    assert_trains_as_plain(make, *STEPS)


class Potential(nn.Module):
    """Returns an energy and its gradient, which it computes inside its forward."""

    def __init__(self, wrap: Wrap, recompute: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([wrap(nn.Sequential(nn.Linear(5, 5), nn.Tanh())) for _ in range(3)])
        self.exit, self.recompute = nn.Linear(5, 1), recompute

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = inputs.clone().requires_grad_()
        hidden = inputs
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False) if self.recompute else layer(hidden)
        energy = self.exit(hidden)
        return torch.cat([energy, gradient_of(energy, inputs)], dim=1)


@pytest.mark.parametrize("recompute", [False, True])
@on_ranks(2)
def test_forces_may_be_computed_inside_of_the_forward(recompute: bool) -> None:
    make = partial(seeded, partial(Potential, recompute=recompute))
    assert_trains_like_plain(make, once)
    assert_trains_like_plain(make, once, options={"use_orig_params": True})
    assert_trains_as_plain(make, once)


@on_ranks(2)
def test_gradients_accumulate_without_reductions() -> None:
    twins = Twins.of(nested_mlp)

    def accumulated(model: nn.Module, inputs: Tensor) -> None:
        with model.no_sync() if model is twins.sharded else torch.enable_grad():
            energy_and_forces(model, inputs)
        energy_and_forces(model, inputs.neg())

    twins.take(0, accumulated)
    twins.take(1, energy_and_forces)
    twins.assert_close()


@on_ranks(2)
def test_parameters_stay_unsharded_between_the_two_backwards_only() -> None:
    model = nested_mlp(fully_sharded())
    inputs = batch(0, dist.get_rank()).float().requires_grad_()
    outputs = model(inputs)
    gradient = gradient_of(outputs, inputs)
    handles = [handle for unit in fsdp.get_fsdp_instances(model) for handle in unit._unit.handles]
    assert all(handle.unsharded.full.untyped_storage().nbytes() for handle in handles)
    gradient.square().sum().backward()
    assert_at_rest(model)


@on_ranks(2)
def test_after_a_step_a_retained_graph_keeps_no_parameters_unsharded() -> None:
    model = nested_mlp(fully_sharded())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = batch(0, dist.get_rank()).float().requires_grad_()
    gradient_of(model(inputs), inputs).square().sum().backward(retain_graph=True)
    optimizer.step()
    score(model(inputs)).backward(retain_graph=True)
    assert_at_rest(model)


@pytest.mark.parametrize("form", ["flat", "original", "rows"])
@on_ranks(2)
def test_a_gradient_of_a_parameter_with_a_graph_is_refused(form: str) -> None:
    torch.manual_seed(0)
    wrap = ours() if form == "rows" else fully_sharded(use_orig_params=form == "original")
    model = wrap(nn.Sequential(wrap(nn.Linear(5, 5)), nn.Tanh(), nn.Linear(5, 5)))

    def gradients() -> list[Tensor | None]:
        model.zero_grad()
        model(torch.ones(2, 5)).sum().backward()
        return [None if param.grad is None else local_part(param.grad).clone() for param in model.parameters()]

    before = gradients()
    with pytest.raises(RuntimeError, match=r"its gradient has a graph.*torch\.autograd\.grad"):
        model(torch.ones(2, 5)).square().sum().backward(create_graph=True)
    torch.testing.assert_close(gradients(), before)


@pytest.mark.parametrize("forward_again", [False, True])
@pytest.mark.parametrize("form", ["flat", "original", "rows"])
@on_ranks(2)
def test_an_optimizer_step_between_the_two_backwards_is_an_error(form: str, forward_again: bool) -> None:
    """The penalty of this model comes to no output of a unit, so only gradients and versions of parameters tell it."""
    torch.manual_seed(0)
    wrap = ours() if form == "rows" else fully_sharded(use_orig_params=form == "original")
    model = wrap(nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        once(model, batch(0, 0).float())
        inputs = batch(0, 0).float().requires_grad_()
        gradient = gradient_of(model(inputs), inputs)
        optimizer.step()
        optimizer.zero_grad()
        if forward_again:
            model(inputs)
        with pytest.raises(
            RuntimeError, match="modified by an inplace" if forward_again else "parameters were changed"
        ):
            gradient.square().sum().backward()
    a_penalty_alone(model, batch(1, 0).float())
    optimizer.step()


@on_ranks(2)
def test_where_ranks_may_run_different_modules_it_is_refused() -> None:
    model = nested_mlp(fully_sharded())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fsdp.join(model, optimizer):
        with pytest.raises(RuntimeError, match=r"create_graph=True is not supported inside fsdp\.join"):
            energy_and_forces(model, batch(0, 0).float())
        torch.func.grad(lambda inputs: score(model(inputs)))(batch(0, 0).float())
        once(model, batch(0, 0).float())
        optimizer.step()
    energy_and_forces(model, batch(0, 0).float())


def make_with_frozen(wrap: Wrap) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)) for _ in range(3)]
    for layer in layers:
        layer[0].requires_grad_(False)
    return wrap(nn.Sequential(*map(wrap, layers)))


@on_ranks(2)
def test_frozen_parameters_stay_unsharded_as_well() -> None:
    steps = energy_and_forces, a_penalty_alone
    assert_trains_like_plain(make_with_frozen, *steps, options={"use_orig_params": True})
    assert_trains_as_plain(make_with_frozen, *steps)


@on_ranks(2)
def test_units_may_compute_in_another_dtype_or_have_their_shards_on_the_host() -> None:
    assert_trains_like_plain(nested_mlp, energy_and_forces, options={"cpu_offload": True})
    twins = Twins.of(nested_mlp, mixed_precision=fsdp.MixedPrecision(param_dtype=torch.float32))
    twins.tolerance = {"rtol": 1e-5, "atol": 1e-5}
    for number in range(3):
        twins.take(number, energy_and_forces)
    twins.assert_close()
