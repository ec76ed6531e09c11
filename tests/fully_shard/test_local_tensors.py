"""What users see of parameters and gradients under `fully_shard`: how they lie in memory, and for how long."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from tests.helpers.dtensor_twins import Plan, assert_side_by_side, conv_net, local, ours, trained_twins, uneven
from tests.helpers.ranks import RankPool
from tests.helpers.twins import once

INPUTS = torch.linspace(-1, 1, 20).view(4, 5)


def nth_dim(dim: int, param: nn.Parameter) -> Shard:
    return Shard(min(dim, param.dim() - 1))


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("dim", [1, 2])
def test_along_any_dimension_everything_is_contiguous(ranks: RankPool, dim: int, world_size: int) -> None:
    ranks(world_size).run(_look_at_strides, dim)


def _look_at_strides(dim: int) -> None:
    seen: list[Tensor] = []

    def look(module: nn.Module, *_: Any) -> None:
        seen.extend(tensor for tensor in vars(module).values() if isinstance(tensor, nn.Parameter))

    model = conv_net(ours(shard_placement_fn=partial(nth_dim, dim)))
    for module in model.modules():
        module.register_forward_pre_hook(look)
    once(model, INPUTS)
    assert len(seen) == len(list(model.parameters()))
    assert all(tensor.is_contiguous() for tensor in seen)
    for param in model.parameters():
        assert local(param).is_contiguous()
        assert param.grad is not None
        assert local(param.grad).is_contiguous()


def test_along_any_dimension_it_trains_as_unsharded(ranks: RankPool) -> None:
    ranks(3).run(_train_along_dim)


def _train_along_dim() -> None:
    trained_twins(conv_net, shard_placement_fn=partial(nth_dim, 1))


def test_the_memory_of_gradients_goes_with_them(ranks: RankPool) -> None:
    ranks(2).run(_zero_gradients)


def _zero_gradients() -> None:
    model = uneven(ours())
    once(model, INPUTS)
    memory = {weakref.ref(local(param.grad)._base) for param in model.parameters() if param.grad is not None}
    assert memory
    assert all(each() is not None for each in memory)
    model.zero_grad()
    assert all(each() is None for each in memory)


def test_gradients_that_users_keep_stay_as_they_are(ranks: RankPool) -> None:
    ranks(2).run(_keep_gradients)


def _keep_gradients() -> None:
    model = uneven(ours())
    once(model, INPUTS)
    kept = {name: param.grad for name, param in model.named_parameters()}
    before = {name: local(grad).clone() for name, grad in kept.items() if grad is not None}
    model.zero_grad()
    once(model, INPUTS * 2)
    for name, grad in before.items():
        assert torch.equal(local(kept[name]), grad)  # type: ignore[arg-type]


def _freeze(model: Any, step: int) -> None:
    if step == 1:
        model.trunk.requires_grad_(False)
        model.entry.weight.requires_grad_(False)


def test_parameters_that_are_frozen_later(ranks: RankPool) -> None:
    ranks(2).run(_freeze_in_training)


def _freeze_in_training() -> None:
    assert_side_by_side(Plan(make_model=uneven, before_step=_freeze))
