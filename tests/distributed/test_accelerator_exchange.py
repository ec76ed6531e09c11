"""Collectives of tensors on an accelerator over gloo, through host memory, with a rank that sends late."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel
from fsdp.distributed.collectives import Communicator, StagedExchange, communicator
from tests.helpers.accelerator import ACCELERATOR, AcceleratorRanks
from tests.helpers.on_ranks import on_accelerators

pytestmark = pytest.mark.accelerator


def _own() -> Tensor:
    return torch.full((3,), 1.0 + dist.get_rank(), device=ACCELERATOR)


def _gathered(way: Communicator) -> list[float]:
    return way.all_gather(torch.empty(6, device=ACCELERATOR), _own(), "gather", 1).wait().tolist()


def _scattered(way: Communicator) -> list[float]:
    return way.reduce_scatter(_own().repeat(2), "reduction", 1).wait().tolist()


def _reduced(way: Communicator) -> list[float]:
    return way.all_reduce(_own()).wait().tolist()


def _passed_on(way: Communicator) -> list[float]:
    return way.broadcast(_own()).wait().tolist()


def _exchanged(way: Communicator) -> list[float]:
    peer, arrived = 1 - dist.get_rank(), torch.empty(3, device=ACCELERATOR)
    way.exchange({peer: [arrived]}, {peer: [_own()]}, "values", 1).wait()
    return arrived.tolist()


CALLS: dict[str, tuple[Callable[[Communicator], list[float]], list[list[float]]]] = {
    "all-gather": (_gathered, [[1.0] * 3 + [2.0] * 3] * 2),
    "reduce-scatter": (_scattered, [[3.0] * 3] * 2),
    "all-reduce": (_reduced, [[3.0] * 3] * 2),
    "broadcast": (_passed_on, [[1.0] * 3] * 2),
    "exchange": (_exchanged, [[2.0] * 3, [1.0] * 3]),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("late", [0, 1])
def test_what_was_awaited_has_come_from_a_rank_that_is_late(
    accelerator_ranks: AcceleratorRanks, call: str, late: int
) -> None:
    assert accelerator_ranks(2, through_host=True).run(_call, call, late) == CALLS[call][1]


def _call(call: str, late: int) -> list[float]:
    way = communicator(dist.group.WORLD, torch.device(ACCELERATOR))
    assert isinstance(way, StagedExchange)
    if dist.get_rank() == late:
        time.sleep(0.05)
    found = CALLS[call][0](way)
    way.settle()
    return found


@on_accelerators(2)
def test_a_group_without_a_backend_for_the_cpu_lets_the_host_wait() -> None:
    (group,) = [dist.new_group(backend=dist.get_backend_config().split(",")[1])]
    first = dist.get_rank() == 0
    with pytest.warns(UserWarning, match=r'init_process_group\("cpu:gloo,\w+:\w+"\)') if first else nullcontext():
        model = FullyShardedDataParallel(nn.Linear(3, 3).to(ACCELERATOR), process_group=group)
        model(torch.ones(2, 3, device=ACCELERATOR)).sum().backward()
