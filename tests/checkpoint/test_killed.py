"""Saves that are killed: whatever the moment and the rank, the newest complete checkpoint is loaded, and saved over.

What the disk can look like is in test_checkpoint_moments.py. Here are processes that die: what the others make of it,
and what is on the disk then.
"""

from __future__ import annotations

import json
import os
import random
import signal
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fsdp
from fsdp import checkpoint, optim_utils
from tests.helpers.checkpoint_models import content
from tests.helpers.equality import assert_same
from tests.helpers.killed_saves import counted_steps
from tests.helpers.models import nested_mlp
from tests.helpers.pairs import Case, parametrize_cases
from tests.helpers.parity import adam, fully_sharded
from tests.helpers.ranks import RankError, RankPool

COMPLETE = 3  # saves before the one that is killed
MODES = ["over the last", "next to the last", "over the last, in the background", "next to the last, in the background"]


def _train(model: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()


def _state(model: Any, optimizer: torch.optim.Optimizer) -> Any:
    """Collective. All of it, on every rank, by another way than checkpoints take."""
    return dict(model.state_dict()), optim_utils.full_optim_state_dict(model, optimizer, recipient_rank=None)


def _kill_all(pids: list[int]) -> None:
    for pid in (*(each for each in pids if each != os.getpid()), os.getpid()):
        os.kill(pid, signal.SIGKILL)


def _save_until_killed(folder: Path, mode: str, seed: int, victims: list[int]) -> None:
    """Collective. Train and save some times; at a random step of the last save, the victims die.

    The first of them counts the steps. What is saved is put beside it, too, for the comparison.
    """
    draw = random.Random(seed)
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    model = nested_mlp(fully_sharded())
    optimizer = adam(model.parameters())
    saver = checkpoint.Saver()
    steps = 0
    for version in range(1, COMPLETE + 2):
        _train(model, optimizer)
        state = _state(model, optimizer)
        if dist.get_rank() == 0:
            torch.save(state, folder / f"{version}.pt")
        dist.barrier()
        is_last = version == COMPLETE + 1
        last = draw.randint(1, steps) if is_last and dist.get_rank() == victims[0] else -1
        options: dict[str, Any] = {} if "over" in mode else {"step": version, "keep": 2}
        with counted_steps(last, partial(_kill_all, [pids[each] for each in victims])) as count:
            if "background" in mode:
                saver.save(folder / "run", model, optimizer, values=version, **options)
                saver.wait()
            else:
                fsdp.save(folder / "run", model, optimizer, values=version, **options)
        steps = count[0]


def _newest(folder: Path, mode: str) -> Path:
    newest = folder / "run" if "over" in mode else checkpoint.newest(folder / "run")
    assert newest is not None
    return newest


def _load(folder: Path, mode: str) -> int:
    """Which version can be loaded; all its bits are those of the state that was saved."""
    model = nested_mlp(fully_sharded(), seed=1)
    optimizer = adam(model.parameters())
    version = fsdp.load(_newest(folder, mode), model, optimizer).values
    assert_same(_state(model, optimizer), torch.load(folder / f"{version}.pt", weights_only=True))
    return version


def _load_and_save(folder: Path, mode: str) -> int:
    """The same; and what is saved next is in order."""
    version = _load(folder, mode)
    if dist.get_rank() == 0:
        torch.save(torch.load(folder / f"{version}.pt", weights_only=True), folder / "9.pt")
    options: dict[str, Any] = {} if "over" in mode else {"step": 9, "keep": 2}
    model = nested_mlp(fully_sharded(), seed=1)
    optimizer = adam(model.parameters())
    fsdp.load(_newest(folder, mode), model, optimizer)
    fsdp.save(folder / "run", model, optimizer, values=9, **options)
    assert _load(folder, mode) == 9
    return version


def _versions_in_place(folder: Path) -> list[int]:
    """Of the checkpoints that are complete and have their final names."""
    manifests = [each for each in folder.rglob("checkpoint.json") if not each.parent.suffix]
    return [json.loads(each.read_text())["checkpoint"]["values"] for each in manifests]


def _assert_in_order(folder: Path, mode: str) -> None:
    """Nothing is left of the killed save, but for one that was complete and not renamed: that, and its free lock."""
    names = sorted(each.name for each in folder.iterdir() if each.suffix != ".pt")
    assert names == ["run"]
    if "next" in mode:
        entries = {each.name for each in (folder / "run").iterdir()}
        folders = {name for name in entries if not name.endswith(".lock")}
        assert len(folders) == len(checkpoint.steps(folder / "run")) == 2
        assert "step-00000009" in folders
        assert entries - folders <= {f"{name}.lock" for name in folders if name.endswith(".saving")}


@parametrize_cases(mode=MODES, world_size=[2, 3], all_die=[True, False], loading=[1, 2])
def test_any_rank_or_all_killed_at_any_moment_leave_the_newest_complete_state(
    ranks: RankPool, tmp_path: Path, world_size: int, case: Case
) -> None:
    seed = 8 * MODES.index(case.mode) + 4 * (world_size - 2) + 2 * case.all_die + case.loading - 1
    victims = list(range(world_size))
    random.Random(seed).shuffle(victims)
    if not case.all_die:
        victims = victims[:1]
    with pytest.raises(RankError, match="SIGKILL"):
        ranks(world_size).run(_save_until_killed, tmp_path, case.mode, seed, victims)
    complete = max(_versions_in_place(tmp_path), default=0)
    (version, *others) = ranks(case.loading).run(_load_and_save, tmp_path, case.mode)
    assert not others or others == [version]
    assert version in (COMPLETE, COMPLETE + 1)
    assert version >= complete
    _assert_in_order(tmp_path, case.mode)


def test_a_first_save_that_is_killed_leaves_nothing_that_can_be_loaded(ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="SIGKILL"):
        ranks(2).run(_die_in_the_first_save, tmp_path)
    with pytest.raises(FileNotFoundError, match="not a complete checkpoint"):
        fsdp.load(tmp_path / "run", nested_mlp())
    assert checkpoint.newest(tmp_path) is None


def _die_in_the_first_save(folder: Path) -> None:
    with counted_steps(2 if dist.get_rank() == 1 else -1):
        fsdp.save(folder / "run", nested_mlp(fully_sharded()))


def test_a_load_that_is_killed_changes_nothing(ranks: RankPool, tmp_path: Path) -> None:
    fsdp.save(tmp_path / "run", nested_mlp(seed=1))
    before = content(tmp_path)
    with pytest.raises(RankError, match="SIGKILL"):
        ranks(2).run(_die_in_a_load, tmp_path)
    assert content(tmp_path) == before


def _die_in_a_load(folder: Path) -> None:
    with suppress(RuntimeError), counted_steps(1 if dist.get_rank() == 1 else -1):
        fsdp.load(folder / "run", nested_mlp(fully_sharded()))
