"""The same training on CUDA: several ranks on one GPU over gloo, and NCCL with a GPU for each rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel
from tests.helpers.accelerator import (
    ACCELERATOR,
    IS_SIMULATED,
    NCCL_SIZES,
    AcceleratorRanks,
    device_module,
    global_batches,
)
from tests.helpers.models import nested_mlp
from tests.helpers.on_ranks import on_accelerators
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.parity import fully_sharded

pytestmark = pytest.mark.accelerator


def train(model: nn.Module, batches: list[Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in batches:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


def _train_and_compare(options: dict[str, Any], moves_afterwards: bool = False) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    plain = nested_mlp().to(ACCELERATOR)
    if moves_afterwards:  # as FairScale's users do
        model = nested_mlp(fully_sharded(**options)).to(ACCELERATOR)
    else:
        model = nested_mlp(lambda module: FullyShardedDataParallel(module.to(ACCELERATOR), **options))
    assert all(param.device.type == ACCELERATOR for param in model.parameters())
    train(model, [batch.chunk(world_size)[rank] for batch in global_batches()])
    train(plain, global_batches())
    expected = plain.state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)


@parametrize_pairs(at_most=3, world_size=[2, 3], reshard_after_forward=[True, False], flatten_parameters=[True, False])
def test_training_on_one_accelerator_equals_the_unsharded_model(
    accelerator_ranks: AcceleratorRanks, world_size: int, reshard_after_forward: bool, flatten_parameters: bool
) -> None:
    options = {"reshard_after_forward": reshard_after_forward, "flatten_parameters": flatten_parameters}
    accelerator_ranks(world_size).run(_train_and_compare, options)


@parametrize_pairs(at_most=3, world_size=NCCL_SIZES, bucket_cap_mb=[25, 0])
def test_training_over_nccl_equals_the_unsharded_model(
    accelerator_ranks: AcceleratorRanks, world_size: int, bucket_cap_mb: int
) -> None:
    accelerator_ranks(world_size, backend="nccl").run(_train_and_compare, {"bucket_cap_mb": bucket_cap_mb})


@pytest.mark.gpu
def test_a_model_may_be_moved_after_wrapping(accelerator_ranks: AcceleratorRanks) -> None:
    accelerator_ranks(2).run(_train_and_compare, {}, moves_afterwards=True)


@pytest.mark.skipif(not IS_SIMULATED, reason="torch moves parameters to CUDA in place")
@on_accelerators(1)
def test_a_move_that_torch_does_not_make_in_place_is_refused() -> None:
    for wrap in (fully_sharded(), fully_sharded(use_orig_params=False)):
        model = nested_mlp(wrap)
        before = [param.detach().clone() for param in model.parameters()]
        with pytest.raises(RuntimeError, match=r"cannot move a parameter from cpu to sim:0 .* before it is sharded"):
            model.to(ACCELERATOR)
        assert all(map(torch.equal, model.parameters(), before))


@on_accelerators(2)
def test_clipping_on_an_accelerator_gives_the_unsharded_norm() -> None:
    plain = nested_mlp().to(ACCELERATOR)
    model: Any = nested_mlp(lambda module: FullyShardedDataParallel(module.to(ACCELERATOR)))
    batch = global_batches(1)[0]
    plain(batch).square().mean().backward()
    model(batch).square().mean().backward()  # equal batches on all ranks: their mean is the same gradient
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    torch.testing.assert_close(model.clip_grad_norm_(0.1), expected)


@on_accelerators(2)
def test_memory_between_steps_is_the_shards_and_their_gradients() -> None:
    torch.manual_seed(0)
    layers = [FullyShardedDataParallel(nn.Linear(1024, 1024).to(ACCELERATOR)) for _ in range(4)]
    model = FullyShardedDataParallel(nn.Sequential(*layers))
    data = torch.randn(8, 1024, device=ACCELERATOR)
    for _ in range(3):
        model(data).sum().backward()
    shards = sum(param.numel() * param.element_size() for param in model.parameters())
    whole_unit = 2 * shards // len(layers)
    # The allocator rounds up, and cuBLAS keeps a workspace: allow less than half a unit.
    before = device_module().memory_allocated()
    model.zero_grad()
    assert before - device_module().memory_allocated() == pytest.approx(shards, rel=0.05)
    handles = [handle for layer in layers for handle in layer._unit.handles]
    assert all(handle.unsharded.full.untyped_storage().nbytes() == 0 for handle in handles)
    assert device_module().memory_allocated() - data.nbytes - shards < whole_unit / 2 + 64 * 2**20
