"""Units that are put into a sharded model, or taken out of it, between steps: added, adapted or replaced layers."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp
from fsdp.distributed.dtensor import full_tensor
from tests.helpers.equality import assert_close
from tests.helpers.forms import FORMS, Beside, inside, sharded
from tests.helpers.module_kinds import seeded
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs


class Block(nn.Module):
    def __init__(self, features: int = 5) -> None:
        super().__init__()
        self.linear = nn.Linear(5, features)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(inputs).tanh()


class Adapted(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.scale = base, nn.Parameter(torch.ones(5))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.base(inputs) + inputs * self.scale


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers, self.head = nn.Linear(5, 5), nn.ModuleList([Block(), Block()]), nn.Linear(5, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.first(inputs)
        for layer in self.layers:
            outputs = layer(outputs)
        return self.head(outputs)


Shard = Callable[[nn.Module], Any]


def _append(model: Stack, shard: Shard) -> None:
    model.layers.append(shard(seeded(Block)))


def _adapt(model: Stack, shard: Shard) -> None:
    model.layers[0] = shard(Adapted(model.layers[0]))


def _drop(model: Stack, shard: Shard) -> None:
    del model.layers[1]


def _replace(model: Stack, shard: Shard) -> None:
    model.layers[0] = shard(seeded(Block))


def _replace_part_of_the_root(model: Stack, shard: Shard) -> None:
    model.head = shard(seeded(lambda: Block(2)))


CHANGES = [_append, _adapt, _drop, _replace, _replace_part_of_the_root]


def _loss(model: nn.Module, inputs: Tensor, step: int) -> Tensor:
    loss = model(inputs).square().sum()
    loss.backward()
    return loss.detach()


@parametrize_pairs(at_most=6, form=FORMS, is_evaluated=[False, True], world_size=[2, 1, 3])
@on_ranks("world_size")
def test_units_that_come_and_go_are_trained_and_clipped(form: str, is_evaluated: bool) -> None:
    for change in CHANGES:
        both = _changed(form, change, is_evaluated=is_evaluated)
        for step in (1, 2):
            both.backward(_loss, step)
            _clip(both)
            both.optimize()
        both.assert_equal()


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_a_model_that_was_changed_is_saved_and_loaded(form: str, tmp_path: Path) -> None:
    for change in CHANGES:
        both = _changed(form, change, is_evaluated=False)
        both.step(_loss, 1)
        fsdp.save(tmp_path / change.__name__, both.model, both.optimizers[0])
        both.model.load_state_dict({name: value * 0 for name, value in both.model.state_dict().items()})
        fsdp.load(tmp_path / change.__name__, both.model, both.optimizers[0])
        both.step(_loss, 2)
        both.assert_equal()


@pytest.mark.parametrize("form", FORMS)
@on_ranks(1)
def test_a_unit_that_was_taken_out_is_freed(form: str) -> None:
    both = Beside(Stack, form, (Block,))
    both.start()
    both.step(_loss, 0)
    model = inside(both.model)
    removed = weakref.ref(next(module for module in model.layers[1].modules() if isinstance(module, Block)))
    _drop(model, lambda module: module)
    _loss(both.model, torch.ones(2, 5), 1)
    both.optimizers = []  # they have its shards
    gc.collect()
    assert removed() is None


@pytest.mark.parametrize("form", ["flat", "orig"])
@on_ranks(2)
def test_the_full_optimizer_state_of_a_model_that_was_changed(form: str) -> None:
    for change in CHANGES:
        both = _changed(form, change, is_evaluated=False)
        both.step(_loss, 1)
        state = fsdp.optim_utils.full_optim_state_dict(both.model, both.optimizers[0])
        expected = {name: both.optimizers[1].state[param] for name, param in both.plain.named_parameters()}
        if dist.get_rank() == 0:
            assert_close(state["state"], expected, change.__name__)


@pytest.mark.parametrize("form", ["flat", "orig"])
@on_ranks(2)
def test_units_that_were_added_are_not_run_inside_of_join_first(form: str) -> None:
    both = _changed(form, _append, is_evaluated=False)
    message = r"cannot run units that were put into the model.* inside fsdp.join"
    with fsdp.join(both.model, both.optimizers[0]), pytest.raises(RuntimeError, match=message):
        both.model(torch.ones(1, 5))


def _changed(form: str, change: Callable[[Stack, Shard], None], *, is_evaluated: bool) -> Beside:
    both = Beside(Stack, form, (Block,))
    both.start()
    both.step(_loss, 0)
    change(inside(both.model), lambda module: sharded(module, form))
    change(both.plain, lambda module: module)
    if is_evaluated:
        with torch.no_grad():
            both.model(torch.ones(1, 5))
    both.optimizers = [torch.optim.SGD(model.parameters(), 0.1, 0.5) for model in (both.model, both.plain)]
    return both


def _clip(both: Beside) -> None:
    clip = getattr(both.model, "clip_grad_norm_", None)
    norm = clip(0.1) if clip else full_tensor(nn.utils.clip_grad_norm_(both.model.parameters(), 0.1))
    expected = nn.utils.clip_grad_norm_([param for param in both.plain.parameters() if param.grad is not None], 0.1)
    torch.testing.assert_close(norm, expected)
