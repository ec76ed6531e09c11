"""Checkpoints that cannot be saved or loaded: every rank hears why, nothing hangs, and what was there stays."""

from __future__ import annotations

import copy
import errno
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp
from fsdp import FullyShardedDataParallel, checkpoint
from tests.helpers.checkpoint_models import content, flip, save_in, small_files
from tests.helpers.equality import assert_same_state
from tests.helpers.models import nested_mlp
from tests.helpers.on_ranks import on_ranks
from tests.helpers.parity import Alone, adam, fully_sharded
from tests.helpers.ranks import RankPool

# Saving


def failing(name: str, number: int) -> Any:
    """The first call of a function of `os` fails."""
    do, calls = getattr(os, name), itertools.count()

    def fail_first(*args: Any, **options: Any) -> Any:
        if next(calls) == 0:
            raise OSError(number, os.strerror(number))
        return do(*args, **options)

    return mock.patch(f"os.{name}", fail_first)


FAILURES = {
    "full": (lambda: small_files(1200), "File too large"),
    "lost": (lambda: failing("fsync", errno.EIO), "Input/output error"),
    "read-only": (lambda: failing("makedirs", errno.EROFS), "Read-only file system"),
    "in the end": (lambda: failing("unlink", errno.EACCES), "Permission denied"),
}


@pytest.mark.parametrize(("failure", "rank"), [("full", 1), ("lost", 2), ("read-only", 0), ("in the end", 0)])
def test_a_rank_that_cannot_write_tells_the_others_and_the_old_checkpoint_stays(
    ranks: RankPool, tmp_path: Path, failure: str, rank: int
) -> None:
    ranks(2).run(save_in, tmp_path / "run", nested_mlp, fully_sharded())
    before = content(tmp_path)
    ranks(3).run(_fail_to_save, tmp_path / "run", failure, rank)
    assert content(tmp_path) == before
    ranks(3).run(save_in, tmp_path / "run", nested_mlp, fully_sharded(), seed=3)
    assert_same_state(_loaded(tmp_path / "run"), nested_mlp(seed=3).state_dict())


def _fail_to_save(path: Path, failure: str, rank: int) -> None:
    model = nested_mlp(fully_sharded())
    context, message = FAILURES[failure]
    is_it = dist.get_rank() == rank
    expected, text = (OSError, message) if is_it else (RuntimeError, rf"rank {rank} could not .*: {message}|{message}")
    with context() if is_it else nullcontext(), pytest.raises(expected, match=text):
        fsdp.save(path, model)


def _loaded(path: Path) -> dict[str, torch.Tensor]:
    model = nested_mlp()
    fsdp.load(path, model)
    return model.state_dict()


@on_ranks(2)
def test_the_message_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run"
    full = failing("pwrite", errno.ENOSPC) if dist.get_rank() == 1 else nullcontext()
    with (
        full,
        pytest.raises((OSError, RuntimeError), match=r"No space left on device: .*run\.saving/model\.safetensors"),
    ):
        fsdp.save(path, nested_mlp(fully_sharded()))


@pytest.mark.parametrize("inside", [".", "logs"])
@on_ranks(2)
def test_the_current_folder_of_a_rank_is_not_replaced(tmp_path: Path, inside: str) -> None:
    run = tmp_path / "run"
    run.mkdir(exist_ok=True)
    here = run / inside if dist.get_rank() == 1 else tmp_path
    with (
        mock.patch("os.getcwd", return_value=str(here)),
        pytest.raises((ValueError, RuntimeError), match=r"would replace the current folder, .*run"),
    ):
        fsdp.save(run, nested_mlp(fully_sharded()))
    assert list(run.iterdir()) == []


def test_a_path_that_is_a_file_or_below_one_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    ranks(2).run(_save_at_file, tmp_path / "run")
    with pytest.raises(OSError, match="run"):
        fsdp.save(tmp_path / "run" / "below", nested_mlp())
    assert content(tmp_path) == {"run": b"mine"}


def _save_at_file(path: Path) -> None:
    expected = NotADirectoryError if dist.get_rank() == 0 else RuntimeError
    with pytest.raises(expected, match="is a file: a checkpoint is a folder"):
        fsdp.save(path, nested_mlp(fully_sharded()))


