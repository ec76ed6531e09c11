"""What `register_comm_hook` refuses, what it says, and that a model is usable after a hook has failed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel, OtherRankError
from fsdp.distributed.comm_hooks import bf16_compress_hook, reduce_scatter
from tests.helpers.comm_hooks import average, average_in_float32
from tests.helpers.models import keep, nested_mlp
from tests.helpers.on_ranks import on_ranks
from tests.helpers.parity import Alone, fully_sharded
from tests.helpers.twins import Toolbox

Hook = Callable[[Any, Tensor, Tensor], Any]


def alone(module: nn.Module | None = None, **options: Any) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(module or nn.Linear(5, 7), Alone(), **options)


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 5)).sum().backward()


# Registering


@pytest.mark.parametrize("hook", [None, 3, "bf16"])
def test_what_cannot_be_called_is_no_hook(hook: Any) -> None:
    with pytest.raises(TypeError, match=r"needs a function hook\(state, gradient, shard\), got"):
        alone().register_comm_hook(None, hook)


def test_a_second_hook_is_refused_with_the_name_of_the_first() -> None:
    model = alone()
    model.register_comm_hook(None, average)
    with pytest.raises(RuntimeError, match=r"Linear.*\(tests\.\S+\.average\) is registered already.*one hook"):
        model.register_comm_hook(None, average_in_float32)
    backward(model)


def test_only_the_outermost_wrapper_takes_a_hook() -> None:
    inner = alone()
    model = alone(nn.Sequential(inner, nn.Linear(7, 3)))
    backward(model)
    with pytest.raises(RuntimeError, match="register_comm_hook is for the outermost"):
        inner.register_comm_hook(None, average)
    model.register_comm_hook(None, average)


@pytest.mark.parametrize("is_used", [False, True])
def test_a_hook_of_an_inner_wrapper_is_an_error_in_the_first_use_of_the_model(is_used: bool) -> None:
    inner = alone()
    inner.register_comm_hook(None, average)
    if is_used:
        backward(inner)
    model = alone(nn.Sequential(inner, nn.Linear(7, 3)))
    with pytest.raises(RuntimeError, match=r"hook tests\.\S+\.average was registered on '0'.*on the outermost"):
        backward(model)


class Registering(nn.Module):
    """Its forward registers a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 7)
        self.wrapper: list[FullyShardedDataParallel] = []

    def forward(self, inputs: Tensor) -> Tensor:
        for wrapper in self.wrapper:
            wrapper.register_comm_hook(None, average)
        return self.layer(inputs)


def test_a_hook_cannot_be_registered_in_a_forward() -> None:
    module = Registering()
    model = alone(module)
    module.wrapper.append(model)
    with pytest.raises(RuntimeError, match="cannot register a communication hook in the middle of a forward"):
        backward(model)
    module.wrapper.clear()
    backward(model)
    model.register_comm_hook(None, average)


def test_a_hook_cannot_be_registered_in_a_backward() -> None:
    model = alone(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)))
    output = model(torch.ones(2, 5))
    output.register_hook(lambda gradient: model.register_comm_hook(None, average))
    with pytest.raises(RuntimeError, match="cannot register a communication hook in the middle of a forward or back"):
        output.sum().backward()
    model.register_comm_hook(None, average)
    backward(model)


@on_ranks(2)
def test_ranks_with_different_hooks_are_told_which() -> None:
    model: Any = nested_mlp(fully_sharded())
    others = {"average_in_float32": partial(average_in_float32), "Toolbox": Toolbox(keep)}
    for name, hook in others.items():
        expected = rf"rank 0 has tests\.\S+\.average and rank 1 has tests\.[\w.]+\.{name}\. Every rank must"
        with pytest.raises(RuntimeError, match=rf"the ranks have different communication hooks: {expected}"):
            model.register_comm_hook(None, hook if dist.get_rank() else average)
    model.register_comm_hook(None, average)  # none was kept
    backward(model)


@on_ranks(2)
def test_what_one_rank_cannot_register_is_an_error_on_every_rank() -> None:
    model: Any = nested_mlp(fully_sharded())
    is_second = dist.get_rank() == 1
    said = "register_comm_hook needs a function"
    with pytest.raises(TypeError if is_second else OtherRankError, match=said if is_second else f"rank 1 .*{said}"):
        model.register_comm_hook(None, None if is_second else average)
    model.register_comm_hook(None, average)
    backward(model)


@on_ranks(2)
def test_a_partial_has_the_name_of_its_function() -> None:
    model: Any = nested_mlp(fully_sharded())
    model.register_comm_hook(None, partial(average) if dist.get_rank() else average)
    backward(model)


# Factors


def test_factors_given_to_the_constructor_contradict_a_hook() -> None:
    model = alone(nn.Sequential(alone(gradient_predivide_factor=1.0)))
    with pytest.raises(ValueError, match=r"^0: gradients are divided by 1\.0 and 1\.0.*divides them by itself"):
        model.register_comm_hook(None, average)
    assert model._unit.policy.comm_hook is None


def test_factors_that_were_set_contradict_a_hook() -> None:
    model = alone()
    model.set_gradient_divide_factors(2.0, 1.0)
    with pytest.raises(ValueError, match=r"divided by 2\.0 and 1\.0.*set the divisor in the hook"):
        model.register_comm_hook(None, average)


def test_factors_cannot_be_set_beside_a_hook() -> None:
    model = alone(nn.Sequential(alone()))
    model.register_comm_hook(None, average)
    with pytest.raises(
        RuntimeError, match=r"hook tests\.\S+\.average divides gradients by itself\. Change the divisor"
    ):
        model.set_gradient_divide_factors(1.0, 1.0, recursive=True)


