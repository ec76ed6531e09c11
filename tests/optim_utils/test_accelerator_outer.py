"""`OuterOptimizer` on an accelerator gives what it gives on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp
from fsdp import FullyShardedDataParallel, OuterOptimizer
from fsdp.distributed.dtensor import full_tensor
from tests.helpers.accelerator import ACCELERATOR, AcceleratorRanks

pytestmark = pytest.mark.accelerator


@pytest.mark.parametrize("form", ["flat", "original", "rows"])
def test_replicas_average_their_changes(accelerator_ranks: AcceleratorRanks, form: str) -> None:
    accelerator_ranks(4, backend="cpu:gloo,cuda:nccl").run(_compare, form)


def _compare(form: str) -> None:
    expected, found = (_train(form, device) for device in ("cpu", ACCELERATOR))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


def _train(form: str, device: str) -> dict[str, Tensor]:
    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("site", "rank"))
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6)).to(device)
    if form == "rows":
        model = fsdp.fully_shard(model, mesh=mesh["rank"])
    else:
        group = mesh["rank"].get_group()
        model = FullyShardedDataParallel(model, process_group=group, use_orig_params=form == "original")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    outer = OuterOptimizer(optimizer, mesh["site"], every=3, lr=0.7, momentum=0.9, fragments=2)
    for step in range(7):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        model(torch.randn(4, 6, generator=generator).to(device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        outer.step()
    return {name: full_tensor(value).detach().cpu().clone() for name, value in model.state_dict().items()}
