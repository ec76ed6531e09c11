"""Weights of bitsandbytes are refused by name, and adapters train beside those that are ignored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel, fully_shard
from tests.helpers.needs import needs
from tests.helpers.on_ranks import on_ranks

pytestmark = needs("bitsandbytes")


class Adapted(nn.Module):
    """A frozen layer of 4 bits with a low-rank adapter."""

    def __init__(self) -> None:
        super().__init__()
        import bitsandbytes as bnb

        self.base = bnb.nn.Linear4bit(64, 32, compute_dtype=torch.float32, quant_type="nf4")
        self.base.weight = bnb.nn.Params4bit(torch.randn(32, 64), requires_grad=False, quant_type="nf4")
        self.base.to("cpu")  # which quantises
        self.base.bias.requires_grad_(False)
        self.down, self.up = nn.Linear(64, 2, bias=False), nn.Linear(2, 32, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.base(inputs) + self.up(self.down(inputs))


def adapted() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Adapted(), nn.Tanh(), nn.Linear(32, 1))


def sharded(model: nn.Module, form: str, ignored: set[nn.Parameter]) -> Any:
    if form == "rows":
        return fully_shard(model, ignored_params=ignored)
    return FullyShardedDataParallel(model, use_orig_params=form == "orig", ignored_parameters=list(ignored))


@pytest.mark.parametrize("form", ["flat", "orig", "rows"])
@on_ranks(2)
def test_4_bit_weights_are_refused_and_may_be_ignored(form: str) -> None:
    with pytest.raises(TypeError, match=r"0\.base\.weight is a frozen Params4bit.*beside the tensor.*ignored_param"):
        sharded(adapted(), form, set())
    plain, model = adapted(), adapted()
    weights = {param for param in model.parameters() if type(param) is not nn.Parameter}
    assert len(weights) == 1
    model = sharded(model, form, weights)
    inputs, losses = torch.linspace(-1, 1, 256).view(4, 64), []
    for each in (model, plain):
        optimizer = torch.optim.SGD([param for param in each.parameters() if param.requires_grad], lr=0.1)
        for _ in range(3):
            loss = each(inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    torch.testing.assert_close(losses[:3], losses[3:])
