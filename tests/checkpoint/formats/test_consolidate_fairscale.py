"""Shards that FairScale 0.4.13 wrote itself, after a step of training: `tests/tools/record_fairscale_shards.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp import FullyShardedDataParallel
from tests.helpers.equality import assert_same
from tests.helpers.legacy_sources import RECORDED, truth
from tests.helpers.local_shards import Shards, consolidated
from tests.helpers.models import keep
from tests.helpers.on_ranks import on_ranks
from tests.tools.record_fairscale_shards import CASES, make_model, make_wrapped

every_case = pytest.mark.parametrize("name", CASES)


def recorded(name: str) -> Shards:
    read = [torch.load(RECORDED / name / f"rank{rank}.pt", weights_only=True) for rank in range(CASES[name].ranks)]
    return [one["weights"] for one in read], [one["metadata"] for one in read]


@every_case
def test_fairscale_s_shards_become_its_whole_weights_with_all_ties(name: str) -> None:
    assert not dist.is_initialized()
    whole = consolidated(recorded(name))
    assert_same(whole, truth(name))
    assert whole["inner.0.weight"] is whole["inner.2.weight"]
    assert whole["first.weight"] is whole["last.weight"]


@every_case
def test_the_whole_weights_fit_the_plain_model(name: str) -> None:
    model = make_model(keep)
    model.load_state_dict(consolidated(recorded(name)))
    assert not torch.equal(model.state_dict()["first.weight"], make_model(keep).state_dict()["first.weight"])


@every_case
@on_ranks(lambda name: CASES[name].ranks)
def test_each_rank_loads_fairscale_s_shard(name: str) -> None:
    model: Any = _ours(name)
    weights, _ = recorded(name)
    result = model.load_local_state_dict(weights[dist.get_rank()])
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    found, expected = model.state_dict(), truth(name)
    if dist.get_rank() == 0:
        assert_same(found, expected)  # other ranks have batch norms' statistics, and lone units, of their own


@every_case
@on_ranks(lambda name: CASES[name].ranks)
def test_names_and_metadata_are_fairscale_s(name: str) -> None:
    model: Any = _ours(name)
    weights, metadata = (each[dist.get_rank()] for each in recorded(name))
    found = model.local_state_dict()
    assert {key: (value.shape, value.dtype) for key, value in found.items()} == {
        key: (value.shape, value.dtype) for key, value in weights.items()
    }
    ours = model.local_metadata_dict()
    if name == "unflattened-3":  # where FairScale's say nothing of ties
        assert [entry["shared_param_info"] for entry in metadata["param_metadata"]] == [[], []]
        metadata["param_metadata"][0]["shared_param_info"] = [("first.weight", "last.weight")]
        metadata["param_metadata"][1]["shared_param_info"] = [("0.weight", "2.weight")]
    if name == "alone-2" and dist.get_rank() == 1:  # of a unit that is read from rank 0 only
        ours["param_metadata"][1]["params"]["flat_param_0"]["padding"] = 0
    assert ours == metadata
    assert [list(entry["params"]) for entry in ours["param_metadata"]] == [
        list(entry["params"]) for entry in metadata["param_metadata"]
    ]


def _ours(name: str) -> nn.Module:
    return make_wrapped(FullyShardedDataParallel, CASES[name], CASES[name].ours)
