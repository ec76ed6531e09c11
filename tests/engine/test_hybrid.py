"""Hybrid sharding, shards within and replicas across, trains as plain sharding and as one process do."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import MixedPrecision, ShardingStrategy, use_torch_collectives
from fsdp.distributed.collectives import communicator
from fsdp.distributed.communicator import default_group, summed
from tests.helpers.hybrid import (
    assert_replicas_agree,
    assert_same_on_every_rank,
    frozen,
    group_option,
    machines_of,
    mesh_of,
)
from tests.helpers.models import Net, Wrap, nested_mlp, tiny_transformer
from tests.helpers.module_kinds import FLAT, FORMS, ORIGINAL
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import Case, parametrize_cases, parametrize_pairs
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

SHAPES = [(2, 2), (2, 1), (1, 2), (3, 1), (1, 3), (4, 1), (1, 4)]
NAMES = [None, ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2]


@parametrize_cases(
    at_most=7,
    shape=SHAPES,
    how=["mesh", "pair", "machine"],
    strategy=NAMES,
    form=FORMS,
    bucket_cap_mb=[25, 0],
    accumulate=[1, 2],
    clip=[None, 0.1],
)
@on_ranks(lambda case: prod(case.shape))
def test_trains_as_one_process_does(case: Case) -> None:
    replicas, shards = case.shape
    is_machine = case.how == "machine"
    strategy = case.strategy or (ShardingStrategy.HYBRID_SHARD if is_machine else None)
    options = {"sharding_strategy": strategy, "bucket_cap_mb": case.bucket_cap_mb, **case.form}
    made: list[nn.Module] = []
    with machines_of(shards):
        wrap = fully_sharded(process_group=group_option(case.how, *case.shape), **options)
        make = partial(_noted, nested_mlp, made)
        assert_parity(make, sgd_with_momentum, wrap=wrap, **case.only("accumulate", "clip"))
    (model,) = (model for model in made if hasattr(model, "process_group"))
    assert (model.world_size, model.replicate_group is not None) == (shards, not is_machine or replicas > 1)
    assert_replicas_agree(model)


def _noted(make: Any, made: list[nn.Module], wrap: Wrap) -> nn.Module:
    made.append(make(wrap))
    return made[-1]


@on_ranks(4)
def test_tied_parameters_train_as_on_one_process() -> None:
    make = partial(tiny_transformer, tied=True)
    assert_parity(make, adamw, wrap=fully_sharded(process_group=mesh_of(2, 2)), task=TOKENS)


@pytest.mark.parametrize("options", [{"reduce_dtype": torch.bfloat16}, {"param_dtype": torch.bfloat16}, {}], ids=str)
@on_ranks(4)
def test_mixed_precision_is_as_near_as_plain_sharding(options: dict[str, Any]) -> None:
    policy = MixedPrecision(**options)
    training = Training(make_model=nested_mlp, make_optimizer=sgd_with_momentum)
    exact, plain, hybrid = (
        train_sharded(training, fully_sharded(**each))
        for each in ({}, {"mixed_precision": policy}, {"mixed_precision": policy, "process_group": mesh_of(2, 2)})
    )
    assert distance(hybrid, exact).weight <= 4 * distance(plain, exact).weight + 1e-6
    assert_same_on_every_rank(hybrid)


@on_ranks(4)
def test_a_wider_reduction_is_wide_until_all_ranks_are_summed() -> None:
    # 256 + 1 is 256 in bfloat16, which is enough of an error to be seen once the other machine has subtracted 256.
    policy = MixedPrecision(reduce_dtype=torch.float32)
    layer = nn.Linear(1, 4, bias=False, dtype=torch.bfloat16)
    model: Any = fully_sharded(process_group=mesh_of(2, 2), mixed_precision=policy)(layer)
    model.set_gradient_divide_factors(1.0, 1.0)
    model(torch.tensor([[256.0, 1.0, -256.0, 0.0][dist.get_rank()]], dtype=torch.bfloat16).view(1, 1)).sum().backward()
    assert model.params[0].grad.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("form", [FLAT, ORIGINAL], ids=["flat", "original"])
@on_ranks(4)
def test_frozen_and_unused_units(form: dict[str, Any]) -> None:
    assert_parity(frozen, adamw, wrap=fully_sharded(process_group=mesh_of(2, 2), **form))


def routed() -> nn.Module:
    """Only ranks of the second machine use the second expert's own bias."""
    return Net(
        lambda net, x: net.experts[dist.get_rank() // 2](x),
        experts=nn.ModuleList(nn.Linear(5, 5) for _ in range(2)),
        never=nn.Parameter(torch.ones(3)),
    )


@on_ranks(4)
def test_an_original_parameter_has_a_gradient_if_any_replica_used_it() -> None:
    torch.manual_seed(0)
    model = fully_sharded(process_group=mesh_of(2, 2), use_orig_params=True)(routed())
    model(torch.ones(2, 5)).sum().backward()
    with_gradient = {name for name, param in model.named_parameters() if param.grad is not None}
    assert with_gradient == {f"experts.{n}.{kind}" for n in range(2) for kind in ("weight", "bias")}


@on_ranks(4)
def test_no_sync_sends_nothing() -> None:
    model = nested_mlp(fully_sharded(process_group=mesh_of(2, 2)))
    with model.no_sync():  # type: ignore[operator]
        model(torch.ones(2, 5)).sum().backward()
    assert all(handle.flat_param.has_unreduced for handle in model._unit.handles)  # type: ignore[union-attr]
    model(torch.ones(2, 5)).sum().backward()
    assert_replicas_agree(model)
    assert not any(handle.flat_param.has_unreduced for handle in model._unit.handles)  # type: ignore[union-attr]


@on_ranks(4)
def test_divide_factors_count_replicas() -> None:
    model: Any = fully_sharded(process_group=mesh_of(2, 2))(nn.Linear(4, 1, bias=False))
    assert model.gradient_predivide_factor * model.gradient_postdivide_factor == 4
    model(torch.ones(1, 4)).sum().backward()
    assert model.params[0].grad.tolist() == [1.0, 1.0]
    model.zero_grad()
    model.set_gradient_divide_factors(1.0, 1.0)
    model(torch.ones(1, 4)).sum().backward()
    assert model.params[0].grad.tolist() == [4.0, 4.0]


# The sum over replicas


@parametrize_pairs(torchs=[False, True], numel=[1, 5, 6], dtype=[torch.float32, torch.bfloat16])
def test_a_sum_in_stages(ranks: RankPool, numel: int, dtype: torch.dtype, torchs: bool) -> None:
    sums = ranks(3).run(_sum_in_stages, numel, dtype, torchs)
    assert sums[0] == sums[1] == sums[2]
    assert sums[0] == [3 * number + 3 for number in range(numel)]


def _sum_in_stages(numel: int, dtype: torch.dtype, torchs: bool) -> list[float]:
    use_torch_collectives(torchs)
    try:
        comm = communicator(default_group(None), torch.device("cpu"))
    finally:
        use_torch_collectives(False)
    stages = summed(comm, torch.arange(numel, dtype=torch.float32) + comm.rank, dtype, "a sum", comm.new_tag())
    while True:
        try:
            next(stages)
        except StopIteration as end:
            comm.settle()
            total: Tensor = end.value
            assert total.shape == (numel,)
            return total.float().tolist()


@on_ranks(4)
def test_collectives_of_torch_do_as_well() -> None:
    use_torch_collectives(True)
    try:
        assert_parity(nested_mlp, sgd_with_momentum, wrap=fully_sharded(process_group=mesh_of(2, 2)))
    finally:
        use_torch_collectives(False)


@on_ranks(4)
def test_units_may_differ_in_what_they_replicate() -> None:
    # One plain, one with the roles of the groups swapped: one communicator then gathers and sums over replicas.
    groups = iter([mesh_of(2, 2), None, (mesh_of(2, 2).get_group(0), mesh_of(2, 2).get_group(1)), mesh_of(2, 2)])

    def wrap(module: nn.Module) -> nn.Module:
        return fully_sharded(process_group=next(groups))(module)

    assert_parity(nested_mlp, sgd_with_momentum, wrap=wrap, clip=0.1)
