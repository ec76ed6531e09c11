"""Files of FairScale's ranks that do not fit together: errors that name the file and what to do."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp.checkpoint.formats.fairscale import open_fairscale
from fsdp.checkpoint.formats.trees import Choices
from tests.helpers.legacy_sources import RECORDED, assert_same_values, state_of

Content = dict[str, Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint as of fairseq, of three ranks."""
    for rank in range(3):
        shutil.copy(RECORDED / "fairseq-flat-3" / f"checkpoint_last-shard{rank}.pt", tmp_path)
    return tmp_path


def shard(folder: Path, rank: int) -> Path:
    return folder / f"checkpoint_last-shard{rank}.pt"


def change(path: Path, edit: Callable[[Content], object]) -> None:
    content = torch.load(path, weights_only=False)
    edit(content)
    torch.save(content, path)


def fails(path: Any, *says: str | Path, error: type[Exception] = ValueError, **options: Any) -> None:
    with pytest.raises(error) as caught:
        open_fairscale(path, Choices(**options))
    for each in says:
        assert str(each) in str(caught.value), str(caught.value)


def test_the_last_rank_s_file_is_missing(folder: Path) -> None:
    shard(folder, 2).unlink()
    fails(folder, "28 elements on the 2 ranks", "metadata say 40", shard(folder, 0), "A rank's shard is missing")


def test_the_last_of_as_many_as_the_names_say_is_missing(folder: Path) -> None:
    for rank in range(2):
        shard(folder, rank).rename(folder / f"rank{rank}-of-3.pt")
    shard(folder, 2).unlink()
    fails(folder, "rank0-of-3.pt", "no file of rank 2", error=FileNotFoundError)


def test_files_in_a_wrong_order(folder: Path) -> None:
    last = shard(folder, 2).rename(folder / "last.pt")
    shard(folder, 1).rename(shard(folder, 2))
    last.rename(shard(folder, 1))
    fails(folder, shard(folder, 1), "ends with 2 elements of padding", f"{shard(folder, 2)} continues it")


class Names(list[str]):
    """A list of a program's own."""


def test_a_container_of_a_program_s_own_is_left_out_and_told_of(folder: Path) -> None:
    change(shard(folder, 0), lambda content: content.update(names=Names(["a", "b"])))
    (note,) = open_fairscale(folder).notes
    assert note == f"left out: names is a {__name__}.Names"


def test_files_of_two_checkpoints_in_one_folder(folder: Path) -> None:
    shutil.copy(shard(folder, 0), folder / "checkpoint_best-shard0.pt")
    fails(folder, "checkpoint_best-shard0.pt, checkpoint_last-shard0.pt", "pass the first file of one")
    assert open_fairscale(shard(folder, 0)).world_size == 3


def test_a_folder_without_files_of_ranks(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing")
    fails(tmp_path, "no files of torch.save with a rank's number", error=FileNotFoundError)


def test_a_path_that_is_nothing(tmp_path: Path) -> None:
    fails(tmp_path / "checkpoint_last.pt", "checkpoint_last-shard0.pt", error=FileNotFoundError)


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("fsdp_metadata", ("no metadata", "model, last_optimizer_state")),
        ("model", ("no weights", "'fsdp_metadata'")),
        ("last_optimizer_state", ("no state of the optimizer under 'last_optimizer_state'",)),
    ],
)
def test_a_file_that_lacks_a_part(folder: Path, key: str, says: tuple[str, ...]) -> None:
    change(shard(folder, 2), lambda content: content.pop(key))
    fails(folder, shard(folder, 2), *says)


def test_a_file_that_is_no_dict(folder: Path) -> None:
    torch.save([1, 2], shard(folder, 0))
    fails(folder, shard(folder, 0), "contains a list")


# --- the optimizer's state ------------------------------------------------------------------------------------------


def state(content: Content) -> Content:
    return content["last_optimizer_state"]["state"]


def test_state_of_a_rank_at_another_step(folder: Path) -> None:
    change(shard(folder, 1), lambda content: state(content)[0].update(step=torch.tensor(3.0)))
    fails(folder, "'step' of first.weight", "different steps")


def test_state_that_a_rank_has_not(folder: Path) -> None:
    change(shard(folder, 2), lambda content: state(content)[1].pop("exp_avg_sq"))
    fails(folder, shard(folder, 2), "inner.flat_param_0", "'exp_avg', 'step'")


def test_state_of_an_odd_shape(folder: Path) -> None:
    change(shard(folder, 0), lambda content: state(content)[0].update(exp_avg=torch.zeros(3)))
    fails(folder, shard(folder, 0), "'exp_avg' of flat_param_0 is [3]", "has shape [14]")


def test_an_optimizer_of_fewer_parameters_wants_their_order(folder: Path) -> None:
    def drop(content: Content) -> None:
        state(content).update({0: state(content).pop(1)})
        content["last_optimizer_state"]["param_groups"][0]["params"] = [0]

    for rank in range(3):
        change(shard(folder, rank), drop)
    fails(folder, "1 parameters in 1 group(s)", "2 shards (flat_param_0, inner.flat_param_0)", "--param-order")
    source = open_fairscale(folder, Choices(param_order=["inner.flat_param_0"]))
    assert list(source.optimizer_rest["state"]) == ["inner.0.weight", "inner.2.bias", "inner.3.weight", "inner.3.bias"]
    fails(folder, "no shard other.flat_param_0", param_order=["other.flat_param_0"])


def test_several_groups_want_the_order_of_parameters(folder: Path) -> None:
    def divide(content: Content) -> None:
        group = content["last_optimizer_state"]["param_groups"][0]
        group["params"] = [0]
        content["last_optimizer_state"]["param_groups"].append({**group, "params": [1], "lr": 0.5})
        state(content).update({0: state(content)[1], 1: state(content)[0]})

    expected = state_of(open_fairscale(folder))
    for rank in range(3):
        change(shard(folder, rank), divide)
    fails(folder, "2 parameters in 2 group(s)", "--param-order")
    source = open_fairscale(folder, Choices(param_order=["inner.flat_param_0", "flat_param_0"]))
    assert source.optimizer_rest["groups"][1]["options"]["lr"] == 0.5
    assert source.optimizer_rest["groups"][1]["params"] == ["first.weight", "first.bias", "norm.weight", "norm.bias"]
    assert_same_values(state_of(source), expected)


def test_a_full_state_of_another_model(folder: Path) -> None:
    content = torch.load(RECORDED / "optim-flat-2" / "full.pt", weights_only=True)
    content["param_id_map"][8] = 1
    torch.save(content, folder / "full.pt")
    fails(shard(folder, 0), folder / "full.pt", "has 9 parameters", "list 8", optimizer_files=folder / "full.pt")


def test_two_optimizers_are_left_out_and_told_of(folder: Path) -> None:
    for rank in range(3):
        change(shard(folder, rank), lambda content: content.update(other=content["last_optimizer_state"]))
    source = open_fairscale(folder)
    assert source.optimizer is None
    assert source.notes == ("last_optimizer_state, other are ignored: a checkpoint has the state of one optimizer",)


def test_a_range_that_is_not_in_a_tensor(folder: Path) -> None:
    source = open_fairscale(folder)
    for start, target in ((-1, torch.empty(2)), (24, torch.empty(2)), (0, torch.empty(2, 2).t())):
        with pytest.raises(ValueError, match=re.escape(f"first.weight in {folder}: cannot read elements {start}")):
            source.model.read("first.weight", target, start)
