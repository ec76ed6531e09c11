"""Lightning's Fabric around a model that is sharded already: with one device in each process, it adds nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.helpers.equality import assert_close_state
from tests.helpers.forms import FORMS, batch, full_state, sharded
from tests.helpers.models import scaled_layers
from tests.helpers.needs import needs
from tests.helpers.on_ranks import on_lit_ranks

pytestmark = needs("lightning")
PRELOAD = ["fsdp.lightning"]


@pytest.mark.parametrize("form", FORMS)
@on_lit_ranks(2)
def test_fabric_trains_a_sharded_model_as_one_process(form: str) -> None:
    from lightning.fabric import Fabric

    torch.set_default_dtype(torch.float64)
    plain = scaled_layers()
    model = sharded(copy.deepcopy(plain), form, (nn.Linear,))
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.1) for each in (plain, model)]
    fabric: Any = Fabric(accelerator="cpu", devices=1)
    shown, optimizer = fabric.setup(model, optimizers[1])
    for step in range(2):
        fabric.backward(shown(batch(step, dist.get_rank())).square().mean())
        for rank in range(2):
            (plain(batch(step, rank)).square().mean() / 2).backward()
        norms = [
            nn.utils.clip_grad_norm_(plain.parameters(), 0.1),
            fabric.clip_gradients(shown, optimizer, max_norm=0.1),
        ]
        assert float(norms[0]) == pytest.approx(float(norms[1]))
        for each in (optimizers[0], optimizer):
            each.step()
            each.zero_grad()
    assert_close_state(full_state(model), plain.state_dict())
