"""`sharding_strategy`: what each name does, that it agrees with the other options, and what is refused."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy as TorchStrategy

from fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy, auto_wrap_bn
from tests.helpers.hybrid import assert_replicas_agree, every_nth, machines_of, mesh_of, neighbours
from tests.helpers.models import Net, nested_mlp
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import Case, parametrize_cases, parametrize_pairs
from tests.helpers.parity import (
    Alone,
    Training,
    adamw,
    assert_parity,
    distance,
    fully_sharded,
    sgd_with_momentum,
    train_sharded,
)
from tests.helpers.ranks import RankPool

FULL, GRAD, NONE = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD
HYBRID, HYBRID_2 = ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2


def wrapped(**options: Any) -> Any:
    return fully_sharded(**options)(nn.Linear(4, 3))


# Names


def test_the_names_are_those_of_torch() -> None:
    torchs = list(TorchStrategy.__members__)
    assert list(ShardingStrategy.__members__)[: len(torchs)] == torchs


@on_ranks(2)
def test_members_of_torch_are_taken() -> None:
    for strategy in TorchStrategy:
        with machines_of(2):
            model = wrapped(sharding_strategy=strategy)
        assert model.sharding_strategy is ShardingStrategy[strategy.name]


@pytest.mark.parametrize("given", ["FULL_SHARD", 1, True])
def test_anything_else_is_refused(given: Any) -> None:
    with pytest.raises(TypeError, match=r"sharding_strategy must be an fsdp.ShardingStrategy \(FULL_SHARD, .*got "):
        wrapped(process_group=Alone(), sharding_strategy=given)


@on_ranks(4)
def test_without_one_the_other_options_say_it() -> None:
    expected = {(None, True): FULL, (None, False): GRAD, ("mesh", True): HYBRID, ("mesh", False): HYBRID_2}
    for (how, reshards), strategy in expected.items():
        model = wrapped(process_group=mesh_of(2, 2) if how else None, reshard_after_forward=reshards)
        assert model.sharding_strategy is strategy
        assert model.reshard_after_forward is reshards


# What each does


@pytest.mark.parametrize("strategy", [FULL, GRAD, HYBRID, HYBRID_2], ids=lambda strategy: strategy.name)
@on_ranks(2)
def test_whole_parameters_are_given_back_as_the_name_says(strategy: ShardingStrategy) -> None:
    hybrid = {"process_group": mesh_of(2, 1)} if strategy.is_hybrid else {}
    # Computed in another dtype, so that there is something to give back where nothing is shared, too.
    model = nested_mlp(
        fully_sharded(sharding_strategy=strategy, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16), **hybrid)
    )
    loss = model(torch.ones(1, 5)).sum()
    core: Any = model.trunk
    is_whole = core._unit.handles[0].unsharded.full.untyped_storage().size() > 0
    assert is_whole is (strategy in (GRAD, HYBRID_2))
    loss.backward()


@parametrize_cases(
    at_most=5,
    world_size=[2, 3, 1, 4],
    form=[{}, {"use_orig_params": True}, {"flatten_parameters": False}, {"reshard_after_forward": False}],
    bucket_cap_mb=[25, 0],
    accumulate=[1, 2],
    clip=[None, 0.1],
)
@on_ranks("world_size")
def test_no_shard_trains_as_one_process_does(case: Case) -> None:
    options = {"bucket_cap_mb": case.bucket_cap_mb, "sharding_strategy": NONE, **case.form}
    wrap = fully_sharded(**options)
    assert_parity(nested_mlp, sgd_with_momentum, wrap=wrap, accumulate=case.accumulate, clip=case.clip)
    model = nested_mlp(wrap)
    optimizer = sgd_with_momentum(model.parameters())
    model(torch.full((1, 5), 1.0 + dist.get_rank())).sum().backward()
    optimizer.step()
    assert_replicas_agree(model)


@on_ranks(2)
def test_no_shard_keeps_whole_parameters_and_gathers_nothing() -> None:
    model = wrapped(sharding_strategy=NONE)
    assert [param.shape for param in model.params] == [(4 * 3 + 3,)]
    assert (model.rank, model.world_size) == (0, 1)
    assert model.replicate_group is dist.group.WORLD
    handle = model._unit.handles[0]
    assert handle.unsharded.is_shard, "what modules see is the parameter itself"


@pytest.mark.parametrize("policy", [{"param_dtype": torch.bfloat16}, {"reduce_dtype": torch.bfloat16}], ids=str)
@on_ranks(2)
def test_no_shard_with_mixed_precision(policy: dict[str, Any]) -> None:
    training = Training(make_model=nested_mlp, make_optimizer=adamw)
    exact, plain, unsharded = (
        train_sharded(training, fully_sharded(**options))
        for options in (
            {},
            {"mixed_precision": MixedPrecision(**policy)},
            {"mixed_precision": MixedPrecision(**policy), "sharding_strategy": NONE},
        )
    )
    assert distance(unsharded, exact).weight <= 4 * distance(plain, exact).weight + 1e-6


@parametrize_pairs(offload=["cpu", "disk"], strategy=[NONE, HYBRID])
@on_ranks(4)
def test_offload(strategy: ShardingStrategy, offload: str, tmp_path: Any) -> None:
    folder = str(tmp_path)
    options: dict[str, Any] = (
        {"offload": offload, "offload_folder": folder} if offload == "disk" else {"offload": "cpu"}
    )
    with machines_of(2):
        wrap = fully_sharded(sharding_strategy=strategy, **options)
        assert_parity(nested_mlp, sgd_with_momentum, 2, wrap=wrap, clip=0.1)


def normed() -> nn.Module:
    """A batch norm, small and called often, inside of what is sharded."""
    return Net(
        lambda net, x: net.exit(torch.tanh(net.norm(net.entry(x)))),
        entry=nn.Linear(5, 6),
        norm=nn.LayerNorm(6),
        exit=nn.Linear(6, 1),
    )


@on_ranks(4)
def test_small_layers_are_replicated_and_averaged_inside_a_sharded_model() -> None:
    def make(wrap: Any) -> nn.Module:
        torch.manual_seed(0)
        model: Any = normed()
        if isinstance(wrap, type(fully_sharded())):
            model.norm = fully_sharded(sharding_strategy=NONE)(model.norm)
        return wrap(model)

    for options in ({}, {"process_group": mesh_of(2, 2)}):
        assert_parity(make, sgd_with_momentum, wrap=fully_sharded(**options), clip=0.1)


@on_ranks(2)
def test_batch_norms_may_be_replicated() -> None:
    norms = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6))
    config = {"sharding_strategy": NONE, "mixed_precision": False}
    model: Any = fully_sharded(mixed_precision=True, compute_dtype=torch.bfloat16)(
        auto_wrap_bn(norms, fsdp_config=config)
    )
    model(torch.randn(4, 5) + dist.get_rank()).sum().backward()
    assert model[1].sharding_strategy is NONE
    assert_replicas_agree(model)


# Groups to reduce over


@on_ranks(4)
def test_gradients_are_not_reduced_over_other_ranks_than_those_that_share_the_parameters() -> None:
    rank = dist.get_rank()
    crossing = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    groups = [(neighbours(2), crossing)]
    if "sort_ranks" in inspect.signature(dist.new_group).parameters:  # not in torch 2.11
        groups.append((dist.group.WORLD, dist.new_group([3, 2, 1, 0], sort_ranks=False)))
    for group, other in groups:
        module = nn.Linear(4, 4)
        with pytest.raises(ValueError, match="each rank would get the gradients of another shard"):
            FullyShardedDataParallel(module, group, other)
        fully_sharded(process_group=group)(module)(torch.ones(1, 4)).sum().backward()


# Machines


@pytest.mark.parametrize("machine", [1, 2, 4])
@on_ranks(4)
def test_hybrid_over_one_group_shards_within_a_machine(machine: int) -> None:
    with machines_of(machine):
        first, second = wrapped(sharding_strategy=HYBRID), wrapped(sharding_strategy=HYBRID)
    rank = dist.get_rank()
    assert (first.rank, first.world_size) == (rank % machine, machine)
    assert first.process_group is second.process_group, "groups are made once"
    assert first.replicate_group is second.replicate_group
    if machine == 4:
        assert first.process_group is dist.group.WORLD
        assert first.replicate_group is None
    else:
        replicas = dist.get_process_group_ranks(first.replicate_group)
        assert replicas == list(range(rank % machine, 4, machine))


@on_ranks(4)
def test_a_part_of_the_ranks_is_split_by_machines_too() -> None:
    with machines_of(2):
        model = wrapped(sharding_strategy=HYBRID, process_group=every_nth(2))  # one rank of each machine
    assert model.world_size == 1
    assert dist.get_process_group_ranks(model.replicate_group) == dist.get_process_group_ranks(every_nth(2))
    model(torch.ones(1, 4)).sum().backward()


@pytest.mark.parametrize("strategy", ShardingStrategy, ids=lambda strategy: strategy.name)
def test_in_a_world_of_one_all_are_the_same(strategy: ShardingStrategy) -> None:
    model = wrapped(process_group=Alone(), sharding_strategy=strategy)
    model(torch.ones(1, 4)).sum().backward()
    assert model.params[0].grad is not None
    assert float(model.clip_grad_norm_(1.0)) > 0


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        (None, r"LOCAL_WORLD_SIZE \(which torchrun sets\) is missing"),
        (3, r"is 3: that does not split ranks \[0, 1, 2, 3\] into equal machines.*or a 2-D DeviceMesh"),
        (0, "is 0: that does not split"),
    ],
)
@on_ranks(4)
def test_machines_that_nobody_knows(machine: int | None, message: str) -> None:
    with machines_of(machine), pytest.raises(ValueError, match=message):
        wrapped(sharding_strategy=HYBRID)


@on_ranks(2)
def test_ranks_that_disagree_about_machines() -> None:
    group = dist.new_group()  # that was not split before
    with (
        machines_of(1 + dist.get_rank()),
        pytest.raises(RuntimeError, match=r"different values of LOCAL_WORLD_SIZE: r"),
    ):
        wrapped(sharding_strategy=HYBRID_2, process_group=group)


@on_ranks(4)
def test_machines_are_found_by_ranks_that_are_in_different_numbers_of_groups() -> None:
    dist.new_group([0, 3])  # which the others are not in
    with machines_of(2):
        model = wrapped(sharding_strategy=HYBRID)
        model(torch.ones(1, 4)).sum().backward()
        assert (model.world_size, model.replicate_group.size()) == (2, 2)
        three = dist.new_group([0, 1, 2])
    if dist.get_rank() < 3:
        with machines_of(1):
            model = wrapped(sharding_strategy=HYBRID_2, process_group=three)
            model(torch.ones(1, 4)).sum().backward()
        assert (model.world_size, model.replicate_group.size()) == (1, 3)


# Contradictions


@pytest.mark.parametrize("strategy", [FULL, HYBRID], ids=lambda strategy: strategy.name)
def test_a_strategy_that_reshards_after_forward_cannot_keep_parameters(strategy: ShardingStrategy) -> None:
    with pytest.raises(
        ValueError,
        match=rf"{strategy.name} reshards after forward, which conflicts with reshard_after_forward=False: .*or use",
    ):
        wrapped(process_group=Alone(), sharding_strategy=strategy, reshard_after_forward=False)


@pytest.mark.parametrize("strategy", [GRAD, ShardingStrategy.SHARD_OPTIM, ShardingStrategy.SHARD_OPTIM_GRADS])
@pytest.mark.parametrize("after_forward", ["host", 2])
def test_a_strategy_that_keeps_parameters_cannot_reshard_them(strategy: ShardingStrategy, after_forward: Any) -> None:
    message = (
        f"{strategy.name} keeps parameters unsharded after forward, .* with reshard_after_forward={after_forward!r}"
    )
    with pytest.raises(ValueError, match=message):
        wrapped(process_group=Alone(), sharding_strategy=strategy, reshard_after_forward=after_forward)


@on_ranks(2)
def test_two_groups_are_for_hybrid_sharding() -> None:
    for groups, kind in ((mesh_of(1, 2), "2-D DeviceMesh"), ((neighbours(2), neighbours(1)), "pair of groups")):
        for strategy in (FULL, NONE):
            with pytest.raises(ValueError, match=rf"process_group is a {kind}, .*sharding_strategy is {strategy.name}"):
                wrapped(process_group=groups, sharding_strategy=strategy)


# Groups


@on_ranks(4)
def test_a_part_of_a_mesh() -> None:
    cube = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "tp", "shard"))
    with pytest.raises(ValueError, match=r'3-D DeviceMesh.*at most two.*mesh\["replicate", "tp"\]'):
        wrapped(process_group=cube)
    model = wrapped(process_group=cube["replicate", "shard"])
    assert (model.world_size, model.replicate_group.size()) == (2, 2)


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ("rows twice", "do not fit: rank 0 shards over ranks .0, 1. and replicates over .0, 1."),
        ("overlapping", "do not fit: rank 0 shards over ranks .0, 1, 2, 3. and replicates over .0, 2."),
        ("three", r"process_group is a tuple of 3: pass one group, or the pair \(shard_group, replicate_group\)"),
    ],
)
def test_pairs_that_do_not_fit(ranks: RankPool, pair: str, message: str) -> None:
    messages = ranks(4).run(_refuse_pair, pair)
    assert re.search(message, messages[0])
    what = message.partition("rank 0")[0]
    for rank, said in enumerate(messages):  # each speaks of its own groups
        assert re.search(what, said)
        assert pair == "three" or f"rank {rank} shards over" in said


def _refuse_pair(pair: str) -> str:
    groups = {
        "rows twice": (neighbours(2), neighbours(2)),
        "overlapping": (neighbours(4), every_nth(2)),
        "three": (neighbours(2), every_nth(2), every_nth(2)),
    }[pair]
    with pytest.raises(ValueError, match="process_group") as caught:
        wrapped(process_group=groups)
    return str(caught.value)


@on_ranks(2)
def test_groups_that_this_rank_is_not_in() -> None:
    rank = dist.get_rank()
    others = [dist.new_group([number]) for number in range(2)]
    meshes = [torch.distributed.device_mesh.DeviceMesh("cpu", [[number]]) for number in range(2)]
    for pair in ((others[1 - rank], others[rank]), (others[rank], others[1 - rank])):
        with pytest.raises(TypeError, match="must be a process group that this rank is in"):
            wrapped(process_group=pair)
    with pytest.raises(TypeError, match=r"a None in it"):
        wrapped(process_group=(None, others[rank]))
    with pytest.raises(ValueError, match=rf"rank {rank} is not in the mesh"):
        wrapped(process_group=meshes[1 - rank])
