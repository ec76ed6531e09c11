"""`checkpoint_wrapper` on plain modules: nothing changes but what is kept between forward and backward."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp import FlattenParamsWrapper
from fsdp.wrap.checkpoint_wrapper import (
    checkpoint_wrapper,
    disable_checkpointing,
    is_checkpointing,
    is_recomputing,
    patch_batchnorm,
)
from tests.helpers.equality import assert_same
from tests.helpers.pairs import parametrize_pairs

kept_or_offloaded = pytest.mark.parametrize("offload_to_cpu", [False, True], ids=["kept", "offloaded"])


class Recorder(nn.Module):
    """Passes its input on, and notes what `look` sees each time."""

    def __init__(self, look: Callable[[], Any] = lambda: None) -> None:
        super().__init__()
        self.look, self.seen = look, list[Any]()

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen.append(self.look())
        return inputs.sin()  # which saves its input: without, nobody would ask for a recomputation


class Function(nn.Module):
    """A module whose forward is any function; with a parameter, so that there is something to learn."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.weight, *args, **kwargs)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Dropout(0.4), nn.Sequential(nn.Linear(7, 7), nn.Tanh()), nn.Linear(7, 5)
    )


def inputs(rows: int = 4) -> Tensor:
    return torch.randn(rows, 5, generator=torch.Generator().manual_seed(1)).requires_grad_()


def gradients(module: nn.Module, tensors: list[Tensor]) -> list[Tensor | None]:
    return [tensor.grad for tensor in [*tensors, *module.parameters()]]


def train(module: nn.Module, rows: int = 4) -> list[Tensor | None]:
    """All gradients of a forward and backward, the input's first."""
    torch.manual_seed(2)
    batch = inputs(rows)
    module(batch).sin().sum().backward()
    return gradients(module, [batch])


# The module stays what it is


