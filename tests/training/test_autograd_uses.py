"""What a model's own code does with autograd: units train as they do unsharded, or an error says why they cannot."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp.distributed.dtensor import local_part
from tests.helpers.dtensor_twins import assert_trains_as_plain, ours
from tests.helpers.forms import FORMS, assert_trains, sharded
from tests.helpers.models import Net, Wrap, seeded
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.parity import fully_sharded
from tests.helpers.twins import (
    OPTIONS,
    assert_at_rest,
    assert_trains_like_plain,
    backward_twice,
    eval_first,
    once,
    score,
    two_forwards_then_one_backward,
)

EVERY_FORM: list[dict[str, Any]] = [*OPTIONS, {"use_orig_params": True}]

# In-place operations on what a unit returns


class Viewing(nn.Module):
    """Returns a view of what it computes, and a view of a part of that."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 10)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.linear(inputs.view(2, 2, 5))
        return hidden[..., :5], inputs[:2] + hidden[0, :, 5:].view(2, 5)


class Changing(nn.Module):
    """Changes in place what its units return: a view of what was computed, the same in a nested unit, and no view."""

    def __init__(self, wrap: Wrap, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.entry = nn.Linear(5, 5)
        self.linear = wrap(nn.Linear(5, 5))
        self.viewing = wrap(nn.Sequential(wrap(Viewing())))
        self.flat = wrap(nn.Linear(5, 5))
        self.change = change

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.change(self.linear(self.entry(inputs).view(2, 2, 5))).view(4, 5)
        first, second = self.viewing(hidden)
        hidden = self.change(first).reshape(4, 5)
        return self.change(self.flat(hidden)) + self.change(second).repeat(2, 1)


def _add(tensor: Tensor) -> Tensor:
    tensor += 1
    return tensor


def _scale_a_part(tensor: Tensor) -> Tensor:
    tensor[0].mul_(2)
    return tensor


def _squash_by_a_view(tensor: Tensor) -> Tensor:
    tensor.transpose(0, 1).tanh_()
    return tensor


@on_ranks(2)
def test_outputs_of_units_may_be_changed_in_place() -> None:
    """Views or not: a view's own place in the graph is another after it was changed."""
    for change in (_add, F.relu_, _scale_a_part, _squash_by_a_view):
        for options in EVERY_FORM if change is _add else EVERY_FORM[:1]:
            for step in (once, two_forwards_then_one_backward):
                assert_trains_like_plain(partial(seeded, partial(Changing, change=change)), step, options=options)


# Backwards inside of a forward


class Failing(torch.autograd.Function):
    """Its backward raises."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise ArithmeticError("on purpose")


class Relaxing(nn.Module):
    """Follows gradients of a unit's outputs, and trains by a loss of its own, in the middle of its forward."""

    def __init__(self, wrap: Wrap, trains_inside: bool) -> None:
        super().__init__()
        self.entry = nn.Linear(5, 5)
        self.energy = wrap(nn.Sequential(nn.Linear(5, 7), wrap(nn.Sequential(nn.Tanh(), nn.Linear(7, 5)))))
        self.exit = wrap(nn.Linear(5, 5))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.trains_inside = trains_inside

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.entry(inputs).tanh()
        with pytest.raises(ArithmeticError, match="on purpose"):
            torch.autograd.grad(self.energy(Failing.apply(hidden)).sum(), hidden)
        for _ in range(2):
            energy = self.energy(hidden)
            (force,) = torch.autograd.grad(energy.square().sum(), hidden, retain_graph=True)
            hidden = hidden - 0.1 * force
        if self.trains_inside:
            (self.energy(hidden.detach()).sin().mean() + (self.scale * energy.detach()).mean()).backward()
            self.entry(inputs.detach()).square().mean().backward()
        return self.exit(hidden) * self.scale + energy


def inner(wrap: Wrap, trains_inside: bool) -> nn.Module:
    """Has that in a unit in the middle."""
    return Net(
        lambda net, x: net.exit(net.middle(net.entry(x))),
        entry=nn.Linear(5, 5),
        middle=wrap(Relaxing(wrap, trains_inside)),
        exit=wrap(nn.Linear(5, 5)),
    )


@pytest.mark.parametrize("trains_inside", [False, True], ids=["grad", "backward"])
@on_ranks(2)
def test_a_backward_inside_of_a_forward_leaves_the_units_that_run_alone(trains_inside: bool) -> None:
    make = partial(seeded, partial(inner, trains_inside=trains_inside))
    for options in EVERY_FORM[:2] if trains_inside else EVERY_FORM[::3]:
        steps = [once] if trains_inside else [eval_first, backward_twice]
        assert_trains_like_plain(make, *steps, options=options)


class Forces(nn.Module):
    """The gradient of a unit inside by its inputs, as a value, and with weights of its own after that."""

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.energy = wrap(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)))
        self.scale = nn.Parameter(torch.full((5,), 0.5))

    def forward(self, inputs: Tensor) -> Tensor:
        point = inputs.detach().requires_grad_()
        (force,) = torch.autograd.grad(self.energy(point).square().sum(), point)
        return (self.energy(inputs) + 0.1 * force) * self.scale


