"""Which ranks' shards make the whole: with replicas, and where a unit has other ranks than the one around it."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp import FullyShardedDataParallel, ShardingStrategy
from tests.helpers.equality import assert_same
from tests.helpers.hybrid import every_nth, group_option, neighbours
from tests.helpers.local_shards import awkward, consolidated, different, through_files
from tests.helpers.models import Wrap, nested_mlp
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.parity import Alone, fully_sharded
from tests.helpers.tensor_parallel import gpt, mesh_of, over_data

# Replicas


@parametrize_pairs(given=[4, 2], form=[{}, {"use_orig_params": True}])
@on_ranks(4)
def test_replicas_may_be_given_or_not(tmp_path: Path, given: int, form: dict[str, Any]) -> None:
    model = awkward(fully_sharded(process_group=group_option("mesh", 2, 2), **form))
    weights, metadata = through_files(model, tmp_path)
    assert_same(consolidated((weights[:given], metadata[:given])), awkward().state_dict())
    for key in ("flat_param_0", "inner.flat_param_0") if not form else ():
        assert torch.equal(weights[0][key], weights[2][key])


@on_ranks(4)
def test_another_replica_than_the_first_is_refused(tmp_path: Path) -> None:
    model = nested_mlp(fully_sharded(process_group=group_option("pair", 2, 2)))
    weights, metadata = through_files(model, tmp_path)
    with pytest.raises(ValueError, match="'flat_param_0' has 0 elements on the 2 ranks given"):
        consolidated((weights[2:], metadata[2:]))


@on_ranks(4)
def test_each_replica_loads_the_same_shards(tmp_path: Path) -> None:
    group = group_option("pair", 2, 2)
    weights, _ = through_files(nested_mlp(fully_sharded(process_group=group)), tmp_path)
    model: Any = different(nested_mlp, process_group=group)
    model.load_local_state_dict(weights[dist.get_rank() % 2])
    assert_same(model.state_dict(), nested_mlp().state_dict())


@pytest.mark.parametrize("given", [3, 1])
@on_ranks(2)
def test_without_sharding_any_first_ranks_will_do(tmp_path: Path, given: int) -> None:
    model = awkward(fully_sharded(sharding_strategy=ShardingStrategy.NO_SHARD))
    weights, metadata = through_files(model, tmp_path)
    assert_same(consolidated((weights[:given], metadata[:given])), awkward().state_dict())


# Units with ranks of their own


def inner_in(group: Any) -> nn.Module:
    """A unit over `group` inside of one over all ranks; each rank seeds its inner one by its group."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))
    torch.manual_seed(min(dist.get_process_group_ranks(group)))
    nn.init.normal_(layers[1].weight)
    layers[1] = FullyShardedDataParallel(layers[1], group)
    return FullyShardedDataParallel(layers)


@cache
def alone() -> Any:
    """Collective. This rank's group of itself."""
    return [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]


@pytest.mark.parametrize("group", [partial(neighbours, 2), partial(every_nth, 2), alone], ids=["next", "nth", "alone"])
@on_ranks(4)
def test_the_first_rank_s_group_gives_a_unit_s_weights(tmp_path: Path, group: Any) -> None:
    model: Any = inner_in(group())
    whole = consolidated(through_files(model, tmp_path))
    (expected,) = _of_first(model.state_dict())
    assert_same(whole, expected)


def _of_first(state: Any) -> list[Any]:
    found = [dict(state)]
    dist.broadcast_object_list(found, src=0)
    return found


@on_ranks(4)
def test_only_units_of_one_rank_inside_of_more_are_not_broadcast() -> None:
    model: Any = inner_in(alone())
    said = [entry["no_broadcast_optim_state"] for entry in model.local_metadata_dict()["param_metadata"]]
    model(torch.randn(2, 3))
    shown = [model.no_broadcast_optim_state, model.module.module[1].no_broadcast_optim_state]
    pairs: Any = inner_in(neighbours(2))
    said_of_pairs = [entry["no_broadcast_optim_state"] for entry in pairs.local_metadata_dict()["param_metadata"]]
    assert (said, shown, said_of_pairs) == ([False, True], [False, True], [False, False])


def test_a_world_of_one_without_torch_distributed() -> None:
    wrap: Wrap = partial(FullyShardedDataParallel, process_group=Alone())
    model: Any = awkward(wrap)
    assert_same(consolidated(([model.local_state_dict()], [model.local_metadata_dict()])), awkward().state_dict())


# Tensor parallelism


@on_ranks(4)
def test_dtensors_go_round_on_the_same_ranks_and_have_no_metadata() -> None:
    mesh = mesh_of(2, 2)
    model: Any = gpt(over_data(mesh), mesh=mesh)
    state = {key: value.clone() for key, value in model.local_state_dict().items()}
    expected = model.state_dict()
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    model.load_local_state_dict(state)
    assert_same(model.state_dict(), expected)
    with pytest.raises(NotImplementedError, match=r"is a DTensor.*Save state_dict\(\) instead"):
        model.local_metadata_dict()
