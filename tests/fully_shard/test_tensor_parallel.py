"""`parallelize_module`, and then `fully_shard` over another dimension of the mesh, beside torch's."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from fsdp import fully_shard
from tests.helpers.dtensor_twins import Plan, assert_side_by_side
from tests.helpers.parity import REGRESSION
from tests.helpers.tensor_parallel import SENTENCES, gpt, mesh_of, perceptron


def _assert_same_as_torchs(shape: tuple[int, int], model: dict[str, Any], **training: Any) -> None:
    mesh = mesh_of(*shape)
    data = mesh["dp"]
    options = training.pop("options", {})
    plan = Plan(make_model=partial(gpt, mesh=mesh, **model), task=SENTENCES, mesh=data, **training)
    assert_side_by_side(plan, mesh=data, **options)


@pytest.mark.parametrize("kind", ["heads", "sequence"])
@pytest.mark.parametrize("shape", [(2, 2), (1, 2), (2, 1)])
def test_trains_as_torchs(ranks, kind, shape):
    ranks(shape[0] * shape[1]).run(_assert_same_as_torchs, shape, {"kind": kind, "vocabulary": True})