@pytest.mark.parametrize("name", ["run", "run.saving", "run.replaced"])
def test_a_folder_with_other_things_in_it_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "thesis.tex").write_text("mine")
    with pytest.raises(FileExistsError, match=f"{name} (contains files and is not a checkpoint|is in the way)"):
        fsdp.save(tmp_path / "run", nested_mlp())
    assert content(tmp_path) == {f"{name}/thesis.tex": b"mine"}


def test_an_empty_folder_is_used(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    fsdp.save(tmp_path / "run", nested_mlp(seed=1))
    assert_same_state(_loaded(tmp_path / "run"), nested_mlp(seed=1).state_dict())


def test_what_users_have_put_into_a_checkpoint_is_in_the_next_one(tmp_path: Path) -> None:
    fsdp.save(tmp_path / "run", nested_mlp())
    (tmp_path / "run" / "config.json").write_text("{}")
    (tmp_path / "run" / "tokenizer").mkdir()
    (tmp_path / "run" / "tokenizer" / "words").write_text("a b")
    (tmp_path / "data").mkdir()
    (tmp_path / "run" / "data").symlink_to(tmp_path / "data")
    fsdp.save(tmp_path / "run", nested_mlp(seed=1))
    assert content(tmp_path / "run")["config.json"] == b"{}"
    assert content(tmp_path / "run")["tokenizer/words"] == b"a b"
    assert (tmp_path / "run" / "data").readlink() == tmp_path / "data"
    assert_same_state(_loaded(tmp_path / "run"), nested_mlp(seed=1).state_dict())


def test_the_range_of_a_rank_that_writes_nothing_is_missed(ranks: RankPool, tmp_path: Path) -> None:
    ranks(3).run(_save_without_a_rank, tmp_path / "run")
    assert not list(tmp_path.iterdir())


def _save_without_a_rank(path: Path) -> None:
    lazy = mock.patch("fsdp.checkpoint.writer.write_parts", return_value=[]) if dist.get_rank() == 1 else nullcontext()
    with lazy, pytest.raises(RuntimeError, match=r"bytes \d+ to \d+ of .* were written by no rank"):
        fsdp.save(path, nested_mlp(fully_sharded()))


@on_ranks(2)
def test_ranks_with_different_tensors_are_told(tmp_path: Path) -> None:
    path = tmp_path / "run"
    model = nn.Sequential(nested_mlp(fully_sharded()))  # ranks compare the buffers of wrappers before
    if dist.get_rank() == 1:
        model.register_buffer("more", torch.zeros(2))
    with pytest.raises(
        RuntimeError, match=r"the ranks have different tensors or settings to save: .* has 10 .* has 11 "
    ):
        fsdp.save(path, model)


def test_parameters_without_values_are_not_saved(tmp_path: Path) -> None:
    with torch.device("meta"):
        plain = nested_mlp()
    with pytest.raises(RuntimeError, match="have no values yet"):
        fsdp.save(tmp_path / "run", FullyShardedDataParallel(plain, Alone()))
    with torch.device("meta"):
        plain = nested_mlp()
    with pytest.raises(RuntimeError, match="is on the meta device and has no values"):
        fsdp.save(tmp_path / "run", plain)


@pytest.mark.parametrize("saved", ["model", "optimizer"])
def test_a_dtype_that_files_do_not_know_is_an_error_with_a_remedy(tmp_path: Path, saved: str) -> None:
    model = FullyShardedDataParallel(nn.Linear(3, 2, dtype=torch.complex128), Alone(), use_orig_params=True)
    optimizer = adam(model.parameters())
    model(torch.ones(1, 3, dtype=torch.complex128)).abs().sum().backward()
    optimizer.step()
    with pytest.raises((TypeError, ValueError), match=r"weight is of torch\.complex128.* cannot hold\. .*torch\.save"):
        fsdp.save(tmp_path / "run", model, *([optimizer] if saved == "optimizer" else []))


def test_a_model_in_use_is_not_saved(tmp_path: Path) -> None:
    model = FullyShardedDataParallel(nested_mlp(), Alone())
    with model.summon_full_params(), pytest.raises(RuntimeError, match="is inside summon_full_params"):
        fsdp.save(tmp_path / "run", model)
    with pytest.raises(RuntimeError, match=r"this Linear is a part of .* Save a checkpoint by the wrapper"):
        fsdp.save(tmp_path / "run", model.module.module.entry)


@on_ranks(4)
def test_a_model_of_other_ranks_is_not_replaced(tmp_path: Path) -> None:
    """As two stages of a pipeline that save to one folder, one after the other."""
    pairs = [dist.new_group(pair) for pair in ([0, 1], [2, 3])]
    stage = dist.get_rank() // 2
    model = FullyShardedDataParallel(nested_mlp(seed=stage), process_group=pairs[stage])
    if stage == 0:
        fsdp.save(tmp_path / "run", model)
    dist.barrier()
    if stage == 1:
        expected = ValueError if dist.get_rank() == 2 else RuntimeError
        with pytest.raises(expected, match=r"run is a checkpoint of another model, which rank 0 and the ranks of"):
            fsdp.save(tmp_path / "run", model)
        fsdp.save(tmp_path / "other", model)
    dist.barrier()
    assert_same_state(_loaded(tmp_path / "run"), nested_mlp(seed=0).state_dict())
    dist.barrier()
    if stage == 0:
        fsdp.save(tmp_path / "run", model)  # again
        if dist.get_rank() == 0:
            shutil.rmtree(tmp_path / "run")
    dist.barrier()
    for _ in range(2 * stage):
        fsdp.save(tmp_path / "run", model)


@on_ranks(4)
def test_a_unit_with_ranks_of_its_own_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run"
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    inner = FullyShardedDataParallel(nn.Linear(3, 3), groups[dist.get_rank() // 2])
    model = FullyShardedDataParallel(nn.Sequential(inner, nn.Linear(3, 3)))
    with pytest.raises(RuntimeError, match="Linear has a separate process group"):
        fsdp.save(path, model)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"model": nested_mlp().state_dict()}, TypeError, r"must be a torch.nn.Module, got OrderedDict"),
        ({"step": 3.5}, TypeError, r"step must be a whole number or None, got 3.5"),
        ({"step": 3, "keep": 1.5}, TypeError, r"keep must be a whole number or None, got 1.5"),
        ({"max_file_bytes": 1e9}, TypeError, r"max_file_bytes must be a whole number or None, got 1000000000.0"),
        ({"dtype": "bfloat16"}, TypeError, r"dtype must be a floating-point torch.dtype or None, got 'bfloat16'"),
        ({"dtype": torch.int8}, TypeError, r"dtype must be a floating-point torch.dtype or None, got torch.int8"),
        ({"path": ""}, ValueError, r"path is empty"),
        (
            {"path": "model.safetensors"},
            ValueError,
            r"path is the name of a file, 'model.safetensors': a checkpoint is",
        ),
        ({"path": Path("run/model.safetensors")}, ValueError, r"path is the name of a file, 'run/model.safetensors'"),
        ({"step": -1}, ValueError, r"step must be 0 or more, got -1"),
        ({"keep": 1}, ValueError, r"keep=1 must be positive, and requires step"),
    ],
)
def test_arguments_of_other_kinds_are_refused_before_anything_is_written(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments = {"path": tmp_path / "run", "model": nested_mlp()} | options
    with pytest.raises(error, match=message):
        fsdp.save(**arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": None}, "TypeError|NoneType"),
        ({"step": 1, "keep": 0}, "keep=0 must be positive"),
        ({"dtype": torch.int8}, "dtype must be a floating-point"),
        ({"max_file_bytes": 0}, "max_file_bytes must be a positive number"),
    ],
)
@pytest.mark.parametrize("in_background", [False, True])
@on_ranks(2)
def test_an_argument_that_one_rank_refuses_is_an_error_on_every_rank(
    tmp_path: Path, in_background: bool, options: dict[str, Any], message: str
) -> None:
    save: Any = checkpoint.Saver().save if in_background else fsdp.save
    arguments = {"path": tmp_path / "run", "model": nested_mlp(fully_sharded())}
    with pytest.raises((TypeError, ValueError, fsdp.OtherRankError), match=message):
        save(**arguments | options if dist.get_rank() == 1 else arguments)


