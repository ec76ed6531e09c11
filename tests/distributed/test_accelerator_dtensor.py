"""`full_tensor` of `DTensor`s on an accelerator over gloo, where torch's own method ends the process (CUDA)."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdp.distributed.dtensor import full_tensor
from tests.helpers.accelerator import ACCELERATOR, AcceleratorRanks

pytestmark = pytest.mark.accelerator


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_the_whole_tensor_is_gathered_in_host_memory(
    accelerator_ranks: AcceleratorRanks, shape: tuple[int, ...]
) -> None:
    accelerator_ranks(4, through_host=True).run(_gather, shape)


def _gather(shape: tuple[int, ...]) -> None:
    mesh = init_device_mesh(ACCELERATOR, shape)
    whole = torch.arange(30.0).view(10, 3)  # rows that 4 does not divide
    for placements in ([Shard(0)] * len(shape), [Shard(1), *[Replicate()] * (len(shape) - 1)]):
        parts = distribute_tensor(whole, init_device_mesh("cpu", shape), placements)
        local = parts.to_local().to(ACCELERATOR)
        tensor = DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())
        found = full_tensor(tensor)
        assert found.device.type == ACCELERATOR
        assert torch.equal(found.cpu(), whole)
