"""Units under activation checkpointing train as the plain model does."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.helpers.calls import infer
from tests.helpers.models import Net, Wrap, nested_mlp
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.parity import fully_sharded
from tests.helpers.ranks import RankPool
from tests.helpers.twins import (
    OPTIONS,
    assert_at_rest,
    assert_trains_like_plain,
    once,
    score,
    tanh_layers,
    toolbox,
    two_forwards_then_backwards,
    two_forwards_then_one_backward,
    with_input_gradient,
)


class CheckpointedInside(nn.Module):
    """A unit that recomputes its two halves one by one; `shared` is used by both."""

    def __init__(self, reentrant: bool, shared: bool = False) -> None:
        super().__init__()
        self.halves = nn.ModuleList(tanh_layers() for _ in range(2))
        self.shared = nn.Linear(5, 5) if shared else nn.Identity()
        self.reentrant = reentrant

    def forward(self, inputs: Tensor) -> Tensor:
        for number in range(2):
            inputs = checkpoint(self._half, number, inputs, use_reentrant=self.reentrant)
        return inputs

    def _half(self, number: int, inputs: Tensor) -> Tensor:
        return self.shared(self.halves[number](inputs))


CHECKPOINTED_STEPS = [once, with_input_gradient, two_forwards_then_backwards, two_forwards_then_one_backward]


@parametrize_pairs(at_most=4, order=["abc", "abcab"], reentrant=[True, False], options=OPTIONS)
def test_checkpointing_around_units(ranks: RankPool, order: str, reentrant: bool, options: dict[str, Any]) -> None:
    make = partial(toolbox, order=order, recompute=reentrant)
    ranks(2).run(assert_trains_like_plain, make, *CHECKPOINTED_STEPS, options=options)


@parametrize_pairs(at_most=4, shared=[False, True], reentrant=[True, False], options=OPTIONS)
def test_checkpointing_inside_units(ranks: RankPool, shared: bool, reentrant: bool, options: dict[str, Any]) -> None:
    make = partial(toolbox, tool=partial(CheckpointedInside, reentrant, shared))
    ranks(2).run(assert_trains_like_plain, make, *CHECKPOINTED_STEPS, options=options)


class OneLayerTwice(nn.Module):
    """A unit whose only parameters have all their gradients after the first of its two checkpoints."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)
        self.reentrant = reentrant

    def forward(self, inputs: Tensor) -> Tensor:
        for _ in range(2):
            inputs = checkpoint(self._layers, inputs, use_reentrant=self.reentrant)
        return inputs

    def _layers(self, inputs: Tensor) -> Tensor:
        return torch.tanh(self.layer(inputs))


def test_one_layer_in_two_checkpoints_of_its_unit(ranks: RankPool) -> None:
    make = partial(toolbox, tool=partial(OneLayerTwice, False))
    ranks(2).run(assert_trains_like_plain, make, *CHECKPOINTED_STEPS)


@on_ranks(2)
def test_one_layer_in_two_reentrant_checkpoints_of_its_unit_is_an_error() -> None:
    # When the second recomputation starts, backward has left the unit with all its gradients: for good, it seems.
    model = toolbox(fully_sharded(), tool=partial(OneLayerTwice, True))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"layer\.weight is sharded"):
            once(model, torch.randn(4, 5))
    infer(model)
    assert_at_rest(model)


@parametrize_pairs(reentrant=[True, False], options=OPTIONS)
def test_checkpointing_around_the_root(ranks: RankPool, reentrant: bool, options: dict[str, Any]) -> None:
    around_root = partial(recompute_all, reentrant, False)
    around_loss = partial(recompute_all, reentrant, True)
    ranks(2).run(assert_trains_like_plain, nested_mlp, around_root, around_loss, options=options)


def recompute_all(reentrant: bool, and_loss: bool, model: nn.Module, inputs: Tensor) -> None:
    inputs = inputs.clone().requires_grad_()  # the re-entrant way sees no other reason for a backward
    if and_loss:
        checkpoint(lambda x: score(model(x)), inputs, use_reentrant=reentrant).backward()
    else:
        score(checkpoint(model, inputs, use_reentrant=reentrant)).backward()


def several_in_one(wrap: Wrap, reentrant: bool) -> nn.Module:
    """One checkpoint around several units."""
    torch.manual_seed(0)
    net = Net(
        lambda net, x: checkpoint(net.units, net.entry(x), use_reentrant=net.reentrant),
        entry=nn.Linear(5, 5),
        units=nn.Sequential(*(wrap(tanh_layers()) for _ in range(3))),
        reentrant=reentrant,
    )
    return wrap(net)


@parametrize_pairs(reentrant=[True, False], options=OPTIONS)
def test_one_checkpoint_around_several_units(ranks: RankPool, reentrant: bool, options: dict[str, Any]) -> None:
    make = partial(several_in_one, reentrant=reentrant)
    ranks(2).run(assert_trains_like_plain, make, *CHECKPOINTED_STEPS, options=options)


@parametrize_pairs(options=OPTIONS, saving=["by reference", "by copy", "save_on_cpu"])
def test_saved_tensors_hooks(ranks: RankPool, saving: str, options: dict[str, Any]) -> None:
    ranks(2).run(assert_trains_like_plain, nested_mlp, partial(save_otherwise, saving), options=options)


def save_otherwise(saving: str, model: nn.Module, inputs: Tensor) -> None:
    contexts = {
        "by reference": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
        "by copy": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t),
        "save_on_cpu": torch.autograd.graph.save_on_cpu,
    }
    with contexts[saving]():
        loss = score(model(inputs))
    loss.backward()