class KeepingObjects(torch.optim.SGD):
    """Has an object of its own for each parameter, as ScalableShampoo of `pytorch_optimizer` has."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["statistics"] = object()
        return super().step(closure)


def test_objects_in_the_state_of_an_optimizer_are_an_error_with_a_remedy(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = KeepingObjects(model.parameters(), lr=0.1)
    optimizer.step()
    with pytest.raises(TypeError, match=r"'statistics' of weight is a .*object.*optimizer\.state_dict\(\)"):
        fsdp.save(tmp_path / "run", model, optimizer)


@pytest.mark.parametrize(
    ("buffer", "kind"),
    [
        (lambda: torch.eye(2).to_sparse(), "sparse_coo"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "nested"),
    ],
    ids=["sparse", "nested"],
)
def test_buffers_without_a_value_for_each_element_are_refused_and_named(
    tmp_path: Path, buffer: Callable[[], torch.Tensor], kind: str
) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("edges", buffer())
    with pytest.raises(TypeError, match=rf"edges is a {kind} tensor, .* persistent=False"):
        fsdp.save(tmp_path / "run", model)
    with pytest.raises(TypeError, match=rf"edges is a {kind} tensor, .* persistent=False"):
        fsdp.stream_weights(model, lambda tensors: None, bucket_bytes=100, buffers=True)
    fsdp.stream_weights(model, lambda tensors: None, bucket_bytes=100)
    assert not list(tmp_path.iterdir())


# Loading


def _damaged_places(folder: Path) -> list[tuple[str, int]]:
    """In each file the first and the last byte, the middle, and some at which tensors begin and end."""
    places = []
    for path in sorted(folder.iterdir()):
        size = path.stat().st_size
        places += [(path.name, place) for place in (0, 9, size // 3, size // 2, 2 * size // 3, size - 3)]
    return places


@pytest.mark.parametrize("max_file_bytes", [None, 400])
def test_a_flipped_bit_is_found_wherever_it_is(ranks: RankPool, tmp_path: Path, max_file_bytes: int | None) -> None:
    ranks(2).run(_save_trained, tmp_path / "run", max_file_bytes)
    places = _damaged_places(tmp_path / "run")
    names = {name for name, _ in places}
    assert len(names) == (3 if max_file_bytes is None else 10)
    if max_file_bytes is not None:  # each file, and each place in some
        places = places[::5]
        assert {name for name, _ in places} == names
    ranks(2).run(_load_damaged, tmp_path / "run", places)
    fsdp.load(tmp_path / "run", nested_mlp())


def _save_trained(folder: Path, max_file_bytes: int | None) -> None:
    model, optimizer = _trained(lr=1e-3)
    fsdp.save(folder, model, optimizer, max_file_bytes=max_file_bytes)


def _trained(lr: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nested_mlp(fully_sharded())
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    return model, optimizer


def _load_damaged(folder: Path, places: list[tuple[str, int]]) -> None:
    model, optimizer = _trained(lr=7.0)
    before = copy.deepcopy(optimizer.state_dict())
    for name, place in places:
        dist.barrier()
        if dist.get_rank() == 0:
            flip(folder / name, place)
        dist.barrier()
        with pytest.raises(ValueError, match=r"damaged"):
            checkpoint.verify(folder)
        with pytest.raises((ValueError, RuntimeError), match=rf"{name}.*damaged|damaged.*{name}"):
            fsdp.load(folder, model, optimizer)
        found = optimizer.state_dict()
        assert found["param_groups"] == before["param_groups"]
        assert [each["step"] for each in found["state"].values()] == [each["step"] for each in before["state"].values()]
        dist.barrier()
        if dist.get_rank() == 0:
            flip(folder / name, place)  # back


def test_blocks_that_several_ranks_read_are_compared_as_a_whole(ranks: RankPool, tmp_path: Path) -> None:
    """In a tensor of more than two blocks, of which ranks begin and end in the middle."""
    fsdp.save(tmp_path / "run", _large())
    size = (tmp_path / "run" / "model.safetensors").stat().st_size
    ranks(3).run(_load_large, tmp_path / "run")
    for place in (-1, size // 2, size // 3, size // 3 * 2, size - (4 << 20), 300):
        flip(tmp_path / "run" / "model.safetensors", place)
        ranks(3).run(_load_large, tmp_path / "run", "bytes [0-9]+ to [0-9]+ of it do not match")
        flip(tmp_path / "run" / "model.safetensors", place)


def _large() -> nn.Module:
    return nn.Linear(1500, 1801, bias=False)


def _load_large(folder: Path, message: str = "") -> None:
    model = FullyShardedDataParallel(_large())
    with pytest.raises((ValueError, RuntimeError), match=message) if message else nullcontext():
        fsdp.load(folder, model)


NOT_WHOLE: list[tuple[Callable[[Path], object], str]] = [
    (lambda path: os.truncate(path / "model.safetensors", 500), "model.safetensors has 500 bytes instead of"),
    (lambda path: os.truncate(path / "optimizer.safetensors", 0), "optimizer.safetensors has 0 bytes instead of"),
    (lambda path: (path / "optimizer.safetensors").unlink(), "optimizer.safetensors is missing"),
    (lambda path: os.truncate(path / "model.safetensors", 1 << 20), "has 1048576 bytes instead of"),
    (lambda path: (path / "model.safetensors").unlink(), "model.safetensors is missing"),
    (lambda path: os.truncate(path / "checkpoint.json", 40), "is damaged: it cannot be read"),
    (lambda path: (path / "checkpoint.json").unlink(), "not a complete checkpoint"),
    (shutil.rmtree, "not a complete checkpoint"),
]


def test_files_that_are_not_whole_are_named_and_nothing_is_loaded(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2).run(_save_trained, tmp_path / "run", None)
    for number, (change, _) in enumerate(NOT_WHOLE):
        change(shutil.copytree(tmp_path / "run", tmp_path / str(number)))
    ranks(2).run(_refuse_each, tmp_path)


def _refuse_each(folder: Path) -> None:
    model = nested_mlp(fully_sharded())
    optimizer = adam(model.parameters())
    for number, (_, message) in enumerate(NOT_WHOLE):
        with pytest.raises((OSError, ValueError), match=message):
            fsdp.load(folder / str(number), model, optimizer)
        assert not optimizer.state
        assert_same_state(model.state_dict(), nested_mlp().state_dict())


def test_another_model_is_refused_before_anything_is_changed(ranks: RankPool, tmp_path: Path) -> None:
    plain = nested_mlp(seed=1)
    plain.exit = nn.Linear(4, 2, bias=False)
    plain.more = nn.Linear(1, 1)
    fsdp.save(tmp_path / "run", plain)
    ranks(2).run(_load_another, tmp_path / "run")


def _load_another(folder: Path) -> None:
    model = nested_mlp(fully_sharded())
    with pytest.raises(RuntimeError) as caught:
        fsdp.load(folder, model)
    for text in (
        "has shape [2, 4], but the model's [1, 3]",
        "missing: exit.bias",
        "unexpected: more.weight, more.bias",
    ):
        assert text in str(caught.value)
    assert_same_state(model.state_dict(), nested_mlp().state_dict())


def test_without_strict_the_result_says_what_was_missing(tmp_path: Path) -> None:
    plain = nested_mlp(seed=1)
    plain.exit = nn.Linear(3, 1, bias=False)
    plain.more = nn.Linear(1, 1, bias=False)
    fsdp.save(tmp_path / "run", plain)
    loaded = fsdp.load(tmp_path / "run", nested_mlp(), strict=False)
    assert (loaded.missing_keys, loaded.unexpected_keys) == (["exit.bias"], ["more.weight"])
    compiled = nn.ModuleDict({"more": nn.ModuleDict({"_orig_mod": nn.Linear(1, 1)})})  # as by torch.compile
    assert fsdp.load(tmp_path / "run", compiled, strict=False).missing_keys == ["more.bias"]


def test_ranks_that_see_different_checkpoints_are_told(ranks: RankPool, tmp_path: Path) -> None:
    fsdp.save(tmp_path / "run0", nested_mlp(seed=1))
    fsdp.save(tmp_path / "run1", nested_mlp(seed=2))
    ranks(2).run(_load_different, tmp_path)


def _load_different(folder: Path) -> None:
    with pytest.raises(
        RuntimeError, match=r"the ranks have different checkpoints: rank 0 has .*run0 and rank 1 .*run1"
    ):
        fsdp.load(folder / f"run{dist.get_rank()}", nested_mlp(fully_sharded()))


def test_a_folder_without_checkpoints_has_no_newest_to_load(tmp_path: Path) -> None:
    message = r"no checkpoint at None, which fsdp\.checkpoint\.newest\(folder\) returns"
    with pytest.raises(FileNotFoundError, match=message):
        fsdp.load(fsdp.checkpoint.newest(tmp_path), nested_mlp())
    with pytest.raises(FileNotFoundError, match=message):
        fsdp.checkpoint.values(fsdp.checkpoint.newest(tmp_path))


def test_a_rank_without_the_checkpoint_does_not_leave_the_others_waiting(ranks: RankPool, tmp_path: Path) -> None:
    fsdp.save(tmp_path / "run", nested_mlp())
    ranks(3).run(_load_nowhere, tmp_path)


def _load_nowhere(folder: Path) -> None:
    is_it = dist.get_rank() == 2
    places: dict[str, Any] = {"nowhere is not a complete checkpoint": folder / "nowhere", "no checkpoint at None": None}
    for message, place in places.items():
        with pytest.raises(FileNotFoundError if is_it else RuntimeError, match=message):
            fsdp.load(place if is_it else folder / "run", nested_mlp(fully_sharded()))


class Stateful(nn.Linear):
    """A layer with state of the user's, which one rank cannot take."""

    def get_extra_state(self) -> str:
        return "state"

    def set_extra_state(self, state: str) -> None:
        if dist.get_rank() == 1:
            raise LookupError(f"no use for {state}")


