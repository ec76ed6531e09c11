"""The disk at every moment of a save: the old checkpoint or the new one is loaded, to the last bit, and saved over."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdp
from fsdp import checkpoint
from tests.helpers.checkpoint_models import content
from tests.helpers.equality import assert_same
from tests.helpers.killed_saves import disk_at_every_moment
from tests.helpers.on_ranks import on_ranks
from tests.helpers.parity import adam

OLDER, OLD, NEW, NEXT = 1, 2, 3, 4  # versions
MINE = {"config.json": b"{}", "tokenizer/words": b"a b"}  # files of the user


def small(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 1, bias=False))


@cache
def trained(version: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer with state, others for each version."""
    model = small(version)
    optimizer = adam(model.parameters())
    for _ in range(version):
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
    return model, optimizer


@cache
def expected(version: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Their states."""
    model, optimizer = trained(version)
    return dict(model.state_dict()), optimizer.state_dict()


def save(path: Path, version: int, **options: Any) -> None:
    fsdp.save(path, *trained(version), values=version, generators=False, **options)


def save_mine(path: Path) -> None:
    """What a user keeps beside the tensors."""
    for name, text in MINE.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(text)


def loaded_version(path: Path) -> int:
    """Which one can be loaded; with all its bits."""
    model = small()
    optimizer = adam(model.parameters())
    version = fsdp.load(path, model, optimizer).values
    assert_same((dict(model.state_dict()), optimizer.state_dict()), expected(version))
    return version


def listing(folder: Path) -> set[str]:
    return {str(each.relative_to(folder)) for each in folder.rglob("*")}


# What is there before, and the save.


def nothing(folder: Path) -> None:
    pass


def one(folder: Path) -> None:
    save(folder / "run", OLD)
    save_mine(folder / "run")


def one_of_several_files(folder: Path) -> None:
    save(folder / "run", OLD, max_file_bytes=20)


def one_and_what_killed_saves_have_left(folder: Path) -> None:
    one(folder)
    for name in ("run.saving", "run.replaced"):
        save(folder / name, OLDER)
        (folder / name / "checkpoint.json").rename(folder / name / "not-a-checkpoint")


def the_two_between_renames(folder: Path) -> None:
    """Killed when the old one was out of the way, and the new one not yet in its place."""
    save(folder / "run.replaced", OLDER)
    save(folder / "run.saving", OLD)


SAVES: dict[str, tuple[Callable[[Path], None], Callable[[Path, int], None]]] = {
    "the first": (nothing, save),
    "of several files": (one_of_several_files, lambda path, version: save(path, version, max_file_bytes=30)),
    "over what was left": (one_and_what_killed_saves_have_left, save),
    "between renames": (the_two_between_renames, save),
}


@pytest.mark.parametrize("case", SAVES)
@on_ranks(1)
def test_the_old_or_the_new_one_is_there_at_every_moment(tmp_path: Path, case: str) -> None:
    prepare, save_new = SAVES[case]
    folder, copies = tmp_path / "disk", tmp_path / "copies"
    folder.mkdir()
    prepare(folder)
    moments = disk_at_every_moment(folder, copies, lambda: save_new(folder / "run", NEW))
    assert len(moments) > 20
    found, tried = [], []
    for moment in moments:
        try:
            found.append(loaded_version(moment / "run"))
        except FileNotFoundError:
            found.append(0)
        # Saving over it depends on what is there, not on how much of the tensors is.
        if (names := listing(moment)) not in tried:
            tried.append(names)
            _save_over(moment, has_mine="config.json" in str(names))
    first = 0 if prepare is nothing else OLD
    assert found == sorted(found)  # the old one up to some moment, and the new one from there on
    assert set(found) == {first, NEW}
    assert [each.name for each in folder.iterdir()] == ["run"]


def _save_over(folder: Path, has_mine: bool) -> None:
    save(folder / "run", NEXT)
    assert loaded_version(folder / "run") == NEXT
    assert [each.name for each in folder.iterdir()] == ["run"]
    files = content(folder / "run")
    assert {name: files.get(name) for name in MINE} == (MINE if has_mine else dict.fromkeys(MINE))


@on_ranks(1)
def test_the_last_ones_are_there_at_every_moment_of_a_rotation(tmp_path: Path) -> None:
    folder, copies = tmp_path / "disk", tmp_path / "copies"
    for version in (OLDER, OLD):
        save(folder, version, step=version)
    shutil.copytree(folder / "step-00000001", folder / "step-00000000.replaced")
    moments = disk_at_every_moment(folder, copies, lambda: save(folder, NEW, step=NEW, keep=2))
    found, tried = [], []
    for moment in moments:
        newest = checkpoint.newest(moment)
        assert newest is not None
        found.append(loaded_version(newest))
        assert loaded_version(moment / f"step-{found[-1] - 1:08d}") == found[-1] - 1
        if (names := listing(moment)) not in tried:
            tried.append(names)
            save(moment, NEXT, step=NEXT, keep=2)
            assert loaded_version(moment / "step-00000004") == NEXT
            places = sorted(each for each in moment.iterdir() if each.is_dir())  # beside the lock of a step that stays
            assert [loaded_version(each) for each in places][-1] == NEXT
    assert found == sorted(found)
    assert set(found) == {OLD, NEW}
    assert sorted(each.name for each in folder.iterdir()) == ["step-00000002", "step-00000003"]
