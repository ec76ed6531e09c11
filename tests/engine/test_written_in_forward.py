"""Modules that write to their own weights in forward: kept, as without sharding, or an error by name."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from fsdp.wrap.checkpoint_wrapper import checkpoint_wrapper
from tests.helpers.forms import full_state
from tests.helpers.on_ranks import on_ranks

OPTIONS: dict[str, dict[str, Any]] = {
    "flat": {},
    "pieces kept whole": {"use_orig_params": True, "reshard_after_forward": False},
    "alone": {"flatten_parameters": False},
    "rows": {},
    "checkpointed": {},
    "offloaded": {"move_params_to_cpu": True},
    "hybrid": {},
}


class Writer(nn.Module):
    """An embedding that normalises the rows it reads, and a layer that clamps its weight before it uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 5, max_norm=0.5)
        self.layer = nn.Linear(5, 3)

    def forward(self, rows: Tensor, write: float | None = None) -> Tensor:
        with torch.no_grad():
            self.layer.weight.data.clamp_(-0.2, 0.2)
            if write is not None:
                self.layer.bias[1:].fill_(write)
        result: Tensor = self.layer(self.table(rows) + self.table(rows.flip(0)))
        return result


def _wrapped(plain: nn.Module, kind: str) -> Any:
    model = copy.deepcopy(plain)
    if kind == "checkpointed":
        model = checkpoint_wrapper(model)
    if kind == "hybrid":
        return FullyShardedDataParallel(model, process_group=init_device_mesh("cpu", (2, 2)))
    if kind == "rows":
        return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return FullyShardedDataParallel(model, **OPTIONS[kind])


def _rows_of(rank: int, step: int) -> Tensor:
    return torch.tensor([[0, 3], [1, 3], [2, 5]][(rank + step) % 3])


@pytest.mark.parametrize("kind", OPTIONS)
@on_ranks(lambda kind: 4 if kind == "hybrid" else 3)
def test_what_forward_writes_to_its_own_weights_is_kept(kind: str) -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    plain, world = Writer(), dist.get_world_size()
    model = _wrapped(plain, kind)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(4):
        accumulates = step < 3 and isinstance(model, FullyShardedDataParallel)
        with model.no_sync() if accumulates else nullcontext():
            model(_rows_of(dist.get_rank(), step)).square().sum().backward()
        plain(torch.cat([_rows_of(rank, step) for rank in range(world)])[:, None])
        for rank in range(world):
            (plain(_rows_of(rank, step)).square().sum() / world).backward()
        if not accumulates:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    with torch.no_grad():
        model(torch.arange(4) + dist.get_rank())
        plain(torch.arange(3 + world))
    found = full_state(model)
    for name, expected in plain.state_dict().items():
        torch.testing.assert_close(found[name], expected, msg=name)


@pytest.mark.parametrize("kind", ["flat", "replicated", "cast"])
@on_ranks(2)
def test_what_ranks_write_differently_is_an_error_on_all_of_them(kind: str) -> None:
    torch.manual_seed(0)
    options: dict[str, dict[str, Any]] = {
        "flat": {},
        "replicated": {"sharding_strategy": ShardingStrategy.NO_SHARD},
        "cast": {"mixed_precision": True, "compute_dtype": torch.bfloat16},
    }
    plain = Writer()
    model = FullyShardedDataParallel(copy.deepcopy(plain), **options[kind])
    same = torch.tensor([1, 2])
    for written in (0.25, 0.5):  # on all ranks alike
        model(same, written).sum().backward()
        plain(same, written)
        sharded_state = model.state_dict()
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(sharded_state[name], value, rtol=1e-2, atol=1e-2, msg=name)
    with pytest.raises(RuntimeError, match=r"wrote to layer\.bias, and the ranks' values conflict"):
        model(same, float(dist.get_rank()))
    if kind == "flat":
        model(same, 0.5).sum().backward()
        assert model.state_dict()["layer.bias"][1:].eq(0.5).all()


class Shrinking(nn.Linear):
    """Makes its weight smaller each time that it computes."""

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.5)
        return super().forward(inputs)


@pytest.mark.parametrize("kept", [False, True])
@on_ranks(2)
def test_what_is_written_again_in_a_recomputation_is_not_kept(kept: bool) -> None:
    layer = Shrinking(3, 5)
    before = layer.weight.detach().clone()
    inner = FullyShardedDataParallel(layer, reshard_after_forward=not kept)
    model = FullyShardedDataParallel(nn.Sequential(checkpoint_wrapper(inner), nn.Linear(5, 2)))
    with model.no_sync() if kept else nullcontext():  # between whose passes they stay unsharded
        for _ in range(2):
            model(torch.ones(2, 3)).sum().backward()
    torch.testing.assert_close(inner.state_dict()["weight"], before * 0.25)


@on_ranks(2)
def test_weights_written_between_forward_and_backward_are_an_error() -> None:
    model = FullyShardedDataParallel(nn.Linear(3, 2), reshard_after_forward=False)
    loss = model(torch.ones(1, 3)).sum()
    with torch.no_grad():
        model.weight.mul_(2)
    with pytest.raises(RuntimeError, match="were changed"):
        loss.backward()
