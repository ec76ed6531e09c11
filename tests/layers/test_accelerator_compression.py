"""`fsdp.compress` on an accelerator: about the same training as on the CPU, and another one than without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp
from fsdp import FullyShardedDataParallel, QuantizedGather, QuantizedReduce
from fsdp.distributed.dtensor import full_tensor
from tests.helpers.accelerator import ACCELERATOR, AcceleratorRanks, host_waits
from tests.helpers.pairs import parametrize_pairs

pytestmark = pytest.mark.accelerator

BOTH = "cpu:gloo,cuda:nccl"  # backends: a training on the CPU is compared with
REDUCE = QuantizedReduce(8, 64, feedback=True)
POLICIES: dict[str, dict[str, Any]] = {
    "gathers": {"gather": QuantizedGather(8, 64)},
    "reductions": {"reduce": REDUCE},
    "both": {"gather": QuantizedGather(8, 64), "reduce": QuantizedReduce(4, 64, feedback=True)},
}


@parametrize_pairs(form=["flat", "original", "rows"], policy=list(POLICIES))
def test_training_is_about_the_same_as_on_the_cpu(accelerator_ranks: AcceleratorRanks, form: str, policy: str) -> None:
    accelerator_ranks(2, backend=BOTH).run(_compare, form, POLICIES[policy])


@pytest.mark.parametrize("form", ["original", "rows"])
def test_sums_over_replicas_are_about_the_same_as_on_the_cpu(accelerator_ranks: AcceleratorRanks, form: str) -> None:
    accelerator_ranks(4, backend=BOTH).run(_compare, form, {"replicas": REDUCE}, (2, 2))


def _compare(form: str, policies: dict[str, Any], replicas: tuple[int, int] | None = None) -> None:
    start = {name: value.clone() for name, value in _plain().state_dict().items()}
    exact, expected, found = (
        _train(form, device, given, replicas)
        for device, given in (("cpu", {}), ("cpu", policies), (ACCELERATOR, policies))
    )
    for name, value in expected.items():
        update = (value - start[name]).norm()
        assert 0 < (value - exact[name]).norm() < 0.3 * update, name
        # A code may be rounded to the other side.
        assert (found[name] - value).norm() < 0.02 * update, name


def _plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 48), nn.GELU(), nn.Linear(48, 8))


def _train(form: str, device: str, policies: dict[str, Any], replicas: tuple[int, int] | None) -> dict[str, Tensor]:
    mesh = None if replicas is None else init_device_mesh(device, replicas, mesh_dim_names=("replicate", "shard"))
    model: Any = _plain().to(device)
    if form == "rows":
        model = fsdp.fully_shard(model, mesh=mesh or init_device_mesh(device, (2,)))
    else:
        model = FullyShardedDataParallel(model, process_group=mesh, use_orig_params=form == "original")
    if policies:
        fsdp.compress(model, **policies)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        inputs = torch.randn(4, 8, generator=generator).to(device)
        before = host_waits()
        (model(inputs) - inputs).square().mean().backward()
        assert step == 0 or host_waits() == before
        optimizer.step()
        optimizer.zero_grad()
    return {name: full_tensor(value).detach().cpu().clone() for name, value in model.state_dict().items()}
