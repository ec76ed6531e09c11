"""Saves that are killed: whatever the moment, the old checkpoint or the new one can be loaded, and saved over."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import fsdp
from fsdp import checkpoint
from tests._ranks import RankError, RankPool
from tests.models import nested_mlp
from tests.saving import content
from tests.stored import assert_equal_states
from tests.support import fully_sharded

# All that changes the disk, after which a process may be killed.
STEPS = ["makedirs", "pwrite", "fsync", "rename", "unlink", "rmdir"]


@contextmanager
def counted_steps(last: int = -1) -> Iterator[Any]:
    """Counts what changes the disk; this process is killed just before step number `last`."""
    count = itertools.count()
    number = [0]

    def counted(name: str) -> Any:
        do = getattr(os, name)

        def step(*args: Any, **options: Any) -> Any:
            number[0] = next(count) + 1
            if number[0] == last:
                os.kill(os.getpid(), signal.SIGKILL)
            return do(*args, **options)

        return mock.patch(f"os.{name}", step)

    patches = [counted(name) for name in STEPS]
    for patch in patches:
        patch.start()
    try:
        yield number
    finally:
        for patch in patches:
            patch.stop()


def _save(folder: Path, version: int, last: int = -1, killed: int = 0) -> int:
    model = nested_mlp(fully_sharded(), seed=version)
    with counted_steps(last if dist.get_rank() == killed else -1) as number:
        fsdp.save(folder / "run", model, values=version)
    return number[0]


def _loaded_version(folder: Path) -> int:
    model = nested_mlp(fully_sharded())
    version = fsdp.load(folder / "run", model).values
    assert_equal_states(model.state_dict(), nested_mlp(seed=version).state_dict())
    return version


def _kill(ranks: RankPool, world_size: int, folder: Path, last: int, killed: int, version: int = 2) -> None:
    with pytest.raises(RankError, match="SIGKILL"):
        ranks(world_size, grace=10).run(_save, folder, version, last, killed)


def steps_of_a_save(ranks: RankPool, world_size: int, folder: Path, version: int = 2) -> list[int]:
    """How often each rank changes the disk."""
    return ranks(world_size).run(_save, folder, version)


def test_a_process_that_is_killed_before_any_step_leaves_the_old_or_the_new(ranks: RankPool, tmp_path: Path) -> None:
    ranks(1).run(_save, tmp_path / "count", 1)
    (count,) = steps_of_a_save(ranks, 1, tmp_path / "count")
    assert count > 10
    found = []
    for last in range(1, count + 1):
        folder = tmp_path / str(last)
        ranks(1).run(_save, folder, 1)
        _kill(ranks, 1, folder, last, killed=0)
        found += ranks(1).run(_loaded_version, folder)
        ranks(1).run(_save, folder, 3)
        assert ranks(1).run(_loaded_version, folder) == [3]
        assert [each.name for each in folder.iterdir()] == ["run"]
    assert found == sorted(found)  # the old one up to some moment, and the new one from there on
    assert set(found) == {1, 2}


@pytest.mark.parametrize("seed", range(6))
def test_any_rank_that_is_killed_at_any_moment_leaves_the_old_or_the_new(
    ranks: RankPool, tmp_path: Path, seed: int
) -> None:
    draw = random.Random(seed)
    world_size = draw.choice([2, 3])
    ranks(world_size).run(_save, tmp_path, 1)
    counts = steps_of_a_save(ranks, world_size, tmp_path / "count")
    killed = draw.randrange(world_size)
    _kill(ranks, world_size, tmp_path, draw.randint(1, counts[killed]), killed)
    assert ranks(2).run(_loaded_version, tmp_path) in ([1, 1], [2, 2])
    ranks(3).run(_save, tmp_path, 3)
    assert ranks(2).run(_loaded_version, tmp_path) == [3, 3]


def test_a_first_save_that_is_killed_leaves_nothing_that_can_be_loaded(ranks: RankPool, tmp_path: Path) -> None:
    _kill(ranks, 2, tmp_path, 2, killed=1)
    with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
        fsdp.load(tmp_path / "run", nested_mlp())
    assert checkpoint.newest(tmp_path) is None


def test_a_second_save_that_is_killed_loses_nothing_either(ranks: RankPool, tmp_path: Path) -> None:
    ranks(1).run(_save, tmp_path / "first", 1)
    ranks(1).run(_save, tmp_path / "second", 2)
    for last in range(1, 7):
        folder = tmp_path / str(last)
        shutil.copytree(tmp_path / "first" / "run", folder / "run.replaced")  # killed between the two renames
        shutil.copytree(tmp_path / "second" / "run", folder / "run.saving")
        assert ranks(1).run(_loaded_version, folder) == [2]
        _kill(ranks, 1, folder, last, killed=0, version=3)
        assert ranks(1).run(_loaded_version, folder) == [2]


def test_what_stays_of_a_removal_that_was_killed_is_removed_by_the_next_save(ranks: RankPool, tmp_path: Path) -> None:
    ranks(1).run(_save, tmp_path, 1)
    (count,) = steps_of_a_save(ranks, 1, tmp_path)
    _kill(ranks, 1, tmp_path, count, killed=0)  # in front of the last rmdir
    assert sorted(each.name for each in tmp_path.iterdir()) == ["run", "run.replaced"]
    before = content(tmp_path / "run")
    assert ranks(1).run(_loaded_version, tmp_path) == [2]
    assert content(tmp_path / "run") == before
    ranks(1).run(_save, tmp_path, 3)
    assert [each.name for each in tmp_path.iterdir()] == ["run"]
