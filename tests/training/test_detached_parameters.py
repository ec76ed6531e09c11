"""Trained parameters that a forward also reads without a gradient: backward needs them after their own gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp
from fsdp.engine.observers import attached
from fsdp.engine.unit import unit_of, units_in
from tests.helpers.forms import FORMS, assert_trains, inside, sharded
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


class Detached(nn.Module):
    """The last operation trains the scale; the first, which backward comes to at the end, has saved it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = Layer(), nn.Parameter(torch.full((5,), 0.7))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * self.scale.detach()) * self.scale


class Slices(Detached):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * self.scale.detach()[:1]) + self.scale


class Quantised(nn.Module):
    """A codebook that is compared with the inputs without a gradient, as those of vector quantisation are."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.codes = Layer(), nn.Parameter(torch.linspace(-1, 1, 20).reshape(4, 5))

    def forward(self, x: Tensor) -> Tensor:
        near = torch.softmax(x @ self.codes.detach().t(), -1)
        return self.layer(near @ torch.ones(4, 5)) + self.codes[near.argmax(-1)]


class Recomputed(Detached):
    """A checkpoint without parameters of its own reads the scale again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._inner, x, use_reentrant=False) + self.scale

    def _inner(self, x: Tensor) -> Tensor:
        return self.layer((x * self.scale.detach()).sin())


class Force(Detached):
    """A gradient for the inputs is a part of the forward, which is computed again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        point = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad((self.layer(point) * self.scale).square().sum(), point)
        return self.layer(x) + 0.1 * slope + self.scale


def _checkpointed_force() -> nn.Module:
    return fsdp.checkpoint_wrapper(Force())


KINDS: list[Callable[[], nn.Module]] = [Detached, Slices, Quantised, Recomputed, Force, _checkpointed_force]


def _train(model: Any, x: Tensor, step: int) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    return loss.detach()


def _train_both(model: Any, x: Tensor, step: int) -> Tensor:
    losses = [model(x).square().mean(), model(2 * x).square().mean()]
    for loss in losses:
        loss.backward()
    return sum(losses).detach()


def _train_as_one(model: Any, x: Tensor, step: int) -> Tensor:
    loss = model(model(x)).square().mean()
    loss.backward()
    return loss.detach()


@parametrize_pairs(at_most=18, form=FORMS, kind=KINDS, nested=[False, True], world_size=[2, 3])
@on_ranks("world_size")
def test_they_are_kept_until_backward_has_used_them(form: str, nested: bool, kind: Callable[[], nn.Module]) -> None:
    units = (Detached, Quantised, *((Layer,) if nested else ()))
    for train in (_train, _train_both, _train_as_one):
        assert_trains(lambda: nn.Sequential(nn.Linear(5, 5), kind(), nn.Linear(5, 5)), form, train, units)


class Unsharded:
    """Observes how many units are unsharded when backward reaches one."""

    def __init__(self) -> None:
        self._now: set[Any] = set()
        self.most = 0

    def unshard(self, unit: Any) -> None:
        self._now.add(unit)

    def reshard(self, unit: Any) -> None:
        self._now.discard(unit)

    def backward(self, unit: Any) -> None:
        self.most = max(self.most, len(self._now))


def _most_unsharded(kind: Callable[[], nn.Module], blocks: int, form: str, *, with_another_graph: bool) -> int:
    model = sharded(nn.Sequential(nn.Linear(5, 5), *(kind() for _ in range(blocks))), form, (Detached, Layer))
    outermost = unit_of(inside(model))
    assert outermost is not None
    observer = Unsharded()
    for _ in range(2):
        losses = [model(torch.randn(2, 5)).square().mean() for _ in range(1 + with_another_graph)]
        with attached(observer, list(units_in(outermost))):
            losses[0].backward()
    return observer.most


@parametrize_pairs(
    at_most=12, form=FORMS, kind=[Detached, Recomputed, Force, _checkpointed_force], with_another_graph=[False, True]
)
@on_ranks(2)
def test_they_are_freed_when_backward_reaches_another_unit(form: str, kind: Any, with_another_graph: bool) -> None:
    few, many = (_most_unsharded(kind, blocks, form, with_another_graph=with_another_graph) for blocks in (3, 6))
    assert 0 < few == many
