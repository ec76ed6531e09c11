"""A gradient that is kept on another device than its parameter, which torch does not allow.

That is so where only one of parameters and gradients is offloaded. `Far` stands for a tensor on the other device, and
`accelerated` for a machine that has one.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FlatParameter
from fsdp.engine.placeholder import Placeholder
from tests.helpers.models import nested_mlp
from tests.helpers.offload import GRADS, PARAMS, Far, accelerated
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.parity import fully_sharded, sgd_with_momentum

apart = pytest.mark.parametrize("options", [PARAMS, GRADS], ids=["only params moved", "only grads moved"])

# One parameter


def flat() -> Any:
    return FlatParameter([nn.Parameter(torch.full((3,), 5.0))], names=["weight"])


def far(value: float) -> Tensor:
    return Far(torch.full((3,), float(value)))


def test_it_cannot_be_read_before_it_is_brought() -> None:
    param = flat()
    param.hold_gradient(far(1))
    message = (
        r"the gradient of a flat parameter with weight is kept on meta and the parameter on cpu, as set by move_params"
    )
    for read in (torch.sum, torch.clone, lambda grad: grad + 1, lambda grad: grad.add_(1), lambda grad: grad.tolist()):
        with pytest.raises(RuntimeError, match=message):
            read(param.grad)


def test_it_is_there_for_those_who_only_ask_whether() -> None:
    param = flat()
    param.hold_gradient(far(1))
    assert isinstance(param.grad, Placeholder)
    assert (param.grad.shape, param.grad.dtype, param.grad.device) == (param.shape, param.dtype, param.device)
    assert isinstance(param.held_gradient, Far)


def test_it_is_brought_once() -> None:
    param = flat()
    param.hold_gradient(far(1))
    param.bring_gradient()
    brought = param.grad
    assert torch.equal(brought, torch.ones(3))
    param.bring_gradient()
    assert param.grad is param.held_gradient is brought


def test_one_on_the_same_device_is_the_parameter_s_own() -> None:
    param, gradient = flat(), torch.ones(3)
    param.hold_gradient(gradient)
    param.bring_gradient()
    assert param.grad is param.held_gradient is gradient


@pytest.mark.parametrize("make", [far, lambda value: torch.full((3,), value)], ids=["far", "near"])
@pytest.mark.parametrize("brought_between", [True, False])
def test_several_add_up(make: Callable[[float], Tensor], brought_between: bool) -> None:
    param = flat()
    for value in (1.0, 2.0, 4.0):
        param.hold_gradient(make(value))
        if brought_between:
            param.bring_gradient()
    param.bring_gradient()
    assert torch.equal(param.grad, torch.full((3,), 7.0))


def by_zero_grad(param: FlatParameter) -> None:
    torch.optim.SGD([param], lr=0.1).zero_grad()


def by_none(param: FlatParameter) -> None:
    param.grad = None


@pytest.mark.parametrize("forget", [by_zero_grad, by_none])
@pytest.mark.parametrize("make", [far, lambda value: torch.full((3,), value)], ids=["far", "near"])
def test_none_is_left_when_it_was_dropped(
    make: Callable[[float], Tensor], forget: Callable[[FlatParameter], None]
) -> None:
    param: Any = flat()
    param.hold_gradient(make(1.0))
    forget(param)
    assert [param.grad, param.held_gradient] == [None, None]
    param.bring_gradient()
    assert [param.grad, param.held_gradient] == [None, None]
    param.hold_gradient(make(2.0))
    param.bring_gradient()
    assert torch.equal(param.grad, torch.full((3,), 2.0))


@pytest.mark.parametrize("forget", [by_zero_grad, by_none])
def test_its_memory_is_free_as_soon_as_it_was_dropped(forget: Callable[[FlatParameter], None]) -> None:
    param = flat()
    gradient = far(1)
    param.hold_gradient(gradient)
    alive = weakref.ref(gradient)
    del gradient
    forget(param)
    gc.collect()
    assert alive() is None


# In training


def loss_of(model: nn.Module) -> Tensor:
    return model(torch.ones(2, 5) + dist.get_rank()).square().mean()


def backward(model: nn.Module, sync: bool = True, scale: float = 1.0) -> None:
    with nullcontext() if sync else model.no_sync():  # type: ignore[operator]
        (scale * loss_of(model)).backward()


def held(model: nn.Module) -> list[Any]:
    return [param.grad for param in model.parameters()]


def near_gradients(*backwards: tuple[bool, float]) -> list[Tensor]:
    """Of a model that is not offloaded, after backwards of which each syncs or does not, and has a scale."""
    model = nested_mlp(fully_sharded())
    for sync, scale in backwards:
        backward(model, sync, scale)
    return held(model)


def brought(model: nn.Module) -> list[Tensor]:
    for param in model.parameters():
        param.bring_gradient()  # type: ignore[attr-defined]
    return held(model)


@apart
@on_ranks(2)
def test_zero_grad_drops_it(options: dict[str, Any]) -> None:
    with accelerated():
        model = nested_mlp(fully_sharded(**options))
        optimizer = sgd_with_momentum(model.parameters())
        before = model.state_dict()
        backward(model)
        optimizer.zero_grad()
        optimizer.step()
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        for drop in (optimizer.zero_grad, model.zero_grad):
            backward(model)
            drop()
            backward(model, scale=2)
            expected = near_gradients((True, 2))
            assert all(torch.equal(*pair) for pair in zip(brought(model), expected, strict=True))
            model.zero_grad()


@parametrize_pairs(
    syncs=[[True, True], [False, True], [True, False, True], [False, False, True, True]], options=[PARAMS, GRADS]
)
@on_ranks(2)
def test_backwards_add_up_in_it(options: dict[str, Any], syncs: list[bool]) -> None:
    backwards = [(sync, float(2**number)) for number, sync in enumerate(syncs)]
    expected = near_gradients(*backwards)
    for zeroed in (False, True):
        with accelerated():
            model = nested_mlp(fully_sharded(**options))
            if zeroed:
                for sync in (True, False):
                    backward(model, sync)
                model.zero_grad()
            for backward_of in backwards:
                backward(model, *backward_of)
            assert all(torch.equal(*pair) for pair in zip(brought(model), expected, strict=True))


@apart
@on_ranks(2)
def test_what_is_not_reduced_is_not_stepped_over(options: dict[str, Any]) -> None:
    with accelerated():
        model: Any = nested_mlp(fully_sharded(**options))
        optimizer = sgd_with_momentum(model.parameters())
        backward(model)
        backward(model, sync=False)
        for act in (optimizer.step, lambda: model.clip_grad_norm_(1.0)):
            with pytest.raises(RuntimeError, match=r"accumulated under no_sync\(\) are not reduced"):
                act()
        backward(model)
        optimizer.step()
