"""What a model's own code does with autograd: units train as they do unsharded, or an error says why they cannot."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests._ranks import RankPool
from tests.kinds import seeded
from tests.models import Wrap
from tests.twins import (
    OPTIONS,
    assert_trains_like_plain,
    backward_twice,
    eval_first,
    once,
    two_forwards_then_one_backward,
)

EVERY_FORM: list[dict[str, Any]] = [*OPTIONS, {"use_orig_params": True}]

# In-place operations on what a unit returns


class Viewing(nn.Module):
    """Returns a view of what it computes, and a view of a part of that."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 10)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.linear(inputs.view(2, 2, 5))
        return hidden[..., :5], inputs[:2] + hidden[0, :, 5:].view(2, 5)


class Changing(nn.Module):
    """Changes in place what its units return: a view of what was computed, the same in a nested unit, and no view."""

    def __init__(self, wrap: Wrap, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.entry = nn.Linear(5, 5)
        self.linear = wrap(nn.Linear(5, 5))
        self.viewing = wrap(nn.Sequential(wrap(Viewing())))
        self.flat = wrap(nn.Linear(5, 5))
        self.change = change

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.change(self.linear(self.entry(inputs).view(2, 2, 5))).view(4, 5)
        first, second = self.viewing(hidden)
        hidden = self.change(first).reshape(4, 5)
        return self.change(self.flat(hidden)) + self.change(second).repeat(2, 1)


def _add(tensor: Tensor) -> Tensor:
    tensor += 1
    return tensor


def _scale_a_part(tensor: Tensor) -> Tensor:
    tensor[0].mul_(2)
    return tensor


def _squash_by_a_view(tensor: Tensor) -> Tensor:
    tensor.transpose(0, 1).tanh_()
    return tensor


def _changing(wrap: Wrap, change: Callable[[Tensor], Tensor]) -> nn.Module:
    return wrap(seeded(partial(Changing, wrap, change)))


def test_outputs_of_units_may_be_changed_in_place(ranks: RankPool) -> None:
    """Views or not: a view's own place in the graph is another after it was changed."""
    ranks(2).run(_train_changing_outputs)


def _train_changing_outputs() -> None:
    for change in (_add, F.relu_, _scale_a_part, _squash_by_a_view):
        for options in EVERY_FORM if change is _add else EVERY_FORM[:1]:
            for step in (once, two_forwards_then_one_backward):
                assert_trains_like_plain(partial(_changing, change=change), step, options=options)


# Backwards inside of a forward


class Relaxing(nn.Module):
    """Follows gradients of a unit's outputs, and trains by a loss of its own, in the middle of its forward."""

    def __init__(self, wrap: Wrap, trains_inside: bool) -> None:
        super().__init__()
        self.entry = nn.Linear(5, 5)
        self.energy = wrap(nn.Sequential(nn.Linear(5, 7), wrap(nn.Sequential(nn.Tanh(), nn.Linear(7, 5)))))
        self.exit = wrap(nn.Linear(5, 5))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.trains_inside = trains_inside

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.entry(inputs).tanh()
        for _ in range(2):
            energy = self.energy(hidden)
            (force,) = torch.autograd.grad(energy.square().sum(), hidden, retain_graph=True)
            hidden = hidden - 0.1 * force
        if self.trains_inside:
            (self.energy(hidden.detach()).sin().mean() + (self.scale * energy.detach()).mean()).backward()
            self.entry(inputs.detach()).square().mean().backward()
        return self.exit(hidden) * self.scale + energy


class Inner(nn.Module):
    """Has that in a unit in the middle."""

    def __init__(self, wrap: Wrap, trains_inside: bool) -> None:
        super().__init__()
        self.entry = nn.Linear(5, 5)
        self.middle = wrap(Relaxing(wrap, trains_inside))
        self.exit = wrap(nn.Linear(5, 5))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.exit(self.middle(self.entry(inputs)))


def _relaxing(wrap: Wrap, trains_inside: bool) -> nn.Module:
    return wrap(seeded(partial(Inner, wrap, trains_inside)))


@pytest.mark.parametrize("trains_inside", [False, True], ids=["grad", "backward"])
def test_a_backward_inside_of_a_forward_leaves_the_units_that_run_alone(ranks: RankPool, trains_inside: bool) -> None:
    ranks(2).run(_train_relaxing, trains_inside)


def _train_relaxing(trains_inside: bool) -> None:
    for options in EVERY_FORM[:2] if trains_inside else EVERY_FORM[::3]:
        steps = [once] if trains_inside else [eval_first, backward_twice]
        assert_trains_like_plain(partial(_relaxing, trains_inside=trains_inside), *steps, options=options)
