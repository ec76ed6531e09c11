"""``python -m fsdp`` with files of FairScale and FSDP1: converted, they are loaded at any number of ranks."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp
from fsdp import FullyShardedDataParallel
from fsdp.checkpoint.cli import FINE, MISUSED, WRONG, main
from fsdp.optim_utils import full_optim_state_dict
from tests.checkpoint.formats.test_fsdp1 import Model, folders, save, truth
from tests.helpers.legacy_sources import NAMES, NAMES_INSIDE, RECORDED, assert_same_values, every_case
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.ranks import RankPool
from tests.tools.record_fairscale_checkpoint import CASES
from tests.tools.record_fairscale_shards import make_model


def loaded(path: Path, make: Callable[[Callable[[nn.Module], nn.Module]], nn.Module], whole: Any, values: Any) -> None:
    """On each rank: a checkpoint of ours, loaded into a wrapped model and its optimizer, is what it should be."""
    model = make(FullyShardedDataParallel)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    found = fsdp.load(path, model, optimizer)
    assert found.values == values
    weights = model.state_dict()
    for name, value in whole["model"].items():
        assert torch.equal(weights[name], value), name
    full = full_optim_state_dict(model, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.01
    if dist.get_rank() == 0:
        assert full is not None
        assert_same_values(full["state"], whole["optimizer"])


def make_fsdp1_model(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    torch.manual_seed(7)
    return wrap(Model(wrap))


@parametrize_pairs(name=list(CASES), world_size=[1, 2, 4])
def test_fairscale_s_checkpoints_are_loaded_at_any_number_of_ranks(
    ranks: RankPool, tmp_path: Path, world_size: int, name: str
) -> None:
    assert main(["convert", str(RECORDED / name), str(tmp_path / "ours")]) == FINE
    whole = torch.load(RECORDED / name / "whole.pt", weights_only=True)
    whole["optimizer"] = dict(zip((*NAMES, *NAMES_INSIDE), whole["optimizer"].values(), strict=True))
    extra = {"val_loss": 1.5, "train_iterator": {"epoch": 2, "iterations_in_epoch": 7}}
    values = {
        "args": {"lr": [0.01], "arch": "tiny", "fp16": True},
        "extra_state": extra,
        "last_optimizer_state": {"loss_scale": 4.0},
    }
    ranks(world_size).run(loaded, tmp_path / "ours", make_model, whole, values)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_fsdp1_s_checkpoints_are_loaded_at_any_number_of_ranks(
    ranks: RankPool, tmp_path: Path, world_size: int
) -> None:
    theirs, ours = folders(tmp_path)
    ranks(3).run(save, theirs, "sharded", {})
    assert main(["convert", str(theirs), str(ours)]) == FINE
    whole = truth(theirs)
    whole["optimizer"] = whole["optimizer"]["state"]
    ranks(world_size).run(loaded, ours, make_fsdp1_model, whole, {"step": 2})


def test_a_plain_model_loads_what_was_converted_to_torch(tmp_path: Path) -> None:
    assert main(["convert", str(RECORDED / "fairseq-flat-3"), str(tmp_path / "whole.pt")]) == FINE
    found = torch.load(tmp_path / "whole.pt", weights_only=True)["model"]
    model = make_model(lambda module: module)
    model.load_state_dict(found)  # with all names of tied parameters
    assert found["first.weight"].data_ptr() == found["last.weight"].data_ptr()


def test_the_optimizer_s_state_may_be_in_files_of_its_own(tmp_path: Path) -> None:
    for rank in range(3):
        content = torch.load(RECORDED / "fairseq-flat-3" / f"checkpoint_last-shard{rank}.pt", weights_only=False)
        torch.save(content.pop("last_optimizer_state"), tmp_path / f"optim-rank{rank}.pt")
        torch.save(content, tmp_path / f"model-rank{rank}.pt")
    options = ["--optimizer-files", str(tmp_path / "optim-rank0.pt")]
    assert main(["convert", str(tmp_path / "model-rank0.pt"), str(tmp_path / "whole.pt"), *options]) == FINE
    found = torch.load(tmp_path / "whole.pt", weights_only=True)["optimizer"]["state"]
    whole = torch.load(RECORDED / "fairseq-flat-3" / "whole.pt", weights_only=True)["optimizer"]
    assert_same_values(found, dict(zip((*NAMES, *NAMES_INSIDE), whole.values(), strict=True)))


def test_options_of_other_formats_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"model": nn.Linear(2, 2).state_dict()}, tmp_path / "plain.pt")
    assert main(["inspect", str(tmp_path / "plain.pt"), "--optimizer-files", "anything"]) == WRONG
    assert "has the format torch, but --optimizer-files is for fairscale and fsdp1" in capsys.readouterr().err


def test_fairscale_s_format_is_not_written(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["convert", str(RECORDED / "flat-2"), "new", "--to", "fairscale"])
    assert left.value.code == MISUSED
    assert "--to: FairScale's shards can be read, but not written: convert to torch" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "code"), [("fairseq-flat-3", MISUSED), ("fairseq-unflattened-3", FINE)])
def test_numbers_are_made_only_where_the_order_of_parameters_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, code: int
) -> None:
    assert main(["convert", str(RECORDED / name), str(tmp_path / "whole.pt"), "--by-number"]) == code
    if code == FINE:
        found, model = torch.load(tmp_path / "whole.pt", weights_only=True), make_model(lambda module: module)
        order = [name for name, _ in model.named_parameters()]
        assert found["optimizer"]["param_groups"][0]["param_names"] == order
    else:
        assert "the order of parameters" in capsys.readouterr().err


@every_case
def test_files_are_fine_and_shown(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(RECORDED / name)]) == FINE
    assert f"(fairscale) is fine: {size_of(name)}, in {CASES[name][1].ranks} files" in capsys.readouterr().out
    assert main(["inspect", str(RECORDED / name / "checkpoint_last.pt")]) == FINE
    shown = capsys.readouterr().out
    assert f"fairscale, saved by {CASES[name][1].ranks} ranks" in shown
    assert "state 'exp_avg' of 8 parameters" in shown


def size_of(name: str) -> str:
    sizes = [path.stat().st_size for path in (RECORDED / name).glob("checkpoint*")]
    return f"{sum(sizes) / 1024:.1f} KiB"


def test_a_flipped_byte_is_found_in_the_file_that_has_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(RECORDED / "flat-2", tmp_path / "flat-2")
    path = tmp_path / "flat-2" / "rank1.pt"
    value = torch.load(path, weights_only=True)["weights"]["flat_param_0"].numpy().tobytes()
    data = bytearray(path.read_bytes())
    data[data.index(value)] ^= 1
    path.write_bytes(data)
    assert main(["verify", str(tmp_path / "flat-2")]) == WRONG
    assert str(path) in capsys.readouterr().out


@pytest.mark.parametrize("command", [["inspect"], ["verify"], ["convert"]])
def test_a_missing_rank_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    shutil.copytree(RECORDED / "flat-3", tmp_path / "flat-3")
    (tmp_path / "flat-3" / "rank1.pt").unlink()
    more = [str(tmp_path / "new")] if command == ["convert"] else []
    assert main([*command, str(tmp_path / "flat-3"), *more]) == WRONG
    said = capsys.readouterr()
    assert "no file of rank 1" in said.out + said.err
