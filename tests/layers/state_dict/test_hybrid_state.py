"""Replicated shards outside of training: state dicts, copies, groups assigned later, and what ranks refuse."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fsdp import ShardingStrategy
from fsdp.distributed.comm_hooks import bf16_compress_hook
from tests.helpers.copied_twins import (
    FLAT,
    ORIGINAL,
    UNFLATTENED,
    CopiedTwins,
    every_form,
    nested,
    tied_and_frozen,
    wrappers_in,
)
from tests.helpers.hybrid import assert_replicas_agree, every_nth, machines_of, mesh_of, neighbours
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import Case, parametrize_cases
from tests.helpers.parity import adamw, assert_parity, fully_sharded, sgd_with_momentum
from tests.helpers.tensor_parallel import SENTENCES, gpt

NONE, HYBRID = ShardingStrategy.NO_SHARD, ShardingStrategy.HYBRID_SHARD


def two_by_two() -> dict[str, Any]:
    return {"process_group": mesh_of(2, 2)}


def replicated() -> dict[str, Any]:
    return {"sharding_strategy": NONE}


def by_machine() -> dict[str, Any]:
    return {"sharding_strategy": HYBRID}


# State dicts


@every_form
@on_ranks(4)
def test_states_are_exchanged_with_plain_sharding(options: dict[str, Any]) -> None:
    plain, hybrid, whole = (nested(fully_sharded(**how, **options)) for how in ({}, two_by_two(), replicated()))
    for number, (source, target) in enumerate(((plain, hybrid), (hybrid, whole), (whole, plain))):
        with source.summon_full_params(), torch.no_grad():
            for param in source.parameters():
                param.add_(1.0 + number)
        state = source.state_dict()
        target.load_state_dict(state)
        assert_replicas_agree(target)
        for name, value in target.state_dict().items():
            assert torch.equal(value, state[name]), name


# Copies


@parametrize_cases(
    at_most=3,
    how=[two_by_two, replicated],
    options=[FLAT, ORIGINAL, UNFLATTENED],
    make=[nested, tied_and_frozen],
    travels=["deepcopy", "pickle"],
)
@on_ranks(4)
def test_copies_and_originals_train_apart(case: Case) -> None:
    twins = CopiedTwins.of(case.make, adamw, **case.how(), **case.options)
    twins.train(0)
    assigned = case.how().get("process_group")
    other = twins.copied(copy.deepcopy if case.travels == "deepcopy" else partial(through_pickle, group=assigned))
    for each, number in ((other, 1), (twins, 2)):
        each.train(number)
        each.assert_close()
        assert_replicas_agree(each.sharded)


def through_pickle(item: Any, group: Any) -> Any:
    """Pickled and unpickled, with `group` given to every wrapper."""
    model, *rest = pickle.loads(pickle.dumps(item))
    for wrapper in wrappers_in(model):
        assert wrapper.replicate_group == "MISSING"
        assert not wrapper.is_connected
        wrapper.process_group = group
    return model, *rest


@on_ranks(2)
def test_a_pickled_model_says_that_its_replicas_are_missing() -> None:
    for how in ({"process_group": mesh_of(2, 1)}, replicated()):
        model = pickle.loads(pickle.dumps(fully_sharded(**how)(nn.Linear(5, 5))))
        assert not model.is_connected
        with pytest.raises(RuntimeError, match="process groups cannot be pickled: assign `process_group`"):
            model(torch.ones(1, 5))


@on_ranks(4)
def test_groups_may_be_assigned_in_another_form() -> None:
    with machines_of(2):
        twins = CopiedTwins.of(nested, adamw, **by_machine())
        for number, group in enumerate((mesh_of(2, 2), (neighbours(2), every_nth(2)), None)):
            for wrapper in wrappers_in(twins.sharded):
                wrapper.process_group = group
            twins.train(number)
            twins.assert_close()
        model = twins.sharded
        model.process_group_reduce_scatter = neighbours(2)
        twins.train(5)
        twins.assert_close()
        assert (model.world_size, model.replicate_group.size()) == (2, 2)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ("other shards", ValueError, r"holds the shards of rank \d of 2, but is rank . of 4 in this process group"),
        ("other replicas", ValueError, r"averaged over 2 replicas, but this process group has 1"),
        ("one group", ValueError, r"LOCAL_WORLD_SIZE .* is missing"),
        ("no group", TypeError, "must be a process group that this rank is in"),
    ],
)
@on_ranks(4)
def test_groups_that_do_not_fit_the_shards(wrong: str, error: Any, message: str) -> None:
    model: Any = fully_sharded(**two_by_two())(nn.Linear(5, 5))
    before = model.process_group
    groups: dict[str, Any] = {
        "other shards": mesh_of(1, 4),
        "other replicas": (neighbours(2), neighbours(1)),
        "one group": None,
        "no group": 3,
    }
    with machines_of(None), pytest.raises(error, match=message):
        model.process_group = groups[wrong]
    assert model.process_group is before


# Agreement


@on_ranks(4)
def test_replicas_that_differ_are_found_by_all_ranks() -> None:
    width = 7 if dist.get_rank() == 3 else 6
    model = fully_sharded(**two_by_two())(nn.Linear(5, width))
    found = rf"rank {dist.get_rank()}: the ranks have built different models.*on rank 0 and .* on rank 3"
    with pytest.raises(RuntimeError, match=found):
        model(torch.ones(1, 5))


@on_ranks(2)
def test_plain_and_replicated_units_are_told_apart() -> None:
    alone = {"process_group": (neighbours(1), neighbours(1))}
    inner = fully_sharded(**(alone if dist.get_rank() else replicated()))(nn.Linear(5, 5))
    model = fully_sharded()(nn.Sequential(inner, nn.Linear(5, 5)))
    with pytest.raises(RuntimeError, match=r"and 2 replicas by DirectExchange: .*on rank 0 and .*on rank 1"):
        model(torch.ones(1, 5))


# Hooks


@pytest.mark.parametrize("how", [two_by_two, replicated])
@on_ranks(4)
def test_a_communication_hook_is_refused(how: Callable[[], dict[str, Any]]) -> None:
    inner = fully_sharded(**how())(nn.Linear(5, 5))
    model: Any = fully_sharded()(nn.Sequential(inner, nn.Linear(5, 5)))
    with pytest.raises(ValueError, match=r"^0: .*over \d replicas, along the replica axis.*reduce_dtype"):
        model.register_comm_hook(None, bf16_compress_hook)
    model(torch.ones(1, 5)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


# With other features


@pytest.mark.parametrize("how", [dict, two_by_two, replicated])
@on_ranks(4)
def test_gradients_that_a_failed_backward_had_sent_do_not_arrive_later(how: Callable[[], dict[str, Any]]) -> None:
    twins = CopiedTwins.of(nested, adamw, bucket_cap_mb=0, **how())
    twins.train(0)

    def give_up(*_: Any) -> None:
        raise KeyError("given up")

    hook = twins.sharded.module.entry.register_full_backward_hook(give_up)
    with pytest.raises(KeyError, match="given up"):
        twins.sharded(torch.ones(4, 5).requires_grad_()).sum().backward()
    hook.remove()
    twins.sharded.zero_grad()
    twins.train(1, 2)
    twins.assert_close()


@on_ranks(4)
def test_units_that_share_a_parameter_must_have_the_same_replicas() -> None:
    layers = [nn.Linear(5, 5) for _ in range(3)]
    for layer in layers[1:]:
        layer.weight = layers[0].weight
    unreplicated = {"process_group": mesh_of(2, 2).get_group("shard")}
    groups = (two_by_two(), two_by_two(), unreplicated)
    one, same, other = (
        fully_sharded(flatten_parameters=False, **group)(layer) for group, layer in zip(groups, layers, strict=True)
    )
    with pytest.raises(ValueError, match="units differ in process_group"):
        other.append_shared_param(one.params[0])  # type: ignore[operator,index]
    same.append_shared_param(one.params[0])  # type: ignore[operator,index]
    around = fully_sharded(**unreplicated)(nn.Sequential(one, same, nn.Linear(5, 5)))
    with pytest.raises(RuntimeError, match="it differs from them in their ranks"):
        around(torch.ones(1, 5))


# Tensor parallelism beside it


def cube(replicas: int, shards: int) -> Any:
    """Collective. Ranks that replicate, shard, and are tensor parallel, two of the last."""
    return init_device_mesh("cpu", (replicas, shards, 2), mesh_dim_names=("replicate", "shard", "tp"))


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
@on_ranks(4)
def test_tensor_parallel_layers(shape: tuple[int, int]) -> None:
    mesh = cube(*shape)
    mine = dist.get_rank() // 2

    def own(inputs: Tensor, targets: Tensor) -> list[tuple[Tensor, Tensor]]:
        return [(inputs.chunk(2)[mine], targets.chunk(2)[mine])]

    assert_parity(
        partial(gpt, mesh=mesh),
        sgd_with_momentum,  # Adam's first steps have the signs of roundings, which differ by the kernels of a processor
        3,
        wrap=fully_sharded(process_group=mesh["replicate", "shard"]),
        own=own,
        task=SENTENCES,
        clip=0.1,
    )


@on_ranks(4)
def test_what_is_spread_over_the_replicas_already_is_refused() -> None:
    layer = nn.Linear(4, 4, bias=False)
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh_of(2, 2)["replicate"], [Shard(0)]))
    with pytest.raises(ValueError, match=r"weight is a DTensor .* must use different dimensions of a mesh"):
        fully_sharded(**two_by_two())(layer)
