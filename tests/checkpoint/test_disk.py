"""What the disk refuses while a checkpoint is saved: every rank hears of it, and the old one is still there."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp
from fsdp import FullyShardedDataParallel, checkpoint
from fsdp.checkpoint.folder import Destination
from tests.helpers.checkpoint_models import content
from tests.helpers.equality import assert_same_state
from tests.helpers.killed_saves import counted_steps
from tests.helpers.models import Wrap, keep
from tests.helpers.on_ranks import on_ranks
from tests.helpers.parity import fully_sharded
from tests.helpers.ranks import RankError, RankPool

OLD, NEW, NEXT = 1, 2, 3  # versions


def small(wrap: Wrap = keep, seed: int = 0) -> nn.Module:
    """Two units; few tensors, so that a save has few steps."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return wrap(nn.Sequential(wrap(nn.Linear(5, 7)), nn.Linear(7, 3, bias=False)))


def _save(path: Path, version: int, background: bool = False) -> None:
    model = small(fully_sharded(), seed=version)
    if background:
        saver = checkpoint.Saver()
        saver.save(path, model, values=version)
        saver.wait()
    else:
        fsdp.save(path, model, values=version)


def _version(path: Path) -> int:
    model = small(fully_sharded())
    version = fsdp.load(path, model).values
    assert_same_state(model.state_dict(), small(seed=version).state_dict())
    return version


def _refuse() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# Any step may fail


@pytest.mark.parametrize(("rank", "background"), [(0, True), (1, False)])
def test_whatever_step_fails_the_old_or_the_new_one_is_there(
    ranks: RankPool, tmp_path: Path, rank: int, background: bool
) -> None:
    found = ranks(2).run(_fail_at_every_step, tmp_path / "run", rank, background)
    versions, have_failed = zip(*found[rank], strict=True)
    assert all(other == found[rank] for other in found)
    assert set(versions) == ({OLD, NEW} if rank == 0 else {OLD})
    assert [version == OLD for version in versions] == list(have_failed)


def _fail_at_every_step(path: Path, rank: int, background: bool) -> list[tuple[int, bool]]:
    """Which version is there after each failure, and whether the save has raised."""
    _save(path, OLD)
    before = content(path.parent)
    with counted_steps() as count:
        _save(path, NEW)
    dist.barrier()
    steps = torch.tensor(count[0])
    dist.broadcast(steps, rank)
    found: list[tuple[int, bool]] = []
    for step in range(1, int(steps) + 1):
        if step == 1 or found[-1][0] == NEW:
            _save(path, OLD)
        error: Exception | None = None
        with counted_steps(step if dist.get_rank() == rank else -1, _refuse):
            try:
                _save(path, NEW, background)
            except (OSError, RuntimeError) as raised:
                error = raised
        assert error is None or "No space left on device" in str(error)
        dist.barrier()
        version = _version(path)
        if version == OLD and dist.get_rank() == 0:
            assert content(path.parent).keys() == before.keys()  # tidied up
        found.append((version, error is not None))
        dist.barrier()
    _save(path, NEXT)
    dist.barrier()
    assert _version(path) == NEXT
    assert [each.name for each in path.parent.iterdir()] == ["run"]
    return found


# A real disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 96 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=96k", "none", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"this system lets nobody mount: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk(ranks: RankPool, small_disk: Path, background: bool) -> None:
    ranks(2).run(_fill_disk, small_disk, background)
    loaded = _square(0)
    fsdp.load(small_disk / "run", loaded)
    assert_same_state(loaded.state_dict(), _square(1).state_dict())


def _square(seed: int) -> nn.Module:
    """36 KiB: two of them do not fit beside a third."""
    torch.manual_seed(seed)
    return nn.Linear(96, 96, bias=False)


