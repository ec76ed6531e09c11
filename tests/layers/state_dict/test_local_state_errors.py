"""A local state that does not fit is refused with a name, a rank, both sizes and a remedy, and nothing is changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp import no_pre_load_state_dict_hook
from tests.helpers.equality import assert_same
from tests.helpers.local_shards import awkward, different, through_files
from tests.helpers.models import nested_mlp
from tests.helpers.on_ranks import on_ranks
from tests.helpers.parity import fully_sharded
from tests.helpers.ranks import RankPool


def refused(model: Any, state: Any, message: str, **how: Any) -> None:
    """The load raises, and every value is what it was."""
    before = copy.deepcopy(dict(model.local_state_dict()))
    with pytest.raises(RuntimeError, match=message):
        model.load_local_state_dict(state, **how)
    assert_same(model.local_state_dict(), before)


def test_shards_of_another_world_size_name_unit_rank_and_both_sizes(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2).run(_save, tmp_path)
    ranks(3).run(_load_of_two, tmp_path)


def _save(folder: Path) -> None:
    through_files(nested_mlp(fully_sharded()), folder)


def _load_of_two(folder: Path) -> None:
    rank = dist.get_rank()
    state, _ = torch.load(folder / f"{min(rank, 1)}.pt", weights_only=True)
    model = different(nested_mlp)
    refused(
        model,
        dict(state),  # without the mark
        rf"(?s)rank {rank} of 3: .*'trunk.flat_param_0' \(unit 'trunk', shard {rank} of 3\) has 39 elements, and this "
        r"rank's shard has 26.*consolidate_shard_weights",
    )
    refused(model, state, rf"shard {min(rank, 1)} of 2, and this rank has shard {rank} of 3")


@on_ranks(2)
def test_shards_of_another_rank_are_refused_though_they_fit(tmp_path: Path) -> None:
    weights, _ = through_files(nested_mlp(fully_sharded()), tmp_path)
    rank = dist.get_rank()
    refused(different(nested_mlp), weights[1 - rank], f"shard {1 - rank} of 2, and this rank has shard {rank} of 2")


def _without(key: str) -> Callable[[Any], None]:
    return lambda state: state.pop(key)


def _with(key: str, value: Any) -> Callable[[Any], None]:
    return lambda state: state.update({key: value})


CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    "missing shard": (_without("inner.flat_param_0"), "missing keys 'inner.flat_param_0'"),
    "another model's": (_with("other.flat_param_0", torch.zeros(3)), "unexpected keys 'other.flat_param_0'"),
    "cut shard": (_with("few.flat_param_0", torch.zeros(0)), r"'few.flat_param_0' \(unit 'few', .* has 0 elements"),
    "buffer's shape": (_with("table", torch.zeros(5)), r"'table' has shape \(5,\), and the model has \(2, 3\)"),
    "no tensor": (_with("flat_param_0", "text"), "'flat_param_0' is a str instead of a tensor"),
    "no values": (_with("table", torch.zeros(2, 3, device="meta")), "'table' has no values: it is on the meta device"),
    "twice": (_with("_fsdp_wrapped_module.flat_param_0", torch.zeros(3)), "two keys .* mean 'flat_param_0'"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_does_not_fit_is_named_and_changes_nothing(ranks: RankPool, change: str) -> None:
    ranks(2).run(_refuses, change)


def _refuses(name: str) -> None:
    change, message = CHANGES[name]
    state = awkward(fully_sharded()).local_state_dict()  # type: ignore[operator]
    change(state)
    refused(different(awkward), state, message)


@on_ranks(2)
def test_without_strict_what_fits_is_loaded_and_the_rest_is_told() -> None:
    model: Any = different(awkward)
    kept = model.local_state_dict()["flat_param_0"].clone()
    state = awkward(fully_sharded()).local_state_dict()  # type: ignore[operator]
    del state["flat_param_0"], state["table"]
    state["odd"] = torch.zeros(1)
    result = model.load_local_state_dict(state, strict=False)
    assert result.missing_keys == ["flat_param_0", "table"]
    assert result.unexpected_keys == ["odd"]
    found = model.local_state_dict()
    assert torch.equal(found["flat_param_0"], kept)
    assert torch.equal(found["inner.flat_param_0"], state["inner.flat_param_0"])


@on_ranks(2)
def test_one_rank_s_bad_shard_leaves_that_rank_as_it_was() -> None:
    model: Any = different(nested_mlp)
    state = dict(nested_mlp(fully_sharded()).local_state_dict())  # type: ignore[operator]
    if dist.get_rank() == 1:
        state["gate.flat_param_0"] = torch.zeros(7)
        refused(model, state, "rank 1 of 2: .*'gate.flat_param_0'")
    else:
        model.load_local_state_dict(state)


class Renaming(nn.Linear):
    """Takes an old name of its buffer."""

    def __init__(self, size: int) -> None:
        super().__init__(size, size)
        self.register_buffer("new", torch.zeros(2))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        if prefix + "old" in state_dict:
            state_dict[prefix + "new"] = state_dict.pop(prefix + "old")
        super()._load_from_state_dict(state_dict, prefix, *rest)


@on_ranks(2)
def test_modules_that_load_in_their_own_way_do_so() -> None:
    model: Any = fully_sharded()(nn.Sequential(Renaming(3), nn.BatchNorm1d(3)))
    state = model.local_state_dict()
    del state["0.new"]
    state["0.old"] = torch.tensor([1.0, 2.0])
    result = model.load_local_state_dict(state)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert torch.equal(model.module.module[0].new, torch.tensor([1.0, 2.0]))
    del state["0.old"]
    with pytest.raises(RuntimeError, match=r"missing keys \['0.new'\]"):
        model.load_local_state_dict(state)
    # Others do not: what does not fit is known before anything is changed.
    changed = {key: value + 1 for key, value in model.local_state_dict().items()}
    refused(model, changed | {"1.running_mean": torch.zeros(2)}, r"'1.running_mean' has shape \(2,\)")


@on_ranks(2)
def test_a_failed_load_leaves_full_loading_alone() -> None:
    model: Any = different(nested_mlp)
    with pytest.raises(RuntimeError, match="missing keys"):
        model.load_local_state_dict({})
    model.load_state_dict(nested_mlp().state_dict())
    assert_same(model.state_dict(), nested_mlp().state_dict())


# no_pre_load_state_dict_hook


@on_ranks(2)
def test_without_the_hook_raw_names_are_loaded() -> None:
    model: Any = different(nested_mlp)
    expected = nested_mlp().state_dict()
    parts = "_fsdp_wrapped_module._fpw_module."
    raw = {
        parts
        + name.replace("trunk.2.", f"trunk.2.{parts}")
        .replace("trunk.", f"trunk.{parts}")
        .replace("gate.", f"gate.{parts}"): value
        for name, value in expected.items()
    }
    with no_pre_load_state_dict_hook():
        model.load_state_dict(raw)
    assert_same(model.state_dict(), expected)


@on_ranks(2)
def test_without_the_hook_plain_names_are_unexpected() -> None:
    model: Any = different(nested_mlp)
    expected = nested_mlp().state_dict()
    message = r'(?s)Missing.*"_fsdp_wrapped_module._fpw_module.scale".*Unexpected.*"scale"'
    with pytest.raises(RuntimeError, match=message), no_pre_load_state_dict_hook():
        model.load_state_dict(expected)
    model.load_state_dict(expected)
    assert_same(model.state_dict(), expected)
