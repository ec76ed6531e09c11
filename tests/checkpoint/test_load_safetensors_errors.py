"""Files that `load_safetensors` cannot load: one error, on every rank, before anything is changed."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp import FullyShardedDataParallel, load_safetensors
from tests.helpers.equality import assert_same_state
from tests.helpers.models import nested_mlp
from tests.helpers.on_ranks import on_ranks
from tests.helpers.parity import Alone, fully_sharded
from tests.helpers.ranks import RankPool
from tests.helpers.safetensors_files import other_values, save


@on_ranks(2)
def test_without_strict_the_result_says_what_does_not_fit(tmp_path: Path) -> None:
    state = other_values()
    del state["entry.bias"]
    save(tmp_path, state | {"more": torch.ones(1)})
    model = nested_mlp(fully_sharded())
    result = load_safetensors(model, tmp_path, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["entry.bias"], ["more"])
    expected = other_values() | {"entry.bias": nested_mlp().state_dict()["entry.bias"]}
    assert_same_state(model.state_dict(), {name: expected[name] for name in other_values()})


@pytest.mark.parametrize("strict", [True, False])
@on_ranks(2)
def test_one_error_names_all_that_does_not_fit_and_nothing_is_changed(tmp_path: Path, strict: bool) -> None:
    state = other_values()
    del state["entry.bias"]
    save(tmp_path, state | {"more": torch.ones(1), "trunk.0.weight": torch.ones(7, 11)})
    model = nested_mlp(fully_sharded())
    with pytest.raises(RuntimeError) as caught:
        load_safetensors(model, tmp_path, strict=strict)
    message = str(caught.value)
    assert "trunk.0.weight in " in message
    assert "has shape [7, 11], but the model's [11, 7]" in message
    assert ("missing: entry.bias" in message) is strict
    assert ("unexpected: more" in message) is strict
    assert_same_state(model.state_dict(), nested_mlp().state_dict())


@on_ranks(2)
def test_a_model_in_use_is_left_alone(tmp_path: Path) -> None:
    save(tmp_path, other_values())
    model = nested_mlp(fully_sharded())
    errors: list[str] = []

    def load(*args: Any) -> None:
        with pytest.raises(RuntimeError) as caught:
            load_safetensors(model, tmp_path)
        errors.append(str(caught.value))

    hook = model.module.module.exit.register_forward_hook(load)
    model(torch.ones(2, 5))
    hook.remove()
    with model.summon_full_params():
        load()
    assert "cannot load safetensors files in the middle of a forward" in errors[0]
    assert "is inside summon_full_params()" in errors[1]
    assert_same_state(model.state_dict(), nested_mlp().state_dict())


def test_a_shard_that_was_replaced_by_something_else_is_named(tmp_path: Path) -> None:
    save(tmp_path, other_values())
    model = FullyShardedDataParallel(nested_mlp(), Alone())
    model.params[0].data = torch.zeros(3)
    with pytest.raises(RuntimeError, match=r"shard has 3 elements instead of \d+: its \.data was replaced"):
        load_safetensors(model, tmp_path)


def test_a_part_of_a_unit_is_refused(tmp_path: Path) -> None:
    save(tmp_path, {"weight": torch.ones(7, 5), "bias": torch.ones(7)})
    model = FullyShardedDataParallel(nested_mlp(), Alone())
    with pytest.raises(RuntimeError, match=r"this Linear is a part of NestedMlp.* Load safetensors files by the wrap"):
        load_safetensors(model.module.module.entry, tmp_path)


def test_a_plain_parameter_without_memory_is_refused(tmp_path: Path) -> None:
    save(tmp_path, {"weight": torch.ones(2, 2), "bias": torch.ones(2)})
    with pytest.raises(RuntimeError, match="weight is on the meta device: allocate it first"):
        load_safetensors(nn.Linear(2, 2, device="meta"), tmp_path)


def test_ranks_with_different_files_are_told(ranks: RankPool, tmp_path: Path) -> None:
    save(tmp_path, other_values())
    (tmp_path / "other").mkdir()
    save(tmp_path / "other", other_values() | {"more": torch.ones(1)})
    ranks(3).run(_load_different_files, tmp_path)


def _load_different_files(path: Path) -> None:
    model = nested_mlp(fully_sharded())
    with pytest.raises(RuntimeError, match=r"different safetensors files: rank 0 has .* and rank 2 has .*other/model"):
        load_safetensors(model, path / "other" if dist.get_rank() == 2 else path, strict=False)


@on_ranks(2)
def test_a_rank_without_the_file_does_not_leave_the_others_waiting(tmp_path: Path) -> None:
    save(tmp_path, other_values())
    model = nested_mlp(fully_sharded())
    if dist.get_rank() == 1:
        with pytest.raises(FileNotFoundError, match="nowhere"):
            load_safetensors(model, tmp_path / "nowhere")
    else:
        with pytest.raises(RuntimeError, match=r"rank 1 could not open its safetensors files.*FileNotFound.*nowhere"):
            load_safetensors(model, tmp_path)


@on_ranks(2)
def test_a_rank_that_cannot_read_does_not_leave_the_others_waiting(tmp_path: Path) -> None:
    save(tmp_path, other_values())
    model = nested_mlp(fully_sharded())
    is_broken = dist.get_rank() == 1
    broken = mock.patch("os.preadv", side_effect=OSError("the disk is gone"))
    raised = OSError if is_broken else RuntimeError
    with broken if is_broken else nullcontext(), pytest.raises(raised, match="the disk is gone"):
        load_safetensors(model, tmp_path)


@on_ranks(2)
def test_a_buffer_that_fits_on_some_ranks_only_is_an_error_on_every_rank(tmp_path: Path) -> None:
    save(tmp_path, {f"0.{name}": value for name, value in other_values().items()} | {"more": torch.ones(2)})
    model = nn.Sequential(nested_mlp(fully_sharded()))  # ranks compare the buffers of wrappers before
    model.register_buffer("more", torch.zeros(2 + dist.get_rank()))
    before = model.state_dict()
    with pytest.raises(RuntimeError, match=r"more .*has shape \[2\], but the model's \[3\]"):
        load_safetensors(model, tmp_path, strict=False)
    assert_same_state(model.state_dict(), before)


def test_complex_values_do_not_become_real(tmp_path: Path) -> None:
    save(tmp_path, {"weight": torch.ones(2, 2, dtype=torch.complex64), "bias": torch.ones(2)})
    model = FullyShardedDataParallel(nn.Linear(2, 2), Alone())
    with pytest.raises(RuntimeError, match=r"weight in .* is of torch.complex64, but the model's of torch.float32"):
        load_safetensors(model, tmp_path)
