"""Ranks that do different things at one time: each has an error that says what it was doing, and none dies.

On gloo, a message that meets a buffer of another size ends the process, and one of the same size is taken for another.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp
from fsdp import FullyShardedDataParallel
from fsdp.distributed.comm_hooks import reduce_scatter
from tests.helpers.hybrid import mesh_of
from tests.helpers.models import Wrap
from tests.helpers.on_ranks import on_ranks
from tests.helpers.standing import given_up

pytestmark = pytest.mark.waiting

INPUTS = torch.ones(2, 5)
Act = Callable[[Any], Any]


class Units(nn.Module):
    """Units of two sizes, of which two can be left out: the first of them is gathered ahead all the same."""

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.first, self.twin = wrap(nn.Linear(5, 5)), wrap(nn.Linear(5, 5))
        self.seldom, self.rarely = wrap(nn.Linear(5, 5, bias=False)), wrap(nn.Linear(5, 5, bias=False))
        self.last = wrap(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)))
        self.skips = False

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.twin(self.first(inputs))
        return self.last(hidden if self.skips else self.rarely(self.seldom(hidden)))


def model_of(group: Any = None, **options: Any) -> Any:
    group = group or dist.new_group()
    wrap = partial(FullyShardedDataParallel, process_group=group, **options)
    return wrap(Units(wrap))


def train(model: Any) -> None:
    model(INPUTS).sum().backward()


def take_state(model: Any) -> None:
    model.state_dict()


def summon_gradients(model: Any) -> None:
    with model.summon_full_params(with_grads=True):
        pass


def clip(model: Any) -> None:
    model.clip_grad_norm_(1.0)


def gather_optimizer(model: Any) -> None:
    model.gather_full_optim_state_dict(torch.optim.SGD(model.parameters(), lr=0.1))


def save(model: Any) -> None:
    fsdp.save("/nowhere", model)


def train_without_a_unit(model: Any) -> None:
    model.module.module.skips = True
    train(model)


def train_frozen(name: str, model: Any) -> None:
    for param in model.module.module.get_submodule(name).parameters():
        param.requires_grad_(False)
    train(model)


def train_in_double(model: Any) -> None:
    model.double()
    model(INPUTS.double()).sum().backward()


def apart(on_first: Act, on_second: Act, model: Any) -> str:
    """The error of this rank, as it is when a wait times out without a report of where the others are."""
    fsdp.set_watchdog(None)
    try:
        with given_up(model.process_group), warnings.catch_warnings():
            warnings.filterwarnings("error", "module forward hook with .* raised an exception that was silenced")
            with pytest.raises(RuntimeError) as caught:
                (on_first if dist.get_rank() == 0 else on_second)(model)
    finally:
        fsdp.set_watchdog()
    message = str(caught.value)
    assert message.startswith(f"rank {dist.get_rank()}: ")
    return message


@pytest.mark.parametrize(
    ("alone", "call"),
    [
        (summon_gradients, "summon_full_params()"),
        (save, "fsdp.save()"),
    ],
)
@on_ranks(2)
def test_a_call_that_one_rank_makes_alone_is_named(alone: Act, call: str) -> None:
    model = model_of()
    train(model)
    message = apart(alone, train, model)
    if dist.get_rank() == 0:
        assert "did not complete" in message
        assert f"This rank is in {call}: make the same call on every rank of the group" in message
    else:
        assert "This rank is in forward or backward" in message
        for remedy in ("make the same collective calls", "fsdp.join", "fsdp.cond"):
            assert remedy in message


@pytest.mark.parametrize(
    ("on_first", "on_second"),
    [
        (train_without_a_unit, train),
        # Gradients of the same size, which were added up.
        (partial(train_frozen, "first"), partial(train_frozen, "twin")),
        (train_in_double, train),
    ],
    ids=["a unit is skipped", "others of one size are frozen", "another dtype"],
)
@on_ranks(2)
def test_ranks_that_train_in_different_ways_hear_of_it(on_first: Act, on_second: Act) -> None:
    model = model_of()
    with mock.patch("fsdp.engine.runtime.SMALL_BYTES", 0):  # else a unit is gathered together with those that run
        train(model)
    message = apart(on_first, on_second, model)
    assert "did not complete: " in message
    assert "This rank is in forward or backward" in message


@on_ranks(2)
def test_models_of_one_group_do_not_take_each_others_messages() -> None:
    group = dist.new_group()
    models = [model_of(group), model_of(group)]
    for model in models:
        train(model)
    apart(lambda first: train(first), lambda _: train(models[1]), models[0])


@on_ranks(2)
def test_ranks_in_different_calls_hear_of_both_at_once() -> None:
    message = apart(take_state, train, model_of())
    assert "the ranks are in different calls, rank 0 in state_dict() and rank 1 in forward or backward" in message
    group = dist.new_group([1, 0])
    message = apart(clip, gather_optimizer, model_of(group))
    assert "rank 0 in clip_grad_norm_() and rank 1 in gather_full_optim_state_dict()" in message
    assert "Make the same calls on every rank" in message


@on_ranks(4)
def test_replicas_of_ranks_in_different_calls_hear_of_them() -> None:
    model = fsdp.fully_shard(nn.Linear(3, 3), mesh=mesh_of(2, 2))
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(
        RuntimeError,
        match=r"^rank \d: the ranks are in different calls, rank . in fsdp\.save\(\) and rank 3 in fsdp\.load",
    ):
        fsdp.load("nowhere", model) if dist.get_rank() == 3 else fsdp.save("nowhere", model)


def all_reduced(group: Any, gradient: Tensor, shard: Tensor) -> None:
    """A hook with a collective of its own, which gloo matches by order."""
    dist.all_reduce(gradient, group=group)
    shard.copy_(gradient.chunk(dist.get_world_size())[dist.get_rank()])


def reduced(group: Any, gradient: Tensor, shard: Tensor) -> None:
    shard.copy_(reduce_scatter(gradient))


@pytest.mark.parametrize("hook", [all_reduced, reduced])
@on_ranks(2)
def test_communication_hooks_meet_those_of_the_same_unit(hook: Any) -> None:
    group = dist.new_group()
    model = model_of(group)
    with mock.patch("fsdp.engine.runtime.SMALL_BYTES", 0):
        model.register_comm_hook(group, hook)
    train(model)
    message = apart(train_without_a_unit, train, model)
    assert "did not complete: " in message
    assert "rarely" in message or dist.get_rank() == 0
