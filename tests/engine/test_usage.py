"""`Usage`: without tags, ranks find out in backward that they have run units in different orders."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp
from fsdp import FullyShardedDataParallel, ShardingStrategy, use_torch_collectives
from tests.helpers.on_ranks import on_ranks
from tests.helpers.own_collectives import OwnAllGather

INPUTS = torch.linspace(-1, 1, 8).view(2, 4)


class Branches(nn.Module):
    """Layers of equal sizes, which run in any order."""

    def __init__(self, shard: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleDict({name: nn.Linear(4, 4) for name in "abc"})
        for name, layer in self.layers.items():
            self.layers[name] = shard(layer)

    def forward(self, inputs: Tensor, order: str) -> Tensor:
        return torch.stack([self.layers[name](inputs) for name in order]).sum()


def wrapped(**options: Any) -> nn.Module:
    shard = partial(FullyShardedDataParallel, **options)
    return shard(Branches(shard))


def in_rows() -> nn.Module:
    return fsdp.fully_shard(Branches(fsdp.fully_shard))


def hybrid(strategy: ShardingStrategy) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return wrapped(process_group=mesh, sharding_strategy=strategy)


@contextmanager
def torchs_collectives() -> Iterator[None]:
    use_torch_collectives()
    try:
        yield
    finally:
        use_torch_collectives(False)


def by_users_gather() -> nn.Module:
    model: Any = in_rows()
    for layer in model.layers.values():
        layer.set_custom_all_gather(OwnAllGather())
    return model


def refuses_another_order(make: Callable[[], nn.Module], ranks: Sequence[int] = (1,), *, by_torch: bool = True) -> None:
    with torchs_collectives() if by_torch else nullcontext():
        model = make()
        order = "bca" if dist.get_rank() in ranks else "abc"
        units = ", ".join(f"layers.{name}" for name in order)
        with pytest.raises(RuntimeError, match=f"have run units in different orders .* {units}"):
            model(INPUTS, order).backward()


@pytest.mark.parametrize(
    "make", [wrapped, in_rows, partial(wrapped, use_orig_params=True), partial(wrapped, bucket_cap_mb=0)]
)
@on_ranks(2, 3)
def test_units_in_different_orders_are_an_error_in_backward(make: Callable[[], nn.Module]) -> None:
    refuses_another_order(make)


@pytest.mark.parametrize("by_torch", [False, True])
@on_ranks(2)
def test_all_gathers_of_users_compare_orders_too(by_torch: bool) -> None:
    refuses_another_order(by_users_gather, by_torch=by_torch)


@pytest.mark.parametrize("strategy", [ShardingStrategy.HYBRID_SHARD, ShardingStrategy.HYBRID_SHARD_OPTIM])
@on_ranks(4)
def test_replicas_and_shards_over_both_axes_compare_orders_too(strategy: ShardingStrategy) -> None:
    refuses_another_order(partial(hybrid, strategy))


@on_ranks(4)
def test_replicas_that_gather_together_compare_orders() -> None:
    refuses_another_order(partial(hybrid, ShardingStrategy.HYBRID_SHARD_OPTIM), ranks=(2, 3))


@on_ranks(4)
def test_replicas_may_run_forwards_by_themselves() -> None:
    with torchs_collectives():
        model = hybrid(ShardingStrategy.HYBRID_SHARD)
        for _ in range(3):
            model(INPUTS, "abc").backward()
            if dist.get_rank() < 2:
                with torch.no_grad():
                    model(INPUTS, "cab")
