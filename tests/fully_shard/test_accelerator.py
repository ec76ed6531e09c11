"""`fully_shard` on CUDA: several ranks on one GPU over gloo, and NCCL with a GPU for each rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from fsdp.distributed.dtensor import full_tensor
from tests.helpers.accelerator import (
    ACCELERATOR,
    NCCL_SIZES,
    AcceleratorRanks,
    device_module,
    global_batches,
    later_kernels,
)
from tests.helpers.models import nested_mlp
from tests.helpers.on_ranks import on_accelerators
from tests.helpers.own_collectives import OwnAllGather, OwnReduceScatter
from tests.helpers.pairs import parametrize_pairs

pytestmark = pytest.mark.accelerator


def _train(model: nn.Module, batches: list[Tensor]) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in batches:
        model(batch).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {name: full_tensor(value).cpu() for name, value in model.state_dict().items()}


def _train_and_compare(options: dict[str, Any], tolerance: float = 1e-5) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = nested_mlp(lambda module: fully_shard(module.to(ACCELERATOR), **options))
    assert all((param.device.type == ACCELERATOR) != ("offload_policy" in options) for param in model.parameters())
    found = _train(model, [batch.chunk(world_size)[rank] for batch in global_batches()])
    expected = _train(nested_mlp().to(ACCELERATOR), global_batches())
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value.cpu(), rtol=10 * tolerance, atol=tolerance)


@parametrize_pairs(at_most=2, world_size=[2, 3], reshard_after_forward=[True, False])
def test_training_on_one_accelerator_equals_the_unsharded_model(
    accelerator_ranks: AcceleratorRanks, world_size: int, reshard_after_forward: bool
) -> None:
    accelerator_ranks(world_size).run(_train_and_compare, {"reshard_after_forward": reshard_after_forward})


@pytest.mark.parametrize("world_size", NCCL_SIZES)
def test_training_over_nccl_equals_the_unsharded_model(accelerator_ranks: AcceleratorRanks, world_size: int) -> None:
    accelerator_ranks(world_size, backend="nccl").run(_train_and_compare, {})


def test_whole_parameters_may_be_kept_among_neighbours(accelerator_ranks: AcceleratorRanks) -> None:
    accelerator_ranks(4).run(_train_and_compare, {"reshard_after_forward": 2})


def test_whole_parameters_may_be_kept_on_the_host(accelerator_ranks: AcceleratorRanks) -> None:
    accelerator_ranks(2).run(_train_and_compare, {"reshard_after_forward": "host"})


def test_shards_may_live_on_the_host(accelerator_ranks: AcceleratorRanks) -> None:
    accelerator_ranks(2).run(_train_and_compare, {"offload_policy": CPUOffloadPolicy()})


def test_bfloat16_on_an_accelerator_is_near_the_unsharded_model(accelerator_ranks: AcceleratorRanks) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    accelerator_ranks(2).run(_train_and_compare, {"mp_policy": policy}, 2e-2)


@on_accelerators(2)
def test_collectives_of_the_users_own_keep_what_they_read() -> None:
    found = []
    for is_own in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(fully_shard(nn.Linear(6, 6).to(ACCELERATOR)) for _ in range(3)))
        for layer in model if is_own else ():
            layer.set_custom_all_gather(OwnAllGather())  # type: ignore[operator]
            layer.set_custom_reduce_scatter(OwnReduceScatter())  # type: ignore[operator]
        with later_kernels():
            found.append(_train(model, [torch.ones(2, 6, device=ACCELERATOR) for _ in range(2)]))
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value)


@on_accelerators(2)
def test_a_hook_runs_on_a_stream_of_its_own_between_what_is_queued_before_and_after() -> None:
    stream, streams = device_module().Stream(), []
    found = []
    for is_beside in (False, True):
        torch.manual_seed(0)
        model = fully_shard(nn.Linear(6, 6).to(ACCELERATOR))

        def change(gradient: Tensor, is_beside: bool = is_beside) -> None:
            if is_beside:
                streams.append(device_module().current_stream())
            gradient.mul_(2)
            gradient.add_(1)

        model.set_all_reduce_hook(change, stream=stream if is_beside else None)
        with later_kernels():
            found.append(_train(model, [torch.ones(2, 6, device=ACCELERATOR) for _ in range(3)]))
    assert streams == [stream] * 3
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value)
