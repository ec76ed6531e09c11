"""Folders of a training without sharding: a model in safetensors, and a plain optimizer, which goes by numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

import fsdp
from fsdp import fully_shard
from fsdp.checkpoint.cli import main
from fsdp.distributed.dtensor import full_tensor
from tests.helpers.convert_formats import command, converted
from tests.helpers.equality import assert_same
from tests.helpers.forms import sharded
from tests.helpers.on_ranks import on_ranks
from tests.helpers.parity import fully_sharded


def linears() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Biases are in the second group, so numbers are in another order than names."""
    named = list(model.named_parameters())
    groups = [[param for name, param in named if name.endswith("bias") is last] for last in (False, True)]
    return torch.optim.AdamW([{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.0}], lr=0.1)


def save_in_two(state: dict[str, Any], folder: Path) -> None:
    """As `transformers` before 5 saves models that are larger than `max_shard_size`."""
    parts = {f"pytorch_model-0000{number}-of-00002.bin": [*state][number - 1 :: 2] for number in (1, 2)}
    for file, names in parts.items():
        torch.save({name: state[name] for name in names}, folder / file)
    weight_map = {name: file for file, names in parts.items() for name in names}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


SAVE_MODEL: dict[str, Any] = {
    "safetensors": lambda state, folder: save_file(state, folder / "model.safetensors"),
    "bin": lambda state, folder: torch.save(state, folder / "pytorch_model.bin"),
    "bins": save_in_two,
}


def saved(
    folder: Path, name: str = "optimizer.pt", kind: str = "safetensors"
) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """Every rank has such a folder."""
    model = linears()
    optimizer = optimizer_of(model)
    model(torch.ones(1, 3)).square().sum().backward()
    optimizer.step()
    folder.mkdir()
    SAVE_MODEL[kind](model.state_dict(), folder)
    torch.save(optimizer.state_dict(), folder / name)
    return model, optimizer


def shard(form: str) -> Any:
    model = linears()
    return fully_shard(model) if form == "rows" else fully_sharded(use_orig_params=form == "orig")(model)


@pytest.mark.parametrize(
    ("form", "name", "kind"),
    [
        ("orig", "optimizer.pt", "safetensors"),
        ("rows", "optimizer.bin", "safetensors"),
        ("orig", "optimizer.pt", "bin"),
        ("rows", "optimizer.pt", "bins"),
    ],
)
@on_ranks(2)
def test_ranks_load_model_and_optimizer(tmp_path: Path, form: str, name: str, kind: str) -> None:
    folder = tmp_path / f"of_{torch.distributed.get_rank()}"
    plain, its = saved(folder, name, kind)
    model = shard(form)
    optimizer = optimizer_of(model)
    fsdp.load(folder, model, optimizer)
    fsdp.save(tmp_path / "ours", model, optimizer)
    other = linears()
    others = optimizer_of(other)
    fsdp.load(tmp_path / "ours", other, others)
    assert_same(other.state_dict(), plain.state_dict())
    assert_same(others.state_dict(), its.state_dict())


@on_ranks(2)
def test_ranks_load_into_modules_that_a_forward_has_left_unsharded(tmp_path: Path) -> None:
    folder = tmp_path / f"of_{torch.distributed.get_rank()}"
    _, its = saved(folder)
    model = sharded(linears(), "rows", (nn.Linear,))
    optimizer = optimizer_of(model)
    for _ in range(3):  # after which the order of units is known
        model(torch.ones(1, 3)).sum().backward()
        optimizer.zero_grad()
    model(torch.ones(1, 3))
    assert {type(param) for param in model.parameters()} != {DTensor}
    fsdp.load(folder, model, optimizer)
    found = {number: full_tensor(state["exp_avg"]) for number, state in optimizer.state_dict()["state"].items()}
    assert_same(found, {number: state["exp_avg"] for number, state in its.state_dict()["state"].items()})


@on_ranks(2)
def test_flat_parameters_have_no_numbers(tmp_path: Path) -> None:
    folder = tmp_path / f"of_{torch.distributed.get_rank()}"
    plain, _ = saved(folder)
    model = shard("flat")
    with pytest.raises(ValueError, match="shard with fully_shard or use_orig_params=True, or load the model alone"):
        fsdp.load(folder, model, torch.optim.AdamW(model.parameters()))
    fsdp.load(folder, model)
    assert_same(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("file", ["pytorch_model-00002-of-00002.bin", "pytorch_model.bin.index.json"])
@on_ranks(1)
def test_an_index_of_absent_or_damaged_files_is_refused(tmp_path: Path, file: str) -> None:
    saved(tmp_path / "saved", kind="bins")
    (tmp_path / "saved" / file).write_text("{}")
    with pytest.raises(ValueError, match=file):
        fsdp.load(tmp_path / "saved", shard("rows"))
    (tmp_path / "saved" / file).unlink()
    with pytest.raises(FileNotFoundError):
        fsdp.load(tmp_path / "saved", shard("rows"))


@on_ranks(1)
def test_groups_of_other_sizes_are_refused(tmp_path: Path) -> None:
    saved(tmp_path / "saved")
    model = shard("rows")
    message = r"has parameter groups of \[2, 2\] parameters, but the given optimizer has groups of \[4\]"
    with pytest.raises(ValueError, match=message):
        fsdp.load(tmp_path / "saved", model, torch.optim.AdamW(model.parameters()))
    several = [torch.optim.AdamW([param]) for param in model.parameters()]
    with pytest.raises(ValueError, match="has the state of one optimizer, but 4 were given"):
        fsdp.load(tmp_path / "saved", model, several)


def test_the_command_converts_both_with_the_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = saved(tmp_path / "saved")
    said = command(capsys, "convert", tmp_path / "saved", tmp_path / "alone")
    assert "optimizer.pt is left out: pass the names of its parameters (--param-order)" in said.out + said.err
    (tmp_path / "order.txt").write_text("0.weight\n1.weight\n0.bias\n1.bias\n")
    converted(tmp_path / "saved", tmp_path / "ours", "--param-order", str(tmp_path / "order.txt"))
    other = linears()
    its = optimizer_of(other)
    fsdp.load(tmp_path / "ours", other, its)
    assert_same(other.state_dict(), model.state_dict())
    assert_same(its.state_dict(), optimizer.state_dict())
    assert main(["verify", str(tmp_path / "ours")]) == 0


def test_adapters_without_a_base_are_no_checkpoint(tmp_path: Path) -> None:
    save_file(linears().state_dict(), tmp_path / "adapter_model.safetensors")
    with pytest.raises(FileNotFoundError, match=r"adapters of peft. Load them before sharding"):
        fsdp.load(tmp_path, linears())
