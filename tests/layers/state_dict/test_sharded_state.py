"""`sharded_state_dict`: what `torch.distributed.checkpoint` writes of it anybody reads, and the other way round.

Everything is compared bit for bit, and saved and loaded at different world sizes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from tests.helpers.dcp_folders import (
    Everything,
    alone_warning,
    assert_whole_state,
    everything,
    load_sharded,
    save_sharded,
    state_in,
)
from tests.helpers.equality import assert_same_state
from tests.helpers.models import Wrap, keep, nested_mlp
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import Case, parametrize_cases, parametrize_pairs
from tests.helpers.parity import Alone, assert_parity, fully_sharded, sgd_with_momentum
from tests.helpers.ranks import RankPool

FOLDER = "offload folder"
POLICY = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16)

FORMS: list[dict[str, Any]] = [{}, {"use_orig_params": True}, {"flatten_parameters": False}]
REST: list[dict[str, Any]] = [
    {},
    {"mixed_precision": POLICY},
    {"offload": "cpu"},
    {"offload": "disk", "offload_folder": FOLDER},
    {"sharding_strategy": ShardingStrategy.NO_SHARD},
]

pytestmark = alone_warning


def with_folder(options: dict[str, Any], folder: Path) -> dict[str, Any]:
    return {name: folder if value == FOLDER else value for name, value in options.items()}


# Round trips


@parametrize_cases(
    at_most=5,
    saved_by=[3, 1, 2, 4],
    loaded_by=[2, 4, 1, 3],
    saving=FORMS,
    loading=FORMS,
    saving_too=REST,
    loading_too=REST,
)
def test_another_number_of_ranks_loads_what_was_saved_and_so_does_a_plain_model(
    ranks: RankPool, tmp_path: Path, case: Case
) -> None:
    folder = tmp_path / "state"
    ranks(case.saved_by).run(_save, folder, with_folder(case.saving | case.saving_too, tmp_path / "saving"))
    ranks(case.loaded_by).run(_load, folder, with_folder(case.loading | case.loading_too, tmp_path / "loading"))
    assert_same_state(state_in(folder, everything), everything(seed=1).state_dict())


def _save(folder: Path, options: dict[str, Any]) -> None:
    save_sharded(everything(fully_sharded(**options), seed=1), folder)


def _load(folder: Path, options: dict[str, Any]) -> None:
    model = everything(fully_sharded(**options))
    result = load_sharded(model, folder)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert_whole_state(model, everything, seed=1)


@parametrize_pairs(at_most=4, world_size=[3, 1, 2, 4], form=FORMS, rest=REST[:4])
def test_what_a_plain_model_has_saved_is_loaded(
    ranks: RankPool, tmp_path: Path, world_size: int, form: dict[str, Any], rest: dict[str, Any]
) -> None:
    dcp.save(everything(seed=1).state_dict(), checkpoint_id=tmp_path / "state", no_dist=True)
    ranks(world_size).run(_load, tmp_path / "state", with_folder(form | rest, tmp_path / "loading"))


# Training


class _Resumed:
    """Wraps a model and loads it."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self._folder, self._wrap = folder, fully_sharded(**options)

    def __call__(self, wrap: Wrap) -> nn.Module:
        if wrap is keep:
            return nested_mlp(seed=1)
        model = nested_mlp(self._wrap)
        with model.no_sync():  # type: ignore[operator]
            model(torch.ones(2, 5)).sum().backward()  # leaves parameters whole
        model.zero_grad()
        load_sharded(model, self._folder)
        return model


@parametrize_pairs(options=[*FORMS, {"offload": "cpu"}, {"reshard_after_forward": False}], world_size=[3, 4])
def test_a_loaded_model_trains_like_the_plain_one(
    ranks: RankPool, tmp_path: Path, options: dict[str, Any], world_size: int
) -> None:
    dcp.save(nested_mlp(seed=1).state_dict(), checkpoint_id=tmp_path, no_dist=True)
    ranks(world_size).run(_train, tmp_path, options)


def _train(folder: Path, options: dict[str, Any]) -> None:
    assert_parity(_Resumed(folder, **options), sgd_with_momentum, wrap=fully_sharded())