def test_the_module_itself_is_returned_with_its_names_and_state() -> None:
    plain, module = layers(), layers()
    wrapped: nn.Sequential = checkpoint_wrapper(module)
    assert wrapped is module
    assert type(wrapped) is nn.Sequential
    assert [name for name, _ in wrapped.named_modules()] == [name for name, _ in plain.named_modules()]
    assert [name for name, _ in wrapped.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert list(wrapped.state_dict()) == list(plain.state_dict())
    assert set(vars(wrapped)) - set(vars(plain)) == {"forward"}


def test_wrapping_again_changes_nothing() -> None:
    module = checkpoint_wrapper(nn.Sequential(recorder := Recorder()), True)
    forward = module.forward
    assert checkpoint_wrapper(module, offload_to_cpu=True).forward is forward
    module(inputs()).sum().backward()
    assert len(recorder.seen) == 2


def test_wrapping_again_with_another_option_is_an_error() -> None:
    with pytest.raises(ValueError, match="Linear is checkpointed already, with offload_to_cpu=False"):
        checkpoint_wrapper(checkpoint_wrapper(nn.Linear(2, 2)), offload_to_cpu=True)


def test_what_cannot_be_wrapped() -> None:
    with pytest.raises(TypeError, match="takes a module, got function"):
        checkpoint_wrapper(layers)  # type: ignore[type-var]
    with pytest.raises(ValueError, match="ModuleList has no forward"):
        checkpoint_wrapper(nn.ModuleList([nn.Linear(2, 2)]))


def test_an_empty_dictionary_is_no_offload() -> None:
    checkpoint_wrapper(checkpoint_wrapper(nn.Linear(2, 2), {}), False)  # type: ignore[arg-type]


def test_a_forward_of_the_modules_own_is_what_is_checkpointed() -> None:
    module = nn.Linear(5, 5)
    module.forward = lambda input: input.sin() * 3  # type: ignore[method-assign]
    batch = inputs()
    assert torch.equal(checkpoint_wrapper(module)(batch), batch.sin() * 3)


def test_the_signature_can_be_inspected() -> None:
    assert inspect.signature(checkpoint_wrapper(nn.Linear(2, 2)).forward) == inspect.signature(nn.Linear(2, 2).forward)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_are_checkpointed_by_themselves(copied: Callable[[nn.Module], nn.Sequential]) -> None:
    original = nn.Sequential(nn.Linear(5, 5), recorder := Recorder(is_recomputing))
    twin: nn.Sequential = copied(checkpoint_wrapper(original))
    with torch.no_grad():
        next(original.parameters()).zero_()
    assert train(twin)[0].count_nonzero() > 0  # type: ignore[union-attr]
    assert vars(twin[1])["seen"] == [False, True]
    assert recorder.seen == []


def test_a_dropped_module_is_freed_at_once() -> None:
    module = checkpoint_wrapper(layers())
    alive = weakref.ref(module)
    gc.disable()
    try:
        del module
        assert alive() is None
    finally:
        gc.enable()


def test_backward_does_not_need_the_module_to_be_kept() -> None:
    def output(batch: Tensor) -> Tensor:
        return checkpoint_wrapper(layers())(batch)

    batch = inputs()
    output(batch).sum().backward()
    assert batch.grad is not None


# Results and gradients

PLACES: dict[str, Callable[[nn.Sequential], list[nn.Module]]] = {
    "whole": lambda module: [module],
    "each": lambda module: list(module),
    "nested": lambda module: [*module[3].children(), module[3], module],
}


@parametrize_pairs(place=list(PLACES), offload_to_cpu=[False, True])
def test_gradients_and_state_are_those_of_the_plain_module_to_the_bit(place: str, offload_to_cpu: bool) -> None:
    plain, module = layers(), layers()
    for part in PLACES[place](module):
        checkpoint_wrapper(part, offload_to_cpu)
    for _ in range(2):
        assert_same(train(module), train(plain))
    assert_same(list(module.state_dict().values()), list(plain.state_dict().values()))


def test_the_module_runs_once_more_in_backward_only_if_it_is_needed() -> None:
    module = checkpoint_wrapper(nn.Sequential(recorder := Recorder()))
    output = module(inputs())
    assert len(recorder.seen) == 1
    output.sum().backward()
    assert len(recorder.seen) == 2
    with torch.no_grad():
        module(inputs())
    assert len(recorder.seen) == 3
    module(inputs().detach())
    assert len(recorder.seen) == 4


@kept_or_offloaded
def test_every_kind_of_backward(offload_to_cpu: bool) -> None:
    found = every_kind_of_backward(checkpoint_wrapper(layers(), offload_to_cpu))
    assert_same(found, every_kind_of_backward(layers()))


def every_kind_of_backward(module: nn.Module) -> list[Tensor | None]:
    batch = inputs()
    torch.manual_seed(3)
    loss = module(batch).sin().sum()
    (gradient,) = torch.autograd.grad(loss, batch, create_graph=True)
    gradient.square().sum().backward(retain_graph=True)
    loss.backward(inputs=[batch], retain_graph=True)
    loss.backward()
    return [gradient, *gradients(module, [batch])]


@pytest.mark.parametrize("where", ["input", "parameter", "neither"])
@pytest.mark.parametrize("flattened", [False, True])
def test_outputs_require_a_gradient_only_if_an_input_or_a_parameter_does(where: str, flattened: bool) -> None:
    module = nn.Linear(5, 5).requires_grad_(where == "parameter")
    whole = checkpoint_wrapper(FlattenParamsWrapper(checkpoint_wrapper(module)) if flattened else module)
    batch = inputs().detach().requires_grad_(where == "input")
    assert whole(batch).requires_grad == (where != "neither")


def test_a_flattened_module_trains_as_the_plain_one() -> None:
    module = FlattenParamsWrapper(checkpoint_wrapper(layers()))
    found = train(module)
    expected = train(layers())
    assert_same(
        [found[0], found[1]], [expected[0], torch.cat([grad.flatten() for grad in expected[1:] if grad is not None])]
    )


def test_a_compiled_module_trains_as_the_plain_one() -> None:
    def half() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 5), nn.Tanh())

    assert_same(train(torch.compile(checkpoint_wrapper(half()), backend="eager")), train(half()))  # type: ignore[arg-type]


# Arguments


class Pair(NamedTuple):
    left: Tensor
    right: Any


@dataclass
class Record:
    value: Tensor
    note: str

    def __post_init__(self) -> None:
        assert self.value.shape == (4, 5)


def nest(
    weight: Tensor, plain: Tensor, things: list[Any], *, scale: float, table: dict[str, Any], record: Record
) -> Any:
    total = plain * scale + things[0].left * things[0].right + things[1][0] + table["deep"]["x"] + record.value
    return {"sum": (total * weight).sin(), "rest": [things[1][0] * 2, None, record.note, table["none"]]}


@kept_or_offloaded
def test_nests_of_arguments_and_results(offload_to_cpu: bool) -> None:
    found, grads = call_with_nest(checkpoint_wrapper(Function(nest), offload_to_cpu))
    expected, expected_grads = call_with_nest(Function(nest))
    assert_same(grads, expected_grads)
    assert_same([found["sum"], found["rest"][0]], [expected["sum"], expected["rest"][0]])
    assert found["rest"][1:] == [None, "noted", None]


def call_with_nest(module: nn.Module) -> tuple[Any, list[Tensor | None]]:
    leaves = [inputs().detach().add(number).requires_grad_() for number in range(5)]
    a, b, c, d, e = leaves
    output = module(a, [Pair(b, 3), (c,)], scale=0.5, table={"deep": {"x": d}, "none": None}, record=Record(e, "noted"))
    (output["sum"].sum() + output["rest"][0].sum()).backward()
    return output, gradients(module, leaves)


