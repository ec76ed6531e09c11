"""Full state dicts that only the first rank has: saved from all, and loaded into all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp import FullyShardedDataParallel, MixedPrecision, auto_wrap_bn
from tests.helpers.equality import assert_same_state
from tests.helpers.models import nested_mlp
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.parity import fully_sharded
from tests.helpers.state_dicts import LAYER_BYTES, LAYERS, LiveBytes, at_most, train, zoo
from tests.helpers.twins import assert_at_rest
from tests.layers.state_dict.test_state_dict import keep

FORMS: list[dict[str, Any]] = [
    {},
    {"flatten_parameters": False},
    {"use_orig_params": True},
    {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)},
    {"move_params_to_cpu": True},
]


def is_first() -> bool:
    return dist.get_rank() == 0


# Saving


@parametrize_pairs(at_most=7, world_size=[2, 1, 3], options=FORMS, by=["option", "argument"])
@on_ranks("world_size")
def test_only_the_first_rank_gets_the_state(options: dict[str, Any], by: str) -> None:
    if by == "option":
        model = zoo(fully_sharded(**options, state_dict_on_rank_0_only=True))
        everywhere, state = model.state_dict(rank0_only=False), model.state_dict()
    else:
        model = zoo(fully_sharded(**options))
        everywhere, state = model.state_dict(), model.state_dict(rank0_only=True)
    assert_same_state(everywhere, zoo().state_dict())
    if is_first():
        assert_same_state(state, everywhere)
        assert state._metadata.keys() == zoo().state_dict()._metadata.keys()
    else:
        assert not state
    if "mixed_precision" not in options:  # the zoo mixes dtypes itself
        train(model)
    assert_at_rest(model)


@on_ranks(2)
def test_inside_a_plain_module_other_ranks_have_the_rest() -> None:
    parent = nn.ModuleDict({"before": nn.Linear(2, 2), "child": zoo(fully_sharded(state_dict_on_rank_0_only=True))})
    expected = nn.ModuleDict({"before": nn.Linear(2, 2), "child": zoo()}).state_dict()
    state = parent.state_dict()
    wanted = list(expected) if is_first() else [key for key in expected if key.startswith("before")]
    assert list(state) == wanted


@on_ranks(4)
def test_replicas_send_nothing_and_get_nothing() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = zoo(fully_sharded(process_group=mesh, state_dict_on_rank_0_only=True))
    state = model.state_dict()
    if is_first():
        assert_same_state(state, zoo().state_dict())
    else:
        assert not state
    loaded = zoo(seed=1).state_dict()
    model.load_state_dict(loaded if is_first() else None, rank0_only=True)
    assert_same_state(model.state_dict(rank0_only=False), loaded)
    train(model)


@on_ranks(2)
def test_units_with_ranks_of_their_own_are_part_of_it() -> None:
    inner = auto_wrap_bn(_norms(), single_rank_pg=True)
    model: Any = FullyShardedDataParallel(inner, state_dict_on_rank_0_only=True)
    state = model.state_dict()
    assert list(state) == (list(_norms().state_dict()) if is_first() else [])
    doubled = {key: value * 2 for key, value in state.items()}
    model.load_state_dict(doubled if is_first() else None, rank0_only=True)
    assert torch.equal(model.state_dict(rank0_only=False)["1.weight"], torch.full((4,), 2.0))


def _norms() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


@on_ranks(2)
def test_what_is_cast_and_where_it_is_put_is_as_asked() -> None:
    state = zoo(fully_sharded()).state_dict(dtype=torch.bfloat16, rank0_only=True)
    if is_first():
        assert_same_state(state, zoo(fully_sharded(process_group=dist.new_group([0]))).state_dict(dtype=torch.bfloat16))
    else:
        dist.new_group([0])
        assert not state


@on_ranks(2)
def test_other_ranks_need_no_memory() -> None:
    model = _layers()
    if is_first():
        with at_most(LAYERS * LAYER_BYTES):
            state = model.state_dict(rank0_only=True)
        with at_most(0):
            model.load_state_dict(state, rank0_only=True)
        return
    with LiveBytes() as live:
        model.state_dict(rank0_only=True)
        model.load_state_dict(None, rank0_only=True)
    assert live.peak < LAYER_BYTES, "not even a unit"


def _layers() -> Any:
    wrap = fully_sharded()
    return wrap(nn.Sequential(*(wrap(nn.Linear(64, 64, bias=False)) for _ in range(LAYERS)), nn.Linear(64, 1)))


# Loading


@parametrize_pairs(at_most=8, world_size=[2, 1, 3], options=FORMS, given=["nothing", "none", "other"])
@on_ranks("world_size")
def test_every_rank_gets_what_the_first_one_has(options: dict[str, Any], given: str) -> None:
    model = zoo(fully_sharded(**options))
    expected = zoo(seed=1)
    elsewhere = {"nothing": {}, "none": None, "other": zoo(seed=2).state_dict()}[given]
    result = model.load_state_dict(expected.state_dict() if is_first() else elsewhere, rank0_only=True)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert_same_state(model.state_dict(), expected.state_dict())
    if "mixed_precision" not in options:
        train(model)
    assert_at_rest(model)


@on_ranks(2)
def test_what_is_missing_stays_and_all_ranks_are_told() -> None:
    model, state = zoo(fully_sharded()), zoo(seed=1).state_dict()
    del state["trunk.0.weight"], state["trunk.2.1.running_mean"]
    state["extra"] = torch.ones(1)
    result = model.load_state_dict(state if is_first() else None, strict=False, rank0_only=True)
    assert sorted(result.missing_keys) == ["trunk.0.weight", "trunk.2.1.running_mean"]
    assert result.unexpected_keys == ["extra"]
    found, before = model.state_dict(), zoo().state_dict()
    assert torch.equal(found["trunk.0.weight"], before["trunk.0.weight"])
    assert torch.equal(found["trunk.2.0.weight"], state["trunk.2.0.weight"])


@on_ranks(2)
def test_every_rank_is_told_of_a_sparse_buffer() -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("adjacency", torch.eye(2).to_sparse())
    model = fully_sharded()(module)
    state = model.state_dict()
    with pytest.raises((RuntimeError, TypeError), match=r"adjacency is a torch\.sparse_coo tensor.*on every rank"):
        model.load_state_dict(state if is_first() else None, rank0_only=True)
    model.load_state_dict(state)
    assert_at_rest(model)


@on_ranks(2)
def test_what_does_not_fit_is_an_error_on_all_ranks_and_changes_nothing() -> None:
    model = zoo(fully_sharded())
    state = zoo(seed=1).state_dict()
    state["trunk.0.weight"] = torch.ones(2, 2)
    with pytest.raises(RuntimeError, match=r"size mismatch for trunk.0.weight"):
        model.load_state_dict(state if is_first() else None, rank0_only=True)
    assert_same_state(model.state_dict(), zoo().state_dict())
    with pytest.raises((RuntimeError, TypeError), match="rank 0 must pass a state dict, but passed a list"):
        model.load_state_dict([1] if is_first() else state, rank0_only=True)
    train(model)


@pytest.mark.parametrize("rank0_only", [True, False])
@on_ranks(2)
def test_a_state_that_does_not_fit_on_one_rank_is_an_error_on_all(rank0_only: bool) -> None:
    model, state = zoo(fully_sharded()), zoo(seed=1).state_dict()
    bad = 0 if rank0_only else 1
    if dist.get_rank() == bad:
        del state["trunk.0.weight"]
    said = "" if rank0_only or dist.get_rank() == bad else "rank 1 could not load its state dict.*"
    with pytest.raises(RuntimeError, match=rf"(?s){said}Missing key\(s\) in state_dict: \"trunk.0.weight\""):
        model.load_state_dict(state, rank0_only=rank0_only)
    assert_same_state(model.state_dict(), zoo().state_dict())


@pytest.mark.parametrize("failing", [0, 1])
@on_ranks(2)
def test_a_load_hook_that_fails_on_one_rank_stops_all(failing: int) -> None:
    def fail(module: nn.Module, *rest: Any) -> None:
        raise ValueError("of the user")

    model, state = nested_mlp(fully_sharded()), nested_mlp().state_dict()
    hooks = []
    if dist.get_rank() == failing:
        hooks = [model.module.module.trunk.module[2].register_load_state_dict_pre_hook(fail)]
    error = ValueError if dist.get_rank() == failing else RuntimeError
    with pytest.raises(error, match="of the user"):
        model.load_state_dict(state if is_first() else None, rank0_only=True)
    for hook in hooks:
        hook.remove()
    doubled = {key: 2 * value for key, value in state.items()}
    model.load_state_dict(doubled if is_first() else None, rank0_only=True)
    assert_same_state(model.state_dict(), doubled)
    assert_at_rest(model)


class Grown(nn.Linear):
    """Loads weights of fewer rows into its first ones."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        given = state_dict[prefix + "weight"]
        with torch.no_grad():
            self.weight[: len(given)].copy_(given)


@pytest.mark.parametrize("rank0_only", [True, False])
@on_ranks(2)
def test_a_load_method_that_writes_a_part_leaves_the_rest(rank0_only: bool) -> None:
    model: Any = FullyShardedDataParallel(nn.Sequential(Grown(4, 6, bias=False), nn.Linear(6, 2)))
    before = model.state_dict()
    given: dict[str, Tensor] = {**before, "0.weight": torch.full((2, 4), 7.0)}
    model.load_state_dict(given if is_first() or not rank0_only else None, rank0_only=rank0_only)
    after = model.state_dict()["0.weight"]
    assert torch.equal(after[:2], given["0.weight"])
    assert torch.equal(after[2:], before["0.weight"][2:])


@on_ranks(2)
def test_a_model_from_the_meta_device_begins_with_it() -> None:
    with torch.device("meta"):
        model: Any = nested_mlp(fully_sharded(compute_device="cpu"))
    expected = nested_mlp(keep)
    model.load_state_dict(expected.state_dict() if is_first() else None, rank0_only=True)
    assert_same_state(model.state_dict(), expected.state_dict())
    with torch.no_grad():
        assert torch.equal(model(torch.ones(2, 5)), expected(torch.ones(2, 5)))
