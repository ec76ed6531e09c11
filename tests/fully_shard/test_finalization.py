"""`finalize_backward`, with which schedules of pipelines end the backwards of a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fsdp
from tests.helpers.dtensor_twins import uneven
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs


def sharded() -> Any:
    torch.set_default_dtype(torch.float64)
    return uneven(fsdp.fully_shard)


def inputs(number: int, rank: int) -> Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * number + rank))


def expected(numbers: range) -> dict[str, Tensor]:
    """The mean over the ranks of the sum of the gradients of these micro-batches."""
    plain, world_size = uneven(), dist.get_world_size()
    for number in numbers:
        for rank in range(world_size):
            (plain(inputs(number, rank)).square().sum() / world_size).backward()
    return {name: param.grad for name, param in plain.named_parameters() if param.grad is not None}


def assert_gradients(model: Any, numbers: range) -> None:
    found = {name: param.grad.full_tensor() for name, param in model.named_parameters()}
    torch.testing.assert_close(found, expected(numbers))


def accumulate(model: Any, numbers: range) -> None:
    for number in numbers:
        model(inputs(number, dist.get_rank())).square().sum().backward()


@parametrize_pairs(world_size=[1, 2, 3], async_op=[True, False], reshards=[True, False])
@on_ranks("world_size")
def test_gradients_that_have_accumulated_are_reduced(async_op: bool, reshards: bool) -> None:
    model = sharded()
    for _ in range(2):
        model.set_manual_backward_finalization(True)
        model.set_reshard_after_backward(reshards)
        model.set_requires_gradient_sync(False)
        accumulate(model, range(3))
        model.set_requires_gradient_sync(True)
        model.set_reshard_after_backward(True)
        handle = model.finalize_backward(async_op=async_op)
        assert isinstance(handle, fsdp.GradientReductionHandle) is async_op
        if handle is not None:
            handle.wait()
        model.set_manual_backward_finalization(False)
        assert_gradients(model, range(3))
        model.zero_grad()


@on_ranks(2)
def test_gradients_of_a_backward_that_has_reduced_them_stay() -> None:
    model = sharded()
    model.set_manual_backward_finalization(True)
    accumulate(model, range(1))
    for _ in range(2):
        model.finalize_backward()
        assert_gradients(model, range(1))


@on_ranks(2)
def test_gradients_without_synchronization_continue_to_accumulate() -> None:
    model = sharded()
    model.set_requires_gradient_sync(False)
    accumulate(model, range(2))
    model.finalize_backward()
    model.set_requires_gradient_sync(True)
    accumulate(model, range(2, 3))
    assert_gradients(model, range(3))


@on_ranks(2)
def test_before_the_first_forward_there_is_nothing_to_finalize() -> None:
    model = sharded()
    assert model.finalize_backward() is None
    model.finalize_backward(async_op=True).wait()
    accumulate(model, range(1))
    assert_gradients(model, range(1))


@on_ranks(2)
def test_an_inner_module_is_an_error() -> None:
    model = sharded()
    accumulate(model, range(1))
    with pytest.raises(RuntimeError, match=r"finalize_backward is for the outermost sharded module, but 'gate' "):
        model.gate.finalize_backward()
    with pytest.raises(RuntimeError, match=r"set_manual_backward_finalization is for the outermost"):
        model.gate.set_manual_backward_finalization(True)


@on_ranks(2)
def test_a_forward_that_waits_for_its_backward_is_not_disturbed() -> None:
    model = sharded()
    loss = model(inputs(0, dist.get_rank())).square().sum()
    model.finalize_backward()
    loss.backward()
    assert_gradients(model, range(1))


@on_ranks(2)
def test_finalizing_in_the_middle_of_a_forward_is_an_error() -> None:
    model = sharded()
    accumulate(model, range(1))
    model.trunk.register_forward_hook(lambda *_: model.finalize_backward())
    with pytest.raises(RuntimeError, match=r"cannot reduce gradients in the middle of a forward"):
        accumulate(model, range(1))
