"""Checkpoints of FairScale 0.4.13 as one, to the bit: recorded by `tests.tools.record_fairscale_checkpoint`."""

from __future__ import annotations

import shutil
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import torch

from fsdp.checkpoint.formats.fairscale import is_fairscale, open_fairscale
from fsdp.checkpoint.formats.trees import Choices
from fsdp.checkpoint.json_values import decoded
from tests.helpers.damaged_files import Touch
from tests.helpers.equality import assert_same
from tests.helpers.legacy_sources import (
    NAMES,
    NAMES_INSIDE,
    RECORDED,
    assert_same_values,
    every_case,
    groups_of,
    state_of,
    truth,
    weights_of,
)
from tests.tools.record_fairscale_checkpoint import CASES, SETTINGS
from tests.tools.record_fairscale_optim import CASES as FULL_CASES
from tests.tools.record_fairscale_shards import CASES as SHARD_CASES


@pytest.mark.parametrize("name", SHARD_CASES)
def test_shards_are_fairscale_s_whole_weights(name: str) -> None:
    source = open_fairscale(RECORDED / name)
    assert_same(weights_of(source), truth(name))
    assert source.world_size == SHARD_CASES[name].ranks
    assert source.optimizer is None


@every_case
def test_files_of_fairseq_and_metaseq_are_whole_weights_and_state(name: str) -> None:
    source, whole = open_fairscale(RECORDED / name), truth(name)
    assert_same(weights_of(source), whole["model"])
    named = zip((*NAMES, *NAMES_INSIDE), whole["optimizer"].values(), strict=True)
    assert_same_values(state_of(source), dict(named))
    # Tied parameters are read once.
    assert source.aliases == {"last.weight": "first.weight", "inner.2.weight": "inner.0.weight"}
    assert not source.aliases.keys() & source.model.tensors.keys()
    ((options, names),) = groups_of(source)
    assert names == [*NAMES, *NAMES_INSIDE]
    assert (options["lr"], options["betas"]) == (0.01, (0.9, 0.999))
    # What else a program saves are values, and its settings a dict.
    assert decoded(source.values) == {
        "args": SETTINGS,
        "extra_state": {"val_loss": 1.5, "train_iterator": {"epoch": 2, "iterations_in_epoch": 7}},
        "last_optimizer_state": {"loss_scale": 4.0},
    }


@every_case
def test_one_file_and_the_common_name_stand_for_the_checkpoint(name: str) -> None:
    program, case = CASES[name]
    for file in (program.file.format(rank=case.ranks - 1), "checkpoint_last.pt"):
        assert_same(weights_of(open_fairscale(RECORDED / name / file)), truth(name)["model"])


@pytest.mark.parametrize("name", FULL_CASES)
def test_fairscale_s_full_optimizer_state_goes_by_names(name: str) -> None:
    full = torch.load(RECORDED / name / "full.pt", weights_only=True)
    shards = "alone-2" if "alone" in name else f"flat-{FULL_CASES[name].ranks}"
    source = open_fairscale(RECORDED / shards, Choices(optimizer_files=RECORDED / name / "full.pt"))
    named = zip((*NAMES, *NAMES_INSIDE), full["state"].values(), strict=True)
    assert_same_values(state_of(source), dict(named))
    assert groups_of(source)[0][1] == [*NAMES, *NAMES_INSIDE]


def test_a_full_optimizer_state_in_the_first_rank_s_file_is_read(tmp_path: Path) -> None:
    for rank in range(2):
        saved = torch.load(RECORDED / "flat-2" / f"rank{rank}.pt", weights_only=True)
        if rank == 0:
            saved["last_optimizer_state"] = torch.load(RECORDED / "optim-flat-2" / "full.pt", weights_only=True)
        torch.save(saved, tmp_path / f"rank{rank}.pt")
    source = open_fairscale(tmp_path)
    assert set(state_of(source)) == {*NAMES, *NAMES_INSIDE}
    assert decoded(source.values) == {"last_optimizer_state": {"loss_scale": 4.0}}