def _fill_disk(folder: Path, background: bool) -> None:
    save: Callable[..., Any] = partial(fsdp.save, generators=False)
    saver = checkpoint.Saver()
    if background:
        save = partial(saver.save, generators=False)
    save(folder / "run", FullyShardedDataParallel(_square(1)))
    saver.wait()
    (folder / f"something else {dist.get_rank()}").write_bytes(bytes(12 << 10))
    dist.barrier()
    before = content(folder)
    ask: Callable[[], Any] = partial(save, folder / "run", FullyShardedDataParallel(_square(2)))
    if background:
        ask()
        ask = saver.wait
    with pytest.raises((OSError, RuntimeError), match=r"No space left on device.*run\.saving/model\.safetensors"):
        ask()
    dist.barrier()
    assert content(folder) == before
    dist.barrier()
    (folder / f"something else {dist.get_rank()}").unlink()
    dist.barrier()
    save(folder / "run", FullyShardedDataParallel(_square(1)))
    saver.wait()


@on_ranks(2)
def test_a_disk_without_any_space_is_named_by_the_file(small_disk: Path) -> None:
    fsdp.save(small_disk / "run", FullyShardedDataParallel(_square(1)), generators=False)
    dist.barrier()
    if dist.get_rank() == 0:
        free = os.statvfs(small_disk)
        (small_disk / "something else").write_bytes(bytes(free.f_bavail * free.f_frsize))
    dist.barrier()
    with pytest.raises((OSError, RuntimeError), match=r"No space left on device: '.*run\.saving/not-a-checkpoint'"):
        fsdp.save(small_disk / "run", FullyShardedDataParallel(_square(2)), generators=False)


