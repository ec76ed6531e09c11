"""Modules that were wrapped before: the new wrapper takes over what the old one had, trained or not."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel, MixedPrecision
from fsdp.compat.fairscale import DummyProcessGroup
from tests.helpers.equality import assert_close_state
from tests.helpers.on_ranks import on_ranks
from tests.helpers.parity import fully_sharded

ALONE = DummyProcessGroup(rank=0, size=1)


class Net(nn.Module):
    """All of its parameters are in children, which are wrapped; it has a buffer of its own."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module] = lambda module: module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = wrap(nn.Linear(4, 6)), wrap(nn.Linear(6, 2))
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, inputs: Tensor) -> Any:
        return self.second(self.first(inputs).relu()) * self.scale


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for number in range(steps):
        model(torch.linspace(-1, 1, 12).view(3, 4) + number).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_close_models(model: Any, plain: nn.Module) -> None:
    assert_close_state(model.state_dict(), plain.state_dict(), rtol=1.3e-6, atol=1e-5)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)


@pytest.mark.parametrize("flatten", [True, False])
@on_ranks(2)
def test_a_module_whose_parameters_are_its_childrens_is_wrapped_in_one_session_after_the_other(flatten: bool) -> None:
    wrap = fully_sharded(flatten_parameters=flatten)
    plain, net = Net(), Net(wrap)
    plain_optimizer = sgd(plain)
    first = FullyShardedDataParallel(net)
    optimizer = sgd(first)
    hooks = _count_hooks(net)
    train(first, optimizer)
    train(plain, plain_optimizer)
    module: nn.Module = net
    for options in ({}, {"mixed_precision": MixedPrecision(buffer_dtype=torch.bfloat16)}, {}):
        again = FullyShardedDataParallel(module, **options)
        module = again.module  # as FairScale's users write: the wrapped module, and here what lists its shards
        assert _count_hooks(net) == hooks, "the old wrapper's are gone"
        assert_close_models(again, plain)
        with torch.no_grad():  # for inference
            torch.testing.assert_close(again.eval()(torch.ones(2, 4)), plain(torch.ones(2, 4)))
        train(again.train(), optimizer)  # the same parameters
        train(plain, plain_optimizer)
        assert again._is_root
        again.load_state_dict(again.state_dict())
        assert_close_models(again, plain)
        with again.summon_full_params():
            torch.testing.assert_close(net.first.weight, plain.first.weight)


def _count_hooks(module: nn.Module) -> dict[str, int]:
    return {name: len(value) for name, value in vars(module).items() if name.endswith("_hooks")}


@pytest.mark.parametrize("is_trained", [False, True])
@on_ranks(2)
def test_a_wrapper_is_wrapped(is_trained: bool) -> None:
    wrap = fully_sharded()
    plain, inner = Net(), FullyShardedDataParallel(Net(wrap))
    optimizer, plain_optimizer = sgd(inner), sgd(plain)
    if is_trained:
        train(inner, optimizer)
        train(plain, plain_optimizer)
    single = wrap(nn.Linear(4, 4))
    for depth in (2, 1):  # the second time in the place of a wrapper of the first time
        model: Any = inner
        for _ in range(depth):
            model = FullyShardedDataParallel(model)
        train(model, optimizer)
        train(plain, plain_optimizer)
        assert model._is_root
        assert not inner._is_root
        assert_close_models(model, plain)
        model.load_state_dict(plain.state_dict())
        assert_close_models(model, plain)
        assert next(name for name, _ in model.named_parameters()).endswith("first._fsdp_wrapped_module.flat_param_0")
    double = wrap(single)
    double(torch.ones(1, 4)).sum().backward()
    assert single.flat_param.grad is not None
    assert list(double.state_dict()) == ["weight", "bias"]


def test_copies_are_wrapped_again() -> None:
    net = Net(lambda module: FullyShardedDataParallel(module, ALONE))
    model = FullyShardedDataParallel(net, ALONE)
    train(model, sgd(model))
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        inner = copied.module.module
        if copied.process_group == "MISSING":
            for wrapper in (copied, inner.first, inner.second):
                wrapper.process_group = ALONE
        hooks = _count_hooks(inner)
        again = FullyShardedDataParallel(inner, ALONE)
        assert _count_hooks(inner) == hooks
        assert_close_models(again, model)
        train(again, sgd(again))


def test_a_failed_attempt_leaves_the_old_wrapper_as_it_was() -> None:
    net = Net(lambda module: FullyShardedDataParallel(module, ALONE))
    model = FullyShardedDataParallel(net, ALONE)
    train(model, sgd(model))
    with pytest.raises(ValueError, match="gradient_predivide_factor"):
        FullyShardedDataParallel(net, ALONE, gradient_predivide_factor=-1)
    assert model._is_root
    train(model, sgd(model))


def test_a_module_with_parameters_of_its_own_is_not_wrapped_again() -> None:
    model = FullyShardedDataParallel(nn.Sequential(nn.Linear(4, 2)), ALONE)
    for module in (model.module, model.module.module):
        message = "this Sequential is wrapped already, and its wrapper has parameters of its own: wrap that"
        with pytest.raises(ValueError, match=message):
            FullyShardedDataParallel(module, ALONE)