def test_a_tensor_that_is_given_twice_is_one_tensor_in_recomputation() -> None:
    same = []

    def compare(weight: Tensor, one: Tensor, others: list[Tensor]) -> Tensor:
        same.append(one is others[0])
        return (weight * one * others[0]).sin()

    batch = inputs()
    checkpoint_wrapper(Function(compare))(batch, [batch]).sum().backward()
    assert same == [True, True]


@kept_or_offloaded
def test_arguments_may_contain_themselves(offload_to_cpu: bool) -> None:
    def compute(weight: Tensor, items: list[Any]) -> Tensor:
        return (weight * items[0]).sin() * items[1][0].cos()

    gradients = []
    for wrap in (lambda module: module, lambda module: checkpoint_wrapper(module, offload_to_cpu=offload_to_cpu)):
        module, inputs = wrap(Function(compute)), torch.linspace(0, 1, 3, requires_grad=True)
        items: list[Any] = [inputs]
        items.append(items)
        module(items).sum().backward()
        gradients.append((module.weight.grad, inputs.grad))
    assert_same(*gradients)


@dataclass
class Computed:
    """Computes fields from its arguments."""

    value: Tensor
    half: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.value = self.value.contiguous() * 2
        self.half = self.value / 2


@kept_or_offloaded
def test_dataclasses_may_compute_their_fields(offload_to_cpu: bool) -> None:
    def compute(weight: Tensor, given: Computed) -> Tensor:
        return (weight * given.value).sin() * given.half.cos()

    gradients = []
    for wrap in (lambda module: module, lambda module: checkpoint_wrapper(module, offload_to_cpu=offload_to_cpu)):
        module, inputs = wrap(Function(compute)), torch.linspace(0, 1, 3, requires_grad=True)
        module(Computed(inputs)).sum().backward()
        gradients.append((module.weight.grad, inputs.grad))
    assert_same(*gradients)


class Cloned(list[Tensor]):
    """Has copies of the tensors that it is made of."""

    def __init__(self, items: Iterable[Tensor]) -> None:
        super().__init__(item.clone() for item in items)


def test_containers_of_other_tensors_than_their_own_are_refused() -> None:
    module = checkpoint_wrapper(Function(lambda weight, items: (weight * items[0]).sin()))
    output = module(Cloned([torch.ones(3)]))
    with pytest.raises(RuntimeError, match="an argument of Function is a container that replaces tensors"):
        output.sum().backward()


def test_a_module_may_change_the_containers_that_it_gets() -> None:
    lengths = []

    def pop(weight: Tensor, batches: list[Tensor], results: dict[str, Tensor]) -> Tensor:
        lengths.append(len(batches))
        results["first"] = batches.pop()
        return (weight * results["first"]).sin()

    batch = inputs()
    given, results = [batch, batch], {"before": batch}
    checkpoint_wrapper(Function(pop))(given, results).sum().backward()
    assert lengths == [2, 2]
    assert len(given) == 1
    assert results["first"] is batch


@kept_or_offloaded
def test_writing_to_an_input_before_backward_is_an_error(offload_to_cpu: bool) -> None:
    batch = inputs().clone()
    output = checkpoint_wrapper(layers(), offload_to_cpu)(batch)
    batch.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


# Global state


def test_random_numbers_after_backward_are_as_if_nothing_was_recomputed() -> None:
    states = []
    for module in (layers(), checkpoint_wrapper(layers())):
        train(module)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_recomputation_is_in_the_autocast_of_the_forward() -> None:
    look = lambda: (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))  # noqa: E731
    module = checkpoint_wrapper(nn.Sequential(nn.Linear(5, 5), recorder := Recorder(look)))
    with torch.autocast("cpu", torch.bfloat16):
        output = module(inputs())
    output.sum().backward()
    assert recorder.seen == [(True, torch.bfloat16)] * 2


def test_autocast_gives_the_gradients_of_the_plain_module() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = train(checkpoint_wrapper(layers())), train(layers())
    assert_same(found, expected)


# What is going on


def look_at_modes() -> tuple[bool, bool]:
    return is_checkpointing(), is_recomputing()


def test_a_module_can_ask_whether_it_is_checkpointed_or_recomputed() -> None:
    module = checkpoint_wrapper(nn.Sequential(recorder := Recorder(look_at_modes)))
    module(inputs()).sum().backward()
    assert recorder.seen == [(True, False), (False, True)]
    assert look_at_modes() == (False, False)
    with torch.no_grad():
        module(inputs())
    assert recorder.seen[-1] == (False, False)


