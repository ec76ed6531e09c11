"""A checkpoint that another process replaces or completes while it is opened and read: one of the two is read."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdp
from fsdp.checkpoint import folder, manifest
from fsdp.checkpoint.folder import SAVING
from fsdp.checkpoint.formats.source import OpenFiles
from fsdp.checkpoint.safetensors import CheckedFiles

OLD, NEW = 1.0, 2.0


def _model(value: float) -> nn.Linear:
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, value)
    return model


def _save(path: Path, value: float) -> None:
    model = _model(value)
    fsdp.save(path, model, torch.optim.SGD(model.parameters(), lr=value), values=value)


def _before(owner: Any, name: str, action: Callable[[], None], monkeypatch: pytest.MonkeyPatch, times: int = 1) -> None:
    """Run an action before each of the first calls of a function."""
    function, left = getattr(owner, name), [action] * times

    def call(*args: Any, **kwargs: Any) -> Any:
        if left:
            left.pop()()
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)


def _load(path: Path) -> float:
    """Return the value of all parts of the checkpoint."""
    model = _model(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = fsdp.load(path, model, optimizer, generators=False).values
    assert (model.weight == found).all()
    assert optimizer.param_groups[0]["lr"] == found
    return float(found)


def test_a_checkpoint_that_is_replaced_while_it_is_opened_is_opened_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    for owner, name in ((manifest, "CheckedFiles"), (manifest.TensorFiles, "opened_in")):
        _save(path, OLD)
        with monkeypatch.context() as patch:
            _before(owner, name, lambda: _save(path, NEW), patch)
            assert _load(path) == NEW
        _save(path, OLD)
        with monkeypatch.context() as patch:
            _before(owner, name, lambda: _save(path, NEW), patch)
            assert fsdp.checkpoint.verify(path) == 4 * 8


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    for owner in (OpenFiles, CheckedFiles):
        _save(path, OLD)
        with monkeypatch.context() as patch:
            _before(owner, "read", lambda: _save(path, NEW), patch)
            assert _load(path) == OLD
        _save(path, OLD)
        with monkeypatch.context() as patch:
            _before(owner, "read", lambda: _save(path, NEW), patch)
            assert fsdp.checkpoint.verify(path) == 4 * 8


@pytest.mark.parametrize("name", ["_read", "CheckedFiles"])
def test_a_checkpoint_that_gets_its_name_while_it_is_opened_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = tmp_path / "run"
    _save(path, OLD)
    os.rename(path, f"{path}{SAVING}")
    _before(manifest, name, lambda: os.rename(f"{path}{SAVING}", path), monkeypatch)
    assert _load(path) == OLD


def test_a_checkpoint_that_gets_its_name_while_it_is_looked_for_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    _save(path, OLD)
    os.rename(path, f"{path}{SAVING}")
    is_complete = folder._is_complete

    def renamed_after(place: str) -> bool:
        found = is_complete(place)
        if not found:
            monkeypatch.undo()
            os.rename(f"{path}{SAVING}", path)
        return found

    monkeypatch.setattr(folder, "_is_complete", renamed_after)
    assert fsdp.checkpoint.values(path) == OLD


def test_a_checkpoint_that_is_replaced_again_and_again_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    _save(path, OLD)
    _before(manifest.TensorFiles, "opened_in", lambda: _save(path, NEW), monkeypatch, times=100)
    with pytest.raises(ValueError, match=r"run was replaced each time that it was opened, .* load it when"):
        _load(path)


def test_damage_is_an_error_at_the_first_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run"
    _save(path, OLD)
    attempts: list[None] = []
    _before(manifest, "_read", lambda: attempts.append(None), monkeypatch, times=9)
    os.truncate(path / "model.safetensors", 8)
    with pytest.raises(ValueError, match=r"model\.safetensors has 8 bytes instead of"):
        _load(path)
    assert len(attempts) == 1
