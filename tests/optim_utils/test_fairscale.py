"""Full optimizer states that FairScale 0.4.13 made itself: `tests/tools/record_fairscale_optim.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp import FullyShardedDataParallel
from fsdp.compat import fairscale
from fsdp.engine.trees import map_tensors
from tests.helpers.equality import assert_close, assert_same
from tests.helpers.on_ranks import on_ranks
from tests.helpers.optimizers import from_first
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.paths import DATA
from tests.tools.record_fairscale_optim import CASES, Scaled, make_optimizer, train
from tests.tools.record_fairscale_shards import make_wrapped

RECORDED = DATA / "fairscale"
every_case = pytest.mark.parametrize("name", CASES)


def recorded(name: str, file: str = "full") -> dict[str, Any]:
    return torch.load(RECORDED / name / f"{file}.pt", weights_only=True)


def ours(name: str) -> Any:
    return make_wrapped(FullyShardedDataParallel, CASES[name], CASES[name].ours)


@every_case
@on_ranks(lambda name: CASES[name].ranks)
def test_each_rank_cuts_fairscale_s_state_as_fairscale_does(name: str) -> None:
    found = ours(name).get_shard_from_optim_state_dict(recorded(name))
    assert_same(found, recorded(name, f"rank{dist.get_rank()}"))


@parametrize_pairs(name=list(CASES), world_size=[1, 2, 3])
@on_ranks("world_size")
def test_fairscale_s_state_is_loaded_at_any_world_size_and_comes_back(name: str) -> None:
    model = ours(name)
    optimizer = make_optimizer(name, model)
    optimizer.load_state_dict(model.get_shard_from_optim_state_dict(recorded(name)))
    full, expected = from_first(model.gather_full_optim_state_dict(Scaled(optimizer))), recorded(name)
    if not CASES[name].is_alone or dist.get_world_size() == 1:  # what is uncollected depends on the number of ranks
        full["uncollected_local_ids"] = expected["uncollected_local_ids"]
    assert full.pop("param_names").keys() == full["param_id_map"].keys()
    assert_same(full, expected)
    train(model, optimizer)


@every_case
@on_ranks(lambda name: CASES[name].ranks)
def test_our_state_is_fairscale_s(name: str) -> None:
    model = ours(name)
    optimizer = make_optimizer(name, model)
    train(model, optimizer)
    full, expected = from_first(model.gather_full_optim_state_dict(Scaled(optimizer))), recorded(name)
    assert full.pop("param_names").keys() == full["param_id_map"].keys()
    assert list(full["state"]) == list(expected["state"])
    if "momentum" in name:
        assert_close(full, expected, rtol=1e-3, atol=1e-5)
    else:  # Adam's first step has the size of the rate and the sign of the gradient, though that may be a rounding
        assert_same(_without_moments(full), _without_moments(expected))


def _without_moments(state: Any) -> Any:
    return map_tensors(lambda tensor: torch.zeros_like(tensor) if tensor.dim() else tensor, state)


@every_case
@on_ranks(lambda name: CASES[name].ranks)
def test_its_helpers_do_what_fairscale_s_do(name: str) -> None:
    """What `gather_full_optim_state_dict` and `get_shard_from_optim_state_dict` do in FairScale."""
    model, full = ours(name), recorded(name)
    instances = [one for one in model.modules() if isinstance(one, FullyShardedDataParallel)]
    fairscale.check_param_counts_before_sharding(full, len(instances))
    with pytest.raises(ValueError, match=r"this model has 5 wrappers .* had 2: wrap the same modules"):
        fairscale.check_param_counts_before_sharding(full, 5)
    fairscale.check_param_counts_before_sharding({**full, "state": {}}, 5)
    uncollected = full["uncollected_local_ids"]
    shards = [recorded(name, f"rank{rank}") for rank in range(CASES[name].ranks)]
    state = {
        number: {key: [shard["state"][number][key] for shard in shards] for key in entry if key != "step"}
        | {key: [value] for key, value in entry.items() if key == "step"}
        for number, entry in shards[0]["state"].items()
        if number not in uncollected
    }
    alone = {number: shards[0]["state"][number] for number in uncollected}
    pads = [
        [one.numel_padded_per_param if rank == len(shards) - 1 else [0] for one in instances]
        for rank in range(len(shards))
    ]
    if dist.get_rank() == len(shards) - 1:  # which knows how much it is padded
        built = fairscale.build_unflat_state_dict(instances, pads, state, {}, alone, dict(shards[0]))
        assert_same(built, full)
    flat = fairscale.flatten_optim_state_dict(recorded(name))
    assert flat.keys() == shards[0].keys()
    for number, entry in flat["state"].items():
        for key, value in entry.items():
            if isinstance(value, torch.Tensor):
                parts = [shard["state"][number][key] for shard in shards[: 1 if number in uncollected else None]]
                assert_same(value, torch.cat(parts)[: value.numel()])


def test_a_singleton_is_a_tensor_without_dimensions() -> None:
    assert fairscale.is_singleton_tensor(torch.tensor(1.0))
    assert not fairscale.is_singleton_tensor(torch.ones(1))
    assert not fairscale.is_singleton_tensor(1.0)
