"""Selective activation checkpointing of torch, where units run inside of the checkpointed region, or around it.

Such a checkpoint records each operation of the region by its number. The operations of a unit's hooks must not be among
them: in the recomputation a unit may be unsharded already.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from fsdp import ShardingStrategy
from tests.helpers.forms import FORMS, assert_trains, sharded
from tests.helpers.module_kinds import seeded
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs

MATMULS = {torch.ops.aten.addmm.default, torch.ops.aten.mm.default}

# Which results the checkpoint keeps, and does not compute again.
KEPT: dict[str, Callable[[Any], bool]] = {
    "matmuls": lambda operator: operator in MATMULS,
    "all but matmuls": lambda operator: operator not in MATMULS,
    "all": lambda operator: True,
    "none": lambda operator: False,
}


def _policy(kept: str, _: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if KEPT[kept](operator) else CheckpointPolicy.PREFER_RECOMPUTE


def _contexts(kept: str) -> Any:
    return partial(create_selective_checkpoint_contexts, partial(_policy, kept))


def _checkpointed(kept: str, module: Any, x: Tensor) -> Any:
    return checkpoint(module, x, use_reentrant=False, context_fn=_contexts(kept))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(5), nn.Linear(5, 11), nn.Linear(11, 5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


class Stack(nn.Module):
    """Three blocks between linear layers; with `kept`, each call of a block is a checkpoint."""

    def __init__(self, kept: str | None = None) -> None:
        super().__init__()
        self.entry, self.exit, self.blocks = nn.Linear(5, 5), nn.Linear(5, 3), nn.ModuleList(Block() for _ in range(3))
        self._kept = kept

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x) if self._kept is None else _checkpointed(self._kept, block, x)
        return self.exit(x)


def _wrapped(kept: str) -> nn.Module:
    model = Stack()
    for number, block in enumerate(model.blocks):
        model.blocks[number] = checkpoint_wrapper(block, context_fn=_contexts(kept))
    return model


def _train(model: Callable[[Tensor], Any], x: Tensor, step: int) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    return loss.detach()


def _train_checkpointed(kept: str, model: nn.Module, x: Tensor, step: int) -> Tensor:
    return _train(partial(_checkpointed, kept, model), x, step)


@parametrize_pairs(world_size=[2, 1, 3], form=FORMS, kept=list(KEPT))
@on_ranks("world_size")
def test_units_inside_of_checkpoints(world_size: int, form: str, kept: str) -> None:
    assert_trains(partial(Stack, kept), form, _train, (Block,))


@parametrize_pairs(world_size=[2, 1], form=FORMS, kept=list(KEPT))
@on_ranks("world_size")
def test_a_checkpoint_around_the_whole_model(world_size: int, form: str, kept: str) -> None:
    assert_trains(Stack, form, partial(_train_checkpointed, kept), (Block,))


@pytest.mark.parametrize("kept", KEPT)
@on_ranks(2)
def test_units_that_are_replicated(kept: str) -> None:
    assert_trains(partial(Stack, kept), "flat", _train, (Block,), sharding_strategy=ShardingStrategy.NO_SHARD)


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_units_around_checkpoints(form: str) -> None:
    assert_trains(partial(_wrapped, "matmuls"), form, _train, (CheckpointWrapper,))


@on_ranks(2)
def test_other_modes_see_the_checkpointed_region_as_before() -> None:
    def flops(model: nn.Module) -> int:
        with FlopCounterMode(display=False) as counter:
            _train(model, torch.ones(2, 5), 0)
        return counter.get_total_flops()

    found = [flops(seeded(partial(Stack, kept))) for kept in ("matmuls", "none")]
    assert found == [flops(sharded(Stack(kept), "flat", (Block,))) for kept in ("matmuls", "none")]
    assert found[0] < found[1]
