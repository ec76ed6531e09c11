"""What tests of hybrid sharding share: the ways to ask for it, and what must hold of replicas."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp import get_fsdp_instances
from tests.helpers.models import Net, Wrap
from tests.helpers.parity import Trained


# Kept for the life of a process: groups are never destroyed, and a mesh that is made anew makes new ones.
@cache
def mesh_of(replicas: int, shards: int) -> DeviceMesh:
    """Collective. All ranks, in dimensions "replicate" and "shard"."""
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


@cache
def neighbours(size: int) -> Any:
    """Collective. This rank's group of `size` ranks that follow each other."""
    made = [dist.new_group(list(range(start, start + size))) for start in range(0, dist.get_world_size(), size)]
    return made[dist.get_rank() // size]


@cache
def every_nth(stride: int) -> Any:
    """Collective. This rank's group of every `stride`-th rank."""
    made = [dist.new_group(list(range(first, dist.get_world_size(), stride))) for first in range(stride)]
    return made[dist.get_rank() % stride]


def group_option(how: str, replicas: int, shards: int) -> Any:
    """Collective. What `process_group` is, to ask for hybrid sharding in one of three ways."""
    if how == "mesh":
        return mesh_of(replicas, shards)
    if how == "pair":
        return neighbours(shards), every_nth(shards)
    return None


@contextmanager
def machines_of(ranks: int | None) -> Iterator[None]:
    """As under torchrun on machines with so many ranks each; None: without torchrun."""
    with mock.patch.dict(os.environ):
        os.environ.pop("LOCAL_WORLD_SIZE", None)
        if ranks is not None:
            os.environ["LOCAL_WORLD_SIZE"] = str(ranks)
        yield


def assert_replicas_agree(model: nn.Module) -> None:
    """Collective. All who hold the same shards hold the same bits of them, and of their gradients."""
    for wrapper in get_fsdp_instances(model):
        replicas: Any = wrapper.replicate_group
        for param in wrapper.params if replicas is not None else ():
            for tensor in (param.detach(), param.grad):
                if tensor is not None:
                    copies = [torch.empty_like(tensor) for _ in range(replicas.size())]
                    dist.all_gather(copies, tensor.contiguous(), group=replicas)
                    if any(not torch.equal(copy, tensor) for copy in copies):
                        raise AssertionError(f"replicas of {wrapper} differ by {copies[0] - copies[-1]}")


def assert_same_on_every_rank(trained: Trained) -> None:
    """Collective. All ranks save the same bits."""
    flat = torch.cat([value.flatten().double() for value in trained.weights.values()])
    copies = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, flat)
    if any(not torch.equal(copy, flat) for copy in copies):
        raise AssertionError("ranks hold different models")


def frozen(wrap: Wrap) -> nn.Module:
    """Frozen layers beside trained ones, and a unit that is not used."""
    torch.manual_seed(0)
    net = Net(
        lambda net, x: net.exit(torch.tanh(net.frozen(net.entry(x)))),
        entry=wrap(nn.Linear(5, 7)),
        frozen=wrap(nn.Linear(7, 7).requires_grad_(False)),
        unused=wrap(nn.Linear(7, 7)),
        exit=nn.Linear(7, 1),
    )
    return wrap(net)