# Hooks that do something else


def return_a_future(state: Any, gradient: Tensor, shard: Tensor) -> Any:
    shard.copy_(gradient)
    return torch.futures.Future()  # type: ignore[var-annotated]


def leave_everything(state: Any, gradient: Tensor, shard: Tensor) -> None:
    shard.data = torch.cat([gradient, gradient])


def leave_a_matrix(state: Any, gradient: Tensor, shard: Tensor) -> None:
    shard.data = gradient.view(7, 6)


def leave_integers(state: Any, gradient: Tensor, shard: Tensor) -> None:
    shard.data = gradient.long()


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (return_a_future, r"returned a Future, which would be ignored: fill `shard` in place"),
        (
            leave_everything,
            r"replaced `shard` by \[84\] of torch\.float32 on cpu; it was \[42\] of torch\.float32",
        ),
        (
            leave_a_matrix,
            r"replaced `shard` by \[7, 6\] of torch\.float32 on cpu; it was \[42\] of torch\.float32",
        ),
        (leave_integers, r"replaced `shard` by \[42\] of torch\.int64 on cpu; it was \[42\] of torch\.float32"),
    ],
)
def test_a_hook_that_breaks_the_contract_is_named(hook: Hook, message: str) -> None:
    model = alone()
    model.register_comm_hook(None, hook)
    with pytest.raises(
        RuntimeError, match=rf"Linear\): the communication hook tests\.[\w.]+\.{hook.__name__} {message}"
    ):
        backward(model)


class Failing:
    """Averages, or fails when it meets a gradient of a certain size."""

    def __init__(self, numel: int | None) -> None:
        self.numel = numel

    def __call__(self, state: Any, gradient: Tensor, shard: Tensor) -> None:
        if gradient.numel() == self.numel:
            raise ZeroDivisionError("out of luck")
        average(state, gradient, shard)


@pytest.mark.parametrize(("numel", "unit"), [(39, r"trunk\.2"), (48, r"root \(NestedMlp\)")])
@on_ranks(3)
def test_a_hook_that_raises_names_the_unit_and_leaves_the_model_usable(numel: int, unit: str) -> None:
    model: Any = nested_mlp(fully_sharded())
    plain = nested_mlp(fully_sharded())
    hook = Failing(numel)
    model.register_comm_hook(None, hook)
    message = rf"^{unit}: the communication hook tests\.[\w.]+\.Failing raised ZeroDivisionError: out of luck"
    with pytest.raises(RuntimeError, match=message) as caught:
        backward(model)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    hook.numel = None
    model.zero_grad()
    for either in (model, plain):
        backward(either)
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad)


def test_a_hook_that_fails_names_the_flat_parameter_of_several() -> None:
    model = alone(nn.Linear(5, 7), flatten_parameters=False)
    model.register_comm_hook(None, Failing(7))
    with pytest.raises(RuntimeError, match=r"root \(Linear\) \(flat parameter 1\): the communication hook"):
        backward(model)


def test_an_interrupt_in_a_hook_stays_what_it_is() -> None:
    def interrupted(state: Any, gradient: Tensor, shard: Tensor) -> None:
        raise KeyboardInterrupt

    model = alone()
    model.register_comm_hook(None, interrupted)
    with pytest.raises(KeyboardInterrupt):
        backward(model)


# fsdp.comm_hooks


@on_ranks(2)
def test_reduce_scatter_is_for_hooks_while_they_run() -> None:
    model: Any = nested_mlp(fully_sharded())
    model.register_comm_hook(None, average)
    backward(model)
    with pytest.raises(RuntimeError, match="can be called only inside a communication hook"):
        reduce_scatter(torch.ones(2))


def reduce_something_else(state: Tensor, gradient: Tensor, shard: Tensor) -> None:
    reduce_scatter(state)


@pytest.mark.parametrize("shape", [(43,), (2, 21)])
@on_ranks(2)
def test_reduce_scatter_wants_equal_parts(shape: tuple[int, ...]) -> None:
    model: Any = fully_sharded()(nn.Linear(5, 7))
    model.register_comm_hook(torch.ones(shape), reduce_something_else)
    with pytest.raises(RuntimeError, match=r"raised ValueError: a tensor of shape \[.*\] cannot be divided into 2"):
        backward(model)


def test_the_state_of_bf16_compress_hook_is_a_group() -> None:
    model = alone()
    model.register_comm_hook("nccl", bf16_compress_hook)
    with pytest.raises(RuntimeError, match=r"bf16_compress_hook raised TypeError: .*must be a process group.*'nccl'"):
        backward(model)


def test_bf16_compress_hook_refuses_complex_gradients() -> None:
    model = alone(nn.Linear(5, 7, dtype=torch.complex64))
    model.register_comm_hook(None, bf16_compress_hook)
    with pytest.raises(RuntimeError, match=r"raised TypeError: a gradient of torch\.complex64 would lose its imag"):
        model(torch.ones(2, 5, dtype=torch.complex64)).abs().sum().backward()


@on_ranks(2)
def test_complex_gradients_are_averaged() -> None:
    model: Any = fully_sharded()(nn.Linear(5, 7, dtype=torch.complex64))
    model.register_comm_hook(None, average)
    inputs = torch.full((2, 5), 1.0 + dist.get_rank(), dtype=torch.complex64)
    model(inputs).real.sum().backward()
    weights = model.params[0].grad[: 35 if dist.get_rank() else 21]
    assert torch.isfinite(weights.real).all()
    if dist.get_rank() == 0:
        assert torch.equal(weights, torch.full((21,), 3.0, dtype=torch.complex64))