@contextmanager
def as_nobody() -> Iterator[None]:
    """Root may write anywhere."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_folder_that_must_not_be_written_to(ranks: RankPool) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fsdp.save(folder / "run", small(seed=OLD), values=OLD)
        folder.chmod(0o555)
        try:
            ranks(2).run(_save_where_nobody_may, folder)
        finally:
            folder.chmod(0o755)
        assert os.listdir(folder) == ["run"]


def _save_where_nobody_may(folder: Path) -> None:
    with as_nobody():
        with pytest.raises((PermissionError, RuntimeError), match=rf"Permission denied: '{folder}/run\.saving"):
            _save(folder / "run", NEW)
        assert _version(folder / "run") == OLD


def test_a_checkpoint_that_must_not_be_read(ranks: RankPool) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        fsdp.save(folder / "run", small(seed=OLD))
        (folder / "run" / "model.safetensors").chmod(0)
        ranks(2).run(_load_what_nobody_may, folder)


def _load_what_nobody_may(folder: Path) -> None:
    model = small(fully_sharded())
    with (
        as_nobody(),
        pytest.raises((PermissionError, RuntimeError), match=r"Permission denied: '.*run/model\.safetensors'"),
    ):
        fsdp.load(folder / "run", model)
    assert_same_state(model.state_dict(), small().state_dict())


# What the disk has promised to keep


@contextmanager
def recorded_events() -> Iterator[list[tuple[str, ...]]]:
    """What is written, synced, renamed and removed, in its order; each with the path that it has at that moment."""
    events: list[tuple[str, ...]] = []

    def path_of(file: Any) -> str:
        return os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else str(file)

    def recorded(name: str) -> Any:
        do = getattr(os, name)

        def step(*args: Any, **options: Any) -> Any:
            done = do(*args, **options)
            events.append((name, *map(path_of, args[: 2 if name == "rename" else 1])))
            return done

        return mock.patch(f"os.{name}", step)

    with ExitStack() as stack:
        for name in ("pwrite", "fsync", "rename", "unlink", "rmdir"):
            stack.enter_context(recorded(name))
        yield events


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="only Linux says which file a descriptor is of")
@pytest.mark.parametrize("max_file_bytes", [None, 80])
def test_each_step_is_on_the_disk_before_the_next_one(tmp_path: Path, max_file_bytes: int | None) -> None:
    """A disk keeps what was synced; of the rest it may keep any part. So the order of syncing and renaming counts."""
    path, folder = tmp_path / "run", tmp_path / "run.saving"
    fsdp.save(path, small(), max_file_bytes=max_file_bytes)
    (path / "config.json").write_text("{}")
    (path / "tokenizer").mkdir()
    (path / "tokenizer" / "words").write_text("a b")
    with recorded_events() as events:
        fsdp.save(path, small(seed=1), max_file_bytes=max_file_bytes)
    part, manifest = f"{folder}/checkpoint.json.part", f"{folder}/checkpoint.json"
    complete, aside, in_place = (
        events.index(("rename", *map(str, names)))
        for names in ((part, manifest), (path, f"{path}.replaced"), (folder, path))
    )
    files = {str(folder / name) for name in content(path)} - {manifest} | {part}
    # It is complete when all files, and their names, are on the disk,
    for file in files:
        written = [number for number, event in enumerate(events) if event == ("pwrite", file)]
        synced = [number for number, event in enumerate(events[:complete]) if event == ("fsync", file)]
        assert synced, file
        assert max(written, default=0) < synced[-1], file
    names = [number for number, event in enumerate(events[:complete]) if event == ("fsync", str(folder))]
    assert names
    assert ("fsync", f"{folder}/tokenizer") in events[:complete]
    # the old one is touched when it is known to be complete, and goes when the new one is known to be in its place.
    assert ("fsync", str(folder)) in events[complete + 1 : aside]
    assert aside < in_place
    gone = next(number for number, event in enumerate(events) if f"{path}.replaced/" in event[1])
    assert ("fsync", str(tmp_path)) in events[in_place + 1 : gone]


def test_a_checkpoint_that_is_removed_says_so_to_the_last(tmp_path: Path) -> None:
    """Or what is left of it would be taken for a user's folder, or for a checkpoint."""
    for version in (OLD, NEW):
        fsdp.save(tmp_path, small(seed=version), step=version, max_file_bytes=80)
    (tmp_path / "step-00000001" / "zzz.txt").write_text("mine")
    with recorded_events() as events:
        fsdp.save(tmp_path, small(seed=NEXT), step=NEXT, keep=2)
    gone = f"{tmp_path}/step-00000001"
    removing = [event for event in events if f"{event[1]}/".startswith(f"{gone}/")]
    assert removing[0] == ("rename", f"{gone}/checkpoint.json", f"{gone}/not-a-checkpoint")
    assert removing[-2:] == [("unlink", f"{gone}/not-a-checkpoint"), ("rmdir", gone)]
    assert len(removing) > 6


# Two jobs at one place


def test_of_two_saves_at_once_one_wins_and_saving_works_afterwards(ranks: RankPool, tmp_path: Path) -> None:
    ranks(3, backend=None).run(_save_again_and_again, tmp_path / "run")
    assert _whole_version(tmp_path / "run") in (0, 1, 2)
    for _ in range(2):  # a lone save
        fsdp.save(tmp_path / "run", small(seed=NEXT), values=NEXT)
        assert _whole_version(tmp_path / "run") == NEXT
        assert [each.name for each in tmp_path.iterdir()] == ["run"]


def _whole_version(path: Path) -> int:
    """Which one is there, to the last bit; in one process."""
    model = small()
    version = fsdp.load(path, model).values
    assert_same_state(model.state_dict(), small(seed=version).state_dict())
    return version


def _save_again_and_again(path: Path) -> None:
    """Each process by itself, until some of its saves have won; the others were told."""
    version, wins = int(os.environ["RANK"]), 0
    model = small(seed=version)
    while wins < 5:
        try:
            fsdp.save(path, model, values=version)
            wins += 1
        except RuntimeError as error:
            if "another save to" not in str(error):
                raise


