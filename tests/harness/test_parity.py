"""The comparison of trainings, on a stand-in for the package: a wrapper whose hooks average gradients.

A comparison that cannot fail proves nothing, so half of these are about trainings that are wrong.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn

from tests.helpers.pairs import every_pair
from tests.helpers.parity import (
    TOKENS,
    Training,
    adam,
    adamw,
    assert_bit_equal,
    assert_parity,
    nested_mlp,
    sgd_with_momentum,
    tiny_transformer,
    train_ddp,
    train_sharded,
)
from tests.helpers.ranks import RankError, RankPool


class Averaged(nn.Module):
    """Replicated training in a few lines; `factor` other than 1 makes it wrong."""

    def __init__(self, module: nn.Module, factor: float = 1.0) -> None:
        super().__init__()
        self.module = module
        self.sync = True
        self.divisor = dist.get_world_size() / factor
        for param in module.parameters():
            param.register_post_accumulate_grad_hook(self._average)

    def _average(self, param: Tensor) -> None:
        if self.sync and param.grad is not None:
            dist.all_reduce(param.grad)
            param.grad /= self.divisor

    def forward(self, inputs: Tensor) -> Tensor:
        return self.module(inputs)

    def no_sync(self) -> Averaged:
        return self

    def __enter__(self) -> None:
        self.sync = False

    def __exit__(self, *_: object) -> None:
        self.sync = True

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(self.parameters(), max_norm)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)


flat_mlp = partial(nested_mlp, nested=False)
flat_transformer = partial(tiny_transformer, nested=False, tied=True, recompute="inside")


@pytest.mark.parametrize(
    ("world_size", "optimizer"),
    [(3, adam), (1, adamw), (2, adamw), (4, sgd_with_momentum)],
)
def test_right_training_is_within_noise(ranks: RankPool, world_size: int, optimizer: Any) -> None:
    ranks(world_size).run(_compare_averaged, optimizer)


def _compare_averaged(optimizer: Any) -> None:
    assert_parity(flat_mlp, optimizer, wrap=Averaged, accumulate=2, clip=0.1, rows=3)
    assert_parity(flat_transformer, optimizer, wrap=Averaged, task=TOKENS, clip=0.5)
    parity = assert_parity(flat_mlp, optimizer, steps=10, wrap=Averaged)
    assert 0 < parity.noise.weight < 1e-4, "a noise that hides mistakes, or that was not measured"
    assert parity.distance.weight < 1e-4


@pytest.mark.parametrize("optimizer", [sgd_with_momentum, adam, adamw])
def test_averaging_in_hooks_equals_ddp_bit_for_bit(ranks: RankPool, optimizer: Any) -> None:
    ranks(2).run(_compare_with_ddp, optimizer)


def _compare_with_ddp(optimizer: Any) -> None:
    training = Training(make_model=flat_mlp, make_optimizer=optimizer, steps=5, accumulate=2)
    assert_bit_equal(train_sharded(training, Averaged), train_ddp(training))


def test_wrong_averaging_is_found(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="ranks 0, 1: AssertionError: sharded and unsharded training differ"):
        ranks(2).run(assert_parity, flat_mlp, sgd_with_momentum, wrap=partial(Averaged, factor=1.001))
    with pytest.raises(RankError, match="not equal bit for bit"):
        ranks(2).run(_compare_different_trainings)


def _compare_different_trainings() -> None:
    training = Training(make_model=flat_mlp, make_optimizer=sgd_with_momentum)
    other = replace(training, make_optimizer=adam)  # not another order of sums, which may round to the same bits
    assert_bit_equal(train_ddp(training), train_ddp(other))


def test_equal_trainings_are_not_compared_with_noise(ranks: RankPool) -> None:
    assert ranks(1).run(_noise_was_measured) == [False]


def _noise_was_measured() -> bool:
    return "noise" in vars(assert_parity(flat_mlp, adam, wrap=Averaged))


def test_a_missing_weight_is_named(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"different names or shapes: exit\.bias: None against \(1,\)"):
        ranks(1).run(assert_parity, flat_mlp, adam, wrap=_Forgetful)


class _Forgetful(Averaged):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        del state["exit.bias"]
        return state


# Samples of grids


def test_every_two_values_of_two_options_meet_in_few_rows() -> None:
    grid: dict[str, list[Any]] = {"a": [1, 2, 3, 4], "b": [True, False], "c": ["x", "y", "z"], "d": [None, 0]}
    rows = every_pair(**grid)
    for one, other in itertools.combinations(grid, 2):
        assert {(row[one], row[other]) for row in rows} == set(itertools.product(grid[one], grid[other]))
    assert rows[0] == {"a": 1, "b": True, "c": "x", "d": None}
    assert len(rows) <= 13, "no more than one more than the two longest options need, of 48"
