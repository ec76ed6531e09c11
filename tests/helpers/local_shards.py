"""What tests of local state and consolidation share: awkward models, and shards as they come out of files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp import FullyShardedDataParallel
from tests.helpers.models import Wrap, keep
from tests.helpers.parity import fully_sharded

State = dict[str, Any]
Shards = tuple[list[Any], list[Any]]  # each rank's weights, and each rank's metadata


class Awkward(nn.Module):
    """Everything that makes a state hard: ties in outer and inner unit, frozen and float64 parameters, a scalar.

    And extra state, and buffers that are saved, shared, of integers, or not saved. `few` has fewer elements than three
    ranks need.
    """

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.entry = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        inner = nn.ModuleDict({"first": nn.Linear(7, 7, bias=False), "second": nn.Linear(7, 7)})
        inner["second"].weight = inner["first"].weight
        inner["second"].register_buffer("steps", torch.tensor([3.0, 4.0]))
        self.inner = wrap(inner)
        self.few = wrap(nn.Linear(2, 1, bias=False))
        self.frozen = nn.Parameter(torch.randn(3, 3), requires_grad=False)
        self.fine = nn.Parameter(torch.randn(2, 5, dtype=torch.float64))
        self.exit = nn.Linear(5, 7, bias=False)
        self.exit.weight = self.entry.weight
        self.register_buffer("table", torch.randn(2, 3))
        self.exit.register_buffer("same", self.table)
        self.register_buffer("scratch", torch.zeros(4), persistent=False)

    def get_extra_state(self) -> dict[str, str]:
        return {"kind": "awkward"}

    def set_extra_state(self, state: dict[str, str]) -> None:
        assert state == {"kind": "awkward"}


def awkward(wrap: Wrap = keep, *, seed: int = 0) -> nn.Module:
    """`Awkward`, with the same values on every call; buffers and parameters are those of `seed`."""
    torch.manual_seed(seed)
    model = Awkward(wrap)
    model.norm.running_mean.normal_()  # type: ignore[union-attr, operator]
    return wrap(model)


def different(make: Callable[..., nn.Module], **options: Any) -> nn.Module:
    """The same model wrapped, with other values than the seed 0 gives."""
    return make(fully_sharded(**options), seed=1)


def through_files(model: nn.Module, folder: Path) -> Shards:
    """Collective. Every rank's shards, written by each and read by all."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.save((model.local_state_dict(), model.local_metadata_dict()), folder / f"{rank}.pt")  # type: ignore[operator]
    dist.barrier()
    read = [torch.load(folder / f"{each}.pt", weights_only=True) for each in range(world_size)]
    dist.barrier()
    return [weights for weights, _ in read], [metadata for _, metadata in read]


def consolidated(shards: Shards, **how: Any) -> State:
    return FullyShardedDataParallel.consolidate_shard_weights(*shards, **how)
