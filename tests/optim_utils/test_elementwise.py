"""torch's elementwise optimizers give each element the same bits in a shard of any length, as `SameBits` relies on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

NUMEL, STEPS = 1027, 4
CUTS: dict[str, Sequence[int]] = {
    "at odd places": [1, 4, 17, 101, 1003],
    "in the middle": [514],
    "every seven": range(7, NUMEL, 7),
}
KINDS: list[tuple[type[optim.Optimizer], dict[str, Any]]] = [
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    (optim.Adam, {"weight_decay": 0.1}),
    (optim.AdamW, {}),
    (optim.AdamW, {"amsgrad": True}),
    (optim.NAdam, {}),
    (optim.RAdam, {}),
    (optim.Adamax, {}),
    (optim.Adadelta, {}),
    (optim.RMSprop, {"momentum": 0.9}),
    (optim.Adagrad, {}),
]


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize(("kind", "options"), KINDS, ids=lambda value: getattr(value, "__name__", ""))
def test_how_elements_are_divided_makes_no_difference(
    kind: type[optim.Optimizer], options: dict[str, Any], foreach: bool
) -> None:
    whole = _stepped(kind, {**options, "foreach": foreach}, [])
    for where, cuts in CUTS.items():
        assert torch.equal(_stepped(kind, {**options, "foreach": foreach}, cuts), whole), where


def _stepped(kind: type[optim.Optimizer], options: dict[str, Any], cuts: Sequence[int]) -> Tensor:
    """Return the weights after some steps, as views of one vector that is cut at these places."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(NUMEL, generator=generator)
    params = [nn.Parameter(part) for part in weights.tensor_split(list(cuts))]
    optimizer = kind(params, **options)
    for _ in range(STEPS):
        gradient = torch.randn(NUMEL, generator=generator)
        for param, part in zip(params, gradient.tensor_split(list(cuts)), strict=True):
            param.grad = part
        optimizer.step()
    return weights
