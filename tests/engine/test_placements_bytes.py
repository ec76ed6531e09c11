"""What each placement sends in a step and holds between uses, to the byte: by `stages` and as counted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel, Placed, Placement, Placements, ShardingStrategy, fully_shard
from fsdp.engine.placements import UNREDUCED, UNSHARDED, Axis
from tests.helpers.hybrid import mesh_of
from tests.helpers.memory import live_bytes
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.ranks import RankPool
from tests.helpers.traffic import by_group, counting_sent

LAYERS, WIDTH, ITEM = 3, 12, 4
LAYER = WIDTH * WIDTH

SHARDED, ON_BOTH = Placed(Placement.SHARDED, Placement.REPLICATED), Placed(Placement.SHARDED, Placement.SHARDED)
VALUES = {
    name: Placements.from_strategy(ShardingStrategy[name])
    for name in ("FULL_SHARD", "SHARD_GRAD_OP", "SHARD_OPTIM", "SHARD_OPTIM_GRADS", "HYBRID_SHARD_OPTIM")
} | {
    "kept on the host": Placements.from_strategy(reshard_after_forward="host"),
    "deferred": Placements(parameters=SHARDED, gradients=UNREDUCED, optimizer=SHARDED),
    "deferred along the replica axis": Placements(
        parameters=SHARDED, gradients=Placed(Placement.SHARDED, Placement.PARTIAL), optimizer=ON_BOTH
    ),
    "ZeRO-1 over both axes": Placements(parameters=UNSHARDED, gradients=UNREDUCED, optimizer=ON_BOTH),
}


class Tower(nn.Module):
    """Layers of 12 x 12 elements, which all numbers of ranks here divide."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


def tower(value: str, form: str, shape: tuple[int, int]) -> Any:
    torch.manual_seed(0)
    model = Tower()
    options: dict[str, Any] = {"placements": VALUES[value]}
    mesh = mesh_of(*shape) if shape[0] > 1 or VALUES[value].is_nested else mesh_of(*shape)["shard"]
    if form == "rows":
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, **options)
        return fully_shard(model, mesh=mesh, **options)
    options |= {"use_orig_params": form == "orig", "bucket_cap_mb": 0, "process_group": mesh}
    for number in range(LAYERS):
        model.layers[number] = FullyShardedDataParallel(model.layers[number], **options)
    return FullyShardedDataParallel(model, **options)


def train(model: Any, optimizer: torch.optim.Optimizer, turns: int) -> None:
    for _ in range(turns):
        model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def expected_bytes(value: str, shape: tuple[int, int], turns: int) -> int:
    """Return the bytes that a rank sends in a step, from the stages of the placements."""
    placements, sizes = VALUES[value], {Axis.REPLICA: shape[0], Axis.SHARD: shape[1]}
    if shape[0] == 1:
        placements = placements.on_one_axis

    def sent(found: Any) -> int:
        return sum(stage.numel_sent(LAYER, sizes) for stage in found)

    # In forward each layer is unsharded, and in backward again but for the last, which backward begins with.
    uses = 2 * LAYERS - 1 if placements.reshard_after_forward is True else LAYERS
    once = LAYERS * (sent(placements.gather) + sent(placements.settle))
    return ITEM * (once + turns * (uses * sent(placements.unshard) + LAYERS * sent(placements.reduce)))


SHAPES = [(1, 2), (1, 3), (2, 2), (1, 4)]


@parametrize_pairs(at_most=10, value=[*VALUES], form=["flat", "orig"], shape=SHAPES, turns=[1, 3])
def test_bytes_on_the_wire(ranks: RankPool, value: str, form: str, shape: tuple[int, int], turns: int) -> None:
    ranks(shape[0] * shape[1]).run(_count, value, form, shape, turns)


@parametrize_pairs(value=["SHARD_OPTIM", "SHARD_OPTIM_GRADS"], shape=[(1, 2), (1, 3), (2, 2)], turns=[1, 3])
def test_bytes_on_the_wire_in_rows(ranks: RankPool, value: str, shape: tuple[int, int], turns: int) -> None:
    ranks(shape[0] * shape[1]).run(_count, value, "rows", shape, turns)


def _count(value: str, form: str, shape: tuple[int, int], turns: int) -> None:
    model = tower(value, form, shape)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        train(model, optimizer, turns)  # ranks agree, and the order is learned
    with counting_sent(by_group) as sent:
        train(model, optimizer, turns)
    assert sum(sent.values()) == expected_bytes(value, shape, turns), (value, dict(sent))


@on_ranks(4)
def test_backward_gathers_from_neighbours_only() -> None:
    torch.manual_seed(0)
    model: Any = Tower()
    options: dict[str, Any] = {"reshard_after_forward": 2, "bucket_cap_mb": 0}
    for number in range(LAYERS):
        model.layers[number] = FullyShardedDataParallel(model.layers[number], **options)
    model = FullyShardedDataParallel(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        train(model, optimizer, 1)
    with counting_sent(by_group) as sent:
        train(model, optimizer, 1)
    forward_and_reduction, backward = 2 * LAYERS * 3 / 4, (LAYERS - 1) / 2
    assert sum(sent.values()) == LAYER * ITEM * (forward_and_reduction + backward)


def expected_numel(value: str, shape: tuple[int, int]) -> tuple[int, int]:
    """Return the elements that a rank holds between steps, and those that it holds besides after a backward."""
    placements, sizes = VALUES[value], {Axis.REPLICA: shape[0], Axis.SHARD: shape[1]}
    if shape[0] == 1:
        placements = placements.on_one_axis
    shards_and_momentum = 2 * placements.optimizer.numel(LAYER, sizes)
    kept = placements.parameters.numel(LAYER, sizes) if placements.gather else 0
    return LAYERS * shards_and_momentum, LAYERS * (kept + placements.gradients.numel(LAYER, sizes))


@parametrize_pairs(at_most=9, value=[*VALUES], form=["flat", "orig"], shape=SHAPES)
def test_bytes_held(ranks: RankPool, value: str, form: str, shape: tuple[int, int]) -> None:
    ranks(shape[0] * shape[1]).run(_hold, value, form, shape)


@parametrize_pairs(value=["SHARD_OPTIM", "SHARD_OPTIM_GRADS"], shape=[(1, 3), (2, 2)])
def test_bytes_held_in_rows(ranks: RankPool, value: str, shape: tuple[int, int]) -> None:
    ranks(shape[0] * shape[1]).run(_hold, value, "rows", shape)


def _hold(value: str, form: str, shape: tuple[int, int]) -> None:
    train(warm := tower(value, form, shape), torch.optim.SGD(warm.parameters(), lr=0.1, momentum=0.9), 1)
    del warm  # what is made once for all models is there
    before = live_bytes()
    model = tower(value, form, shape)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, 2)
    between_steps, after_backward = expected_numel(value, shape)
    assert live_bytes() - before == ITEM * between_steps, f"{value}: between steps"
    for turn in range(2):
        model(torch.ones(1, WIDTH)).sum().backward()
        assert live_bytes() - before == ITEM * (between_steps + after_backward), f"{value}: after backward {turn}"
    optimizer.step()
    optimizer.zero_grad()
    assert live_bytes() - before == ITEM * between_steps, f"{value}: after a step"
