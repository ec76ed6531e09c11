"""Checkpoints of several files, and of several steps in one folder."""

from __future__ import annotations

import errno
import itertools
import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

import fsdp
from fsdp import FullyShardedDataParallel, checkpoint, load_safetensors, optim_utils
from fsdp.checkpoint.checksums import HoleError, by_name, fragment, joined, merged, of_tensor, spans
from fsdp.checkpoint.folder import Destination
from fsdp.checkpoint.safetensors import Entry, write_parts
from fsdp.checkpoint.writer import Senders
from tests.helpers.checkpoint_models import content, flip
from tests.helpers.dcp_folders import everything
from tests.helpers.equality import assert_same, assert_same_state
from tests.helpers.models import nested_mlp
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import Case, parametrize_cases
from tests.helpers.parity import adam, fully_sharded
from tests.helpers.ranks import RankPool

# Several files


@parametrize_cases(at_most=4, saved_by=[1, 2, 3, 4], loaded_by=[2, 1, 3], max_file_bytes=[200, 1, 10_000])
def test_large_models_are_divided_as_hugging_face_divides_them(ranks: RankPool, tmp_path: Path, case: Case) -> None:
    ranks(case.saved_by).run(_save_divided, tmp_path, case.max_file_bytes)
    names = sorted(each.name for each in (tmp_path / "run").iterdir() if each.suffix == ".safetensors")
    files = [name for name in names if name.startswith("model")]
    total = sum(value.nbytes for value in nested_mlp().state_dict().values())
    if case.max_file_bytes > total:
        assert files == ["model.safetensors"]
    else:
        count = len(files)
        assert files == [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
        index = json.loads((tmp_path / "run" / "model.safetensors.index.json").read_text())
        assert index["metadata"] == {"total_size": total}
        found = _of_index(tmp_path / "run", index["weight_map"])
        assert_same_state({name: found[name] for name in nested_mlp().state_dict()}, nested_mlp(seed=1).state_dict())
        for name in files:
            sizes = [value.nbytes for key, value in found.items() if index["weight_map"][key] == name]
            assert sum(sizes) <= case.max_file_bytes or len(sizes) == 1
    ranks(case.loaded_by).run(_load_divided, tmp_path)
    checkpoint.verify(tmp_path / "run")


def _of_index(folder: Path, weight_map: dict[str, str]) -> dict[str, Tensor]:
    found = {}
    for name, file in weight_map.items():
        with safe_open(folder / file, framework="pt") as opened:
            found[name] = opened.get_tensor(name)
    return found


def _save_divided(folder: Path, max_file_bytes: int) -> None:
    model = nested_mlp(fully_sharded(), seed=1)
    optimizer = adam(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    model.load_state_dict(nested_mlp(seed=1).state_dict())
    fsdp.save(folder / "run", model, optimizer, max_file_bytes=max_file_bytes)
    state = optim_utils.full_optim_state_dict(model, optimizer)  # by another way
    if state is not None:
        torch.save(state, folder / "optimizer.pt")


def _load_divided(folder: Path) -> None:
    model = nested_mlp(fully_sharded())
    optimizer = adam(model.parameters())
    fsdp.load(folder / "run", model, optimizer)
    assert_same_state(model.state_dict(), nested_mlp(seed=1).state_dict())
    state = optim_utils.full_optim_state_dict(model, optimizer, recipient_rank=None)
    assert_same(state, torch.load(folder / "optimizer.pt", weights_only=True))
    other = nested_mlp(fully_sharded())
    load_safetensors(other, folder / "run")
    assert_same_state(other.state_dict(), nested_mlp(seed=1).state_dict())


def test_a_damaged_index_is_found(tmp_path: Path) -> None:
    fsdp.save(tmp_path / "run", nested_mlp(), max_file_bytes=200)
    flip(tmp_path / "run" / "model.safetensors.index.json", 30)
    with pytest.raises(ValueError, match=r"index\.json: its header is damaged"):
        fsdp.load(tmp_path / "run", nested_mlp())


def test_files_of_the_last_checkpoint_do_not_stay(tmp_path: Path) -> None:
    fsdp.save(tmp_path / "run", nested_mlp(), max_file_bytes=200)
    fsdp.save(tmp_path / "run", nested_mlp())
    assert sorted(content(tmp_path / "run")) == ["checkpoint.json", "model.safetensors"]


@on_ranks(2)
def test_ranks_begin_with_different_files(tmp_path: Path) -> None:
    """Most file systems let one process write to a file at a time."""
    model = nested_mlp(fully_sharded())
    optimizer = adam(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    with mock.patch("fsdp.checkpoint.writer.write_parts", wraps=write_parts) as write:
        fsdp.save(tmp_path / "run", model, optimizer)
    names = [file.name for call in write.call_args_list for file in call.args[1]]
    order = ["model.safetensors", "optimizer.safetensors"]
    assert names == (order if dist.get_rank() == 0 else order[::-1])


@on_ranks(2)
def test_a_path_need_not_be_utf8(tmp_path: Path) -> None:
    path, model = tmp_path / os.fsdecode(b"caf\xe9"), nested_mlp(fully_sharded())
    assert fsdp.save(path, model).path == path
    fsdp.load(path, model)


# Several steps


def test_old_steps_are_removed_and_the_newest_is_found(ranks: RankPool, tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path / "runs") is None
    assert checkpoint.steps(tmp_path / "runs") == {}
    ranks(2).run(_save_steps, tmp_path / "runs")
    assert sorted(each.name for each in (tmp_path / "runs").iterdir()) == ["mine", "step-00000030", "step-00000040"]
    assert checkpoint.newest(tmp_path / "runs") == tmp_path / "runs" / "step-00000040"
    places = checkpoint.steps(tmp_path / "runs")
    assert list(places) == sorted(places)
    assert places[40] == tmp_path / "runs" / "step-00000040"
    assert fsdp.load(tmp_path / "runs" / "step-00000030", nested_mlp()).values == 30


def _save_steps(folder: Path) -> None:
    model = nested_mlp(fully_sharded())
    for step in (10, 20, 30, 40):
        saved = fsdp.save(folder, model, step=step, keep=2, values=step)
        assert saved.path == folder / f"step-{step:08d}"
        if step == 10 and dist.get_rank() == 0:
            (folder / "mine").mkdir()


def test_a_lower_step_than_those_that_are_there_stays(tmp_path: Path) -> None:
    for step in (5, 6, 7, 3):
        fsdp.save(tmp_path, nested_mlp(), step=step, keep=2)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step-00000003", "step-00000006", "step-00000007"]


def test_what_killed_saves_have_left_is_no_checkpoint_and_is_removed(tmp_path: Path) -> None:
    for step in (1, 2):
        fsdp.save(tmp_path, nested_mlp(), step=step, values=step)
    (tmp_path / "step-00000002").rename(tmp_path / "step-00000002.replaced")  # and the new one is not there yet
    for name in ("step-00000009.saving", "step-00000000.saving", "step-00000000"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "not-a-checkpoint").touch()
    newest = checkpoint.newest(tmp_path)
    assert newest == tmp_path / "step-00000002"
    assert fsdp.load(newest, nested_mlp()).values == checkpoint.values(newest) == 2
    fsdp.save(tmp_path, nested_mlp(), step=3, keep=1)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step-00000003", "step-00000009.saving"]


def test_a_step_whose_removal_was_killed_is_saved_again(tmp_path: Path) -> None:
    fsdp.save(tmp_path, nested_mlp(), step=1)
    (tmp_path / "step-00000001" / "checkpoint.json").rename(tmp_path / "step-00000001" / "not-a-checkpoint")
    fsdp.save(tmp_path, nested_mlp(), step=1, values="again")
    assert checkpoint.values(tmp_path / "step-00000001") == "again"


# Where ranks see different folders


@contextmanager
def folder_of_its_own(path: Path) -> Iterator[None]:
    """This rank sees another folder than others under the same relative path."""
    path.mkdir(exist_ok=True)
    before = os.getcwd()
    os.chdir(path)
    try:
        yield
    finally:
        os.chdir(before)


@parametrize_cases(world_size=[3, 2], apart=[1, 2], background=[False, True], size=["small", "large"])
def test_ranks_that_do_not_share_a_file_system_send_their_parts_to_the_first(
    ranks: RankPool, tmp_path: Path, world_size: int, case: Case
) -> None:
    ranks(world_size).run(_save_apart, tmp_path, case.apart, case.background, case.size)
    assert [each.name for each in tmp_path.iterdir() if any(each.iterdir())] == ["0"]
    checkpoint.verify(tmp_path / "0" / "run")
    ranks(2).run(_load_there, tmp_path / "0" / "run", case.size)


def _model(size: str, seed: int) -> Any:
    if size == "small":
        return nested_mlp(fully_sharded(), seed=seed)
    torch.manual_seed(seed)
    return FullyShardedDataParallel(torch.nn.Linear(1500, 1801, bias=False))  # of several blocks


def _step(model: Any, optimizer: Any) -> None:
    model(torch.ones(2, 5 if isinstance(model.module.module, type(nested_mlp())) else 1500)).sum().backward()
    optimizer.step()


def _save_apart(folder: Path, apart: int, background: bool, size: str) -> None:
    model = _model(size, seed=1)
    optimizer = adam(model.parameters())
    _step(model, optimizer)
    model.load_state_dict(_model(size, seed=1).state_dict())
    with folder_of_its_own(folder / ("0" if dist.get_rank() < apart else f"{dist.get_rank()}")):
        if background:
            with checkpoint.Saver() as saver:
                saver.save("run", model, optimizer)
        else:
            fsdp.save("run", model, optimizer)


def _load_there(folder: Path, size: str) -> None:
    model, expected = _model(size, seed=2), _model(size, seed=1)
    optimizer, other = adam(model.parameters()), adam(expected.parameters())
    fsdp.load(folder, model, optimizer)
    assert_same_state(model.state_dict(), expected.state_dict())
    _step(expected, other)
    for found, wanted in zip(optimizer.state.values(), other.state.values(), strict=True):
        torch.testing.assert_close(found, wanted)


@on_ranks(2)
def test_a_rank_looks_for_the_folder_after_it_was_made(tmp_path: Path) -> None:
    """A network file system may remember for a while that a name was not there."""
    token, is_missing = cast(Any, Destination.token).fget, False

    def remembered(destination: Destination) -> bytes:
        nonlocal is_missing
        found = b"" if is_missing else token(destination)
        is_missing = not found
        return found

    folders = mock.patch.object(Destination, "token", property(remembered)) if dist.get_rank() else nullcontext()
    with folders, mock.patch.object(Senders, "send", side_effect=AssertionError("parts were sent")):
        fsdp.save(tmp_path / "run", nested_mlp(fully_sharded()))


@on_ranks(2)
def test_a_rank_that_sends_takes_a_block_of_memory(tmp_path: Path) -> None:
    model = FullyShardedDataParallel(torch.nn.Linear(2048, 4096, bias=False))
    with folder_of_its_own(tmp_path / f"{dist.get_rank()}"), torch.profiler.profile(profile_memory=True) as profile:
        fsdp.save("run", model)
    assert max((event.cpu_memory_usage for event in profile.events()), default=0) <= 4 << 20


@on_ranks(3)
def test_a_rank_cannot_read_what_it_sends(tmp_path: Path) -> None:
    model, rank = nested_mlp(fully_sharded()), dist.get_rank()
    left = [None] * 2  # chunks that rank 1 reads

    def chunks(self: Entry, do: Any = Entry.chunks) -> Iterator[Any]:
        for chunk in do(self):
            if rank == 1 and not left:
                raise MemoryError("no memory for a block")
            yield chunk
            left[:1] = []

    with folder_of_its_own(tmp_path / f"rank{rank}"):
        with (
            mock.patch.object(Entry, "chunks", chunks),
            pytest.raises((MemoryError, RuntimeError), match="no memory for a block"),
        ):
            fsdp.save("run", model)
        fsdp.save("run", model)
        assert rank or sorted(os.listdir()) == ["run"]


@on_ranks(2)
def test_the_first_rank_cannot_write_what_it_gets(tmp_path: Path) -> None:
    mine = tmp_path / f"{dist.get_rank()}"
    full = mock.patch("os.pwrite", side_effect=OSError(errno.ENOSPC, "No space left on device"))
    model = nested_mlp(fully_sharded())
    own = mock.patch("fsdp.checkpoint.writer.write_parts", return_value=[])
    with folder_of_its_own(mine):
        with full, own, pytest.raises((OSError, RuntimeError), match=r"No space left on device.*run\.saving/model"):
            fsdp.save("run", model)
        fsdp.save("run", model)
    assert not list(mine.iterdir()) or dist.get_rank() == 0


@on_ranks(2)
def test_the_first_rank_has_no_files_any_more_for_what_it_gets(tmp_path: Path) -> None:
    removed = mock.patch("fsdp.checkpoint.writer.opened_to_write", side_effect=FileNotFoundError(2, "No such", "model"))
    model = nested_mlp(fully_sharded())
    own = mock.patch("fsdp.checkpoint.writer.write_parts", return_value=[])
    with folder_of_its_own(tmp_path / f"{dist.get_rank()}"):
        with removed, own, pytest.raises((OSError, RuntimeError), match=r"No such.*model"):
            fsdp.save("run", model)
        fsdp.save("run", model)


@on_ranks(2)
def test_a_folder_that_is_taken_over_at_once_is_an_error_on_every_rank(tmp_path: Path) -> None:
    reads, token = itertools.count(), Destination.token.fget  # type: ignore[attr-defined]

    def read(destination: Destination) -> bytes:
        if dist.get_rank() == 0 and next(reads) == 1:
            Path(destination.folder, "not-a-checkpoint").unlink()
        found: bytes = token(destination)
        return found

    model = nested_mlp(fully_sharded())
    with (
        mock.patch.object(Destination, "token", property(read)),
        pytest.raises(RuntimeError, match=r"run\.saving was changed during this save"),
    ):
        fsdp.save(tmp_path / "run", model)


@on_ranks(2)
def test_another_replica_cannot_send(tmp_path: Path) -> None:
    inner = FullyShardedDataParallel(torch.nn.Linear(3, 3))
    model = FullyShardedDataParallel(
        torch.nn.Sequential(inner, torch.nn.Linear(3, 3)), sharding_strategy=fsdp.ShardingStrategy.NO_SHARD
    )
    refused = r"rank 1 does not see .*run\.saving, which rank 0 has created, and cannot write"
    with folder_of_its_own(tmp_path / f"{dist.get_rank()}"), pytest.raises(RuntimeError, match=refused):
        fsdp.save("run", model)


def test_ranks_that_save_to_different_places(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2).run(_save_to_different_places, tmp_path)
    assert not list(tmp_path.iterdir())


def _save_to_different_places(folder: Path) -> None:
    rank, model = dist.get_rank(), nested_mlp(fully_sharded())
    optimizer = adam(model.parameters())
    found = rf"rank {rank}: the ranks have different places or settings for a checkpoint: rank 0 has .*"
    with pytest.raises(RuntimeError, match=found + "run0, .* and rank 1 has .*run1, "):
        fsdp.save(folder / f"run{rank}", model)
    with pytest.raises(RuntimeError, match=found + "step-00000007, .* and rank 1 has .*step-00000008, "):
        fsdp.save(folder, model, step=7 + rank)
    with checkpoint.Saver() as saver, pytest.raises(RuntimeError, match=found + "keep=1, .* and rank 1 has .*keep=2"):
        saver.save(folder, model, step=7, keep=1 + rank)
    with pytest.raises(RuntimeError, match=found + "an optimizer and rank 1 has .*no optimizer"):
        fsdp.save(folder, model, optimizer if rank == 0 else None)
    with pytest.raises(
        RuntimeError, match=r"settings to load a checkpoint: .*an optimizer and rank 1 has .*no optimizer"
    ):
        fsdp.load(folder, model, optimizer if rank == 0 else None)


# Checksums


@pytest.mark.parametrize("cuts", [(), (1,), (5, 1 << 20), (4 << 20,), (3, (4 << 20) + 1, 8 << 20, (8 << 20) + 7)])
def test_checksums_of_parts_make_that_of_the_whole(cuts: tuple[int, ...]) -> None:
    data = torch.randint(256, ((8 << 20) + 12345,), dtype=torch.uint8).numpy().data
    ends = [0, *cuts, len(data)]
    parts = [span for begin, end in pairwise(ends) for span in spans(begin, end)]
    fragments = [fragment("x", begin, data[begin:end]) for begin, end in reversed(parts)]
    found = of_tensor(by_name(fragments)["x"], len(data))
    assert found == [zlib.crc32(data[begin:end]) for begin, end in spans(0, len(data))]
    assert joined(zlib.crc32(data[:1000]), zlib.crc32(data[1000:]), len(data) - 1000) == zlib.crc32(data)


@pytest.mark.parametrize("width", [7, 4096, 3 << 20])
def test_columns_of_several_ranks_make_the_checksums_of_blocks(width: int) -> None:
    data = torch.randint(256, (5 << 20,), dtype=torch.uint8).numpy().data
    if width < 4096:
        data = data[:1000]
    columns = [list(range(first, len(data), 3 * width)) for first in range(0, 3 * width, width)]
    by_rank = [
        merged(
            fragment("x", start, data[start:stop])
            for begin in column
            for start, stop in spans(begin, min(begin + width, len(data)))
        )
        for column in columns
    ]
    assert max(map(len, by_rank)) <= 2, "one for each block"
    expected = [zlib.crc32(data[begin:end]) for begin, end in spans(0, len(data))]
    assert of_tensor(by_name(chain(*by_rank, by_rank[0]))["x"], len(data)) == expected  # the first one has a replica
    with pytest.raises(HoleError, match="bytes 0 to"):
        of_tensor(by_name(chain(*by_rank[1:]))["x"], len(data))


def test_verify_counts_the_bytes_of_all_tensors(tmp_path: Path) -> None:
    fsdp.save(tmp_path / "run", everything())
    model = everything()
    stored = {value.data_ptr(): value.nbytes for value in model.state_dict().values() if value.numel()}
    assert checkpoint.verify(tmp_path / "run") == sum(stored.values())
