"""A write to a tensor of a full state dict is lost with it, which is said; what is saved or loaded is not in vain."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import fsdp
from fsdp import FullyShardedDataParallel
from tests.helpers.on_ranks import on_ranks

Use = Callable[[Any], None]


@torch.no_grad()
def average(model: Any) -> None:
    """As averages of weights in libraries of models do."""
    other = copy.deepcopy(model)
    for own, value in zip(other.state_dict().values(), model.state_dict().values(), strict=True):
        own.copy_(own * 0.5 + 0.5 * value)


@torch.no_grad()
def load_in_part(model: Any) -> None:
    own = model.state_dict()
    own["0.weight"].copy_(torch.ones(3, 5))


def read(model: Any) -> None:
    state = model.state_dict()
    torch.save(state, io.BytesIO())
    assert all(torch.isfinite(value + 1).all() for value in state.values())


def keep_average(model: Any) -> None:
    """An average that the user keeps is no mistake."""
    _kept.append(model.state_dict())
    for value in _kept[-1].values():
        value.mul_(0.5)


def load_again(model: Any) -> None:
    state = model.state_dict()
    state["0.weight"].mul_(2.0)
    model.load_state_dict(state)


def cast(model: Any) -> None:
    state = model.state_dict()
    for key in state:
        state[key] = state[key].half().mul_(2)


_kept: list[Any] = []


@on_ranks(2)
@pytest.mark.parametrize("use", [average, load_in_part, read, keep_average, load_again, cast])
def test_a_write_that_is_dropped_with_the_state_dict_is_a_warning(use: Use) -> None:
    is_lost = use in (average, load_in_part)
    for wrap in (FullyShardedDataParallel, partial(FullyShardedDataParallel, use_orig_params=True)):
        model = wrap(nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2)))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            use(model)
        lost = [str(each.message) for each in caught if "written in place" in str(each.message)]
        assert len(lost) == is_lost, lost
        assert all("Sequential" in message and "load_state_dict()" in message for message in lost)
    _kept.clear()


@on_ranks(2)
def test_under_fully_shard_writes_reach_the_model() -> None:
    model: Any = fsdp.fully_shard(nn.Linear(5, 3))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        model.state_dict()["bias"].fill_(2.0)
    assert (model.state_dict()["bias"].full_tensor() == 2).all()