def test_an_exception_leaves_no_mode_behind() -> None:
    def fail(weight: Tensor, batch: Tensor, when: Callable[[], bool]) -> Tensor:
        if when():
            raise KeyError("as asked")
        return (weight * batch).sin()

    module = checkpoint_wrapper(Function(fail))
    for when in (is_checkpointing, is_recomputing):
        with pytest.raises(KeyError, match="as asked"):
            module(inputs(), when).sum().backward()
        assert look_at_modes() == (False, False)
    assert module(inputs(), lambda: False).requires_grad


def test_checkpointing_can_be_disabled() -> None:
    module = checkpoint_wrapper(nn.Sequential(recorder := Recorder(look_at_modes)))
    with disable_checkpointing():
        output = module(inputs())
    output.sum().backward()
    assert recorder.seen == [(False, False)]
    module(inputs()).sum().backward()
    assert len(recorder.seen) == 3


def test_it_is_the_forward_that_is_disabled_and_not_the_backward() -> None:
    inner = checkpoint_wrapper(nn.Sequential(nn.Tanh(), recorder := Recorder(look_at_modes)))
    module = checkpoint_wrapper(nn.Sequential(nn.Linear(5, 5), inner, nn.Tanh()))
    output = module(inputs())
    with disable_checkpointing():
        output.sum().backward()
    # The inner one runs for the module around it, checkpointed again, and then for itself.
    assert recorder.seen == [(True, False), (True, True), (False, True)]


# Batch norms


def norms(kind: type[nn.Module] = nn.BatchNorm1d) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 6), nn.Unflatten(1, (2, 3)), kind(2, track_running_stats=True), nn.Flatten(), nn.Tanh()
    )


def updates(module: nn.Sequential) -> int:
    return int(module.state_dict()["2.num_batches_tracked"])


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.InstanceNorm1d])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_statistics_are_updated_once(kind: type[nn.Module], momentum: float | None) -> None:
    plain, module = norms(kind), checkpoint_wrapper(norms(kind))
    plain[2].momentum = module[2].momentum = momentum  # type: ignore[assignment]
    buffers = list(module.buffers())
    for _ in range(3):
        assert_same(train(module), train(plain))
        assert_same(list(module.buffers()), list(plain.buffers()))
    assert all(one is other for one, other in zip(module.buffers(), buffers, strict=True))


def test_statistics_are_updated_once_in_nested_checkpoints_of_any_kind() -> None:
    module = checkpoint_wrapper(norms())
    checkpoint_wrapper(module[2])
    train(nn.Sequential(checkpoint_wrapper(nn.Sequential(module))))
    batch = inputs()
    checkpoint(module, batch, use_reentrant=False).sum().backward()
    checkpoint(module, batch, use_reentrant=True).sum().backward()
    assert updates(module) == 3


@pytest.mark.parametrize("number", [0, 2], ids=["the whole", "one norm"])
def test_recomputation_updates_statistics_too_if_it_may(number: int) -> None:
    module = norms()
    (module if number == 0 else module[number]).disable_patch_batchnorm = True  # type: ignore[assignment]
    train(checkpoint_wrapper(module))
    assert updates(module) == 2


def test_statistics_are_restored_when_recomputation_fails() -> None:
    def fail(*_: Any) -> None:
        if is_recomputing():
            raise KeyboardInterrupt

    module = checkpoint_wrapper(norms())
    buffers = list(module.buffers())
    module[2].register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        train(module)
    assert all(one is other for one, other in zip(module.buffers(), buffers, strict=True))
    assert updates(module) == 1


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("times", [1, 2])
def test_patched_norms_update_once_under_any_checkpoint(use_reentrant: bool, times: int) -> None:
    module, plain = norms(), norms()
    handles = [handle for _ in range(times) for handle in patch_batchnorm(module)]
    found = checkpointed_gradients(copy.deepcopy(module), use_reentrant)  # patched modules can be copied
    assert_same(found, train(plain))
    checkpointed_gradients(module, use_reentrant)
    assert_same(list(module.buffers()), list(plain.buffers()))
    for handle in handles:
        handle.remove()
    checkpointed_gradients(module, use_reentrant)
    assert updates(module) == 3


def test_patched_norms_have_their_own_statistics_after_a_recomputation_that_stops_in_them() -> None:
    module = norms()[:3]  # nothing after the norm has to be computed again
    patch_batchnorm(module)
    buffers = list(module.buffers())
    checkpointed_gradients(module, use_reentrant=False)
    assert all(one is other for one, other in zip(module.buffers(), buffers, strict=True))


def checkpointed_gradients(module: nn.Module, use_reentrant: bool) -> list[Tensor | None]:
    batch = inputs()
    torch.manual_seed(2)
    checkpoint(module, batch, use_reentrant=use_reentrant).sin().sum().backward()
    return gradients(module, [batch])


def test_patched_norms_learn_without_gradients_as_others_do() -> None:
    module = norms()
    patch_batchnorm(module)
    with torch.no_grad():
        module(inputs())
    assert updates(module) == 1
