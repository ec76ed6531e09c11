"""Sharded states with torch's own tools: asynchronous saves, one file, torch's FSDP2, and what it costs on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

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
from tests.helpers.models import nested_mlp, tiny_transformer
from tests.helpers.on_ranks import on_ranks
from tests.helpers.parity import fully_sharded
from tests.helpers.ranks import RankPool

pytestmark = alone_warning


# Asynchronous saves


def by_default() -> dict[str, Any]:
    return {}


def shared_with_a_process() -> dict[str, Any]:
    return {"async_stager": DefaultStager(StagingOptions(False, True, False, False))}


def by_blocking_stager() -> dict[str, Any]:
    return {"async_stager": BlockingAsyncStager()}


@pytest.mark.parametrize("how", [by_default, shared_with_a_process, by_blocking_stager])
@on_ranks(2)
def test_a_model_may_train_on_while_its_state_is_written(tmp_path: Path, how: Callable[[], dict[str, Any]]) -> None:
    model: Any = tiny_transformer(fully_sharded(), seed=1)
    pending = dcp.async_save(model.sharded_state_dict(), checkpoint_id=tmp_path, **how())
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    pending.result()  # type: ignore[union-attr]
    assert_same_state(state_in(tmp_path, tiny_transformer), tiny_transformer(seed=1).state_dict())


@on_ranks(2)
def test_a_number_cannot_be_staged_as_a_plain_tensor(tmp_path: Path) -> None:
    model: Any = nested_mlp(fully_sharded())
    message = rf"rank {dist.get_rank()}: a plain tensor cannot hold scale.*pass async_stager=DefaultStager"
    with pytest.raises(NotImplementedError, match=message):
        dcp.async_save(model.sharded_state_dict(), checkpoint_id=tmp_path, async_stager=BlockingAsyncStager())
    dcp.async_save(model.sharded_state_dict(), checkpoint_id=tmp_path).result()  # type: ignore[union-attr]
    assert_same_state(state_in(tmp_path, nested_mlp), nested_mlp().state_dict())


# One file


def test_a_checkpoint_becomes_one_file(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2).run(_save, tmp_path / "folder")
    dcp_to_torch_save(tmp_path / "folder", tmp_path / "model.pt")
    model = everything()
    model.load_state_dict(torch.load(tmp_path / "model.pt"))
    assert_same_state(model.state_dict(), everything(seed=1).state_dict())


def _save(folder: Path) -> None:
    save_sharded(everything(fully_sharded(), seed=1), folder)


def test_one_file_becomes_a_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    torch.save(everything(seed=1).state_dict(), tmp_path / "model.pt")
    torch_save_to_dcp(tmp_path / "model.pt", tmp_path / "folder")
    ranks(2).run(_load, tmp_path / "folder")


def _load(folder: Path) -> None:
    model = everything(fully_sharded())
    load_sharded(model, folder)
    assert_whole_state(model, everything, seed=1)


# FSDP2


def _by_torch(seed: int) -> Any:
    """The language model under torch's FSDP2."""
    model: Any = tiny_transformer(seed=seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _whole(model: Any) -> dict[str, Tensor]:
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def test_fsdp2_loads_what_was_saved(ranks: RankPool, tmp_path: Path) -> None:
    ranks(3).run(_save_for_fsdp2, tmp_path)
    ranks(2).run(_load_by_fsdp2, tmp_path)


def _save_for_fsdp2(folder: Path) -> None:
    save_sharded(tiny_transformer(fully_sharded(), seed=1), folder)


def _load_by_fsdp2(folder: Path) -> None:
    model = _by_torch(seed=0)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state)
    assert_same_state(_whole(model), tiny_transformer(seed=1).state_dict())


def test_what_fsdp2_has_saved_is_loaded(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2).run(_save_by_fsdp2, tmp_path)
    ranks(3).run(_load_from_fsdp2, tmp_path)


def _save_by_fsdp2(folder: Path) -> None:
    dcp.save(_by_torch(seed=1).state_dict(), checkpoint_id=folder)


def _load_from_fsdp2(folder: Path) -> None:
    model = tiny_transformer(fully_sharded())
    load_sharded(model, folder)
    assert_whole_state(model, tiny_transformer, seed=1)


# torch.distributed.checkpoint.state_dict, and Stateful


class _Sharded:
    """As docs/state_dicts.md shows it: has DCP ask for the sharded state."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def state_dict(self) -> Any:
        return self.model.sharded_state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.model.load_sharded_state_dict(state_dict)


@on_ranks(2)
def test_dcp_asks_a_stateful_object_by_itself(tmp_path: Path) -> None:
    model, other = (nested_mlp(fully_sharded(), seed=seed) for seed in (1, 0))
    dcp.save({"model": _Sharded(model), "step": 3}, checkpoint_id=tmp_path)
    job = {"model": _Sharded(other), "step": 0}
    dcp.load(job, checkpoint_id=tmp_path)
    assert_whole_state(other, nested_mlp, seed=1)
    assert job["step"] == 3


# What is written


def test_every_element_is_written_once(ranks: RankPool, tmp_path: Path) -> None:
    ranks(3).run(_save, tmp_path)
    assert_written_once(tmp_path, everything(seed=1).state_dict())


def test_each_rank_writes_what_it_keeps(ranks: RankPool, tmp_path: Path) -> None:
    ranks(4).run(_save_large, tmp_path)
    sizes = [(tmp_path / f"__{rank}_0.distcp").stat().st_size for rank in range(4)]
    assert all(size == pytest.approx(512 * 512 * 4 / 4, rel=0.02) for size in sizes)


def _save_large(folder: Path) -> None:
    save_sharded(fully_sharded()(torch.nn.Linear(512, 512, bias=False)), folder)
