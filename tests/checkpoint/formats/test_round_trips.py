"""Checkpoints through every format and back: equal bits in all that both can hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

import fsdp
from fsdp.checkpoint.formats.open_source import open_source
from tests.helpers.convert_formats import (
    VALUES,
    assert_same_checkpoint,
    assert_same_states,
    command,
    converted,
    in_groups,
    kinds,
    saved,
    stepped,
    trained,
)
from tests.helpers.dcp_folders import alone_warning
from tests.helpers.equality import assert_same, assert_same_state
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs

WAYS = {
    "fsdp": ["--to", "fsdp"],
    "files": ["--to", "fsdp", "--max-file-bytes", "100"],
    "torch": ["--to", "torch"],
    "numbers": ["--to", "torch", "--by-number"],
    "dcp": ["--to", "dcp"],
}


@parametrize_pairs(last=["fsdp", "torch", "dcp"], first=list(WAYS))
def test_a_checkpoint_comes_through_formats_as_it_was(tmp_path: Path, first: str, last: str) -> None:
    origin = saved(tmp_path / "origin")
    between = converted(origin, tmp_path / "between", *WAYS[first])
    assert open_source(between).format == WAYS[first][1]
    target = converted(between, tmp_path / "target", *WAYS[last])
    assert open_source(target).format == last
    assert_same_checkpoint(between, origin)
    assert_same_checkpoint(target, origin)


def test_a_flat_optimizer_comes_back_with_its_settings(tmp_path: Path) -> None:
    origin = saved(tmp_path / "origin")
    converted(origin, tmp_path / "flat", "--to", "dcp", "--flat-optimizer")
    model = kinds(seed=1)
    optimizer = in_groups(model)
    fsdp.load(tmp_path / "flat", model, optimizer)
    assert_same(optimizer.state_dict(), trained()[1].state_dict())


@pytest.mark.parametrize("way", ["torch", "numbers", "dcp"])
def test_training_goes_on_from_a_converted_checkpoint(tmp_path: Path, way: str) -> None:
    place = converted(saved(tmp_path / "origin"), tmp_path / "there", *WAYS[way])
    back = place if way == "dcp" else converted(place, tmp_path / "back")
    model = kinds(seed=1)
    model.note = None
    optimizer = in_groups(model)
    loaded = fsdp.load(back, model, optimizer)
    expected, other = trained()
    assert loaded.values["step"] == VALUES["step"]
    assert torch.equal(loaded.values["table"], VALUES["table"])
    assert model.note == expected.note
    stepped(model, optimizer)
    stepped(expected, other)
    assert_same_states(model.state_dict(), expected.state_dict())
    assert_same(optimizer.state_dict(), other.state_dict())


@pytest.mark.parametrize("way", ["files", "torch", "numbers", "dcp", "flat"])
@on_ranks(2)
def test_state_of_rows_and_columns_comes_back(tmp_path: Path, way: str) -> None:
    """Adafactor's, of whole parameters on their owners, which no element of a parameter corresponds to."""
    model, optimizer = _factored()
    model(torch.ones(1, 5)).sum().backward()
    optimizer.step()
    fsdp.save(tmp_path / "origin", model, optimizer)
    there, back = tmp_path / "there", tmp_path / "back"
    if dist.get_rank() == 0:
        converted(tmp_path / "origin", there, *WAYS.get(way, ["--to", "dcp", "--flat-optimizer"]))
        converted(there, back)
    dist.barrier()
    for place in (back, there) if way in ("files", "dcp", "flat") else (back,):
        found, other = _factored(seed=1)
        fsdp.load(place, found, other)
        assert fsdp.fingerprint(found, other) == fsdp.fingerprint(model, optimizer)


def _factored(seed: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 1))
    wrapped = fsdp.FullyShardedDataParallel(model, use_orig_params=True)
    return wrapped, fsdp.OwnedOptimizer(wrapped, [{"optimizer": torch.optim.Adafactor}])


# What others read


def test_torch_loads_the_file_without_us(tmp_path: Path) -> None:
    place = converted(saved(tmp_path / "origin"), tmp_path / "all.pt", "--by-number")
    found = torch.load(place, weights_only=True)
    model = kinds(seed=1)
    optimizer = in_groups(model)
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    expected, other = trained()
    assert_same_states(model.state_dict(), expected.state_dict())
    assert found["step"] == VALUES["step"]
    stepped(model, optimizer)
    stepped(expected, other)
    assert_same_states(model.state_dict(), expected.state_dict())


def test_every_tensor_in_a_torch_file_has_memory_of_its_own(tmp_path: Path) -> None:
    found = torch.load(converted(saved(tmp_path / "origin"), tmp_path / "all.pt"), weights_only=True)
    for name, value in found["model"].items():
        assert not isinstance(value, Tensor) or value.untyped_storage().nbytes() == value.nbytes, name


