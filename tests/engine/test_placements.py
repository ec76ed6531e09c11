"""`Placements` as a value: the stages between two placements, the names of values, and what is refused."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from torch import nn

from fsdp import FullyShardedDataParallel, Placed, Placement, Placements, ShardingStrategy
from fsdp.engine.placements import UNREDUCED, UNSHARDED, Axis, Collective, stages
from tests.helpers.parity import Alone

REPLICATED, SHARDED, PARTIAL, OWNED = Placement
S_R, S_S, S_P = Placed(SHARDED, REPLICATED), Placed(SHARDED, SHARDED), Placed(SHARDED, PARTIAL)
SIZES = {Axis.SHARD: 3, Axis.REPLICA: 2}


def shown(source: Placed, target: Placed) -> list[str]:
    return [f"{stage.collective.name} {stage.axis.name}" for stage in stages(source, target)]


# Stages


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        (S_R, S_R, []),
        (S_R, UNSHARDED, ["ALL_GATHER SHARD"]),
        # The shards of replicas are neighbours, and are joined first.
        (S_S, UNSHARDED, ["ALL_GATHER REPLICA", "ALL_GATHER SHARD"]),
        (S_S, S_R, ["ALL_GATHER REPLICA"]),
        (UNREDUCED, S_R, ["REDUCE_SCATTER SHARD", "ALL_REDUCE REPLICA"]),
        (UNREDUCED, S_S, ["REDUCE_SCATTER SHARD", "REDUCE_SCATTER REPLICA"]),
        (UNREDUCED, S_P, ["REDUCE_SCATTER SHARD"]),
        (S_P, S_R, ["ALL_REDUCE REPLICA"]),
        (UNREDUCED, UNSHARDED, ["ALL_REDUCE SHARD", "ALL_REDUCE REPLICA"]),
        (UNSHARDED, S_S, ["SLICE SHARD", "SLICE REPLICA"]),
        (S_R, Placed(OWNED, REPLICATED), ["TO_OWNERS SHARD"]),
        (Placed(OWNED, REPLICATED), S_R, ["FROM_OWNERS SHARD"]),
    ],
)
def test_stages_lead_from_one_placement_to_another(source: Placed, target: Placed, expected: list[str]) -> None:
    assert shown(source, target) == expected


def test_stages_follow_each_other() -> None:
    every = itertools.starmap(Placed, itertools.product(Placement, Placement))
    for source, target in itertools.product(every, repeat=2):
        try:
            found = stages(source, target)
        except ValueError:
            continue  # no collective leads there
        now = source
        for stage in found:
            assert stage.before == now
            assert now[1 - stage.axis.value] == stage.after[1 - stage.axis.value]
            now = stage.after
        assert now == target


def test_no_collective_leads_to_partial_sums() -> None:
    with pytest.raises(ValueError, match="no collective turns SHARDED into PARTIAL along the SHARD axis"):
        stages(S_R, UNREDUCED)


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        (S_R, UNSHARDED, 2 / 3),
        (S_S, UNSHARDED, 1 / 2 / 3 + 2 / 3),
        (UNREDUCED, S_R, 2 / 3 + 2 * 1 / 2 / 3),
        (UNREDUCED, S_S, 2 / 3 + 1 / 2 / 3),
        (UNREDUCED, UNSHARDED, 2 * 2 / 3 + 2 * 1 / 2),
        (UNSHARDED, S_S, 0),
    ],
)
def test_elements_sent_by_formula(source: Placed, target: Placed, expected: float) -> None:
    assert sum(stage.numel_sent(600, SIZES) for stage in stages(source, target)) == round(600 * expected)


def test_an_all_reduce_of_a_shard_that_the_ranks_do_not_divide_is_padded() -> None:
    [stage] = stages(S_P, S_R)
    assert stage.collective is Collective.ALL_REDUCE
    assert stage.numel_sent(15, SIZES) == 2 * 3  # 5 elements of a shard, padded to 6 on two ranks


def test_elements_that_go_to_owners_depend_on_the_owners() -> None:
    [stage] = stages(S_R, Placed(OWNED, REPLICATED))
    with pytest.raises(ValueError, match="TO_OWNERS: the elements that are sent depend on the owners"):
        stage.numel_sent(6, SIZES)


def test_elements_held() -> None:
    held = {placed: placed.numel(600, SIZES) for placed in (UNSHARDED, S_R, S_S, S_P, UNREDUCED)}
    assert held == {UNSHARDED: 600, S_R: 200, S_S: 100, S_P: 200, UNREDUCED: 600}


# Names


@pytest.mark.parametrize("strategy", ShardingStrategy, ids=lambda strategy: strategy.name)
def test_a_strategy_is_the_name_of_a_value(strategy: ShardingStrategy) -> None:
    assert Placements.from_strategy(strategy).strategy(strategy.is_hybrid) is strategy


def test_the_collectives_of_each_strategy() -> None:
    found = {
        strategy.name: [
            " ".join(f"{stage.collective.name}/{stage.axis.name}" for stage in each) or "-"
            for each in (value.gather, value.unshard, value.reduce, value.settle)
        ]
        for strategy in ShardingStrategy
        for value in [Placements.from_strategy(strategy)]
    }
    summed, scattered = "REDUCE_SCATTER/SHARD ALL_REDUCE/REPLICA", "REDUCE_SCATTER/SHARD REDUCE_SCATTER/REPLICA"
    usual = ["-", "ALL_GATHER/SHARD", summed, "-"]
    assert found == {
        "FULL_SHARD": usual,
        "SHARD_GRAD_OP": usual,
        "NO_SHARD": ["-", "-", "ALL_REDUCE/SHARD ALL_REDUCE/REPLICA", "-"],
        "HYBRID_SHARD": usual,
        "_HYBRID_SHARD_ZERO2": usual,
        "SHARD_OPTIM": ["ALL_GATHER/SHARD", "-", "-", summed],
        "SHARD_OPTIM_GRADS": ["ALL_GATHER/SHARD", "-", summed, "-"],
        "HYBRID_SHARD_OPTIM": ["ALL_GATHER/REPLICA", "ALL_GATHER/SHARD", scattered, "-"],
    }


def test_values_without_a_name() -> None:
    value = Placements(parameters=S_R, gradients=UNREDUCED, optimizer=S_R)
    assert value.strategy(is_hybrid=False) is None
    assert Placements.from_strategy(reshard_after_forward=2).strategy(is_hybrid=False) is None


def test_pairs_may_be_tuples() -> None:
    pair: Any = (SHARDED, REPLICATED)
    value = Placements(parameters=pair, gradients=pair, optimizer=pair)
    assert value == Placements.from_strategy()
    assert value.gradients.shard is SHARDED


def test_numbers_that_are_flags() -> None:
    for given, expected in ((0, False), (1, True), (2, 2), (True, True)):
        value = Placements.resolve(None, None, given)
        assert value.reshard_after_forward is expected or value.reshard_after_forward == expected == 2


def test_what_is_no_number_of_ranks() -> None:
    with pytest.raises(TypeError, match=r'must be True, False, a number of ranks or "host", got 1\.5'):
        Placements.from_strategy(reshard_after_forward=1.5)  # type: ignore[arg-type]


# What is refused


@pytest.mark.parametrize(
    ("parameters", "gradients", "optimizer", "message"),
    [
        (S_R, S_R, UNSHARDED, "parameters are SHARDED and optimizer state is REPLICATED along the shard axis"),
        (UNSHARDED, UNSHARDED, S_R, "gradients must be PARTIAL or SHARDED. PARTIAL accumulates .*(SHARD_OPTIM)"),
        (UNSHARDED, S_R, UNSHARDED, "gradients must be PARTIAL or REPLICATED"),
        (UNREDUCED, S_R, S_R, "PARTIAL along the shard axis is for gradients, not for parameters: use REPLICATED"),
        (S_R, S_R, Placed(OWNED, REPLICATED), "OWNED along the shard axis is not supported.*use fsdp.OwnedOptimizer"),
        (UNSHARDED, Placed(PARTIAL, REPLICATED), S_R, "REPLICATED along the replica axis, which .*use PARTIAL"),
        (Placed(REPLICATED, SHARDED), S_S, S_S, "and REPLICATED along the shard axis: use"),
        (UNSHARDED, UNREDUCED, Placed(REPLICATED, SHARDED), "shard it along the shard axis first"),
    ],
)
def test_what_does_not_fit_together(parameters: Placed, gradients: Placed, optimizer: Placed, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Placements(parameters=parameters, gradients=gradients, optimizer=optimizer)


@pytest.mark.parametrize("given", [SHARDED, (SHARDED,), "SHARDED", ("SHARDED", "REPLICATED"), None])
def test_what_is_no_pair(given: Any) -> None:
    with pytest.raises(TypeError, match=re.escape("gradients must be an fsdp.Placed, a pair of placements")):
        Placements(parameters=S_R, gradients=given, optimizer=S_R)


def test_a_number_of_ranks_is_for_parameters_that_are_sharded_between_uses() -> None:
    with pytest.raises(ValueError, match="reshard_after_forward=2 requires parameters that are sharded like"):
        Placements(parameters=UNSHARDED, gradients=S_R, optimizer=S_R, reshard_after_forward=2)


FULL: dict[str, Any] = {"sharding_strategy": ShardingStrategy.FULL_SHARD}


@pytest.mark.parametrize("other", [FULL, {"reshard_after_forward": False}])
def test_placements_beside_what_they_replace(other: dict[str, Any]) -> None:
    options = {"process_group": Alone(), "placements": Placements.from_strategy(), **other}
    with pytest.raises(ValueError, match=f"placements and {next(iter(other))} both determine where"):
        FullyShardedDataParallel(nn.Linear(2, 2), **options)


@pytest.mark.parametrize("given", [ShardingStrategy.SHARD_OPTIM, "SHARD_OPTIM", S_R])
def test_what_are_no_placements(given: Any) -> None:
    with pytest.raises(TypeError, match=re.escape("placements must be an fsdp.Placements or None, got")):
        FullyShardedDataParallel(nn.Linear(2, 2), process_group=Alone(), placements=given)
