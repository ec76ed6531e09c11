"""Parameters that are frozen in some of the forwards before a backward, as in a network that is a criterion too."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.helpers.forms import FORMS, assert_trains
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs


class Scaled(nn.Module):
    """A unit with parameters of two dtypes, which are frozen independently in each form."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.full((1,), 1.5, dtype=torch.float32)), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear((x * self.scale).tanh())


def _train(order: str, dtype: torch.dtype, model: Any, x: Tensor, step: int) -> Tensor:
    frozen = [param for param in model.parameters() if param.dtype is dtype]
    losses = [model(x).square().mean()]
    for param in frozen:
        param.requires_grad_(False)
    losses.append(model(2 * x).square().mean())
    for param in frozen:
        param.requires_grad_(True)
    if order == "together":
        losses = [sum(losses)]
    for loss in reversed(losses) if order == "last" else losses:
        loss.backward()
    return sum(losses).detach()


@parametrize_pairs(
    at_most=12,
    form=FORMS,
    order=["first", "last", "together"],
    dtype=[torch.float32, torch.float64],
    world_size=[2, 3],
)
@on_ranks("world_size")
def test_they_are_trained_by_the_other_forwards(form: str, order: str, dtype: torch.dtype) -> None:
    assert_trains(lambda: nn.Sequential(nn.Linear(5, 5), Scaled()), form, partial(_train, order, dtype), (Scaled,))
