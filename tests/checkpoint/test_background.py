"""`fsdp.checkpoint.Saver`: training goes on while a checkpoint is written, and nothing of it is lost."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fsdp
from fsdp.checkpoint import Saver
from tests.helpers.equality import assert_same_state
from tests.helpers.models import nested_mlp
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.parity import adam, fully_sharded

write_parts = "fsdp.checkpoint.writer.write_parts"


def train(model: Any, optimizer: Any) -> None:
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def tcp_store() -> dist.TCPStore:
    """Collective. A store on the first rank, with a connection of each rank."""
    options: dict[str, Any] = {"world_size": 2, "wait_for_workers": False, "timeout": timedelta(seconds=20)}
    first = dist.TCPStore("127.0.0.1", 0, is_master=True, **options) if dist.get_rank() == 0 else None
    port = [None if first is None else first.port]
    dist.broadcast_object_list(port)
    return first or dist.TCPStore("127.0.0.1", cast(int, port[0]), is_master=False, **options)


def held_back(gate: threading.Event) -> Any:
    """Writing begins when the gate is opened."""
    from fsdp.checkpoint.safetensors import write_parts as do

    def write(*args: Any) -> Any:
        gate.wait()
        return do(*args)

    return mock.patch(write_parts, write)


@parametrize_pairs(world_size=[1, 2], options=[{}, {"use_orig_params": True}, {"offload": "cpu"}])
@on_ranks("world_size")
def test_what_is_saved_is_as_it_was_when_save_was_called(tmp_path: Path, options: dict[str, Any]) -> None:
    model = nested_mlp(fully_sharded(**options))
    optimizer = adam(model.parameters())
    gate = threading.Event()
    with Saver() as saver, held_back(gate):
        for step in range(3):
            train(model, optimizer)
            gate.set()
            saver.wait()
            gate.clear()
            before = model.state_dict()
            saver.save(tmp_path, model, optimizer, step=step, keep=2, values=step)
            assert saver.is_busy
            train(model, optimizer)  # with collectives of its own, while nothing is written yet
            assert not (tmp_path / f"step-{step:08d}").exists()
        gate.set()
        saved = saver.wait()
    assert saved is not None
    assert saved.path == fsdp.checkpoint.newest(tmp_path) == tmp_path / "step-00000002"
    loaded = nested_mlp(fully_sharded())
    assert fsdp.load(saved.path, loaded, adam(loaded.parameters())).values == 2
    assert_same_state(loaded.state_dict(), before)


@on_ranks(2)
def test_a_relative_path_is_of_the_folder_in_which_save_was_called(tmp_path: Path) -> None:
    model = nested_mlp(fully_sharded())
    gate = threading.Event()
    write = fsdp.checkpoint.writer.write

    def late(*args: Any) -> Any:
        gate.wait()
        return write(*args)

    (tmp_path / "elsewhere").mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch, Saver() as saver:
        patch.setattr(fsdp.checkpoint.writer, "write", late)
        for step in range(2):
            patch.chdir(tmp_path)
            saver.save("run", model, step=step, keep=1)
            patch.chdir(tmp_path / "elsewhere")
            gate.set()
            saver.wait()
            gate.clear()
    assert list(fsdp.checkpoint.steps(tmp_path / "run")) == [1]
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("by_members", [True, False])
@on_ranks(3)
def test_ranks_in_different_numbers_of_groups_save(tmp_path: Path, by_members: bool) -> None:
    if dist.get_rank() < 2 or not by_members:
        dist.new_group([0, 1], use_local_synchronization=by_members)  # which rank 2 is not in
    model = nested_mlp(fully_sharded())
    with Saver() as saver:
        saver.save(tmp_path / "saved", model)
    assert fsdp.load(tmp_path / "saved", model).world_size == 3


@on_ranks(2)
def test_memory_of_the_copies_is_used_again(tmp_path: Path) -> None:
    model = nested_mlp(fully_sharded())
    optimizer = adam(model.parameters())
    train(model, optimizer)
    shards = sum(param.nbytes for param in model.parameters())
    with Saver() as saver:
        for step in range(3):
            saver.save(tmp_path, model, optimizer, step=step)
        saver.wait()
        assert saver._stager.held_bytes <= 3 * shards
    with pytest.raises(RuntimeError, match="closed: create a new one"):  # its memory is released with the block
        saver.save(tmp_path, model, optimizer)


@pytest.mark.parametrize("rank", [0, 1])
@on_ranks(2)
def test_an_error_is_raised_by_the_next_call_on_every_rank(tmp_path: Path, rank: int) -> None:
    model = nested_mlp(fully_sharded())
    saver = Saver()
    failing = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for ask in (lambda: saver.save(tmp_path / "run", model), saver.wait):
        with mock.patch("os.pwrite", side_effect=failing) if dist.get_rank() == rank else mock.patch("os.getpid"):
            saver.save(tmp_path / "run", model)
            saver._jobs[0].exception()
        with pytest.raises((OSError, RuntimeError), match="No space left on device"):
            ask()
        assert dist.get_rank() or not list(tmp_path.iterdir())  # the first rank tidies up
    assert saver.wait() is None
    saver.save(tmp_path / "run", model)
    assert saver.wait() is not None


@pytest.mark.parametrize("slow", [0, 1])
@on_ranks(2)
def test_a_save_that_comes_too_early_is_refused_on_every_rank_if_asked(tmp_path: Path, slow: int) -> None:
    model = nested_mlp(fully_sharded())
    gate = threading.Event()
    with held_back(gate), Saver(when_busy="raise") as saver:
        if dist.get_rank() != slow:
            gate.set()
        saver.save(tmp_path / "run", model, values=1)
        with pytest.raises(RuntimeError, match="the last checkpoint is still being written"):
            saver.save(tmp_path / "run", model, values=2)
        gate.set()
        saver.wait()
        dist.barrier()
        saver.save(tmp_path / "run", model, values=3)
    assert fsdp.load(tmp_path / "run", model).values == 3


@on_ranks(2)
def test_a_save_that_comes_too_early_waits_otherwise(tmp_path: Path) -> None:
    model = nested_mlp(fully_sharded())
    gate = threading.Event()
    opens = threading.Timer(0.2, gate.set)
    with held_back(gate), Saver() as saver:
        saver.save(tmp_path / "run", model, values=1)
        opens.start()
        saver.save(tmp_path / "run", model, values=2)
        assert gate.is_set()
    assert fsdp.load(tmp_path / "run", model).values == 2


@on_ranks(2)
def test_savers_of_two_models_write_at_the_same_time(tmp_path: Path) -> None:
    """Their threads run in another order on each rank."""
    models = {name: nested_mlp(fully_sharded()) for name in ("first", "second")}
    optimizers = {name: adam(model.parameters()) for name, model in models.items()}
    from fsdp.checkpoint.safetensors import write_parts as do

    def late(folder: str, *args: Any) -> Any:
        if ("first" in folder) == (dist.get_rank() == 0):
            time.sleep(0.3)
        return do(folder, *args)

    with mock.patch(write_parts, late), Saver() as one, Saver() as other:
        savers = {"first": one, "second": other}
        for steps, (name, model) in enumerate(models.items(), 1):
            for _ in range(steps):
                train(model, optimizers[name])
        for name, model in models.items():
            savers[name].save(tmp_path / name, model, optimizers[name], values=name)
    for name, model in models.items():
        loaded = nested_mlp(fully_sharded())
        assert fsdp.load(tmp_path / name, loaded, adam(loaded.parameters())).values == name
        assert_same_state(loaded.state_dict(), model.state_dict())


def test_a_saver_may_end_before_its_save_in_any_thread(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    gate = threading.Event()

    def collect(*args: Any) -> Any:
        gate.wait()
        gc.collect()  # in the thread that writes, the garbage collector ends the saver
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    saver: Any = Saver()
    saver.cycle = saver
    ended = weakref.ref(saver)
    with mock.patch(write_parts, collect):
        saver.save(tmp_path / "run", nested_mlp())
        (writer,) = (thread for thread in threading.enumerate() if thread.name.startswith("saves "))
        del saver
        gate.set()
        writer.join(timeout=60)
    assert ended() is None
    assert "a checkpoint could not be saved" in capfd.readouterr().err


@on_ranks(2)
def test_a_rank_may_wait_for_a_save_while_the_first_rank_waits_for_it_in_the_store(tmp_path: Path) -> None:
    """As where ranks make a group. Only one thread at a time can use a connection to torchrun's store."""
    is_first, gate, write = dist.get_rank() == 0, threading.Event(), fsdp.checkpoint.writer.write
    store = tcp_store()

    def late(*args: Any) -> Any:
        gate.wait()
        return write(*args)

    model = nested_mlp(fully_sharded())
    with (
        mock.patch.object(dist.ProcessGroup, "get_group_store", return_value=store),
        mock.patch("fsdp.checkpoint.writer.write", late),
        Saver() as saver,
    ):
        saver.save(tmp_path / "run", model)
        opens = threading.Timer(0.5 * is_first, gate.set)
        opens.start()
        if is_first:
            store.get("from the other rank")
        else:
            saver.wait()
            store.set("from the other rank", "it has waited")
        opens.join()
    assert fsdp.load(tmp_path / "run", model).world_size == 2