@on_ranks(3)
def test_ranks_that_keep_nothing_of_what_was_loaded_gather_again(tmp_path: Path) -> None:
    dcp.save({"scale": torch.tensor(-3.0)}, checkpoint_id=tmp_path)
    model: Any = nested_mlp(fully_sharded(reshard_after_forward=False))
    inputs = torch.ones(2, 5)
    with model.no_sync():
        before = model(inputs)
    state = {"scale": model.sharded_state_dict()["scale"]}
    dcp.load(state, checkpoint_id=tmp_path)
    model.load_sharded_state_dict(state, strict=False)
    assert not torch.equal(model(inputs), before)


# Models without values


@parametrize_pairs(options=FORMS, world_size=[3, 1])
def test_a_model_from_the_meta_device_is_loaded(
    ranks: RankPool, tmp_path: Path, options: dict[str, Any], world_size: int
) -> None:
    dcp.save(everything(seed=1).state_dict(), checkpoint_id=tmp_path, no_dist=True)
    ranks(world_size).run(_load_meta, tmp_path, options)


def _on_meta(**options: Any) -> Any:
    wrap = fully_sharded(**options)
    model = everything()
    inner = model.inner.to("meta")
    model.to("meta")
    model.head.weight = model.tokens.weight
    assert isinstance(model, Everything)
    model.inner = wrap(inner)
    return wrap(model)


def _load_meta(folder: Path, options: dict[str, Any]) -> None:
    model = _on_meta(**options)
    load_sharded(model, folder)
    assert_whole_state(model, everything, seed=1)


@on_ranks(3)
def test_what_was_not_loaded_goes_on_having_no_values(tmp_path: Path) -> None:
    dcp.save({"tokens.weight": everything(seed=1).tokens.weight.detach()}, checkpoint_id=tmp_path)
    model = _on_meta()
    state = model.sharded_state_dict()
    dcp.load(state, checkpoint_id=tmp_path, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    result = model.load_sharded_state_dict(state, strict=False)
    assert "tokens.weight" not in result.missing_keys
    assert {"wide", "table", "norm.running_mean", "inner.0.weight"} <= set(result.missing_keys)
    with pytest.raises(RuntimeError, match=r"\d+ of its parameters and buffers have no values yet"):
        model.state_dict()


@on_ranks(2)
def test_what_has_no_values_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match=r"(?s)cannot save \S+: it has no values yet.*materialize"):
        save_sharded(_on_meta(), tmp_path)


# What it costs


@on_ranks(3)
def test_taking_the_state_communicates_once_and_saving_copies_nothing() -> None:
    model: Any = nested_mlp(fully_sharded())
    model.sharded_state_dict()
    if dist.get_rank() == 0:  # no other rank takes part
        state = model.sharded_state_dict()
        shard = model.params[0]
        addresses = range(shard.data_ptr(), shard.data_ptr() + shard.nbytes)
        assert all(state[name].local.data_ptr() in addresses for name in ("scale", "entry.weight"))
    dist.barrier()


@on_ranks(3)
def test_a_load_leaves_the_model_alone_until_it_is_taken_over(tmp_path: Path) -> None:
    dcp.save(everything(seed=1).state_dict(), checkpoint_id=tmp_path)
    model = everything(fully_sharded())
    dcp.load(model.sharded_state_dict(), checkpoint_id=tmp_path)
    assert_whole_state(model, everything, seed=0)


@on_ranks(2)
def test_a_wrapper_inside_has_a_sharded_state_of_its_own(tmp_path: Path) -> None:
    model: Any = nested_mlp(fully_sharded(), seed=1)
    dcp.save(model.trunk.sharded_state_dict(prefix="trunk."), checkpoint_id=tmp_path)
    other: Any = nested_mlp()
    state = {name: value for name, value in other.state_dict().items() if name.startswith("trunk.")}
    dcp.load(state, checkpoint_id=tmp_path)
    other.load_state_dict(state, strict=False)
    source: Any = nested_mlp(seed=1)
    assert_same_state(other.trunk.state_dict(), source.trunk.state_dict())


def test_a_world_of_one_needs_no_process_group(tmp_path: Path) -> None:
    save_sharded(FullyShardedDataParallel(everything(seed=1), Alone()), tmp_path)
    model = FullyShardedDataParallel(everything(), Alone())
    load_sharded(model, tmp_path)
    assert_whole_state(model, everything, seed=1)
