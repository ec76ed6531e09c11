"""A gradient that is not finite is named on the rank where it comes from, if that was asked for."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp
from fsdp import FullyShardedDataParallel, fully_shard
from fsdp.distributed.communicator import CollectiveError
from tests.helpers.on_ranks import on_ranks

BAD = 1  # the number of the batch that is not finite, on rank 1


def wrapped() -> nn.Module:
    torch.manual_seed(0)
    return FullyShardedDataParallel(nn.Sequential(FullyShardedDataParallel(nn.Linear(4, 4)), nn.Linear(4, 4)))


def fully_sharded() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0])
    return fully_shard(model)


@pytest.mark.parametrize("make", [wrapped, fully_sharded])
@on_ranks(2, backend=None)
def test_the_first_one_is_named_with_its_rank_and_the_others_hear_of_it_and_can_go_on(
    tmp_path: Path, make: Callable[[], nn.Module]
) -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(str(tmp_path / "store"), 2))
    model, expected = make(), make()
    train(expected, [0, 2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    errors = []
    for number in range(3):
        try:
            with fsdp.detect_nonfinite(model):
                step(model, optimizer, number)
        except RuntimeError as error:
            errors.append(error)
            fsdp.recover(model)
    (error,) = errors
    where = "rank 1: the gradient of 1.bias of unit 'root"
    assert where in str(error)
    assert isinstance(error, CollectiveError) == (rank == 0)
    for mine, its in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(local(mine), local(its))
    dist.destroy_process_group()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    is_bad = number == BAD and dist.get_rank() == 1
    (model(torch.ones(2, 4) * number) * (float("nan") if is_bad else 1.0)).sum().backward()
    optimizer.step()


def train(model: nn.Module, numbers: list[int]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in numbers:
        step(model, optimizer, number)


def local(param: torch.Tensor) -> torch.Tensor:
    return param.to_local() if hasattr(param, "to_local") else param.detach()


@on_ranks(2)
def test_nothing_is_looked_at_outside() -> None:
    model = wrapped()
    with fsdp.detect_nonfinite(model):
        train(model, [0])
    train(model, [BAD])
    assert not any(param.isfinite().all() for param in model.parameters())


def test_a_model_that_is_not_sharded_has_nothing_to_look_at() -> None:
    with pytest.raises(ValueError, match="nothing in this Linear is sharded"), fsdp.detect_nonfinite(nn.Linear(1, 1)):
        pass
