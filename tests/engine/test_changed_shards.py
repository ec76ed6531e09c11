"""Shards that users write themselves, while the weights that were gathered from them are still there."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp import FullyShardedDataParallel, fully_shard
from fsdp.distributed.dtensor import local_part
from tests.helpers.on_ranks import on_ranks

KINDS: dict[str, dict[str, Any]] = {
    "flat": {},
    "alone": {"flatten_parameters": False},
    "pieces": {"use_orig_params": True},
    "cast": {"mixed_precision": True, "compute_dtype": torch.bfloat16},
    "rows": {},
}


def counted(params: Iterable[nn.Parameter]) -> None:
    with torch.no_grad():
        for param in params:
            param.mul_(2)


def by_data(params: Iterable[nn.Parameter]) -> None:
    for param in params:
        param.data.mul_(2)


def by_copying_data(params: Iterable[nn.Parameter]) -> None:
    for param in params:
        param.data.copy_(2 * param.data)


def through_an_alias(params: Iterable[nn.Parameter]) -> None:
    for alias in [param.data.view(param.shape) for param in params]:
        alias.mul_(2)


def through_local_tensors(params: Iterable[nn.Parameter]) -> None:
    for param in params:
        local_part(param.data).mul_(2)


WRITES = [counted, by_data, by_copying_data, through_an_alias, through_local_tensors]


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_what_is_written_to_shards_is_computed_with_whatever_was_kept_whole(kind: str) -> None:
    torch.manual_seed(0)
    plain, inputs = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)), torch.randn(2, 4)
    model: Any = copy.deepcopy(plain)
    if kind == "rows":
        model = fully_shard(model, mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=False)
    else:
        model = FullyShardedDataParallel(model, reshard_after_forward=False, **KINDS[kind])
    for write in WRITES:
        for go in (_forward, _backward_without_reduction):
            go(model, inputs, kind)
            write(model.parameters())
            counted(plain.parameters())
            with torch.no_grad():
                torch.testing.assert_close(model(inputs).float(), plain(inputs), rtol=2e-2, atol=1e-2, msg=str(write))
            model.zero_grad()
            counted_back(model.parameters())
            counted_back(plain.parameters())


def counted_back(params: Iterable[nn.Parameter]) -> None:
    with torch.no_grad():
        for param in params:
            param.div_(2)


def _forward(model: Any, inputs: Tensor, kind: str) -> None:
    model(inputs)


def _backward_without_reduction(model: Any, inputs: Tensor, kind: str) -> None:
    if kind == "rows":
        model.set_requires_gradient_sync(False)
        model.set_reshard_after_backward(False)
        model(inputs).sum().backward()
        model.set_requires_gradient_sync(True)
        return
    with model.no_sync():
        model(inputs).sum().backward()


@on_ranks(2)
def test_what_was_written_to_unsharded_weights_is_stored_once() -> None:
    model = FullyShardedDataParallel(nn.Linear(4, 3), reshard_after_forward=False)
    before = model.state_dict()["weight"]
    _backward_without_reduction(model, torch.ones(2, 4), "flat")
    with torch.no_grad():
        model.module.module.weight.mul_(2)
    assert torch.equal(model.state_dict()["weight"], 2 * before)
    counted(model.parameters())  # the shards, which what was written before is not put over
    assert torch.equal(model.state_dict()["weight"], 4 * before)