def test_a_save_that_runs_is_left_alone_whoever_saves_or_tidies_up(ranks: RankPool, tmp_path: Path) -> None:
    running = Destination(tmp_path / "step-00000001")
    running.begin()
    ranks(1, backend=None).run(_save_beside, tmp_path, os.getpid())
    (Path(running.folder) / "model.safetensors").write_bytes(b"of the first")
    running.commit(b"{}")
    assert content(tmp_path / "step-00000001") == {"model.safetensors": b"of the first", "checkpoint.json": b"{}"}
    fsdp.save(tmp_path, small(seed=NEXT), step=1)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def _save_beside(folder: Path, pid: int) -> None:
    holder = rf"process {pid} on {socket.gethostname()}"
    with pytest.raises(RuntimeError, match=rf"another save to .*step-00000001 is running, by {holder}\."):
        fsdp.save(folder, small(), step=1)
    fsdp.save(folder, small(), step=2, keep=1)  # which removes what is left of lower steps


def test_a_process_that_was_forked_while_a_save_ran_does_not_keep_others_from_saving(tmp_path: Path) -> None:
    """As workers of a `DataLoader` are while a save runs in the background."""
    destination = Destination(tmp_path / "run")
    destination.begin()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)  # until the other end is closed
        os._exit(0)
    os.close(reading)
    try:
        destination.commit(b"{}")
        fsdp.save(tmp_path / "run", small())
    finally:
        os.close(writing)
        os.waitpid(child, 0)


def test_without_locks_a_job_whose_folder_another_has_taken_over_is_told_and_leaves_it_alone(tmp_path: Path) -> None:
    """As when a job is started again while a process of the last one still runs, on a file system without locks."""
    first, second = Destination(tmp_path / "run"), Destination(tmp_path / "run")
    with mock.patch("fcntl.flock", side_effect=OSError(errno.ENOLCK, "No locks available")):
        first.begin()
        second.begin()
        (Path(second.folder) / "model.safetensors").write_bytes(b"of the second")
        with pytest.raises(RuntimeError, match=r"run\.saving .*another process"):
            first.commit(b"{}")
        first.abandon()
        second.commit(b"{}")
        assert content(tmp_path) == {"run/model.safetensors": b"of the second", "run/checkpoint.json": b"{}"}
        with pytest.raises(RuntimeError, match=r"run\.saving .*another process"):
            first.commit(b"{}")


def test_a_folder_whose_marker_was_lost_to_another_save_is_put_in_order(tmp_path: Path) -> None:
    (tmp_path / "run.saving").mkdir()
    (tmp_path / "run.saving" / "model-00001-of-00002.safetensors").write_bytes(b"")
    fsdp.save(tmp_path / "run", small())
    assert [each.name for each in tmp_path.iterdir()] == ["run"]


# Ranks that are not there


@pytest.mark.parametrize("when", ["before", "while the others write"])
def test_a_rank_that_is_gone_does_not_leave_the_others_waiting(ranks: RankPool, tmp_path: Path, when: str) -> None:
    fsdp.save(tmp_path / "run", small(seed=OLD), values=OLD)
    with pytest.raises(RankError) as caught:
        ranks(3, grace=60).run(_save_without_one, tmp_path / "run", when)
    assert [outcome.ending.name for outcome in caught.value.outcomes] == ["RETURNED", "DIED", "RETURNED"]
    assert content(tmp_path).keys() == {"run/model.safetensors", "run/checkpoint.json"}
    model = small()
    assert fsdp.load(tmp_path / "run", model).values == OLD


def _save_without_one(path: Path, when: str) -> None:
    model = small(fully_sharded(), seed=NEW)
    if dist.get_rank() == 1 and when == "before":
        os._exit(3)
    last = 2 if dist.get_rank() == 1 else -1
    with counted_steps(last, lambda: os._exit(3)), pytest.raises(RuntimeError, match=r"rank|onnection|peer"):
        fsdp.save(path, model, values=NEW)
