"""A parametrization that a forward puts on a weight and takes off again, as adapters on the weights of experts do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fsdp import FullyShardedDataParallel
from tests.helpers.dtensor_twins import assert_trains_as_plain, ours
from tests.helpers.models import Net, Wrap
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.twins import assert_trains_like_plain, backward_twice, no_grad_between, once


def plus(added: Tensor) -> nn.Module:
    return Net(lambda net, weight: weight + net.added, added=added)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5, 5) * 0.1)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.einsum("bi,eio->bo", inputs, self.weight)


class Adapted(nn.Module):
    """Experts and an adapter of low rank, whose product is added to their weight in each forward."""

    def __init__(self, is_frozen: bool) -> None:
        super().__init__()
        self.experts = Experts()
        self.experts.weight.requires_grad_(not is_frozen)
        self.down, self.up = nn.Parameter(torch.randn(3, 5, 2)), nn.Parameter(torch.randn(3, 2, 5))

    def forward(self, inputs: Tensor) -> Tensor:
        needs_grad = self.experts.weight.requires_grad
        parametrize.register_parametrization(self.experts, "weight", plus(self.down @ self.up))
        self.experts.parametrizations.weight.original.requires_grad_(needs_grad)  # type: ignore[union-attr]
        try:
            with parametrize.cached():
                return self.experts(inputs)
        finally:
            parametrize.remove_parametrizations(self.experts, "weight", leave_parametrized=False)


def _model(is_frozen: bool, wrap: Wrap) -> nn.Module:
    torch.manual_seed(0)
    return wrap(_layers(is_frozen, wrap))


def _layers(is_frozen: bool, wrap: Wrap) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 5), wrap(Adapted(is_frozen)), nn.Linear(5, 2))


STEPS = (once, backward_twice, no_grad_between)


@parametrize_pairs(at_most=6, form=["flat", "orig", "rows"], is_frozen=[True, False], world_size=[2, 3])
@on_ranks("world_size")
def test_a_weight_can_be_parametrized_in_a_forward(form: str, is_frozen: bool) -> None:
    make: Callable[[Wrap], nn.Module] = partial(_model, is_frozen)
    if form == "rows":
        assert_trains_as_plain(make, *STEPS)
    else:
        assert_trains_like_plain(make, *STEPS, options={"use_orig_params": form == "orig"})


@on_ranks(2)
def test_a_weight_cannot_be_parametrized_between_steps() -> None:
    for options in ({}, {"reshard_after_forward": False}, {"use_orig_params": True}):
        model: Any = FullyShardedDataParallel(nn.Linear(5, 5), **options)  # type: ignore[arg-type]
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"weight'? (of this Linear )?is sharded"):
                parametrize.register_parametrization(model.module.module, "weight", plus(torch.ones(5, 5)))
            model(torch.ones(2, 5))
    rows: Any = ours()(nn.Linear(5, 5))
    rows(torch.ones(2, 5))
    with pytest.raises(RuntimeError, match="'weight' of this FSDPLinear is sharded"):
        parametrize.register_parametrization(rows, "weight", plus(torch.ones(5, 5)))
