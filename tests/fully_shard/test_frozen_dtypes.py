"""Frozen parameters of dtypes in which nobody trains: a quantised model whose adapters are trained, beside torch's."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torchs_fully_shard

import fsdp
from tests.helpers.dtensor_twins import FullyShard, assert_within, local, mesh_of, spread_of
from tests.helpers.equality import assert_same
from tests.helpers.on_ranks import on_ranks

INPUTS = torch.linspace(-1, 1, 36).view(4, 9)


class Quantised(nn.Module):
    """A frozen layer whose weight is kept in 8 bits, with a scale, and an adapter that is trained."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        values = torch.arange(7 * 9).view(7, 9) % 100
        self.weight = nn.Parameter(values.to(dtype), requires_grad=False)
        self.seen = nn.Parameter(torch.tensor([True, False, True]), requires_grad=False)
        self.scale = nn.Parameter(torch.linspace(0.001, 0.002, 7), requires_grad=False)
        self.down, self.up = nn.Linear(9, 2, bias=False), nn.Linear(2, 7, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        weight = self.weight.to(inputs.dtype) * self.scale[:, None].to(inputs.dtype)
        return nn.functional.linear(inputs, weight) * self.seen.sum() + self.up(self.down(inputs))


def quantised(dtype: torch.dtype, shard: FullyShard, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(Quantised(dtype), nn.Linear(7, 1))
    shard(model[0], mesh=mesh_of(dist.get_world_size()), **options)
    return shard(model, mesh=mesh_of(dist.get_world_size()), **options)


def step(model: nn.Module) -> Tensor:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    loss = model(INPUTS).float().square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11's own refuses integers")
@pytest.mark.parametrize("is_mixed", [False, True])
@pytest.mark.parametrize(("dtype", "world_size"), [(torch.uint8, 2), (torch.int32, 3)], ids=str)
@on_ranks("world_size")
def test_integers_are_sharded_and_computed_with_as_by_torchs(dtype: torch.dtype, is_mixed: bool) -> None:
    options = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)} if is_mixed else {}
    expected, model = quantised(dtype, torchs_fully_shard, **options), quantised(dtype, fsdp.fully_shard, **options)
    for _ in range(3):
        assert_within("loss", step(model), step(expected))
    for (name, ours), theirs in zip(model.state_dict().items(), expected.state_dict().values(), strict=True):
        assert spread_of(ours) == spread_of(theirs), name
        assert_within(name, local(ours), local(theirs))


@pytest.mark.parametrize("dtype", [torch.int16, torch.float8_e5m2], ids=str)
@on_ranks(2)
def test_dtypes_that_a_backend_does_not_know_are_gathered(dtype: torch.dtype) -> None:
    """gloo's collectives know neither of the two, and NCCL's do not know 16-bit integers."""
    expected = quantised(dtype, fsdp.fully_shard)
    fsdp.use_torch_collectives()
    try:
        model = quantised(dtype, fsdp.fully_shard)
    finally:
        fsdp.use_torch_collectives(False)
    for _ in range(2):
        assert_within("loss", step(model), step(expected))
    assert torch.equal(model(INPUTS), expected(INPUTS))


@on_ranks(2)
def test_integers_are_saved_loaded_and_copied(tmp_path: Path) -> None:
    model = quantised(torch.uint8, fsdp.fully_shard)
    step(model)
    fsdp.save(tmp_path / "saved", model)
    copied = copy.deepcopy(model)
    other = quantised(torch.uint8, fsdp.fully_shard)
    with torch.no_grad():
        other[0].weight.fill_(0)  # type: ignore[index, operator]
    fsdp.load(tmp_path / "saved", other)
    full = quantised(torch.uint8, fsdp.fully_shard)
    full.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
    for one in (copied, other, full):
        for name, value in model.state_dict().items():
            assert_same(local(one.state_dict()[name]), local(value), name)
        assert torch.equal(one(INPUTS), model(INPUTS))
