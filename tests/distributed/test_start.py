"""`fsdp.init_distributed`: the process group, this rank's device, and how a missing environment is reported."""

from __future__ import annotations

import gc
import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp
from fsdp.distributed import start
from tests.helpers.equality import assert_same
from tests.helpers.on_ranks import on_ranks
from tests.helpers.ranks import RankError, RankPool


def test_ranks_that_torchrun_starts_again_meet(ranks: RankPool) -> None:
    """torchrun, by which the examples are started, keeps its store with the addresses of the ranks before."""
    # As torchrun does it: a store outside of the ranks, which all of them connect to.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(RankError, match="exited with status 3"):
        ranks(2, backend=None).run(_meet_and_end, store.port)
    assert ranks(2, backend=None).run(_meet, store.port, restarts=1) == [("cpu", "cpu:gloo", 2)] * 2


def test_ranks_that_start_twice_in_one_process_meet(ranks: RankPool) -> None:
    """The addresses of their first start are still in torchrun's store."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert ranks(2, backend=None).run(_meet_twice, store.port) == [("cpu", "cpu:gloo", 2)] * 2


def _meet_twice(port: int) -> tuple[str, str, int]:
    _meet(port)
    is_late = dist.get_rank() == 1
    dist.destroy_process_group()
    time.sleep(is_late)  # so that the other rank looks for addresses first
    return _meet(port)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads and files in /proc")
@pytest.mark.parametrize("is_default", [True, False])
def test_destroyed_process_groups_leave_no_threads_and_files(ranks: RankPool, is_default: bool) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for counts in ranks(2, backend=None).run(_train_with_many_groups, store.port, is_default):
        assert max(counts[3:]) <= max(counts[:3]), counts


def _train_with_many_groups(port: int, is_default: bool) -> list[tuple[int, int]]:
    """Return the numbers of threads and files after each of some starts."""
    counts = []
    for _ in range(6):
        _meet(port)
        group = None if is_default else dist.new_group()
        model = fsdp.FullyShardedDataParallel(nn.Linear(3, 2), group)
        model(torch.ones(1, 3)).sum().backward()
        dist.destroy_process_group()
        del model, group
        gc.collect()
        counts.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))))
    return counts


@on_ranks(2, backend=None)
def test_a_model_outlives_its_process_group_and_those_of_later_models(tmp_path: Path) -> None:
    dist.init_process_group("gloo", f"file://{tmp_path}/first", rank=int(os.environ["RANK"]), world_size=2)
    model = fsdp.FullyShardedDataParallel(nn.Linear(3, 2))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    dist.destroy_process_group()
    dist.init_process_group("gloo", f"file://{tmp_path}/second", rank=int(os.environ["RANK"]), world_size=2)
    fsdp.FullyShardedDataParallel(nn.Linear(3, 2))
    fsdp.save(tmp_path / "saved", model)
    assert_same(model.state_dict(), expected)


def _meet_and_end(port: int) -> None:
    _meet(port)
    os._exit(3)


def _meet(port: int, restarts: int = 0) -> tuple[str, str, int]:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ.update(address, GROUP_WORLD_SIZE="1", TORCHELASTIC_RESTART_COUNT=str(restarts))
    device = fsdp.init_distributed(timeout=timedelta(seconds=20))
    dist.all_reduce(total := torch.ones(1, device=device))
    return device.type, str(dist.get_backend_config()), int(total)


def test_a_program_without_torchrun_learns_how_it_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RuntimeError, match=r"needs RANK, WORLD_SIZE, .* torchrun --nproc-per-node 2 train.py"):
        fsdp.init_distributed()
    assert not dist.is_initialized()


@pytest.mark.parametrize(("rank", "world_size"), [("2", "2"), ("-1", "2"), ("x", "2"), ("", "1"), ("0", "")])
def test_a_rank_outside_of_the_world_is_an_error(monkeypatch: pytest.MonkeyPatch, rank: str, world_size: str) -> None:
    for name, value in {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=f"RANK={rank} and WORLD_SIZE={world_size} in .* 0 to WORLD_SIZE - 1"):
        fsdp.init_distributed(timeout=timedelta(seconds=1))


@pytest.fixture
def four_devices(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Four accelerators, and the number of the current one at the end of the list. No process group is created."""
    current = [0]
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "2" if name == "WORLD_SIZE" else "1")
    monkeypatch.setattr(start, "accelerator", lambda: torch.device("cuda", current[-1]))
    monkeypatch.setattr(start, "current_device", lambda kind: torch.device(kind, current[-1]))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(torch.accelerator, "set_device_index", current.append)
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **options: None)
    return current


def test_a_rank_takes_the_accelerator_of_its_local_number(
    four_devices: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert fsdp.init_distributed() == torch.device("cuda", 2)
    assert four_devices == [0, 2]


@pytest.mark.parametrize("number", ["4", None])
def test_a_rank_without_an_accelerator_of_its_own_is_an_error(
    four_devices: list[int], monkeypatch: pytest.MonkeyPatch, number: str | None
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if number is not None:
        monkeypatch.setenv("LOCAL_RANK", number)
    with pytest.raises(RuntimeError, match=f"LOCAL_RANK, which is {number}, and torch sees 4 here.*per-node 4"):
        fsdp.init_distributed()
    assert four_devices == [0]
