"""What hybrid sharding sends within and across, to the byte, and when.

Of a unit whose whole parameters have P bytes, on S shards and R replicas, a rank sends (S - 1) / S * P within for each
gather and for the reduction, and 2 (R - 1) / R * P / S across.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from fsdp.distributed.collectives import Communicator, DirectExchange, Pending
from tests.helpers.hybrid import mesh_of
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import Case, parametrize_cases
from tests.helpers.parity import fully_sharded
from tests.helpers.ranks import RankPool
from tests.helpers.traffic import by_group, counting_sent

LAYERS, WIDTH = 3, 12
ITEM = 4


class Tower(nn.Module):
    """Layers of 12 x 12 elements, which every group here divides, and a root with 12."""

    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.layers = nn.Sequential(*(wrap(nn.Linear(WIDTH, WIDTH, bias=False)) for _ in range(LAYERS)))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs * self.scale)


def tower(**options: Any) -> FullyShardedDataParallel:
    torch.manual_seed(0)
    wrap = fully_sharded(**options)
    model: Any = wrap(Tower(wrap))
    for _ in range(3):
        step(model)  # the ranks agree, and the order is learned
    return model


def step(model: nn.Module) -> None:
    model(torch.ones(1, WIDTH)).sum().backward()
    model.zero_grad()


@parametrize_cases(
    at_most=6,
    shape=[(2, 2), (1, 4), (4, 1), (3, 1), (1, 3), (2, 1)],
    strategy=[ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2],
    bucket_cap_mb=[0, 25],
)
@on_ranks(lambda case: case.shape[0] * case.shape[1])
def test_bytes_are_by_formula(case: Case) -> None:
    replicas, shards = case.shape
    model = tower(process_group=mesh_of(*case.shape), sharding_strategy=case.strategy, bucket_cap_mb=case.bucket_cap_mb)
    with counting_sent(by_group) as sent:
        step(model)
    # The root and the layer that comes last in forward are whole until backward has used them.
    gathers = LAYERS + 1 if case.strategy is ShardingStrategy._HYBRID_SHARD_ZERO2 else 2 * (LAYERS - 1) + 1 + 1
    layer, root = WIDTH * WIDTH * ITEM, WIDTH * ITEM
    gathered = layer * (gathers - 1) + root
    reduced = layer * LAYERS + root
    assert sent[model.process_group] == (shards - 1) * (gathered + reduced) / shards
    assert sent[model.replicate_group] == 2 * (replicas - 1) * reduced / (replicas * shards)
    assert not sent.keys() - {model.process_group, model.replicate_group}


@on_ranks(3)
def test_without_shards_only_gradients_travel() -> None:
    model = tower(sharding_strategy=ShardingStrategy.NO_SHARD)
    with counting_sent(by_group) as sent:
        step(model)
    assert sent == {dist.group.WORLD: 2 * 2 * (LAYERS * WIDTH * WIDTH + WIDTH) * ITEM / 3}


@on_ranks(4)
def test_what_goes_across_is_in_the_dtype_of_the_reduction() -> None:
    counts = []
    for dtype in (torch.float32, torch.bfloat16):
        model = tower(process_group=mesh_of(2, 2), mixed_precision=MixedPrecision(reduce_dtype=dtype))
        with counting_sent(by_group) as sent:
            step(model)
        counts.append(sent[model.replicate_group])
    assert counts[0] == 2 * counts[1] > 0


@pytest.mark.parametrize("shape", [(2, 2), (1, 4)])
def test_what_goes_across_overlaps_with_what_stays_within(ranks: RankPool, shape: tuple[int, int]) -> None:
    orders = ranks(4).run(_order, shape)
    within = [f"reduce-scatter of layers.{number}" for number in (2, 1, 0)]
    if shape[0] == 1:
        assert orders == [["reduce-scatter of root (Tower)" if i == 3 else within[i] for i in range(4)]] * 4
        return
    across = [f"sum over replicas of layers.{number}" for number in (2, 1, 0)]
    root = "root (Tower)"
    expected = [
        *(within[0], within[1], across[0]),
        # While this one travels within, the one before is summed across, and the sum of the first comes back.
        *(within[2], across[1], across[0]),
        *(f"reduce-scatter of {root}", across[2], across[1]),
        *(f"sum over replicas of {root}", across[2]),
        f"sum over replicas of {root}",
    ]
    assert orders == [expected] * 4


def _order(shape: tuple[int, int]) -> list[str]:
    model = tower(process_group=mesh_of(*shape), bucket_cap_mb=0)
    started: list[str] = []
    with noting(lambda what: started.extend([what] * (not what.startswith("all-gather")))):
        step(model)
    return started


@contextmanager
def noting(note: Callable[[str], object]) -> Iterator[None]:
    """Calls `note` with what an exchange is of, before it starts."""

    def noted(name: str) -> Any:
        method = getattr(DirectExchange, name)

        def call(self: Communicator, *args: Any) -> Pending:
            note(next(arg for arg in args if isinstance(arg, str)))
            pending: Pending = method(self, *args)
            return pending

        return mock.patch.object(DirectExchange, name, call)

    with noted("reduce_scatter"), noted("all_gather"):
        yield


@pytest.mark.parametrize("strategy", [None, ShardingStrategy.NO_SHARD])
@on_ranks(4)
def test_small_gradients_go_across_together(strategy: ShardingStrategy | None) -> None:
    model = tower(process_group=mesh_of(2, 2)) if strategy is None else tower(sharding_strategy=strategy)
    sent: list[str] = []
    with noting(lambda what: sent.extend([what] * (not what.startswith("all-gather")))):
        step(model)
    across = ["sum over replicas of root (Tower) to layers.2"] * 2
    assert sent == (["reduce-scatter of root (Tower) to layers.2"] if strategy is None else []) + across


@on_ranks(4)
def test_at_most_two_whole_gradients_are_held() -> None:
    # In 16 bits, and the rest in 64, so that gradients have a size of their own.
    torch.set_default_dtype(torch.float64)
    policy = MixedPrecision(reduce_dtype=torch.bfloat16)
    model = tower(process_group=mesh_of(2, 2), bucket_cap_mb=0, mixed_precision=policy)
    held: list[int] = []
    with noting(lambda what: held.append(storages_of(WIDTH * WIDTH * 2))):
        step(model)
    left = storages_of(WIDTH * 2 // 4)  # of the root, which was the last
    assert max(held) == 2
    assert left == 0, "what was sent to replicas is kept"


def storages_of(nbytes: int) -> int:
    """How many storages of this size there are."""
    tensors = [item for item in gc.get_objects() if type(item) is Tensor]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return len({storage.data_ptr() for storage in storages if storage.nbytes() == nbytes})
