"""Sharded state dicts of kinds of parameters and groups: tied, ignored, tensor parallel, replicated, apart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import Replicate, Shard

from fsdp import FullyShardedDataParallel, ShardingStrategy, auto_wrap_bn
from tests.helpers.dcp_folders import (
    alone_warning,
    assert_whole_state,
    assert_written_once,
    everything,
    load_sharded,
    save_sharded,
    state_in,
)
from tests.helpers.equality import assert_same_state
from tests.helpers.hybrid import assert_replicas_agree, mesh_of, neighbours
from tests.helpers.models import Wrap, keep, nested_mlp, tiny_transformer
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import Case, parametrize_cases, parametrize_pairs
from tests.helpers.parity import fully_sharded
from tests.helpers.ranks import RankPool
from tests.helpers.tensor_parallel import cube, gpt, over_data, perceptron
from tests.helpers.tensor_parallel import mesh_of as tensor_mesh
from tests.helpers.tied_siblings import KINDS

pytestmark = alone_warning

FORMS: list[dict[str, Any]] = [{}, {"use_orig_params": True}, {"flatten_parameters": False}]


# Tied


@parametrize_pairs(options=FORMS, world_size=[3, 2])
@on_ranks("world_size")
def test_a_tied_parameter_is_saved_under_each_name(tmp_path: Path, options: dict[str, Any]) -> None:
    save_sharded(_tied(fully_sharded(**options), seed=1), tmp_path)
    assert_same_state(state_in(tmp_path, _tied), _tied(seed=1).state_dict())
    model: Any = _tied(fully_sharded(**options))
    load_sharded(model, tmp_path)
    assert_whole_state(model, _tied, seed=1)
    with model.summon_full_params():
        assert model.head.weight is model.tokens.weight


def _tied(wrap: Wrap = keep, seed: int = 0) -> nn.Module:
    return tiny_transformer(wrap, tied=True, seed=seed)


@pytest.mark.parametrize(("make", "wrap"), KINDS)
@on_ranks(2)
def test_parameters_that_units_share(
    tmp_path: Path, make: Callable[[], nn.Module], wrap: Callable[..., nn.Module]
) -> None:
    torch.manual_seed(1)
    plain = make()
    torch.manual_seed(1)
    save_sharded(wrap(make(), fully_sharded()), tmp_path)
    assert_same_state(state_in(tmp_path, lambda seed: make()), plain.state_dict())
    torch.manual_seed(2)
    model = wrap(make(), fully_sharded())
    load_sharded(model, tmp_path)
    assert_same_state(model.state_dict(), plain.state_dict())


# Not sharded


@on_ranks(2)
def test_ignored_parameters_are_saved_and_loaded_with_the_rest(tmp_path: Path) -> None:
    save_sharded(_with_ignored(1), tmp_path)
    assert_same_state(state_in(tmp_path, nested_mlp), nested_mlp(seed=1).state_dict())
    model = _with_ignored(0)
    weight = model.module.module.entry.weight
    load_sharded(model, tmp_path)
    assert_whole_state(model, nested_mlp, seed=1)
    assert model.module.module.entry.weight is weight


def _with_ignored(seed: int) -> Any:
    plain: Any = nested_mlp(seed=seed)
    return FullyShardedDataParallel(plain, ignored_modules=[plain.entry], ignored_parameters=[plain.scale])


class WithExtraState(nn.Linear):
    """Saves something of its own."""

    note: Any = "first"

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


@on_ranks(2)
def test_extra_state_is_saved_and_loaded(tmp_path: Path) -> None:
    model: Any = FullyShardedDataParallel(WithExtraState(3, 4))
    model.module.module.note = "second"
    save_sharded(model, tmp_path)
    other: Any = FullyShardedDataParallel(WithExtraState(3, 4))
    load_sharded(other, tmp_path)
    assert other.module.module.note == "second"


@on_ranks(2)
def test_names_that_hooks_change_are_those_of_the_plain_model(tmp_path: Path) -> None:
    save_sharded(_recomputing(fully_sharded(), seed=1), tmp_path)
    found = state_in(tmp_path, _recomputing)
    assert_same_state(found, _recomputing(seed=1).state_dict())
    assert list(found) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    model = _recomputing(fully_sharded())
    load_sharded(model, tmp_path)
    assert_whole_state(model, _recomputing, seed=1)


def _recomputing(wrap: Wrap = keep, seed: int = 0) -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    torch.manual_seed(seed)
    return wrap(nn.Sequential(checkpoint_wrapper(nn.Linear(3, 4)), wrap(checkpoint_wrapper(nn.Linear(4, 3)))))


# Replicas


@parametrize_pairs(shape=[(2, 2), (4, 1), (1, 4)], options=FORMS)
@on_ranks(4)
def test_replicas_write_nothing_twice(tmp_path: Path, shape: tuple[int, int], options: dict[str, Any]) -> None:
    hybrid = fully_sharded(process_group=mesh_of(*shape), **options)
    save_sharded(everything(hybrid, seed=1), tmp_path)
    expected = everything(seed=1).state_dict()
    assert_written_once(tmp_path, expected)
    assert_same_state(state_in(tmp_path, everything), expected)
    model = everything(hybrid)
    load_sharded(model, tmp_path)
    assert_same_state(model.state_dict(), expected)
    assert_replicas_agree(model)


# Tensor parallelism


@parametrize_cases(
    at_most=6,
    saved_by=[(2, 2), (1, 2), (2, 1), (1, 4)],
    loaded_by=[(2, 1), (2, 2), (1, 3), (4, 1)],
    kind=["heads", "sequence"],
    model=[{}, {"vocabulary": True}, {"vocabulary": True, "tied": True}],
    options=FORMS,
)
def test_parts_of_dtensors_are_saved_and_loaded(ranks: RankPool, tmp_path: Path, case: Case) -> None:
    if (case.loaded_by == (1, 3) and case.kind == "heads") or (case.saved_by == (1, 4) and case.kind == "sequence"):
        pytest.skip("that many ranks do not divide heads, or rows")
    how = {"kind": case.kind, **case.model}
    ranks(case.saved_by[0] * case.saved_by[1]).run(_save_parallel, tmp_path, case.saved_by, how, case.options)
    ranks(case.loaded_by[0] * case.loaded_by[1]).run(_load_parallel, tmp_path, case.loaded_by, how, case.options)


def _plain_gpt(how: dict[str, Any], seed: int) -> Any:
    return gpt(tied=how.get("tied", False), seed=seed)


def _save_parallel(folder: Path, shape: tuple[int, int], how: dict[str, Any], options: dict[str, Any]) -> None:
    mesh = tensor_mesh(*shape)
    save_sharded(gpt(over_data(mesh, **options), mesh=mesh, seed=1, **how), folder)


def _load_parallel(folder: Path, shape: tuple[int, int], how: dict[str, Any], options: dict[str, Any]) -> None:
    expected = _plain_gpt(how, seed=1).state_dict()
    assert_same_state(state_in(folder, lambda seed: _plain_gpt(how, seed)), expected)
    mesh = tensor_mesh(*shape)
    model = gpt(over_data(mesh, **options), mesh=mesh, **how)
    load_sharded(model, folder)
    assert_same_state(model.state_dict(), expected)


@on_ranks(4)
def test_uneven_parts_and_several_mesh_dimensions(tmp_path: Path) -> None:
    cuts: list[tuple[Any, Any, Any, int]] = [
        (tensor_mesh(2, 2), "tp", [[Shard(0)], [Shard(1)]], 1),
        (cube(), ("a", "b"), [[Shard(0), Shard(0)], [Shard(1), Replicate()]], 7),
        (cube(), ("a", "b"), [[Shard(0), Shard(1)], [Shard(1), Shard(0)]], 1),
    ]
    for number, (mesh, dims, placements, hidden) in enumerate(cuts):
        cut: Any = {"mesh": mesh[dims], "hidden": hidden, "placements": placements}
        model, plain = perceptron(over_data(mesh), **cut), perceptron(**cut)
        save_sharded(model, tmp_path / str(number))
        assert_same_state(state_in(tmp_path / str(number), lambda seed, cut=cut: perceptron(**cut)), plain.state_dict())
        doubled = {name: 2 * value for name, value in plain.state_dict().items()}
        dcp.save(doubled, checkpoint_id=tmp_path / f"doubled {number}")
        load_sharded(model, tmp_path / f"doubled {number}")
        assert_same_state(model.state_dict(), doubled)


# Units with ranks of their own


def _with_experts(size: int, seed: int = 0) -> Any:
    """A layer of all ranks, and an expert that `size` ranks share; each such group has another one."""
    torch.manual_seed(seed)
    first, expert = nn.Linear(5, 5), nn.Linear(5, 5)
    with torch.no_grad():
        expert.weight.add_(dist.get_rank() // size)
    inner = fully_sharded(process_group=neighbours(size))(expert)
    return fully_sharded()(nn.Sequential(first, inner))


@pytest.mark.parametrize("size", [2, 1])
@on_ranks(4)
def test_experts_that_would_be_mixed_are_not_saved(tmp_path: Path, size: int) -> None:
    with pytest.raises(CheckpointException, match=r"(?s)cannot save 1\.\w+: its unit has a process group of its own"):
        save_sharded(_with_experts(size), tmp_path)


@pytest.mark.parametrize("size", [2, 1])
@on_ranks(4)
def test_experts_are_saved_under_names_of_their_own(tmp_path: Path, size: int) -> None:
    expert = dist.get_rank() // size

    def renamed(state: Any) -> dict[str, Any]:
        return {f"expert {expert}: {key}" if key.startswith("1.") else key: value for key, value in state.items()}

    source = _with_experts(size, seed=1)
    dcp.save(renamed(source.sharded_state_dict()), checkpoint_id=tmp_path)
    model = _with_experts(size)
    state = renamed(model.sharded_state_dict())
    dcp.load(state, checkpoint_id=tmp_path)
    model.load_sharded_state_dict({key.split(": ")[-1]: value for key, value in state.items()})
    assert_same_state(model.state_dict(), source.state_dict())


@on_ranks(2)
def test_batch_norms_that_each_rank_trains_are_saved_as_buffers_are(tmp_path: Path) -> None:
    model: Any = fully_sharded()(auto_wrap_bn(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), single_rank_pg=True))
    with torch.no_grad():
        model.module.module[1].weight.fill_(dist.get_rank() + 1)
    save_sharded(model, tmp_path)
    assert state_in(tmp_path, lambda seed: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))["1.weight"][0] in (1, 2)


@on_ranks(2)
def test_layers_that_are_not_sharded_are_saved_once(tmp_path: Path) -> None:
    first, second = _two_layers()
    whole = fully_sharded(sharding_strategy=ShardingStrategy.NO_SHARD)
    save_sharded(fully_sharded()(nn.Sequential(first, whole(second))), tmp_path)
    assert_written_once(tmp_path, _two_layers().state_dict())
    assert_same_state(state_in(tmp_path, _two_layers), _two_layers().state_dict())


def _two_layers(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 6))
