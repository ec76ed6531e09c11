"""``python -m fsdp verify``: all damage is named, in every format, and the exit code says whether there is any."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from fsdp.checkpoint.formats.dcp import DcpFolder
from fsdp.checkpoint.formats.torch_file import TorchArchive
from fsdp.checkpoint.safetensors import SafetensorsFiles
from tests.helpers.checkpoint_models import flip
from tests.helpers.convert_formats import command, converted, saved

Captured = pytest.CaptureFixture[str]
WORDS = ["fsdp", "torch", "dcp", "safetensors"]


@pytest.mark.parametrize("word", WORDS)
def test_a_whole_checkpoint_is_fine(tmp_path: Path, capsys: Captured, word: str) -> None:
    place = converted(saved(tmp_path / "origin"), tmp_path / "there", "--to", word)
    said = command(capsys, "verify", place)
    assert (said.code, said.err) == (0, "")
    assert said.out.startswith(f"{place} ({word}) is fine: ")
    assert ("data matches" in said.out) is (word != "safetensors")


def test_what_cannot_be_said_is_not_said(tmp_path: Path, capsys: Captured) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"x": torch.ones(3)}, tmp_path / "x.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert "there are no checksums" in command(capsys, "verify", tmp_path / "x.pt").out
    place = converted(saved(tmp_path / "origin"), tmp_path / "x.safetensors")
    assert "the format has no checksums" in command(capsys, "verify", place).out


# Damage


def place_of(path: Path, word: str) -> tuple[Path, int, str]:
    """A byte of the tensor ``wide.weight``: the file, the place, and what messages should call it."""
    if word == "torch":
        tensor = TorchArchive(str(path)).content["model"]["wide.weight"]
        return path, tensor.begin, "data/"
    if word == "dcp":
        (find,) = DcpFolder(str(path)).tree()["model"]["wide.weight"].chunks.values()
        return Path(find().file.path), find().begin, "model.wide.weight"
    stored = SafetensorsFiles(path).tensors["wide.weight"]
    return Path(stored.file), stored.tensor.begin, "wide.weight"


@pytest.mark.parametrize("word", ["fsdp", "torch", "dcp"])
def test_a_flipped_bit_is_found_and_named(tmp_path: Path, capsys: Captured, word: str) -> None:
    path = converted(saved(tmp_path / "origin"), tmp_path / "there", "--to", word)
    file, place, name = place_of(path, word)
    flip(file, place + 5)
    said = command(capsys, "verify", path)
    assert said.code == 1
    first, last = said.out.splitlines()
    assert name in first
    assert str(file) in first
    assert last == f"{path} ({word}) is damaged in 1 place"
    flip(file, place + 5)
    assert command(capsys, "verify", path).code == 0


@pytest.mark.parametrize("word", WORDS)
def test_truncated_files_are_named(tmp_path: Path, capsys: Captured, word: str) -> None:
    path = converted(saved(tmp_path / "origin"), tmp_path / "there", "--to", word)
    file = place_of(path, word)[0]
    os.truncate(file, file.stat().st_size - 3)
    said = command(capsys, "verify", path)
    assert said.code == 1
    assert str(file) in said.out


def test_all_damage_is_named(tmp_path: Path, capsys: Captured) -> None:
    path = saved(tmp_path / "origin", max_file_bytes=200)
    files = SafetensorsFiles(path).tensors
    flip(Path(files["wide.weight"].file), files["wide.weight"].tensor.begin)
    optimizer = SafetensorsFiles(path / "optimizer.safetensors.index.json").tensors
    for name in ("fine/exp_avg", "wide.weight/exp_avg_sq"):
        flip(Path(optimizer[name].file), optimizer[name].tensor.begin)
    said = command(capsys, "verify", path)
    assert said.code == 1
    for name in ("wide.weight in", "fine/exp_avg in", "wide.weight/exp_avg_sq in"):
        assert sum(name in line for line in said.out.splitlines()) == 1, name
    assert said.out.endswith("is damaged in 3 places\n")


@pytest.mark.parametrize("word", ["fsdp", "dcp"])
def test_missing_files_are_named(tmp_path: Path, capsys: Captured, word: str) -> None:
    path = converted(saved(tmp_path / "origin"), tmp_path / "there", "--to", word)
    file = place_of(path, word)[0]
    file.unlink()
    said = command(capsys, "verify", path)
    assert said.code == 1
    assert f"{file} is missing" in said.out


def test_damaged_descriptions_are_named(tmp_path: Path, capsys: Captured) -> None:
    path = saved(tmp_path / "origin")
    content = json.loads((path / "checkpoint.json").read_text())
    content["checkpoint"]["values"] = 5
    (path / "checkpoint.json").write_text(json.dumps(content))
    assert "checkpoint.json is damaged" in command(capsys, "verify", path).out
    folder = converted(saved(tmp_path / "other"), tmp_path / "dcp", "--to", "dcp")
    flip(folder / ".metadata", 1)
    assert ".metadata is damaged" in command(capsys, "verify", folder).out


# Usage


def test_what_is_not_there_is_wrong_usage(tmp_path: Path, capsys: Captured) -> None:
    said = command(capsys, "verify", tmp_path / "nothing")
    assert (said.code, said.out) == (2, "")
    assert said.err == f"fsdp: {tmp_path / 'nothing'}: there is no such file or folder\n"


def test_what_is_no_checkpoint_is_an_error(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "text").write_text("no checkpoint")
    said = command(capsys, "verify", tmp_path / "text")
    assert (said.code, said.out) == (1, "")
    assert "is not a complete checkpoint of a supported format" in said.err
    assert said.err.count("\n") == 1


def test_a_format_may_be_named(tmp_path: Path, capsys: Captured) -> None:
    path = saved(tmp_path / "origin")
    assert "(fsdp) is fine" in command(capsys, "verify", path).out
    assert "(safetensors) is fine" in command(capsys, "verify", path, "--from", "safetensors").out
    assert command(capsys, "verify", path, "--from", "another").code == 2
