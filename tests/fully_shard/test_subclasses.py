"""Parameters of classes that say themselves how they are all-gathered, beside torch's `fully_shard`."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.helpers.dtensor_twins import Plan, assert_side_by_side
from tests.helpers.extended_tensors import InEight, InHalf, extended
from tests.helpers.ranks import RankPool

HALF = partial(extended, kind=InHalf, width=7)  # which no number of ranks divides
EIGHT = partial(extended, kind=InEight, width=12)


@pytest.mark.parametrize(
    ("make_model", "world_size"), [(HALF, 1), (HALF, 2), (HALF, 3), (HALF, 4), (EIGHT, 2), (EIGHT, 3), (EIGHT, 4)]
)
def test_training_at_every_world_size(ranks: RankPool, make_model: Any, world_size: int) -> None:
    ranks(world_size).run(_compare, {"make_model": make_model}, {})


def _compare(plan: dict[str, Any], options: dict[str, Any]) -> None:
    assert_side_by_side(Plan(rows=4, **plan), **options)
