"""Models with a tied parameter whose parts are wrapped one by one, and share it by `append_shared_param`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.helpers.models import Wrap
from tests.helpers.parity import fully_sharded

UNFLATTENED = fully_sharded(flatten_parameters=False)


class Siblings(nn.Module):
    """FairScale's own example: `l1` and `l3` have the same weight, or the same bias, and each something of its own."""

    def __init__(self, tied: str = "weight") -> None:
        super().__init__()
        self.l0, self.l1, self.l2, self.l3 = (nn.Linear(5, 5) for _ in range(4))
        setattr(self.l3, tied, getattr(self.l1, tied))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.l3(self.l2(torch.tanh(self.l1(self.l0(inputs)))))


class Deep(nn.Module):
    """The siblings are deep inside, two modules further down than each other, and there are two pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(5, 5)
        self.body = nn.Sequential(Siblings(), nn.Sequential(nn.Tanh(), Siblings("bias")))
        self.exit = nn.Linear(5, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.exit(self.body(self.entry(inputs)))


class Three(nn.Module):
    """Three share a weight; the first one uses it twice."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))
        self.second, self.third, self.other = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)
        for linear in (self.twice[2], self.second, self.third):
            linear.weight = self.twice[0].weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.third(self.other(self.second(torch.tanh(self.twice(inputs)))))


def share_between(first: Any, *others: Any, name: str = "weight") -> None:
    for other in others:
        other.append_shared_param(getattr(first.module, name))


def unflattened(wrap: Wrap) -> Wrap:
    assert isinstance(wrap, partial)
    return partial(wrap.func, **(wrap.keywords | {"flatten_parameters": False}))


def wrapped_siblings(model: Any, wrap: Wrap, name: str = "weight") -> Any:
    model.l1, model.l2, model.l3 = unflattened(wrap)(model.l1), wrap(model.l2), unflattened(wrap)(model.l3)
    share_between(model.l1, model.l3, name=name)
    return model


def under_the_root(model: nn.Module, wrap: Wrap) -> nn.Module:
    return wrap(wrapped_siblings(model, wrap))


def under_a_unit_deep_inside(model: Any, wrap: Wrap) -> nn.Module:
    model.body[0] = wrap(wrapped_siblings(model.body[0], wrap))
    wrapped_siblings(model.body[1][1], wrap, name="bias")
    model.body[1] = wrap(model.body[1])
    return wrap(model)


def three_sharers(model: Any, wrap: Wrap) -> nn.Module:
    names = ("twice", "second", "third")
    for name in names:
        setattr(model, name, unflattened(wrap)(getattr(model, name)))
    model = wrap(model)  # the outermost may be wrapped first
    first = model.twice.module[0].weight
    for name in names[1:]:
        getattr(model, name).append_shared_param(first)
    return model


class Recurrent(nn.Module):
    """These keep their weights in a list as well."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.own = nn.GRU(5, 5), nn.GRU(5, 5), nn.Linear(5, 5)
        self.second.weight_hh_l0, self.second.bias_hh_l0 = self.first.weight_hh_l0, self.first.bias_hh_l0

    def forward(self, inputs: Tensor) -> Tensor:
        hidden, _ = self.first(torch.stack([inputs, 2 * inputs]))
        return self.own(self.second(hidden)[0][-1])


def two_recurrent(model: Any, wrap: Wrap) -> nn.Module:
    model.first, model.second = unflattened(wrap)(model.first), unflattened(wrap)(model.second)
    for name in ("weight_hh_l0", "bias_hh_l0"):
        share_between(model.first, model.second, name=name)
    return wrap(model)


class Blocks(nn.Module):
    """Each block has one of the siblings."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)) for _ in range(2))
        self.right[0].weight = self.left[0].weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.right(self.left(inputs))


def wrapped_blocks(model: Any, wrap: Wrap) -> nn.Module:
    model.left[0], model.right[0] = UNFLATTENED(model.left[0]), UNFLATTENED(model.right[0])
    share_between(model.left[0], model.right[0])
    model.left, model.right = wrap(model.left), wrap(model.right)
    return wrap(model)


KINDS: list[tuple[Callable[[], nn.Module], Callable[[nn.Module, Wrap], nn.Module]]] = [
    (Siblings, under_the_root),
    (Deep, under_a_unit_deep_inside),
    (Three, three_sharers),
    (Recurrent, two_recurrent),
    (Blocks, wrapped_blocks),
]
