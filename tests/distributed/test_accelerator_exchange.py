"""Collectives of tensors on an accelerator over gloo, through host memory, with a rank that sends late."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp import FullyShardedDataParallel, fully_shard
from fsdp.distributed.collectives import Communicator, StagedExchange, communicator
from fsdp.distributed.dtensor import full_tensor
from tests.helpers.accelerator import ACCELERATOR, host_waits, later_kernels
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


@on_accelerators(2, through_host=True)
def test_what_was_awaited_has_come_from_a_rank_that_is_late() -> None:
    way = communicator(dist.group.WORLD, torch.device(ACCELERATOR))
    assert isinstance(way, StagedExchange)
    for name, (call, expected) in CALLS.items():
        for late in (0, 1):
            if dist.get_rank() == late:
                time.sleep(0.05)
            assert call(way) == expected[dist.get_rank()], name
            way.settle()


@on_accelerators(2)
def test_a_sent_tensor_keeps_its_memory_until_it_has_arrived() -> None:
    way, rank = communicator(dist.group.WORLD, torch.device(ACCELERATOR)), dist.get_rank()
    with later_kernels():
        for number in range(20):
            arrived = torch.empty(3, device=ACCELERATOR)
            pending = way.exchange({1 - rank: [arrived]}, {1 - rank: [_own()]}, "values", number)
            _others = [torch.zeros(3, device=ACCELERATOR) for _ in range(3)]
            pending.wait()
            assert arrived.tolist() == [2.0 - rank] * 3


@on_accelerators(2, through_host=True)
def test_gloo_for_the_accelerator_only_is_refused() -> None:
    group = dist.new_group(backend=f"{ACCELERATOR}:gloo")
    with pytest.raises(ValueError, match=f"backend='cpu:gloo,{ACCELERATOR}:gloo'"):
        FullyShardedDataParallel(nn.Linear(3, 4).to(ACCELERATOR), process_group=group)


@pytest.mark.parametrize("form", ["flat", "original", "rows"])
@on_accelerators(2, backend="cpu:gloo,cuda:nccl")
def test_the_host_waits_for_no_device_in_a_group_without_a_backend_for_the_cpu(form: str) -> None:
    """Short messages then have a group of their own."""
    device_only = dist.get_backend_config().split(",")[1]
    assert device_only.startswith(ACCELERATOR)
    expected = _trained(form, dist.group.WORLD)
    found = _trained(form, dist.new_group(backend=device_only))
    assert all(torch.equal(full_tensor(value), full_tensor(expected[name])) for name, value in found.items())


@on_accelerators(2, backend="cpu:gloo,cuda:nccl")
def test_ranks_in_different_numbers_of_groups_exchange_on_the_host() -> None:
    expected = _trained("flat", dist.group.WORLD)
    group = dist.new_group(backend=dist.get_backend_config().split(",")[1])
    dist.new_group([0])  # which rank 1 is not in
    assert torch.equal(_trained("flat", group)["weight"], expected["weight"])


@on_accelerators(3, backend="cpu:gloo,cuda:nccl")
def test_ranks_that_exchange_nothing_connect_with_the_others_first() -> None:
    """NCCL connects all ranks of a group at its first operation, and would wait for a rank without messages."""
    way = communicator(dist.new_group(backend=dist.get_backend_config().split(",")[1]), torch.device(ACCELERATOR))
    rank, arrived = dist.get_rank(), torch.empty(3, device=ACCELERATOR)
    outgoing, incoming = ({1: [_own()]}, {}) if rank == 0 else ({}, {0: [arrived]} if rank == 1 else {})
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as connect:
        for _ in range(2):
            way.exchange(incoming, outgoing, "values", 1).wait()
    assert connect.call_count == 1
    assert rank != 1 or arrived.tolist() == [1.0] * 3


def _trained(form: str, group: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model: Any = nn.Linear(3, 4).to(ACCELERATOR)
    if form == "rows":
        model = fully_shard(model, mesh=DeviceMesh.from_group(group, ACCELERATOR))
    else:
        model = FullyShardedDataParallel(model, process_group=group, use_orig_params=form == "original")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.full((2, 3), 1.0 + dist.get_rank(), device=ACCELERATOR)
    for step in range(3):
        before = host_waits()
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert step == 0 or host_waits() == before
    return dict(model.state_dict())
