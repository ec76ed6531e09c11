"""`fsdp.cond` of modules under `fully_shard`: ranks run different parts, with the weights of one process."""

from __future__ import annotations

from typing import Any

import fsdp
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.twins import assert_at_rest
from tests.helpers.uneven_models import Pair


@parametrize_pairs(
    at_most=6,
    world_size=[2, 3],
    recompute=[None, False, True],
    accumulate=[1, 2],
    options=[{}, {"reshard_after_forward": False}],
)
@on_ranks("world_size", timeout=120)
def test_choices_equal_the_unsharded_model(recompute: bool | None, accumulate: int, options: dict[str, Any]) -> None:
    pair = Pair(recompute=recompute, shard=fsdp.fully_shard, **options)
    pair.train(steps=3, accumulate=accumulate)
    pair.assert_close()
    assert_at_rest(pair.model)