@alone_warning
def test_torch_loads_the_folder_without_us(tmp_path: Path) -> None:
    place = converted(saved(tmp_path / "origin"), tmp_path / "folder", "--to", "dcp")
    expected, other = trained()
    model = kinds(seed=1)
    names = {param: name for name, param in expected.named_parameters()}
    state: Any = {
        "model": model.state_dict(),
        "optimizer": {
            "state": {
                names[param]: {key: torch.zeros_like(value) for key, value in found.items()}
                for param, found in other.state.items()
            }
        },
        "step": 0,
    }
    dcp.load(state, checkpoint_id=place, no_dist=True)
    assert state["step"] == VALUES["step"]
    assert_same_states(state["model"], expected.state_dict())
    for param, found in other.state.items():
        for key, value in found.items():
            assert_same(state["optimizer"]["state"][names[param]][key], value, key)


def test_a_safetensors_file_has_the_model(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    place = converted(saved(tmp_path / "origin"), tmp_path / "model.safetensors")
    assert_same_states(load_file(place), trained()[0].state_dict())
    origin = converted(place, tmp_path / "back.pt")
    assert_same_states(torch.load(origin, weights_only=True)["model"], trained()[0].state_dict())


def test_safetensors_files_are_divided(tmp_path: Path) -> None:
    place = converted(saved(tmp_path / "origin"), tmp_path / "folder", "--to", "safetensors", "--max-file-bytes", "64")
    assert len(list(place.glob("*.safetensors"))) > 2
    model = kinds(seed=1)
    fsdp.load_safetensors(model, place)
    assert_same_state(tensors_of(model), tensors_of(trained()[0]))


def tensors_of(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}


# Options


def test_a_dtype_is_of_the_models_floating_point_tensors(tmp_path: Path) -> None:
    origin = saved(tmp_path / "origin")
    place = converted(origin, tmp_path / "cast", "--dtype", "bfloat16")
    expected = tensors_of(trained()[0])
    with_cast = open_source(place)
    for name, value in expected.items():
        wanted = torch.bfloat16 if value.is_floating_point() else value.dtype
        made = torch.empty(value.shape, dtype=wanted)
        assert with_cast.model.tensors[name].dtype == wanted
        with_cast.model.read(name, made)
        assert_same(made, value.to(wanted), name)
    assert with_cast.optimizer is not None
    assert {each.dtype for each in with_cast.optimizer.tensors.values()} > {torch.float32}
    fsdp.checkpoint.verify(place)


@pytest.mark.parametrize("way", ["fsdp", "torch", "dcp"])
def test_the_model_alone(tmp_path: Path, way: str) -> None:
    place = converted(saved(tmp_path / "origin"), tmp_path / "model", *WAYS[way], "--only", "model")
    with_model = open_source(place)
    assert with_model.optimizer is None
    assert set(with_model.model.tensors) == set(tensors_of(trained()[0]))


def test_the_optimizer_alone_is_a_state_by_names(tmp_path: Path) -> None:
    place = converted(saved(tmp_path / "origin"), tmp_path / "optimizer.pt", "--only", "optimizer")
    found = torch.load(place, weights_only=True)
    model, optimizer = trained()
    names = {param: name for name, param in model.named_parameters()}
    assert found.keys() == {"state", "param_groups"}
    for param, state in optimizer.state.items():
        for key, value in state.items():
            assert_same(found["state"][names[param]][key], value, key)
    assert [sorted(group["params"]) for group in found["param_groups"]] == [
        sorted(names[param] for param in group["params"]) for group in optimizer.param_groups
    ]


@pytest.mark.parametrize("way", ["torch", "dcp"])
def test_a_tied_tensor_gets_its_other_name(tmp_path: Path, way: str) -> None:
    origin = saved(tmp_path / "origin")
    place = converted(origin, tmp_path / "tied", *WAYS[way], "--tied", "head.weight=wide.weight")
    source = open_source(place)
    one, other = torch.empty(7, 5), torch.empty(7, 5)
    source.model.read("head.weight", one)
    source.model.read("wide.weight", other)
    assert torch.equal(one, trained()[0].wide.weight)
    assert torch.equal(one, other)
    if way == "torch":
        model = torch.load(place, weights_only=True)["model"]
        assert model["head.weight"].data_ptr() == model["wide.weight"].data_ptr()


def test_generators_go_on_where_only_the_files_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    origin = saved(tmp_path / "origin")
    expected = torch.rand(3)
    fsdp_copy = converted(origin, tmp_path / "copy", "--max-file-bytes", "100")
    assert fsdp.load(fsdp_copy, kinds()).has_generators
    assert torch.equal(torch.rand(3), expected)
    assert "random number generators" in command(capsys, "convert", origin, tmp_path / "x.pt").err