def _refuse_on_one_rank(*_: Any) -> None:
    if dist.get_rank() == 1:
        raise LookupError("no use for state")


@pytest.mark.parametrize("part", ["module", "optimizer"])
@on_ranks(2)
def test_state_that_one_rank_refuses_is_an_error_on_every_rank(tmp_path: Path, part: str) -> None:
    model = FullyShardedDataParallel(Stateful(2, 2) if part == "module" else nn.Linear(2, 2))
    optimizer = adam(model.parameters())
    fsdp.save(tmp_path / "run", model, optimizer)
    optimizer.register_load_state_dict_post_hook(_refuse_on_one_rank)
    with pytest.raises((LookupError, fsdp.OtherRankError), match="no use for state"):
        fsdp.load(tmp_path / "run", model, optimizer if part == "optimizer" else None)


def test_a_path_that_is_no_checkpoint_is_told_apart(tmp_path: Path) -> None:
    for step in (3, 12):
        fsdp.save(tmp_path / "steps", nested_mlp(), step=step)
    (tmp_path / "steps" / "step-00000003" / "checkpoint.json").rename(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    for name, message in {
        "steps": r"it contains the checkpoints of steps 12\. fsdp.checkpoint.newest returns the last, .*step-00000012",
        "steps/step-00000003": r"there is no checkpoint.json in it\. fsdp.load_safetensors loads a model's tensors",
        "empty": r"there is no checkpoint.json in it$",
        "file": "it is a file",
        "nowhere": "the path does not exist",
    }.items():
        with pytest.raises(FileNotFoundError, match=f"{name} is not a complete checkpoint: {message}"):
            fsdp.load(tmp_path / name, nested_mlp())


def test_a_newer_version_is_refused(tmp_path: Path) -> None:
    fsdp.save(tmp_path / "run", nested_mlp())
    path = tmp_path / "run" / "checkpoint.json"
    content = json.loads(path.read_text())["checkpoint"] | {"version": 99}
    digest = hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()
    path.write_text(json.dumps({"sha256": digest, "checkpoint": content}))
    with pytest.raises(ValueError, match="is of version 99, but this library supports version 1"):
        fsdp.load(tmp_path / "run", nested_mlp())
