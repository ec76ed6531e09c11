"""What goes wrong in a world of ranks is found at once, and named: mistakes, faults, deaths, waits without end."""

from __future__ import annotations

import gc
import os
import random
import re
import sys
import threading
import time
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp import FullyShardedDataParallel, check_messages
from fsdp.distributed import communicator, passes
from fsdp.distributed.communicator import CollectiveError, DamagedMessageError
from fsdp.testing import Fault, World, WorldError, die
from tests.helpers.models import nested_mlp
from tests.helpers.on_ranks import on_ranks

# --- what ranks wait for --------------------------------------------------------------------------------------------


def test_ranks_that_wait_for_each_other_say_so_at_once() -> None:
    with pytest.raises(WorldError) as caught:
        World(3).run(_wait_in_a_ring)
    assert set(caught.value.errors) == {0, 1, 2}
    place = r"rank 0: waiting for a message of rank 1, at test_world_faults.py:\d+ in _wait_in_a_ring"
    assert re.search(f"(?s)wait for each other.*{place}", str(caught.value))


def _wait_in_a_ring() -> None:
    dist.recv(torch.empty(1), (dist.get_rank() + 1) % 3)


def test_a_rank_that_has_returned_is_named_by_those_that_wait_for_it() -> None:
    with pytest.raises(WorldError, match="rank 1: has returned") as caught:
        World(2).run(_leave_early)
    assert set(caught.value.errors) == {0}
    assert caught.value.results == {1: "done"}


def _leave_early() -> str:
    if dist.get_rank() == 0:
        dist.barrier()
    return "done"


def test_different_collectives_are_named() -> None:
    with pytest.raises(WorldError, match=r"rank 0 in all_reduce\(\[2\] float32\) .*; rank 1 in barrier"):
        World(2).run(_different_collectives)


def _different_collectives() -> None:
    dist.barrier() if dist.get_rank() else dist.all_reduce(torch.ones(2))


# --- mistakes in a training -----------------------------------------------------------------------------------------


def test_a_rank_that_cannot_leave_its_group_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no such group")

    monkeypatch.setattr(dist, "destroy_process_group", fail)
    with pytest.raises(WorldError, match=r"rank 0 has raised OSError: no such group"):
        World(2).run(dist.get_rank)


@pytest.mark.parametrize(
    ("mistake", "text"),
    [
        ("skips a unit", "did not complete.*waiting for all-gather of .*gate.*Rank 1 left gate out of forward 1"),
        ("other order", "did not complete.*waiting for all-gather of.*Rank 1 ran gate before first in forward 1"),
        ("other model", "ranks"),
        ("other seed", "the ranks have sharded different values"),
        ("other optimizer", "different optimizer steps.*rank 1: SGD.*lr=0.2"),
        ("other call", "the ranks are in different calls|did not complete"),
    ],
)
def test_a_mistake_on_one_rank_is_named(mistake: str, text: str) -> None:
    with pytest.raises(WorldError, match=f"(?s){text}"):
        World(2).run(_make_mistake, mistake)


def _make_mistake(mistake: str) -> None:
    wrong = dist.get_rank() == 1
    if mistake == "other model" and wrong:
        FullyShardedDataParallel(nn.Linear(5, 3))(torch.ones(2, 5))
    torch.manual_seed(int(mistake == "other seed" and wrong))
    model = FullyShardedDataParallel(_Two(mistake if wrong else ""))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2 if mistake == "other optimizer" and wrong else 0.1)
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if mistake == "other call":
        model.state_dict() if wrong else model.clip_grad_norm_(1.0)


