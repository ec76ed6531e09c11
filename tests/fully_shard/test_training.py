"""Our `fully_shard` trains as torch's does: the same models on the same batches, rank by rank.

Losses, gradients and weights are compared after every step, to the last bit where sums have one order.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import fsdp
from tests.helpers.dtensor_twins import Plan, adamw_at_once, adamw_one_by_one, assert_side_by_side, conv_net, uneven
from tests.helpers.models import tiny_transformer
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.parity import TOKENS, MakeOptimizer, adam, sgd_with_momentum
from tests.helpers.ranks import RankPool

GPT = {"make_model": tiny_transformer, "task": TOKENS}
TIED = {"make_model": partial(tiny_transformer, tied=True), "task": TOKENS}
MLP = {"make_model": uneven, "rows": 4}
CONV = {"make_model": conv_net, "rows": 4}


@parametrize_pairs(world_size=[1, 2, 3, 4], what=[GPT, TIED, MLP, CONV])
def test_every_kind_of_model_at_every_world_size(ranks: RankPool, what: dict[str, Any], world_size: int) -> None:
    ranks(world_size).run(_compare, what, {})


def _compare(what: dict[str, Any], options: dict[str, Any], **how: Any) -> None:
    unlike = {"offload_policy": fsdp.CPUOffloadPolicy()} if options.pop("offload", False) else {}
    assert_side_by_side(Plan(**what, **how), unlike=unlike, **options)


@parametrize_pairs(
    at_most=5,
    world_size=[2, 3, 4, 1],
    what=[MLP, TIED, CONV],
    make_optimizer=[sgd_with_momentum, adam, adamw_at_once, adamw_one_by_one],
    reshard_after_forward=[True, False, 2],
    offload=[False, True],
    training=[{}, {"clip": 0.1}, {"accumulate": 2, "clip": 0.3}, {"accumulate": 2, "sync_each": True}],
)
def test_every_pair_of_options(
    ranks: RankPool,
    world_size: int,
    what: dict[str, Any],
    make_optimizer: MakeOptimizer,
    reshard_after_forward: bool | int,
    offload: bool,
    training: dict[str, Any],
) -> None:
    if reshard_after_forward == 2 and world_size % 2:
        reshard_after_forward = world_size
    options = {"reshard_after_forward": reshard_after_forward, "offload": offload}
    ranks(world_size).run(_compare, what, options, make_optimizer=make_optimizer, **training)
