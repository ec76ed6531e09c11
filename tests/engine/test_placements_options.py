"""Placements beside other options: precision, offload, recomputation, scalers, freezing, torch's collectives."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp
from fsdp import MixedPrecision, Placements, ShardingStrategy, checkpoint_wrapper, use_torch_collectives
from fsdp.distributed.dtensor import full_tensor
from tests.helpers.hybrid import frozen, mesh_of
from tests.helpers.models import nested_mlp, tiny_transformer
from tests.helpers.offload import with_folder
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.parity import (
    TOKENS,
    Training,
    adamw,
    assert_parity,
    distance,
    fully_sharded,
    sgd_with_momentum,
    train_sharded,
)
from tests.helpers.ranks import RankPool

STRATEGIES = ["SHARD_OPTIM", "SHARD_OPTIM_GRADS", "HYBRID_SHARD_OPTIM"]


def options_of(strategy: str) -> dict[str, Any]:
    """Collective. Options for four ranks."""
    hybrid = {"process_group": mesh_of(2, 2)} if strategy.startswith("HYBRID") else {}
    return {"sharding_strategy": ShardingStrategy[strategy], **hybrid}


POLICIES = {
    "computed in bfloat16": MixedPrecision(param_dtype=torch.bfloat16),
    "reduced in bfloat16": MixedPrecision(reduce_dtype=torch.bfloat16),
}


@parametrize_pairs(strategy=STRATEGIES, policy=[*POLICIES], accumulate=[1, 2])
@on_ranks(4)
def test_mixed_precision_is_as_near_as_full_sharding(strategy: str, policy: str, accumulate: int) -> None:
    training = Training(make_model=nested_mlp, make_optimizer=sgd_with_momentum, accumulate=accumulate, no_sync=False)
    mixed = {"mixed_precision": POLICIES[policy]}
    exact, plain, placed = (
        train_sharded(training, fully_sharded(**each)) for each in ({}, mixed, {**mixed, **options_of(strategy)})
    )
    assert distance(placed, exact).weight <= 4 * distance(plain, exact).weight + 1e-6


@parametrize_pairs(strategy=STRATEGIES, options=[{"move_params_to_cpu": True}, {"offload": "cpu"}, {"offload": "disk"}])
def test_offload(ranks: RankPool, tmp_path: Path, strategy: str, options: dict[str, Any]) -> None:
    ranks(4).run(_train, strategy, with_folder(options, tmp_path))


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(4)
def test_collectives_of_torch(strategy: str) -> None:
    use_torch_collectives(True)
    try:
        _train(strategy, {})
    finally:
        use_torch_collectives(False)


def _train(strategy: str, options: dict[str, Any]) -> None:
    wrap = fully_sharded(**options_of(strategy), **options)
    assert_parity(nested_mlp, sgd_with_momentum, wrap=wrap, accumulate=2, no_sync=False, clip=0.1)


@parametrize_pairs(at_most=4, strategy=STRATEGIES, form=[{}, {"use_orig_params": True}])
@on_ranks(4)
def test_frozen_and_unused_units(strategy: str, form: dict[str, Any]) -> None:
    assert_parity(frozen, adamw, wrap=fully_sharded(**options_of(strategy), **form), accumulate=2, no_sync=False)


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(4)
def test_tied_parameters_and_recomputation(strategy: str) -> None:
    wrap = fully_sharded(**options_of(strategy))
    assert_parity(partial(tiny_transformer, tied=True), adamw, wrap=wrap, task=TOKENS)

    def checkpointed(module: nn.Module) -> nn.Module:
        return wrap(checkpoint_wrapper(module) if isinstance(module, nn.Linear) else module)

    assert_parity(nested_mlp, sgd_with_momentum, wrap=checkpointed, accumulate=2, no_sync=False)


@parametrize_pairs(strategy=STRATEGIES, clip=[None, 0.1])
@on_ranks(4)
def test_scaled_losses(strategy: str, clip: float | None) -> None:
    scaling = {"init_scale": 4.0, "growth_interval": 2}
    wrap = fully_sharded(**options_of(strategy))
    assert_parity(nested_mlp, sgd_with_momentum, wrap=wrap, accumulate=2, no_sync=False, scaling=scaling, clip=clip)


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(4)
def test_units_may_differ_in_their_placements(strategy: str) -> None:
    pairs = [(strategy, "FULL_SHARD"), ("FULL_SHARD", strategy)]
    pairs += [(strategy, "NO_SHARD")] if strategy == "SHARD_OPTIM" else []
    for number, (outer, inner) in enumerate(pairs, STRATEGIES.index(strategy)):
        each, form = iter([inner, outer, inner, outer]), {"use_orig_params": number % 2 == 1}

        def wrap(module: nn.Module) -> nn.Module:
            return fully_sharded(**options_of(next(each)), **form)(module)  # noqa: B023 (called at once)

        assert_parity(nested_mlp, sgd_with_momentum, wrap=wrap, accumulate=2, no_sync=False, clip=0.1)


# Switches of `fully_shard`


class Tower(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))


@on_ranks(2)
def test_the_last_backward_may_reduce_while_it_runs() -> None:
    torch.manual_seed(0)
    plain = Tower()
    model: Any = copy.deepcopy(plain)
    fsdp.fully_shard(model, placements=Placements.from_strategy(ShardingStrategy.SHARD_OPTIM))
    model(torch.ones(1, 5)).sum().backward()
    grads = [param.grad for param in model.parameters()]
    with pytest.raises(RuntimeError, match=r"not reduced over the ranks yet.*fsdp\.reduce_gradients"):
        grads[0].sum()
    model.set_requires_gradient_sync(True)
    model(torch.ones(1, 5)).sum().backward()
    plain(torch.ones(1, 5)).sum().mul(2).backward()
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full_tensor(param.grad), expected.grad)


@on_ranks(2)
def test_gradients_that_wait_for_the_step_are_shown_after_a_reduction() -> None:
    model = fully_sharded(sharding_strategy=ShardingStrategy.SHARD_OPTIM)(Tower())
    model(torch.ones(1, 5)).sum().backward()
    message = r"cannot show gradients.*fsdp\.reduce_gradients\(model\).*SHARD_OPTIM"
    with pytest.raises(RuntimeError, match=message), model.summon_full_params(with_grads=True):
        pass
    fsdp.reduce_gradients(model)
    with model.summon_full_params(with_grads=True):
        assert all(param.grad is not None for param in model.parameters())


@on_ranks(2)
def test_kept_parameters_are_not_listed_in_the_places_of_shards() -> None:
    torch.manual_seed(0)
    model: Any = Tower()
    fsdp.fully_shard(model, placements=Placements.from_strategy(ShardingStrategy.SHARD_OPTIM_GRADS))
    listed = list(model.parameters())
    model(torch.ones(1, 5)).sum().backward()
    model.zero_grad()
    assert all(one is other for one, other in zip(model.parameters(), listed, strict=True))
    assert dist.get_world_size() == 2
