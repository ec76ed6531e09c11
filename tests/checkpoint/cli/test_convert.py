"""``python -m fsdp convert``: what it refuses, and that a failure at any moment leaves what was there and no more."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from fsdp.checkpoint.cli import Progress
from fsdp.checkpoint.cli import _size as size_of
from fsdp.checkpoint.safetensors import SafetensorsFiles
from tests.helpers.checkpoint_models import content, flip, small_files
from tests.helpers.convert_formats import assert_same_checkpoint, command, converted, saved

Captured = pytest.CaptureFixture[str]
WORDS = ["fsdp", "torch", "dcp", "safetensors"]
every_target = pytest.mark.parametrize("word", WORDS)
every_target_with_a_signal = pytest.mark.parametrize(
    ("word", "number"), [*zip(WORDS, 2 * [signal.SIGINT, signal.SIGTERM], strict=True)]
)


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("checkpoints") / "origin")


# What is there already


def test_what_is_there_is_not_replaced(tmp_path: Path, capsys: Captured, origin: Path) -> None:
    converted(origin, tmp_path / "there")
    before = content(tmp_path)
    said = command(capsys, "convert", origin, tmp_path / "there")
    assert said.code == 2
    assert "exists already: choose another path, or replace it (--overwrite)" in said.err
    assert content(tmp_path) == before


@every_target
def test_what_is_there_is_replaced_if_that_is_wanted(tmp_path: Path, origin: Path, word: str) -> None:
    converted(origin, tmp_path / "there", "--to", word, "--dtype", "float64", "--only", "model")
    converted(origin, tmp_path / "there", "--to", word, "--overwrite")
    assert os.listdir(tmp_path) == ["there"]
    if word != "safetensors":
        assert_same_checkpoint(tmp_path / "there", origin)


@pytest.mark.parametrize("word", ["fsdp", "dcp", "safetensors"])
def test_a_folder_with_other_files_is_never_replaced(tmp_path: Path, capsys: Captured, origin: Path, word: str) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "thesis.txt").write_text("all of it")
    said = command(capsys, "convert", origin, tmp_path / "there", "--to", word, "--overwrite")
    assert said.code == 2
    assert content(tmp_path) == {"there/thesis.txt": b"all of it"}


def test_a_folder_is_not_replaced_by_a_file(tmp_path: Path, capsys: Captured, origin: Path) -> None:
    (tmp_path / "x.pt").mkdir()
    (tmp_path / "x.pt" / "y").write_text("")
    said = command(capsys, "convert", origin, tmp_path / "x.pt", "--overwrite")
    assert said.code == 2
    assert "is a folder: move it away first" in said.err


def test_what_another_conversion_writes_is_left_alone(tmp_path: Path, capsys: Captured, origin: Path) -> None:
    (tmp_path / "x.pt.converting").write_text("half of it")
    said = command(capsys, "convert", origin, tmp_path / "x.pt")
    assert said.code == 2
    assert "x.pt.converting exists" in said.err
    assert (tmp_path / "x.pt.converting").read_text() == "half of it"


@pytest.mark.parametrize("word", ["fsdp", "safetensors"])
def test_a_checkpoint_is_not_written_over_itself(tmp_path: Path, capsys: Captured, word: str) -> None:
    place = saved(tmp_path / "origin")
    before = content(tmp_path)
    said = command(capsys, "convert", place, place, "--overwrite", "--to", word)
    assert said.code == 2
    assert "is the checkpoint itself" in said.err
    assert content(tmp_path) == before


# Failures


@every_target
def test_a_damaged_source_leaves_what_was_there(tmp_path: Path, capsys: Captured, word: str) -> None:
    source = saved(tmp_path / "origin")
    converted(source, tmp_path / "there", "--to", word)
    tensor = SafetensorsFiles(source).tensors["wide.weight"]
    flip(Path(tensor.file), tensor.tensor.begin)
    before = content(tmp_path)
    said = command(capsys, "convert", source, tmp_path / "there", "--to", word, "--overwrite")
    assert said.code == 1
    assert "wide.weight in" in said.err
    assert "is damaged" in said.err
    assert content(tmp_path) == before


@every_target
def test_a_disk_that_takes_no_more_is_said(tmp_path: Path, capsys: Captured, origin: Path, word: str) -> None:
    (tmp_path / "beside").write_text("mine")
    with small_files(700):
        said = command(capsys, "convert", origin, tmp_path / "there", "--to", word)
    assert said.code == 1
    assert said.err.splitlines()[-1].startswith("fsdp: ")
    assert str(tmp_path / "there") in said.err.splitlines()[-1]
    assert "Traceback" not in said.err
    assert content(tmp_path) == {"beside": b"mine"}


@every_target_with_a_signal
def test_an_interrupt_leaves_nothing(
    tmp_path: Path, capsys: Captured, origin: Path, word: str, number: signal.Signals
) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    keyboard = signal.signal(signal.SIGINT, signal.default_int_handler)  # shells have jobs ignore it

    def interrupted(self: Progress, nbytes: int) -> None:
        assert os.listdir(tmp_path)  # it has begun
        signal.raise_signal(number)

    try:
        with mock.patch.object(Progress, "__call__", interrupted):
            said = command(capsys, "convert", origin, tmp_path / "there", "--to", word)
    finally:
        signal.signal(signal.SIGINT, keyboard)
    assert said.code == 130
    assert said.err.splitlines()[-1] == "fsdp: interrupted"
    assert os.listdir(tmp_path) == []
    assert signal.getsignal(signal.SIGTERM) == handler


@every_target_with_a_signal
def test_a_second_interrupt_while_it_cleans_up_leaves_nothing(
    tmp_path: Path, capsys: Captured, origin: Path, word: str, number: signal.Signals
) -> None:
    keyboard, unlink = signal.signal(signal.SIGINT, signal.default_int_handler), os.unlink

    def interrupted(self: Progress, nbytes: int) -> None:
        signal.raise_signal(signal.SIGTERM)

    def unlink_slowly(*args: Any, **options: Any) -> None:
        signal.raise_signal(number)
        unlink(*args, **options)

    try:
        with (
            mock.patch.object(Progress, "__call__", interrupted),
            mock.patch.object(os, "unlink", unlink_slowly),
        ):
            said = command(capsys, "convert", origin, tmp_path / "there", "--to", word)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, keyboard)
    assert (said.code, said.err.splitlines()[-1]) == (130, "fsdp: interrupted")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("step", ["os.rename", "os.replace", "shutil.rmtree"])
@pytest.mark.parametrize("word", ["dcp", "safetensors"])
def test_an_interrupt_while_a_folder_is_replaced_leaves_the_old_or_the_new_one(
    tmp_path: Path, capsys: Captured, origin: Path, word: str, step: str
) -> None:
    converted(origin, tmp_path / "new", "--to", word, "--dtype", "float64", "--only", "model")
    converted(origin, tmp_path / "there", "--to", word)
    expected = content(tmp_path / ("new" if step == "shutil.rmtree" else "there"))
    shutil.rmtree(tmp_path / "new")
    module, name = step.split(".")
    function: Any = getattr(sys.modules[module], name)
    interrupts = iter([KeyboardInterrupt])

    def interrupted(*args: Any, **options: Any) -> Any:
        for interrupt in interrupts:
            raise interrupt
        return function(*args, **options)

    with mock.patch(step, interrupted):
        arguments = (origin, tmp_path / "there", "--to", word, "--dtype", "float64", "--only", "model", "--overwrite")
        assert command(capsys, "convert", *arguments).code == 130
    assert os.listdir(tmp_path) == ["there"]
    found = content(tmp_path / "there")
    assert found.keys() == expected.keys()
    assert word == "dcp" or found == expected  # whose metadata has the time
    assert command(capsys, "convert", *arguments).code == 0
    assert os.listdir(tmp_path) == ["there"]


@pytest.mark.parametrize("is_there", [True, False])
def test_what_a_killed_conversion_has_replaced_is_left_alone(
    tmp_path: Path, capsys: Captured, origin: Path, is_there: bool
) -> None:
    for name in ("there", "there.replaced") if is_there else ("there.replaced",):
        converted(origin, tmp_path / name, "--to", "dcp")
    before = content(tmp_path)
    said = command(capsys, "convert", origin, tmp_path / "there", "--to", "dcp", "--overwrite")
    assert said.code == 2
    assert "there.replaced exists: a conversion that was killed" in said.err
    assert content(tmp_path) == before


@pytest.mark.parametrize("word", ["torch", "dcp"])
def test_an_interrupt_inside_of_an_archive_of_torch_is_an_interrupt(
    tmp_path: Path, capsys: Captured, origin: Path, word: str
) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    def ended(*args: Any) -> None:
        raise RuntimeError("unexpected pos 704 vs 598")  # as where the interrupt has come in the middle of a record

    with (
        mock.patch.object(torch.serialization, "_save", interrupted),
        mock.patch.object(torch.serialization._open_zipfile_writer_file, "__exit__", ended),
        mock.patch.object(torch.serialization._open_zipfile_writer_buffer, "__exit__", ended),
    ):
        said = command(capsys, "convert", origin, tmp_path / "there", "--to", word)
    assert (said.code, said.err.splitlines()[-1]) == (130, "fsdp: interrupted")
    assert os.listdir(tmp_path) == []


# Usage


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--to", "dcp", "--by-number"], "--by-number is for torch, and the target is dcp"),
        (["--to", "fsdp", "--flat-optimizer"], "--flat-optimizer is for dcp, and the target is fsdp"),
        (["--to", "torch", "--max-file-bytes", "5M"], "--max-file-bytes is for fsdp and safetensors, and the target"),
        (["--to", "fsdp", "--tied", "a=scale"], "--tied is for torch and dcp and safetensors, and the target is fsdp"),
        (["--to", "fsdp", "--only", "optimizer"], "--only optimizer is for torch and dcp, and the target is fsdp"),
        (["--to", "torch", "--only", "optimizer", "--dtype", "float16"], "--dtype and --tied apply to the model"),
        (["--to", "torch", "--tied", "a=b"], "has no tensor b to save under another name"),
        (["--max-file-bytes", "5X"], "'5X' is not a number of bytes, such as 5000000, 500M or 5G"),
        (["--tied", "a"], "'a' is not of the form NAME=OTHER"),
        (["--to", "another"], "invalid choice: 'another'"),
    ],
)
def test_options_that_make_no_sense_are_wrong_usage(
    tmp_path: Path, capsys: Captured, origin: Path, options: list[str], message: str
) -> None:
    said = command(capsys, "convert", origin, tmp_path / "there", *options)
    assert said.code == 2
    assert message in said.err
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("text", "nbytes"), [("7", 7), ("3K", 3 << 10), ("3M", 3 << 20), ("2G", 2 << 30), ("1T", 1 << 40)]
)
def test_numbers_of_bytes_may_have_a_unit(text: str, nbytes: int) -> None:
    assert size_of(text) == nbytes


def test_an_optimizer_that_is_not_there_is_wrong_usage(tmp_path: Path, capsys: Captured, origin: Path) -> None:
    model = converted(origin, tmp_path / "model.pt", "--only", "model")
    said = command(capsys, "convert", model, tmp_path / "x.pt", "--only", "optimizer")
    assert said.code == 2
    assert "has no optimizer in it" in said.err


def test_one_safetensors_file_is_not_divided(tmp_path: Path, capsys: Captured, origin: Path) -> None:
    said = command(capsys, "convert", origin, tmp_path / "x.safetensors", "--max-file-bytes", "500")
    assert said.code == 1
    assert "writes several files" in said.err


@pytest.mark.parametrize(("name", "word"), [("x.pt", "torch"), ("x.safetensors", "safetensors"), ("x", "fsdp")])
def test_the_target_says_which_format_is_meant(
    tmp_path: Path, capsys: Captured, origin: Path, name: str, word: str
) -> None:
    said = command(capsys, "convert", origin, tmp_path / name)
    assert said.code == 0
    assert said.out.startswith(f"{tmp_path / name} ({word}): ")


def test_what_a_format_has_no_place_for_is_noted(tmp_path: Path, capsys: Captured, origin: Path) -> None:
    said = command(capsys, "convert", origin, tmp_path / "x.safetensors")
    notes, count = said.err.splitlines(), len(SafetensorsFiles(tmp_path / "x.safetensors").tensors)
    assert f"(safetensors): {count} tensors" in said.out
    assert "the optimizer, extra state of modules, values" in notes[0]
    assert "random number generators" in notes[1]
    assert command(capsys, "convert", origin, tmp_path / "x").err == ""


# How far it is


def test_progress_is_for_terminals_only(tmp_path: Path, capsys: Captured, origin: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert "\r" not in command(capsys, "verify", origin).err
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    said = command(capsys, "verify", origin)
    assert "\rverifying [" in said.err
    assert said.err.endswith("\r")


def test_progress_is_tqdms_where_it_is_installed(capsys: Captured, origin: Path, monkeypatch: Any) -> None:
    bar = mock.Mock()
    monkeypatch.setitem(sys.modules, "tqdm", types.SimpleNamespace(tqdm=bar))
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    command(capsys, "verify", origin)
    done = sum(call.args[0] for call in bar.return_value.update.call_args_list)
    assert done == bar.call_args.kwargs["total"] > 0
    bar.return_value.close.assert_called_once()
