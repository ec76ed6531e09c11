"""Steps by owners on an accelerator, with shards there and on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp
from tests.helpers.accelerator import ACCELERATOR
from tests.helpers.models import keep, nested_mlp
from tests.helpers.on_ranks import on_accelerators
from tests.helpers.parity import fully_sharded

pytestmark = pytest.mark.accelerator


@pytest.mark.parametrize("options", [{}, {"offload": "cpu"}, {"use_orig_params": True}], ids=str)
@on_accelerators(2)
def test_owners_step_where_the_shards_are(options: dict[str, Any]) -> None:
    torch.set_default_dtype(torch.float64)
    batches = [torch.randn(4, 5, generator=torch.Generator().manual_seed(number)) for number in range(3)]
    plain: nn.Module = nested_mlp(keep)
    alone = torch.optim.Adafactor(plain.parameters(), lr=0.05)
    for batch in batches:
        alone.zero_grad()
        plain(batch).square().mean().backward()
        alone.step()
    model: Any = fully_sharded(**options)(nested_mlp(keep).to(ACCELERATOR))
    optimizer = fsdp.OwnedOptimizer(model, [{"optimizer": torch.optim.Adafactor, "lr": 0.05}])
    for batch in batches:
        optimizer.zero_grad()
        model(batch.chunk(2)[dist.get_rank()].to(ACCELERATOR)).square().mean().backward()
        optimizer.step()
    for param, state in optimizer.state.items():
        assert all(value.device == param.device for value in state.values() if value.dim())
    found = {name: value.cpu() for name, value in model.state_dict().items()}
    torch.testing.assert_close(found, dict(plain.state_dict()))
