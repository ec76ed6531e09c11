"""Files of FSDP1 that do not fit together, or do not say what they are: errors that name the file and what to do."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fsdp.checkpoint.formats.rank_files import open_fsdp1
from fsdp.checkpoint.formats.trees import Choices
from tests.checkpoint.formats.test_fsdp1 import folders, save
from tests.helpers.ranks import RankPool


def fails(path: Any, *says: str | Path, error: type[Exception] = ValueError, **options: Any) -> None:
    with pytest.raises(error) as caught:
        open_fsdp1(path, Choices(**options))
    for each in says:
        assert str(each) in str(caught.value), str(caught.value)


@pytest.fixture(scope="module")
def original(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(ranks, tmp_path_factory.mktemp("fsdp1"), "sharded")


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(original, tmp_path / "run")


def saved(ranks: RankPool, path: Path, kind: str, world_size: int = 3, **options: Any) -> Path:
    ranks(world_size).run(save, path, kind, options)
    return path


def test_the_last_rank_s_file_is_missing(ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    for path in (folder, saved(ranks, tmp_path, "sharded", mesh=(3,))):
        (path / "rank2.pt").unlink()
        fails(path, "inner.0.weight", "the 2 files given", "A rank's file is missing")


def test_a_file_of_another_world_size_is_among_them(ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    (saved(ranks, tmp_path, "sharded", 2) / "rank1.pt").rename(folder / "rank1.pt")
    fails(folder, "inner.0.weight", "by another number of ranks")


def test_a_file_of_another_model_is_among_them(folder: Path) -> None:
    torch.save({"model": nn.Linear(2, 2).state_dict()}, folder / "rank1.pt")
    fails(folder, folder / "rank1.pt", "has no inner.0.weight", "different models")


def test_a_truncated_file(folder: Path) -> None:
    data = (folder / "rank1.pt").read_bytes()
    (folder / "rank1.pt").write_bytes(data[: len(data) - 100])
    fails(folder, folder / "rank1.pt", "truncated or damaged")


def test_a_file_without_a_state_dict(folder: Path) -> None:
    torch.save({"optimizer": {"state": {}, "param_groups": []}}, folder / "rank2.pt")
    fails(folder, folder / "rank2.pt", "no state dict of the model under 'model'")


def test_several_state_dicts(tmp_path: Path) -> None:
    plain = nn.Linear(2, 2).state_dict()
    torch.save({"student": plain, "teacher": plain}, tmp_path / "both.pt")
    fails(tmp_path / "both.pt", tmp_path / "both.pt", "student, teacher", "save the right one")


def test_a_file_that_is_no_dict(tmp_path: Path) -> None:
    torch.save(torch.ones(2), tmp_path / "ones.pt")
    fails(tmp_path / "ones.pt", tmp_path / "ones.pt", "contains a Tensor")


def test_local_state_says_what_to_save_instead(ranks: RankPool, tmp_path: Path) -> None:
    path = saved(ranks, tmp_path, "local", 2)
    fails(path, path / "rank0.pt", "LOCAL_STATE_DICT", "FSDP1 on the same number of ranks", "FULL_STATE_DICT")


def test_flat_state_beside_weights_that_are_whole(ranks: RankPool, tmp_path: Path) -> None:
    shards, whole = folders(tmp_path)
    saved(ranks, shards, "local", 2)
    content = torch.load(shards / "whole.pt", weights_only=True)
    torch.save(content["model"], whole / "model.pt")
    numbered = {"state": {0: {"exp_avg": torch.zeros(3)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    for rank in range(2):
        torch.save(numbered, whole / f"rank{rank}.pt")
    says = (whole / "rank0.pt", "parameters have numbers", "FSDP.full_optim_state_dict")
    fails(whole / "model.pt", *says, optimizer_files=whole / "rank0.pt")


def test_state_of_another_shape_than_its_parameter(folder: Path) -> None:
    def flatten(content: Mapping[str, Any]) -> None:
        content["optimizer"]["state"]["first.weight"]["exp_avg"] = torch.zeros(25)

    content = torch.load(folder / "whole.pt", weights_only=True)
    flatten(content)
    torch.save(content, folder / "odd.pt")
    fails(folder / "odd.pt", folder / "odd.pt", "'exp_avg' of first.weight", "(25,)", "(5, 5)")


def test_state_of_ranks_at_different_steps(folder: Path, tmp_path: Path) -> None:
    content = torch.load(folder / "whole.pt", weights_only=True)
    (tmp_path / "state").mkdir()
    for rank in range(2):
        content["optimizer"]["state"]["few.weight"]["step"] = torch.tensor(2.0 + rank)
        torch.save(content["optimizer"], tmp_path / "state" / f"rank{rank}.pt")
    fails(folder / "whole.pt", "'step' of few.weight", "different steps", optimizer_files=tmp_path / "state")
