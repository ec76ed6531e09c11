"""`fsdp.cond`: ranks run different parts of a model, and come to the same weights as one process that runs all.

Answers pain point 8: ranks take different paths (layer drop, no image in a batch, experts without tokens).
"""

from __future__ import annotations

from typing import Any

import pytest

from tests._ranks import RankPool
from tests.choosing import PARTS, Choice, Pair
from tests.pairs import parametrize_pairs
from tests.twins import assert_at_rest


def nothing_but(*parts: str) -> Choice:
    return {part: part in parts for part in PARTS}


# Results


@pytest.mark.parametrize("world_size", [3, 2])
def test_500_steps_of_random_choices_equal_the_unsharded_model_pain_point_8(ranks: RankPool, world_size: int) -> None:
    ranks(world_size, timeout=300).run(_random_steps, 500 if world_size == 3 else 50)


def _random_steps(steps: int) -> None:
    pair = Pair()
    for step in range(steps):
        pair.backward()
        pair.step()
        if step % 50 == 49:
            pair.assert_equal()
    assert_at_rest(pair.model)


@parametrize_pairs(
    world_size=[3, 1, 4],
    recompute=[None, False, True],
    accumulate=[1, 3],
    options=[
        {},
        {"reshard_after_forward": False, "flatten_parameters": False, "bucket_cap_mb": 0},
        {"bucket_cap_mb": 0},
        {"use_orig_params": True, "reshard_after_forward": False},
        {"use_orig_params": True, "bucket_cap_mb": 0},
    ],
)
def test_choices_equal_the_unsharded_model(
    ranks: RankPool, world_size: int, recompute: bool | None, accumulate: int, options: dict[str, Any]
) -> None:
    ranks(world_size, timeout=120).run(_choices, recompute, accumulate, options)


def _choices(recompute: bool | None, accumulate: int, options: dict[str, Any]) -> None:
    pair = Pair(recompute=recompute, **options)
    for _ in range(12):
        for turn in range(accumulate):
            pair.backward(sync=turn == accumulate - 1)
        pair.step()
    pair.assert_equal()
    assert_at_rest(pair.model)
