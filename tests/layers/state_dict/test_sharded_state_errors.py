"""What cannot be taken, saved or loaded as a sharded state: each a clear error, and the model is as it was before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import fsdp
from fsdp.layers.state_dict.sharded import Held, Part, TensorPart
from tests.helpers.dcp_folders import alone_warning, assert_whole_state, everything, load_sharded, save_sharded
from tests.helpers.equality import assert_same_state
from tests.helpers.models import nested_mlp
from tests.helpers.on_ranks import on_ranks
from tests.helpers.parity import fully_sharded
from tests.helpers.ranks import RankPool

pytestmark = alone_warning


def other_state(model: Any) -> Any:
    """A sharded state of the model with other values, as after a load."""
    state = model.sharded_state_dict()
    for name, value in state.items():
        if isinstance(value, TensorPart):
            value.__create_chunk_list__()  # memory of its own
            value.local.add_(name != "head.weight")  # which is tied
        else:
            value.add_(1)
    return state


# State dicts that do not fit


def without_a_key(state: Any) -> None:
    del state["conv.bias"]


def with_a_key_too_many(state: Any) -> None:
    state["other"] = torch.ones(3)


def with_another_shape(state: Any) -> None:
    state["conv.bias"] = torch.ones(9)


def without_values(state: Any) -> None:
    state["conv.bias"] = torch.ones(3, device="meta")


def with_a_dtensor(state: Any) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state["conv.weight"] = distribute_tensor(torch.ones(3, 2, 2, 3, 1), mesh, [Shard(0)])


def with_complex_numbers(state: Any) -> None:
    state["frozen"] = torch.ones(5, 2, dtype=torch.complex64)


def with_something_else(state: Any) -> None:
    state["frozen"] = "a string"


def with_a_buffer_of_another_shape(state: Any) -> None:
    state["table"] = torch.ones(2, 2)


def with_another_part(state: Any) -> None:
    part = Part.of_whole(torch.Size((3, 2, 2, 3, 1)), "conv.weight", 0)
    state["conv.weight"] = TensorPart.around(part, Held(torch.zeros(36)))


MISFITS: list[tuple[Callable[[Any], None], str]] = [
    (without_a_key, r"Missing key\(s\) in state_dict: \"conv.bias\""),
    (with_a_key_too_many, r"Unexpected key\(s\) in state_dict: \"other\""),
    (with_another_shape, r"size mismatch for conv.bias: .*torch.Size\(\[9\]\).*torch.Size\(\[3\]\)"),
    (without_values, r"rank \d: conv.bias: expected a tensor of \[3\] with values"),
    (with_a_dtensor, r"rank \d: conv.weight: a DTensor cannot be sharded here"),
    (with_complex_numbers, r"rank \d: frozen is of torch.float32, but the given value is of torch.complex64"),
    (with_something_else, r"frozen.*expected torch.Tensor or Tensor-like object.*received <class 'str'>"),
    (with_a_buffer_of_another_shape, r"size mismatch for table"),
    (
        with_another_part,
        r"rank \d: conv.weight: this rank keeps elements \d+:\d+ of .*, but got elements 0:36",
    ),
]


@pytest.mark.parametrize(("change", "message"), MISFITS, ids=lambda value: getattr(value, "__name__", ""))
@on_ranks(3)
def test_a_state_that_does_not_fit_changes_nothing(change: Callable[[Any], None], message: str) -> None:
    model = everything(fully_sharded())
    state = other_state(model)
    change(state)
    with pytest.raises(RuntimeError, match=rf"(?s){message}"):
        model.load_sharded_state_dict(state)
    assert_whole_state(model, everything, seed=0)


@on_ranks(3)
def test_all_ranks_refuse_what_one_rank_cannot_load() -> None:
    model = everything(fully_sharded())
    state = other_state(model)
    if dist.get_rank() == 1:
        with_another_shape(state)
    own = "Error.s. in loading state_dict"
    told = f"rank {dist.get_rank()}: rank 1 could not load its part of a sharded state. RuntimeError: {own}"
    with pytest.raises(RuntimeError, match=own if dist.get_rank() == 1 else told):
        model.load_sharded_state_dict(state)
    assert_whole_state(model, everything, seed=0)


@on_ranks(2)
def test_all_ranks_hear_that_one_rank_has_no_state() -> None:
    model = everything(fully_sharded())
    state = other_state(model)
    with pytest.raises((TypeError, fsdp.OtherRankError), match="NoneType"):
        model.load_sharded_state_dict(None if dist.get_rank() == 1 else state)
    assert_whole_state(model, everything, seed=0)


@on_ranks(2)
def test_ranks_must_load_the_same_keys() -> None:
    wrap = fully_sharded()
    torch.manual_seed(0)
    model: Any = wrap(nn.Sequential(wrap(nn.Linear(3, 3)), wrap(nn.Linear(3, 3))))
    before, state = model.state_dict(), other_state(model)
    del state[f"{dist.get_rank()}.weight"]
    with pytest.raises(RuntimeError, match=r"different keys in the sharded state .*: rank 0 has those of 3 parameters"):
        model.load_sharded_state_dict(state, strict=False)
    assert_same_state(model.state_dict(), before)


@pytest.mark.parametrize("change", [without_a_key, with_a_key_too_many])
@on_ranks(3)
def test_without_strict_the_rest_is_loaded(change: Callable[[Any], None]) -> None:
    model = everything(fully_sharded())
    state = other_state(model)
    change(state)
    result = model.load_sharded_state_dict(state, strict=False)
    missing, unexpected = ([], ["other"]) if "other" in state else (["conv.bias"], [])
    assert (result.missing_keys, result.unexpected_keys) == (missing, unexpected)
    loaded = everything().state_dict()
    for name, value in model.state_dict().items():
        added = loaded[name] + (name not in missing)
        torch.testing.assert_close(value, added)


def test_a_state_of_another_number_of_ranks_is_named(ranks: RankPool, tmp_path: Path) -> None:
    ranks(3).run(_save_by_rank, tmp_path)
    ranks(2).run(_load_by_rank, tmp_path)


def _save_by_rank(folder: Path) -> None:
    state = nested_mlp(fully_sharded()).sharded_state_dict()  # type: ignore[operator]
    torch.save(state, folder / f"{dist.get_rank()}.pt")


def _load_by_rank(folder: Path) -> None:
    model: Any = nested_mlp(fully_sharded(), seed=1)
    state = torch.load(folder / f"{dist.get_rank()}.pt")
    wanted = r"rank 1: entry.weight: this rank keeps elements 23:35 of \[7, 5\], but got elements 15:31 of \[7, 5\]"
    message = wanted if dist.get_rank() else "entry.weight: this rank keeps elements 0:23 .*, but got elements 0:15"
    with pytest.raises(RuntimeError, match=rf"(?s){message}.*load it with torch.distributed.checkpoint"):
        model.load_sharded_state_dict(state)
    assert_whole_state(model, nested_mlp, seed=1)


@on_ranks(2)
def test_it_is_no_whole_state() -> None:
    model: Any = nested_mlp(fully_sharded())
    with pytest.raises(RuntimeError, match="Load a sharded state with load_sharded_state_dict"):
        model.load_state_dict(model.sharded_state_dict())


# Checkpoints that do not fit


@on_ranks(3)
def test_a_checkpoint_of_another_model(tmp_path: Path) -> None:
    state = {**everything(seed=1).state_dict(), "conv.weight": torch.ones(3, 2, 2, 4, 1)}
    dcp.save(state, checkpoint_id=tmp_path / "shape")
    del state["frozen"], state["conv.weight"]
    dcp.save(state, checkpoint_id=tmp_path / "key")
    model = everything(fully_sharded())
    for name, message in (("shape", "Size mismatch .* for conv.weight"), ("key", "Missing key .*(conv.weight|frozen)")):
        with pytest.raises(CheckpointException, match=rf"(?s){message}"):
            load_sharded(model, tmp_path / name)
    assert_whole_state(model, everything, seed=0)


@on_ranks(3)
def test_a_damaged_checkpoint_leaves_the_model_alone(tmp_path: Path) -> None:
    save_sharded(everything(fully_sharded(), seed=1), tmp_path)
    dist.barrier()
    if dist.get_rank() == 0:
        file = tmp_path / "__2_0.distcp"
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    dist.barrier()
    model = everything(fully_sharded())
    with pytest.raises(CheckpointException, match="ranks"):
        load_sharded(model, tmp_path)
    assert_whole_state(model, everything, seed=0)


# At the wrong time


@pytest.mark.parametrize("rank0_only", [False, True])
@on_ranks(2)
def test_not_inside_summon_full_params(rank0_only: bool) -> None:
    model: Any = nested_mlp(fully_sharded())
    state = model.sharded_state_dict()
    with model.summon_full_params(rank0_only=rank0_only):
        with pytest.raises(RuntimeError, match=r"cannot take a sharded state dict: .* is inside summon_full_params"):
            model.sharded_state_dict()
        with pytest.raises(RuntimeError, match=r"cannot load a sharded state dict: .* is inside summon_full_params"):
            model.load_sharded_state_dict(state)


@on_ranks(2)
def test_not_in_a_forward() -> None:
    model: Any = fully_sharded()(_Asking())
    model.module.module.ask = model.sharded_state_dict
    with pytest.raises(RuntimeError, match="take a sharded state dict"):
        model(torch.ones(1, 3))


class _Asking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.ask: Callable[[], Any] = dict

    def forward(self, inputs: Tensor) -> Tensor:
        self.ask()
        return self.layer(inputs)


# Ranks that are not alike


@on_ranks(3)
def test_values_that_ranks_were_wrapped_with_differently_are_not_saved_but_loaded(tmp_path: Path) -> None:
    # Rank 2 was wrapped with these, and holds all of some parameters, which it will find as they were.
    dcp.save(nested_mlp(seed=2).state_dict(), checkpoint_id=tmp_path / "good")
    model = nested_mlp(fully_sharded(), seed=dist.get_rank())
    with pytest.raises(CheckpointException, match=r"(?s)cannot save \S+: .*the ranks have sharded different values"):
        save_sharded(model, tmp_path / "bad")
    load_sharded(model, tmp_path / "good")
    assert_whole_state(model, nested_mlp, seed=2)
    save_sharded(model, tmp_path / "now")


@on_ranks(3)
def test_what_was_not_loaded_is_still_compared(tmp_path: Path) -> None:
    dcp.save({"scale": torch.tensor(2.0)}, checkpoint_id=tmp_path)
    model: Any = nested_mlp(fully_sharded(), seed=dist.get_rank())
    state = model.sharded_state_dict()
    dcp.load(state, checkpoint_id=tmp_path, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    model.load_sharded_state_dict(state)
    with pytest.raises(RuntimeError, match=r"sharded different values.*of entry.weight of unit"):
        model(torch.ones(2, 5))


@on_ranks(2)
def test_other_models_on_other_ranks() -> None:
    model: Any = fully_sharded()(nn.Linear(3, 3 + dist.get_rank()))
    with pytest.raises(RuntimeError, match="the ranks have built different models"):
        model.sharded_state_dict()
