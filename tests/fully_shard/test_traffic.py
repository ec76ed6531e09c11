"""A rank receives no more than with torch's `fully_shard`, whatever the recipe.

`assert_side_by_side` compares that in every test that trains beside torch's. Here are recipes that those leave out, and
what our ranks tell each other besides.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.helpers.dtensor_twins import (
    ROUNDING,
    Plan,
    assert_side_by_side,
    assert_within,
    local,
    mesh_of,
    ours,
    partly_frozen,
    seeded,
    torchs,
    train,
    uneven,
)
from tests.helpers.models import Net, Wrap, tiny_transformer
from tests.helpers.on_ranks import on_ranks
from tests.helpers.parity import TOKENS
from tests.helpers.traffic import Counting, Traffic

LAYERS, WIDTH = 3, 12


def tower(wrap: Wrap) -> nn.Module:
    """Layers that two ranks divide, each sharded, and nothing around them."""
    layers = [wrap(nn.Linear(WIDTH, WIDTH, bias=False)) for _ in range(LAYERS)]
    return wrap(nn.Sequential(*layers))


@on_ranks(2)
def test_what_is_counted_is_by_formula() -> None:
    half, counts = WIDTH * WIDTH * 4 // 2, []
    for options in ({}, {"mesh": mesh_of(2, 1)}):
        for wrap in (torchs, ours):
            model: Any = tower(wrap(**options))
            for _ in range(3):
                with Counting(traffic := Traffic()):
                    model(torch.ones(1, WIDTH)).sum().backward()
            counts.append(traffic.values / half)
    # Each layer is gathered and reduced; and gathered for backward, but for the last one with ours.
    assert counts == [3 * LAYERS, 3 * LAYERS - 1, 2 * LAYERS, 2 * LAYERS]


def _freeze_some(model: Any, step: int) -> None:
    for param in list(model.parameters())[::2]:
        param.requires_grad_(step == 0)


def sometimes(wrap: Wrap) -> nn.Module:
    """One of its parts is never used."""
    return Net(
        lambda net, x: net.both(torch.tanh(net.used(x))),
        used=wrap(nn.Linear(5, 9)),
        unused=wrap(nn.Linear(5, 9)),
        both=wrap(nn.ModuleDict({"used": nn.Linear(9, 1), "unused": nn.Linear(9, 1)})["used"]),
        spare=nn.Linear(3, 3),
    )


class UsedInPart(nn.Module):
    """Some parameters of each unit are not used, and none of the last; or each of these in every other forward."""

    def __init__(self, wrap: Wrap, alternates: bool = False) -> None:
        super().__init__()
        layers = [nn.ModuleDict({"used": nn.Linear(12, 12), "unused": nn.Linear(12, 12)}) for _ in range(3)]
        self.layers = nn.ModuleList(wrap(used_in_part(layer)) for layer in layers)
        self.entry, self.exit, self.spare = nn.Linear(5, 12), nn.Linear(12, 1), nn.Linear(12, 6)
        self.calls, self.alternates = 0, alternates

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += self.alternates
        hidden = self.entry(inputs)
        for layer in self.layers[: 2 + self.calls % 2]:
            hidden = torch.tanh(layer(hidden, "unused" if self.calls % 3 == 1 else "used"))
        return self.exit(hidden)


def used_in_part(parts: nn.ModuleDict) -> nn.Module:
    return Net(lambda net, x, part: net.parts[part](x), parts=parts)


TIED = {"make_model": partial(tiny_transformer, tied=True), "task": TOKENS}
PARTLY = {"make_model": partial(seeded, UsedInPart), "steps": 3}
FROZEN = partial(partly_frozen, ("trunk.2", "gate", "entry"))

RECIPES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "frozen part, replicated": (2, {"make_model": FROZEN}, {"mesh": (2, 1)}),
    "unused parameters, replicated": (2, {"make_model": partial(seeded, sometimes)}, {"mesh": (2, 1)}),
    "frozen in the middle, replicated": (2, {"before_step": _freeze_some}, {"mesh": (2, 1)}),
    "used in part, accumulated": (2, {"accumulate": 2, **PARTLY}, {}),
    "used in part, hybrid": (4, {"accumulate": 2, **PARTLY}, {"mesh": (2, 2)}),
    "shared parameters, hybrid": (4, TIED, {"mesh": (2, 2)}),
}


@pytest.mark.parametrize("recipe", RECIPES)
@on_ranks(lambda recipe: RECIPES[recipe][0])
def test_recipes(recipe: str) -> None:
    _, what, options = RECIPES[recipe]
    plan = Plan(**{"make_model": uneven, **what})
    expected, found = (train(plan, wrap(**options)) for wrap in (torchs, ours))
    assert 0 < found.traffic.values <= expected.traffic.values
    assert expected.traffic.words == 0
    # Which parameters a backward uses is told in the background: two bytes for each, and as many where some are unused.
    peers, params = dist.get_world_size() - 1, len(found.gradients[0])
    assert found.traffic.words <= 4 * params * peers * plan.accumulate


@pytest.mark.parametrize(("accumulate", "mesh"), [(1, (3,)), (2, (2,)), (3, (2, 2))], ids=str)
@on_ranks(lambda mesh: 4 if len(mesh) > 1 else mesh[0])
def test_what_is_used_now_and_then_trains_as_torchs(accumulate: int, mesh: tuple[int, ...]) -> None:
    make_model = partial(seeded, partial(UsedInPart, alternates=True))
    # What is gathered in advance, and then not used, is not compared.
    plan = Plan(make_model=make_model, steps=6 // accumulate, accumulate=accumulate, is_counted=False)
    assert_side_by_side(plan, mesh=mesh)
    if accumulate > 1:
        assert_side_by_side(replace(plan, sync_each=True), mesh=mesh)


@on_ranks(4)
def test_what_is_used_now_and_then_accumulates_in_shards() -> None:
    torch.set_default_dtype(torch.float64)
    found = []
    for accumulates in (False, True):  # torch's adds up what is of different parameters
        model: Any = seeded(partial(UsedInPart, alternates=True), ours(mesh=mesh_of(2, 2)))
        torch.manual_seed(dist.get_rank())
        for is_last in (False, False, True, False, True):
            model.set_requires_all_reduce(is_last or not accumulates)
            model(torch.randn(3, 5)).square().sum().backward()
        found.append([None if param.grad is None else local(param.grad) for param in model.parameters()])
    for expected, grad in zip(*found, strict=True):
        assert_within("gradient", grad, expected, ROUNDING)