@on_ranks(2)
def test_copies_that_need_more_memory_than_is_allowed_are_refused_on_every_rank(tmp_path: Path) -> None:
    model = nested_mlp(fully_sharded())
    saver = Saver(max_bytes=10 if dist.get_rank() == 1 else None)
    with pytest.raises((MemoryError, RuntimeError), match="max_bytes=10"):
        saver.save(tmp_path / "run", model)
    assert not list(tmp_path.iterdir())


def test_another_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="when_busy must be"):
        Saver(when_busy="sometimes")  # type: ignore[arg-type]


SCRIPT = """
import os, sys, threading, torch, fsdp
from unittest import mock
from fsdp.checkpoint import Saver, checksum_threads
from fsdp.checkpoint import writer as module

checksum_threads.free_cores = lambda: 1  # threads begin when the interpreter waits for its last ones
do = module.write_parts
main = threading.main_thread()


def write(*args):
    main.join()  # which has nothing left to do
    if {fails}:
        raise OSError("the disk is gone")
    return do(*args)


module.write_parts = write
saver = Saver()
saver.save({path!r}, torch.nn.Linear(2048, 1025))
"""


IN_CHILDREN = """
import os, sys, fsdp

for script, errors in zip(sys.argv[1::2], sys.argv[2::2]):
    if os.fork() == 0:
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
        exec(script, {"__name__": "__main__"})
        sys.exit()
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)  # or the next child would print it again
"""