class _Two(nn.Module):
    def __init__(self, mistake: str) -> None:
        super().__init__()
        self.mistake = mistake
        self.first, self.gate = (FullyShardedDataParallel(nn.Linear(3, 3)) for _ in range(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.mistake == "skips a unit":
            return self.first(inputs)
        if self.mistake == "other order":
            return self.first(self.gate(inputs))
        return self.gate(self.first(inputs))


# --- faults and deaths ----------------------------------------------------------------------------------------------


def _train() -> str:
    model = nested_mlp(FullyShardedDataParallel)
    for _ in range(2):
        model(torch.ones(2, 5)).sum().backward()
    return "trained"


def test_an_exception_at_a_message_is_known_to_the_others() -> None:
    with pytest.raises(WorldError) as caught:
        World(3, faults=[Fault(1, 24, OSError("cable"))]).run(_train)
    errors = caught.value.errors
    assert isinstance(errors[1], OSError)
    for rank in (0, 2):
        assert isinstance(errors[rank], CollectiveError)
        assert "rank 1 was ended by OSError" in str(errors[rank])
    assert str(caught.value).index("OSError: cable") < str(caught.value).index("CollectiveError")


def test_a_rank_that_dies_closes_its_connections() -> None:
    with pytest.raises(WorldError) as caught:
        World(3, faults=[Fault(2, 24, "die")]).run(_train)
    assert set(caught.value.errors) == {0, 1}
    for error in caught.value.errors.values():
        assert isinstance(error, CollectiveError)
        assert "rank 2 is gone" in str(error)


def test_ranks_can_go_on_without_one_that_has_died() -> None:
    assert World(3).run(_outlive) == ["outlived", None, "outlived"]


def _outlive() -> str:
    if dist.get_rank() == 1:
        try:
            die()
        except Exception:  # noqa: BLE001
            return "nobody holds it up"
    with pytest.raises(RuntimeError, match="Connection closed by peer: rank 1 is gone"):
        dist.barrier()
    return "outlived"


def test_a_message_that_is_lost_is_waited_for() -> None:
    with pytest.raises(WorldError, match=r"(?s)did not complete: .*no message is in flight.*rank 0: waiting for"):
        World(2, faults=[Fault(1, 12, "lose")]).run(_train)


def test_flipped_bits_are_found_by_checksums_alone() -> None:
    flipped = [Fault(1, 12, "flip")]
    assert World(2, faults=flipped).run(_train) == ["trained", "trained"]
    check_messages()
    try:
        with pytest.raises(WorldError) as caught:
            World(2, faults=flipped).run(_train)
    finally:
        check_messages(False)
    assert isinstance(caught.value.errors[0], DamagedMessageError)


def test_collectives_of_torch_are_messages_too() -> None:
    assert World(2).run(_sum) == [3.0, 3.0]
    (found, same) = World(2, faults=[Fault(1, 0, "flip")]).run(_sum)
    assert found == same != 3.0
    with pytest.raises(WorldError, match=r"ranks 0-1: waiting for all_reduce\(\[1\] float32\)"):
        World(2, faults=[Fault(1, 0, "lose")]).run(_sum)
    with pytest.raises(WorldError, match="rank 1 is gone"):
        World(2, faults=[Fault(1, 0, "die")]).run(_sum)


def _sum() -> float:
    value = torch.tensor([1.0 + dist.get_rank()])
    dist.all_reduce(value)
    return float(value)


def test_a_fault_that_nobody_has_come_to_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"Fault\(rank=1, at=1000.*did not occur: rank 1 sent \d+ messages"):
        World(2, faults=[Fault(1, 1000, "lose")]).run(_train)


def test_a_buffer_that_is_written_again_before_it_was_sent_arrives_changed_in_some_orders() -> None:
    assert {World(2, seed=seed).run(_write_too_early)[1] for seed in range(8)} == {1.0, 2.0}


def _write_too_early() -> float:
    value = torch.ones(1)
    if dist.get_rank() == 0:
        work = dist.isend(value, 1)
        value.fill_(2.0)
        work.wait()
    else:
        dist.recv(value, 0)
    return float(value)


def test_a_buffer_that_is_freed_before_it_was_sent_is_an_error() -> None:
    with pytest.raises(WorldError, match="the memory of what is to be sent was freed"):
        World(2).run(_free_too_early)


def _free_too_early() -> None:
    value = torch.ones(1)
    if dist.get_rank() == 0:
        dist.isend(value, 1)
        value.untyped_storage().resize_(0)
        dist.barrier()
    else:
        dist.barrier()
        dist.recv(value, 0)


# --- orders ---------------------------------------------------------------------------------------------------------


def test_a_seed_gives_an_order() -> None:
    orders = []
    for seed in (1, 1, 2):
        world = World(3, seed=seed)
        world.run(_train)
        orders.append(world.order)
    assert orders[0] == orders[1] != orders[2]


def test_late_ranks_run_where_nobody_else_can() -> None:
    for seed in range(4):
        ended: list[int] = []
        World(3, late=[0], seed=seed).run(lambda: (dist.barrier(), ended.append(dist.get_rank())))  # noqa: B023
        assert ended[-1] == 0


# --- each rank has its own ------------------------------------------------------------------------------------------


def test_each_rank_has_its_own_process_state() -> None:
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    random.seed(5)
    for found in World(3).run(_use_process_state):
        assert torch.equal(found, expected)
    assert torch.equal(torch.rand(4), expected), "the caller's generator is where it was"
    assert torch.get_default_dtype() == torch.float32


def _use_process_state() -> torch.Tensor:
    import os

    rank = dist.get_rank()
    torch.set_default_dtype((torch.float32, torch.float64, torch.float16)[rank])
    drawn, chances = [], []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(4):
            drawn.append(torch.rand(1, dtype=torch.float32))
            chances.append(random.random())
            dist.barrier()
            warnings.warn(f"{rank} {number}", stacklevel=1)
    assert [str(each.message) for each in caught] == [f"{rank} {number}" for number in range(4)]
    assert torch.ones(1).dtype == (torch.float32, torch.float64, torch.float16)[rank]
    assert os.environ["RANK"] == str(rank)
    assert os.environ["WORLD_SIZE"] == "3"
    every: list[Any] = [None] * 3
    dist.all_gather_object(every, chances)
    assert every[0] == every[1] == every[2]
    assert len(set(chances)) == 4
    return torch.cat(drawn)


def test_nothing_is_left_behind() -> None:
    threads, hook, before = set(threading.enumerate()), sys.excepthook, len(communicator.communicators)
    models: list[weakref.ref[Any]] = []
    for _ in range(2):
        World(2).run(lambda: models.append(weakref.ref(_trained_model())))
        with pytest.raises(WorldError):
            World(2).run(_die_in_training)
    gc.collect()
    assert set(threading.enumerate()) == threads
    assert sys.excepthook is hook
    assert not dist.is_initialized()
    assert len(communicator.communicators) == before
    assert len(models) == 4
    assert not any(model() for model in models)


def _trained_model() -> nn.Module:
    model = nested_mlp(FullyShardedDataParallel)
    model(torch.ones(2, 5)).sum().backward()
    return model


def _die_in_training() -> None:
    model = _trained_model()
    if dist.get_rank():
        raise ValueError("in the middle")
    model(torch.ones(2, 5)).sum().backward()


# --- how it is used -------------------------------------------------------------------------------------------------


def test_bad_arguments_are_refused() -> None:
    for wrong in ({"ranks": 0}, {"ranks": 2, "late": [2]}, {"ranks": 2, "faults": [Fault(3, 0, "die")]}):
        with pytest.raises(ValueError, match="a world needs"):
            World(**wrong)
    with pytest.raises(ValueError, match="effect of a fault"):
        Fault(0, 0, "explode")
    with pytest.raises(RuntimeError, match="this thread is not a rank"):
        die()


def test_a_rank_cannot_run_a_world() -> None:
    with pytest.raises(WorldError, match="a second world cannot run, which is called by rank 0"):
        World(1).run(World(1).run, dist.get_rank)


def test_a_rank_that_runs_on_for_ever_is_given_up() -> None:
    going_on = threading.Event()
    with pytest.raises(WorldError, match=r"(?s)has run for 3 s without.*at test_world_faults.py"):
        World(2, timeout=3).run(lambda: _spin(going_on))
    going_on.set()


@on_ranks(1)
def test_a_rank_that_was_given_up_does_not_change_its_process() -> None:
    group, path, variables = dist.group.WORLD, passes.path, dict(os.environ)
    going_on = threading.Event()
    with pytest.raises(WorldError, match="has run for 1 s"):
        World(3, timeout=1).run(_spin, going_on)
    late = [thread for thread in threading.enumerate() if thread.name == "rank 1"]
    going_on.set()
    for thread in late:
        thread.join(60)
    assert late
    assert dist.group.WORLD is group
    assert passes.path is path
    assert dict(os.environ) == variables
    assert init_device_mesh("cpu", (1,)).get_group() is group  # which torch finds by its name
    assert World(2).run(dist.get_rank) == [0, 1]


def _spin(going_on: threading.Event) -> None:
    while dist.get_rank() == 1 and not going_on.is_set():
        time.sleep(0.001)
    dist.barrier()


def test_skipping_on_all_ranks_skips() -> None:
    with pytest.raises(pytest.skip.Exception, match="not here"):
        World(2).run(pytest.skip, "not here")