def checkpointed(wrap: Wrap) -> nn.Module:
    """Computes that again in backward; what is differentiated inside is computed again there as well."""
    return Net(
        lambda net, x: net.exit(checkpoint(net.forces, net.entry(x), use_reentrant=False).tanh()),
        entry=nn.Linear(5, 5),
        forces=wrap(Forces(wrap)),
        exit=wrap(nn.Linear(5, 5)),
    )


@on_ranks(2)
def test_a_backward_inside_of_a_checkpointed_unit_leaves_it_whole() -> None:
    for options in EVERY_FORM:
        assert_trains_like_plain(partial(seeded, checkpointed), once, two_forwards_then_one_backward, options=options)


# Results that leave a unit by another way than its output


class Adjoint(torch.autograd.Function):
    """An explicit Euler method whose backward calls the module again, and asks for the gradients of its parameters."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, inputs: Tensor, *params: Tensor) -> Tensor:
        state = inputs.detach()
        for _ in range(3):
            state = state + 0.1 * module(state)
        ctx.module = module
        ctx.save_for_backward(state, *params)
        return state

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (adjoint,), (state, *params) = gradients, ctx.saved_tensors
        sums = [torch.zeros_like(param) for param in params]
        for _ in range(3):
            state = state.detach().requires_grad_()
            with torch.enable_grad():
                slope = ctx.module(state)
            change, *found = torch.autograd.grad(slope, [state, *params], adjoint, allow_unused=True)
            state, adjoint = state - 0.1 * slope.detach(), adjoint + 0.1 * change
            sums = [total if new is None else total + 0.1 * new for total, new in zip(sums, found, strict=True)]
        return None, adjoint, *sums


class Flow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))

    def forward(self, inputs: Tensor) -> Tensor:
        return Adjoint.apply(self.slope, inputs, *self.slope.parameters())  # type: ignore[no-any-return]


def _flow(wrap: Wrap) -> nn.Module:
    return seeded(lambda wrap: nn.Sequential(nn.Linear(5, 5), wrap(Flow()), nn.Linear(5, 5)), wrap)


@on_ranks(2)
def test_the_adjoint_method_inside_of_a_unit() -> None:
    for options in EVERY_FORM[::3]:
        assert_trains_like_plain(_flow, once, backward_twice, options=options)
    assert_trains_as_plain(_flow, once, backward_twice)


class Aside(nn.Module):
    """A unit of which nothing that it returns shows what there is to differentiate."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.way = way

    def forward(self, inputs: Tensor) -> Any:
        hidden = self.second(self.first(inputs).tanh()) * self.first.weight[0]
        if self.way == "closure":
            return lambda: [hidden]
        if self.way == "generator":
            return (part for part in hidden.chunk(2))
        self.found = [hidden]
        return hidden.detach()


class Collecting(nn.Module):
    """Computes on with what two of those have found."""

    def __init__(self, wrap: Wrap, way: str) -> None:
        super().__init__()
        self.entry = nn.Linear(5, 5)
        self.asides = (Aside(way), Aside(way))  # which their attributes are read from
        self.parts = nn.ModuleList(wrap(aside) for aside in self.asides)
        self.exit = wrap(nn.Linear(5, 5))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.entry(inputs)
        for aside, part in zip(self.asides, self.parts, strict=True):
            found = part(hidden)
            if aside.way == "closure":
                found = found()
            hidden = hidden + (aside.found.pop() if aside.way == "attribute" else torch.cat(list(found)))
        return self.exit(hidden)


