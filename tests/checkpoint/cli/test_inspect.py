"""``python -m fsdp inspect``: what is in a checkpoint, for people and for programs."""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
from pathlib import Path, PosixPath

import pytest
import torch

from fsdp.__main__ import _add
from fsdp.checkpoint import cli
from tests.helpers.convert_formats import command, converted, kinds, saved, trained
from tests.helpers.forked import Forked
from tests.helpers.models import nested_mlp

Captured = pytest.CaptureFixture[str]


@pytest.mark.parametrize("word", ["fsdp", "torch", "dcp", "safetensors"])
def test_tensors_are_listed_with_shapes_dtypes_and_bytes(tmp_path: Path, capsys: Captured, word: str) -> None:
    place = converted(saved(tmp_path / "origin"), tmp_path / "there", "--to", word)
    said = command(capsys, "inspect", place)
    assert (said.code, said.err) == (0, "")
    rows = {line.split()[0]: line.split()[1:] for line in said.out.splitlines() if line.startswith("  ")}
    assert rows["wide.weight"] == ["7", "x", "5", "float32", "140"]
    assert rows["thin"] == ["3", "x", "2", "bfloat16", "12"]
    assert rows["scale"] == ["number", "float32", "4"]
    assert rows["empty"] == ["0", "x", "3", "float32", "0"]
    tensors = [each for each in trained()[0].state_dict().values() if isinstance(each, torch.Tensor)]
    elements = sum(each.numel() for each in tensors)
    nbytes = sum(each.nbytes for each in tensors)
    assert f"model: {len(tensors)} tensors, {elements} elements, {nbytes} B" in said.out


def test_groups_state_and_values_are_shown(tmp_path: Path, capsys: Captured) -> None:
    lines = command(capsys, "inspect", saved(tmp_path / "origin")).out.splitlines()
    assert lines[0] == f"{tmp_path / 'origin'}: fsdp, saved by 1 rank"
    assert "extra state of modules: _extra_state" in lines
    assert any(line.startswith("optimizer (AdamW): 14 tensors, ") for line in lines)
    assert any(line.startswith("  group 0: 4 parameters, lr=0.01, betas=(0.9, 0.999)") for line in lines)
    assert any(line.startswith("  group 1: 4 parameters, ") and "betas=(0.8, 0.9)" in line for line in lines)
    assert "  state 'step' of 7 parameters: 2.0" in lines
    assert "  state 'exp_avg' of 7 parameters: tensors of bfloat16, float32, float64" in lines
    assert "  step: 7" in lines
    assert "  table: tensor([0, 1, 2])" in lines


def test_json_has_all_of_it(tmp_path: Path, capsys: Captured) -> None:
    found = json.loads(command(capsys, "inspect", saved(tmp_path / "origin"), "--json").out)
    assert (found["format"], found["world_size"], found["generators"]) == ("fsdp", 1, True)
    assert found["model"]["tensors"]["thin"] == {"shape": [3, 2], "dtype": "bfloat16", "nbytes": 12}
    assert found["optimizer"]["class"] == "AdamW"
    assert found["optimizer"]["tensors"]["fine/exp_avg"] == {"shape": [2, 2], "dtype": "float64", "nbytes": 32}
    assert [len(group["params"]) for group in found["optimizer"]["groups"]] == [4, 4]
    assert found["optimizer"]["state"]["thin"]["step"] == ["number", "F32", 2.0]
    assert found["values"]["step"] == 7
    assert found["extra_state"] == ["_extra_state"]
    assert found["notes"] == []


def test_what_was_left_out_is_noted(tmp_path: Path, capsys: Captured) -> None:
    torch.save({"model": nested_mlp().state_dict(), "place": Path("here")}, tmp_path / "x.pt")
    lines = command(capsys, "inspect", tmp_path / "x.pt").out.splitlines()
    assert any(line.startswith(f"note: left out: place is a {PosixPath.__module__}.PosixPath") for line in lines)


def test_an_optimizer_that_cannot_be_understood_does_not_hide_the_model(tmp_path: Path, capsys: Captured) -> None:
    model, optimizer = trained()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    said = command(capsys, "inspect", tmp_path / "x.pt")
    assert said.code == 0
    assert "wide.weight" in said.out
    assert "note: the optimizer is not shown: " in said.out
    assert "parameters have numbers" in said.out


def test_damage_is_one_line_without_a_traceback(tmp_path: Path, capsys: Captured) -> None:
    place = saved(tmp_path / "origin")
    os.truncate(place / "model.safetensors", 30)
    said = command(capsys, "inspect", place)
    assert (said.code, said.out) == (1, "")
    assert said.err.startswith("fsdp: ")
    assert "model.safetensors has 30 bytes instead of" in said.err
    assert said.err.count("\n") == 1


# As a process


def test_help_consists_of_sentences() -> None:
    parser = cli._parser(_add)
    (listed,) = [action.choices for action in parser._actions if isinstance(action.choices, dict)]
    assert {"inspect", "verify", "convert", "diagnose", "plan", "compare"} == listed.keys()
    for name, each in {"": parser, **listed}.items():
        texts = {action.dest: action.help for action in each._actions if action.help not in (None, argparse.SUPPRESS)}
        for about, text in {**texts, "about": each.description, "listed": each.description.splitlines()[0]}.items():
            assert text[0].isupper(), (name, about, text)
            assert text.endswith("."), (name, about, text)


def test_the_version_is_told(capsys: Captured) -> None:
    assert command(capsys, "--version").out.startswith("fsdp ")


def test_it_is_run_as_a_module_and_nobody_who_reads_is_no_error(tmp_path: Path) -> None:
    torch.save(kinds().state_dict(), tmp_path / "x.pt")
    with Forked(_run_module, "inspect", str(tmp_path / "x.pt")) as process:
        process.stdout.close()
        process.stdin.close()
        assert process.wait() == 141


def _run_module(*arguments: str) -> None:
    sys.stdin.read()  # until its output has no reader
    sys.modules.pop("fsdp.__main__", None)
    os.dup2(sys.stdout.fileno(), 1)
    sys.stdout, sys.argv = os.fdopen(1, "w"), ["fsdp", *arguments]
    try:
        runpy.run_module("fsdp", run_name="__main__")
    except SystemExit as ended:
        sys.stdout.flush()  # as an interpreter does at its end
        os._exit(int(ended.code or 0))


def test_help_names_the_commands_and_nothing_is_wrong_usage(capsys: Captured) -> None:
    assert command(capsys, "--help").code == 0
    said = command(capsys)
    assert said.code == 2
    for name in ("inspect", "verify", "convert"):
        assert name in said.err
