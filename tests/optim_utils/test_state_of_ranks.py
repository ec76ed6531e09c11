"""An optimizer's own state dict says whose shards it is of, beside its groups, and other ranks' shards are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fsdp
from fsdp import FullyShardedDataParallel, optim_utils
from fsdp.layers.optimizer_states import SHARDS_OF
from tests.helpers.equality import assert_same
from tests.helpers.on_ranks import on_ranks
from tests.helpers.optimizers import adam, from_first, garden, train
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.parity import fully_sharded
from tests.helpers.ranks import RankPool

FORMS: list[dict[str, Any]] = [{}, {"use_orig_params": True}, {"flatten_parameters": False}]
OF_ANOTHER = r"into this Adam is for the shards of rank {} of {}, but this rank has those of rank {} of {}.*fsdp\.save"


def trained(form: dict[str, Any], steps: int = 1) -> tuple[FullyShardedDataParallel, torch.optim.Optimizer]:
    model = garden(fully_sharded(**form))
    optimizer = adam(model)
    train(model, optimizer, range(steps))
    return model, optimizer


@pytest.mark.parametrize("form", FORMS, ids=str)
@on_ranks(1, 2)
def test_groups_are_as_torch_makes_them(tmp_path: Path, form: dict[str, Any]) -> None:
    model, optimizer = trained(form)
    own = optimizer.state_dict()
    fresh = adam(garden(fully_sharded(**form))).state_dict()
    assert own["param_groups"] == fresh["param_groups"]
    size = dist.get_world_size()
    assert own.get(SHARDS_OF) == ([[dist.get_rank(), size]] if size > 1 else None)
    full = from_first(model.gather_full_optim_state_dict(optimizer))
    assert SHARDS_OF not in full
    assert_same(model.get_shard_from_optim_state_dict(full), own)  # as FairScale's own tests compare them
    optimizer.load_state_dict(own)
    assert optimizer.state_dict()["param_groups"] == fresh["param_groups"]
    named = optim_utils.full_optim_state_dict(model, optimizer, recipient_rank=None)
    fsdp.save(tmp_path / "saved", model, optimizer)
    optim_utils.load_full_optim_state_dict(model, optimizer, named)
    train(model, optimizer, range(1, 2))
    fsdp.load(tmp_path / "saved", model, optimizer)
    train(model, optimizer, range(1, 2))
    assert optimizer.state_dict()["param_groups"] == fresh["param_groups"]


def _written_by_0_1_0(state: dict[str, Any]) -> dict[str, Any]:
    """The same with the signature in each group."""
    signature = state.pop(SHARDS_OF)
    return {**state, "param_groups": [{**group, SHARDS_OF: signature} for group in state["param_groups"]]}


@parametrize_pairs(form=FORMS, is_old=[False, True])
@on_ranks(3)
def test_the_shards_of_another_rank_are_refused(tmp_path: Path, form: dict[str, Any], is_old: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    other = (rank + 1) % size
    model, optimizer = trained(form)
    state = optimizer.state_dict()
    torch.save(_written_by_0_1_0(state) if is_old else state, tmp_path / f"{rank}.pt")
    dist.barrier()
    own, others = (torch.load(tmp_path / f"{each}.pt", weights_only=True) for each in (rank, other))
    before = optimizer.state_dict()
    with pytest.raises(RuntimeError, match=OF_ANOTHER.format(other, size, rank, size)):
        optimizer.load_state_dict(others)
    assert_same(optimizer.state_dict(), before)
    train(model, optimizer, range(1, 2))  # what was refused is forgotten

    resumed = garden(fully_sharded(**form))
    fresh = adam(resumed)
    fresh.load_state_dict(others)  # whose shards these are is known from the first forward on
    assert not any(SHARDS_OF in group for group in fresh.param_groups)
    with pytest.raises(RuntimeError, match=OF_ANOTHER.format(other, size, rank, size)):
        train(resumed, fresh, range(1, 2))
    fresh.load_state_dict(own)
    assert not any(SHARDS_OF in group for group in fresh.param_groups)
    train(resumed, fresh, range(1, 2))


def test_shards_of_another_number_of_ranks_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2).run(_save, tmp_path)
    ranks(3).run(_load, tmp_path)


def _save(folder: Path) -> None:
    torch.save(trained({})[1].state_dict(), folder / f"{dist.get_rank()}.pt")


def _load(folder: Path) -> None:
    model, optimizer = trained({}, steps=0)
    optimizer.load_state_dict(torch.load(folder / "0.pt", weights_only=True))
    with pytest.raises(RuntimeError, match=OF_ANOTHER.format(0, 2, dist.get_rank(), 3)):
        train(model, optimizer, range(1))