@on_ranks(2)
def test_results_that_leave_a_unit_by_another_way_than_its_output() -> None:
    for way in ("attribute", "closure", "generator"):
        make = partial(seeded, partial(Collecting, way=way))
        assert_trains_like_plain(make, once, two_forwards_then_one_backward)
    for options in EVERY_FORM[1:]:
        assert_trains_like_plain(partial(seeded, partial(Collecting, way="attribute")), once, options=options)


class Regularised(nn.Module):
    """Returns a weight of a unit inside, and a view of it."""

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.linears = (nn.Linear(5, 5),)  # whose attributes are read
        self.inner, self.exit = wrap(self.linears[0]), wrap(nn.Linear(5, 5))

    def forward(self, inputs: Tensor) -> Any:
        output = self.exit(self.inner(inputs).tanh())
        return output, self.linears[0].weight, self.linears[0].weight.t()[1:]


def _reads_weights_after_backward(model: Any, inputs: Tensor) -> None:
    output, weight, view = model(inputs)
    expected = weight.detach().clone()
    (score(output) + score(weight) + 2 * score(view)).backward()
    assert torch.equal(weight, expected)
    assert torch.equal(view, expected.t()[1:])


def _reads_weights_after_an_evaluation(model: Any, inputs: Tensor) -> None:
    with torch.no_grad():
        _, weight, view = model(inputs)
    assert torch.equal(weight.t()[1:], view)
    _reads_weights_after_backward(model, inputs)


@pytest.mark.parametrize("options", [{}, {"use_orig_params": True}, None], ids=["flat", "orig", "rows"])
@on_ranks(2)
def test_weights_of_a_unit_that_the_model_returns_stay_valid(options: dict[str, Any] | None) -> None:
    """Where they are unsharded until backward. Reading freed memory ends the process."""
    steps = _reads_weights_after_backward, _reads_weights_after_an_evaluation
    make = partial(seeded, Regularised)
    if options is None:
        assert_trains_as_plain(make, *steps, reshard_after_forward=False)
    else:
        assert_trains_like_plain(make, *steps, options=options | {"reshard_after_forward": False})