def test_a_file_of_whole_weights_beside_metadata_is_read_as_it_is(tmp_path: Path) -> None:
    whole, saved = truth("flat-2"), torch.load(RECORDED / "flat-2" / "rank0.pt", weights_only=True)
    whole["last.weight"] = whole["first.weight"]
    full = torch.load(RECORDED / "optim-flat-2" / "full.pt", weights_only=True)
    content = {"model": whole, "fsdp_metadata": saved["metadata"], "last_optimizer_state": full}
    torch.save(content, tmp_path / "checkpoint_last.pt")
    source = open_fairscale(tmp_path / "checkpoint_last.pt")
    assert_same(weights_of(source), whole)
    assert source.aliases["last.weight"] == "first.weight"
    assert source.world_size is None
    assert set(state_of(source)) == {*NAMES, *NAMES_INSIDE}


def test_extra_state_of_modules_is_the_first_rank_s(tmp_path: Path) -> None:
    for rank in range(2):
        saved = torch.load(RECORDED / "flat-2" / f"rank{rank}.pt", weights_only=True)
        saved["weights"]["_fsdp_wrapped_module._fpw_module.inner._extra_state"] = {"rank": rank, "of": torch.ones(2)}
        torch.save(saved, tmp_path / f"rank{rank}.pt")
    source = open_fairscale(tmp_path)
    found = decoded(source.extra["inner._extra_state"])
    assert found["rank"] == 0
    assert torch.equal(found["of"], torch.ones(2))
    assert "inner._extra_state" not in source.model.tensors


def test_ranks_are_in_the_order_of_their_numbers_and_not_of_the_letters(tmp_path: Path) -> None:
    saved = torch.load(RECORDED / "flat-2" / "rank0.pt", weights_only=True)
    values = torch.arange(40.0)
    for rank in range(14):  # three elements each, of which the last rank has one
        own = values[3 * rank : 3 * rank + 3]
        for key, entry in zip(("flat_param_0", "inner.flat_param_0"), saved["metadata"]["param_metadata"], strict=True):
            saved["weights"][key] = torch.cat([own, torch.zeros(3 - own.numel())])
            entry["params"]["flat_param_0"]["padding"] = 3 - own.numel()
        torch.save(saved, tmp_path / f"rank{rank}-of-14.pt")
    found = weights_of(open_fairscale(tmp_path))
    assert torch.equal(found["first.weight"].view(-1), values[:25])
    assert torch.equal(found["norm.bias"], values[35:])


def test_a_folder_is_known_by_its_metadata(tmp_path: Path) -> None:
    assert is_fairscale(RECORDED / "fairseq-flat-3")
    assert is_fairscale(RECORDED / "fairseq-flat-3" / "checkpoint_last.pt")
    assert not is_fairscale(RECORDED / "fairseq-flat-3" / "whole.pt")
    assert not is_fairscale(RECORDED / "optim-flat-2")
    assert not is_fairscale(tmp_path)
    assert not is_fairscale(tmp_path / "nothing.pt")


def test_nothing_in_a_file_is_run_and_what_is_not_known_is_left_out_and_told(tmp_path: Path) -> None:
    shutil.copytree(RECORDED / "flat-2", tmp_path / "flat-2")
    path = tmp_path / "flat-2" / "rank0.pt"
    more = {
        "trap": [Touch(str(tmp_path / "made"))],
        "kept": 1,
        "counts": defaultdict(int, {"a": 2}),
        "steps": Counter([3]),
    }
    torch.save({**torch.load(path, weights_only=True), **more}, path)
    source = open_fairscale(tmp_path / "flat-2")
    assert_same(weights_of(source), truth("flat-2"))
    assert decoded(source.values) == {"kept": 1, "counts": {"a": 2}, "steps": Counter({3: 1})}
    assert type(decoded(source.values)["steps"]) is Counter
    assert "left out: trap" in source.notes[0]
    assert "open" in source.notes[0]
    assert not (tmp_path / "made").exists()
