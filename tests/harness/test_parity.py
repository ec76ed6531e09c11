"""The comparison of trainings finds what is wrong: one that cannot fail proves nothing."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from fsdp import FullyShardedDataParallel
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import every_pair
from tests.helpers.parity import (
    Trained,
    Training,
    adam,
    assert_bit_equal,
    assert_parity,
    distance,
    nested_mlp,
    sgd_with_momentum,
    train_ddp,
)

flat_mlp = partial(nested_mlp, nested=False)


def _off_by_a_thousandth(module: nn.Module) -> nn.Module:
    model = FullyShardedDataParallel(module)
    model.set_gradient_divide_factors(2.0, 1 / 1.001)
    return model


@on_ranks(2)
def test_wrong_averaging_is_found() -> None:
    with pytest.raises(AssertionError, match="sharded and unsharded training differ"):
        assert_parity(flat_mlp, sgd_with_momentum, wrap=_off_by_a_thousandth)


@on_ranks(2)
def test_other_bits_are_found() -> None:
    training = Training(make_model=flat_mlp, make_optimizer=sgd_with_momentum)
    other = replace(training, make_optimizer=adam)  # not another order of sums, which may round to the same bits
    with pytest.raises(AssertionError, match="not equal bit for bit"):
        assert_bit_equal(train_ddp(training), train_ddp(other))


@on_ranks(1)
def test_equal_trainings_are_not_compared_with_noise() -> None:
    assert "noise" not in vars(assert_parity(flat_mlp, adam))


def test_a_missing_weight_is_named() -> None:
    one, other = (Trained(*[torch.empty(0)] * 3, {name: torch.ones(1)}) for name in ("entry.bias", "exit.bias"))
    with pytest.raises(AssertionError, match=r"different names or shapes: .*exit\.bias: None against \(1,\)"):
        distance(one, other)


# Samples of grids


def test_every_two_values_of_two_options_meet_in_few_rows() -> None:
    grid: dict[str, list[Any]] = {"a": [1, 2, 3, 4], "b": [True, False], "c": ["x", "y", "z"], "d": [None, 0]}
    rows = every_pair(**grid)
    for one, other in itertools.combinations(grid, 2):
        assert {(row[one], row[other]) for row in rows} == set(itertools.product(grid[one], grid[other]))
    assert rows[0] == {"a": 1, "b": True, "c": "x", "d": None}
    assert len(rows) <= 13, "no more than one more than the two longest options need, of 48"
