"""Folders of `accelerate` with torch's FSDP, in which model and optimizer are apart: read, loaded and examined."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

import fsdp
from fsdp import optim_utils
from fsdp.checkpoint.cli import main
from fsdp.checkpoint.formats.open_source import format_of
from tests.helpers.checkpoint_models import flip
from tests.helpers.convert_formats import converted, in_groups, kinds, trained
from tests.helpers.equality import assert_same
from tests.helpers.parity import adam, fully_sharded
from tests.helpers.ranks import RankPool

KINDS = ["sharded", "full"]
MODEL = {"sharded": "pytorch_model_fsdp_0", "full": "pytorch_model_fsdp.bin"}
OPTIMIZER = {"sharded": "optimizer_0", "full": "optimizer.bin"}


def saved(folder: Path, kind: str, model: Any, optimizer: Any = None) -> Path:
    """As `accelerate.utils.save_fsdp_model` and `save_fsdp_optimizer` save, which want a process group."""
    folder.mkdir()
    parts = {MODEL[kind]: ("model", get_model_state_dict(model))}
    if optimizer is not None:
        parts[OPTIMIZER[kind]] = "optimizer", get_optimizer_state_dict(model, optimizer)
    for name, (key, state) in parts.items():
        if kind == "sharded":
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                dcp.save({key: state}, checkpoint_id=folder / name, no_dist=True)
        else:
            torch.save(state, folder / name)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_model_and_optimizer_are_converted_together(tmp_path: Path, kind: str) -> None:
    model, optimizer = trained()
    folder = saved(tmp_path / "saved", kind, model, optimizer)
    assert format_of(str(folder)).word == "accelerate"
    converted(folder, tmp_path / "ours")
    other = kinds(seed=1)
    its = in_groups(other)
    fsdp.load(tmp_path / "ours", other, its)
    assert_same(other.state_dict(), model.state_dict())
    assert_same(its.state_dict(), optimizer.state_dict())


def linears() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_load_the_folder_itself(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    model = linears()
    optimizer = adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()["state"]
    folder = saved(tmp_path / "saved", kind, model, optimizer)
    ranks(2).run(_load, folder, model.state_dict(), state[0]["exp_avg"])


def _load(folder: Path, weights: Any, exp_avg: Tensor) -> None:
    model = fully_sharded()(linears())
    optimizer = adam(model.parameters())
    loaded = fsdp.load(folder, model, optimizer)
    assert loaded.missing_keys == loaded.unexpected_keys == []
    assert_same(model.state_dict(), weights)
    full = optim_utils.full_optim_state_dict(model, optimizer, None)
    assert_same(full["state"]["0.weight"]["exp_avg"], exp_avg)


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_alone_is_a_checkpoint_without_an_optimizer(tmp_path: Path, kind: str) -> None:
    folder = saved(tmp_path / "saved", kind, trained()[0])
    model = kinds(seed=1)
    with pytest.raises(ValueError, match="no optimizer"):
        fsdp.load(folder, model, in_groups(model))
    fsdp.load(folder, model)
    assert_same(model.state_dict(), trained()[0].state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_verify_reads_both(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = trained()
    folder = saved(tmp_path / "saved", kind, model, optimizer)
    assert main(["verify", str(folder)]) == 0
    assert "all data matches torch's checksums" in capsys.readouterr().out
    place = folder / OPTIMIZER[kind]
    place = place if kind == "full" else next(place.glob("*.distcp"))
    flip(place, place.read_bytes().index(optimizer.state[model.wide.weight]["exp_avg"].numpy().tobytes()))
    assert main(["verify", str(folder)]) == 1
    assert OPTIMIZER[kind] in capsys.readouterr().out


def cut(place: Path) -> None:
    """Leave what is there when a save is killed: a folder without the file that is written last, or a short file."""
    if place.is_dir():
        (place / ".metadata").unlink()
    else:
        place.write_bytes(b"")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parts", [MODEL, OPTIMIZER], ids=["model", "optimizer"])
def test_a_part_that_was_not_saved_to_its_end_is_no_absent_part(
    tmp_path: Path, kind: str, parts: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = trained()
    folder = saved(tmp_path / "saved", kind, model, optimizer)
    save_file(linears().state_dict(), folder / "model.safetensors")  # another model
    cut(folder / parts[kind])
    with pytest.raises(ValueError, match=rf"{parts[kind]} is (incomplete|not a file of torch.save)"):
        fsdp.load(folder, model, optimizer)
    assert main(["verify", str(folder)]) == 1
    assert main(["convert", str(folder), str(tmp_path / "ours")]) == 1
    captured = capsys.readouterr()
    assert parts[kind] in captured.out
    assert parts[kind] in captured.err


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_is_read_beside_an_incomplete_optimizer(tmp_path: Path, kind: str) -> None:
    model, optimizer = trained()
    folder = saved(tmp_path / "saved", kind, model, optimizer)
    cut(folder / OPTIMIZER[kind])
    other = kinds(seed=1)
    fsdp.load(folder, other)
    assert_same(other.state_dict(), model.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_a_link_to_an_optimizer_that_is_gone_is_no_absent_optimizer(tmp_path: Path, kind: str) -> None:
    folder = saved(tmp_path / "saved", kind, trained()[0])
    (folder / OPTIMIZER[kind]).symlink_to(tmp_path / "gone")
    assert main(["convert", str(folder), str(tmp_path / "ours")]) == 1


def test_two_kinds_of_one_folder_are_not_chosen_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = trained()
    folder = saved(tmp_path / "saved", "full", model, optimizer)
    saved(tmp_path / "other", "sharded", model)
    (tmp_path / "other" / MODEL["sharded"]).rename(folder / MODEL["sharded"])
    both = rf"{MODEL['sharded']} and .*{MODEL['full']} are two saves of a model in one folder"
    for given in (None, optimizer):
        with pytest.raises(ValueError, match=both):
            fsdp.load(folder, model, given)
    assert main(["verify", str(folder)]) == 1
    assert "two saves" in capsys.readouterr().out
    assert main(["convert", str(folder), str(tmp_path / "ours")]) == 1