class Penalised(nn.Module):
    """Computes something with its weight after its output, which leaves by an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        output = self.linear(inputs)
        self.penalty = (self.linear.weight * inputs[0]).sum()
        return output


@on_ranks(2)
def test_what_backward_meets_before_its_unit_is_gathered_is_an_error() -> None:
    """And no crash of the process, which reading freed memory is."""
    torch.manual_seed(0)
    wrap = fully_sharded()
    penalised = Penalised()
    model = wrap(nn.Sequential(nn.Linear(5, 5), wrap(penalised), wrap(nn.Linear(5, 5))))
    inputs = torch.ones(2, 5)
    for _ in range(2):
        loss = model(inputs).sum() + penalised.penalty
        with pytest.raises(RuntimeError, match=r"modified by an inplace.*linear.weight of 1 .*left its unit"):
            loss.backward()
        model(inputs).sum().backward()
    assert_at_rest(model)


class Remembering(nn.Module):
    """Keeps something that it has computed on the way to its output."""

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.entry, self.exit = wrap(nn.Linear(5, 5)), nn.Linear(5, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        self.hidden = torch.tanh(self.exit(self.entry(inputs)))
        return self.exit(self.hidden)


@parametrize_pairs(form=[*EVERY_FORM, None], world_size=[2, 3])
@on_ranks("world_size")
def test_a_second_backward_that_begins_inside_of_a_unit_is_an_error(form: dict[str, Any] | None) -> None:
    """It is named, also if the first backward has freed the parameters; the next step is as ever."""
    torch.manual_seed(0)
    wrap = ours() if form is None else fully_sharded(**form)
    remembering = Remembering(wrap)
    model = wrap(remembering)
    inputs = torch.ones(2, 5)
    model(inputs).sum().backward()
    before = [None if param.grad is None else local_part(param.grad).clone() for param in model.parameters()]
    model.zero_grad()
    model(inputs).sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"modified by an inplace.*exit.weight of root .*single backward"):
        remembering.hidden.sum().backward()
    model.zero_grad()
    model(inputs).sum().backward()
    after = [None if param.grad is None else local_part(param.grad) for param in model.parameters()]
    torch.testing.assert_close(after, before)


# Gradients of the parameters that the wrapped model lists


@pytest.mark.parametrize("form", [*EVERY_FORM[::2], EVERY_FORM[3], None], ids=["flat", "unflattened", "pieces", "rows"])
@on_ranks(2)
def test_gradients_of_listed_parameters_without_backward_are_refused(form: dict[str, Any] | None) -> None:
    """They are not in the graph: torch says so, or nothing, and then the step does."""
    torch.manual_seed(0)
    wrap = ours() if form is None else fully_sharded(**form)
    model = wrap(nn.Sequential(wrap(nn.Linear(5, 5)), nn.Tanh(), nn.Linear(5, 5)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.ones(2, 5, requires_grad=True)
    listed = list(model.parameters())

    def refuse_step() -> None:
        with pytest.raises(
            RuntimeError, match=r"SGD\.step\(\): no parameter of root .* has received a gradient.*Call backward"
        ):
            optimizer.step()

    optimizer.step()  # before anything was computed
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(model(inputs).sum(), listed)
    refuse_step()
    assert set(torch.autograd.grad(model(inputs).sum(), listed, allow_unused=True)) == {None}
    refuse_step()
    model(inputs).sum().backward(inputs=inputs)
    refuse_step()
    model(inputs).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model(inputs)
    optimizer.step()  # without a backward, on purpose: a batch may be left out
    with model.no_sync() if form is not None else nullcontext():
        model(inputs).sum().backward()
    optimizer.zero_grad()
    optimizer.step()


def _layers(wrap: Wrap) -> nn.Module:
    return seeded(lambda wrap: nn.Sequential(wrap(nn.Linear(5, 5)), nn.Tanh(), nn.Linear(5, 5)), wrap)


def _backward_to(some: Callable[[str], bool], model: nn.Module, inputs: Tensor) -> None:
    listed = [param for name, param in model.named_parameters() if some(name)]
    output = model(inputs).sin()
    output.mean().backward(inputs=listed, retain_graph=True)
    torch.autograd.backward([output.square().mean()], inputs=(listed[0], *listed[1:]))


def _any(name: str) -> bool:
    return True


def _of_the_unit(name: str) -> bool:
    return "0" in name.split(".")


def _weight(name: str) -> bool:
    return name.endswith("2.weight")


@pytest.mark.parametrize("form", [*EVERY_FORM, None], ids=["flat", "kept", "unflattened", "pieces", "rows"])
@on_ranks(2)
def test_backward_takes_listed_parameters_as_inputs(form: dict[str, Any] | None) -> None:
    of_one = [_weight] if form is None or "use_orig_params" in form or "flatten_parameters" in form else []
    for some in (_any, _of_the_unit, *of_one):
        step = partial(_backward_to, some)
        if form is None:
            assert_trains_as_plain(_layers, step, once)
        else:
            assert_trains_like_plain(_layers, step, once, options=form)


@on_ranks(2)
def test_backward_finds_inputs_beside_sharded_ones() -> None:
    model = _layers(fully_sharded())
    inputs, unrelated = torch.ones(2, 5, requires_grad=True), torch.ones(3, requires_grad=True)
    model(inputs).sum().backward(inputs=[*model.parameters(), inputs])
    assert inputs.grad is not None
    assert all(param.grad is not None for param in model.parameters())
    model.zero_grad()
    (model(inputs).sum() + unrelated.sum()).backward(inputs=[unrelated])
    assert unrelated.grad is not None
    assert all(param.grad is None for param in model.parameters())
    frozen = list(model.requires_grad_(False).parameters())
    with pytest.raises(RuntimeError, match="requires_grad=False"):
        model(inputs).sum().backward(inputs=frozen)


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_torchs_copies_of_saved_tensors_before_they_are_written_are_refused(form: str) -> None:
    """They would read freed memory, which ends the process."""
    model = sharded(nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)), form, (nn.Linear,))
    with _copies(), pytest.raises(RuntimeError, match=r"allow_mutation_on_saved_tensors.*Run this module outside"):
        model(torch.ones(2, 5))
    model(torch.ones(2, 5)).sum().backward()


@pytest.mark.parametrize("form", FORMS)
@on_ranks(1)
def test_torchs_copies_of_saved_tensors_are_right_where_no_memory_is_freed(form: str) -> None:
    def step(model: nn.Module, inputs: Tensor, number: int) -> None:
        with _copies():
            hidden = model(inputs)
            out = hidden.square()
            hidden.mul_(2)
            out.sum().backward()

    assert_trains(lambda: nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)), form, step, (nn.Linear,))


def _copies() -> Any:
    return torch.autograd.graph.allow_mutation_on_saved_tensors()
