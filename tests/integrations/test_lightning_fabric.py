"""Lightning around a model that the user shards: Fabric with one device in each process, and ModelParallelStrategy."""

from __future__ import annotations

import copy
from pathlib import Path
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


@on_lit_ranks(2)
def test_model_parallel_strategy_takes_fully_shard_and_resumes(tmp_path: Path) -> None:
    from lightning.pytorch.strategies import ModelParallelStrategy

    from fsdp import fully_shard
    from tests.helpers import lightning as lit

    class Sharded(lit.Regression):
        def configure_model(self) -> None:
            mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
            for module in (*self.net.layers, self.net, self.head):
                fully_shard(module, mesh=mesh)

    def trainer(epochs: int) -> Any:
        strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
        return lit.trainer(tmp_path, strategy, max_epochs=epochs, gradient_clip_val=0.1)

    first = lit.fitted(Sharded(), trainer(1))
    first.save_checkpoint(tmp_path / "last.ckpt")
    module = Sharded()
    lit.fitted(module, trainer(2), ckpt_path=tmp_path / "last.ckpt")
    expected = lit.trained_alone(lit.Regression(), epochs=2, clip=lambda params: nn.utils.clip_grad_norm_(params, 0.1))
    found = {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in module.state_dict().items()
    }
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
