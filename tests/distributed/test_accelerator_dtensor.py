"""`full_tensor` of `DTensor`s on an accelerator over gloo, where torch's own method ends the process (CUDA)."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdp.distributed.dtensor import full_tensor
from tests.helpers.accelerator import ACCELERATOR
from tests.helpers.on_ranks import on_accelerators

pytestmark = pytest.mark.accelerator


@on_accelerators(4, through_host=True)
def test_the_whole_tensor_is_gathered_in_host_memory() -> None:
    mesh, host = (init_device_mesh(device, (2, 2)) for device in (ACCELERATOR, "cpu"))
    whole = torch.arange(30.0).view(10, 3)  # rows that 4 does not divide
    for placements in ([Shard(0), Shard(0)], [Shard(1), Replicate()]):
        parts = distribute_tensor(whole, host, placements)
        local = parts.to_local().to(ACCELERATOR)
        tensor = DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())
        found = full_tensor(tensor)
        assert found.device.type == ACCELERATOR
        assert torch.equal(found.cpu(), whole)