def test_the_end_of_a_script_waits_and_tells(tmp_path: Path) -> None:
    arguments = []
    for name, fails in (("saved", False), ("told", True)):
        (tmp_path / name).mkdir()
        arguments += [SCRIPT.format(fails=fails, path=str(tmp_path / name / "run")), str(tmp_path / f"{name}.txt")]
    command = [sys.executable, "-c", IN_CHILDREN, *arguments]  # which imports torch once
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    errors = {name: (tmp_path / f"{name}.txt").read_text() for name in ("saved", "told")}
    assert done.stdout.split() == ["0", "0"], (done.stderr, errors)
    fsdp.load(tmp_path / "saved" / "run", torch.nn.Linear(2048, 1025))
    assert errors["saved"] == ""
    assert "a checkpoint could not be saved" in errors["told"]
    assert "the disk is gone" in errors["told"]
    assert not list((tmp_path / "told").iterdir())


def test_an_error_that_ends_the_block_is_not_replaced_by_that_of_a_save(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = mock.patch("os.pwrite", side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    with failing, pytest.raises(KeyError, match="of the training"):
        _train_within_a_saver(tmp_path / "run", KeyError("of the training"))
    assert "besides, a checkpoint could not be saved" in capsys.readouterr().err
    with failing, pytest.raises(OSError, match="No space left"):
        _train_within_a_saver(tmp_path / "run", None)


def _train_within_a_saver(path: Path, error: Exception | None) -> None:
    with Saver() as saver:
        saver.save(path, nested_mlp())
        if error is not None:
            raise error
