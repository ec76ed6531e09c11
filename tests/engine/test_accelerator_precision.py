"""Precision, offload and loss scaling on CUDA: several ranks on one GPU over gloo, and one rank with NCCL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp import FlatParameter, FullyShardedDataParallel
from tests.helpers.accelerator import ACCELERATOR, IS_SIMULATED, AcceleratorRanks
from tests.helpers.models import nested_mlp
from tests.helpers.on_ranks import on_accelerators
from tests.helpers.pairs import Case, parametrize_cases, parametrize_pairs
from tests.helpers.parity import fully_sharded, fused_adamw, sgd_with_momentum
from tests.optim_utils.test_grad_scaler import (
    OFFLOADS,
    backward,
    counted_reductions,
    new_scaler,
    offload_options,
    skip_together,
    spoil_shard,
    step_changes,
)
from tests.training.test_option_grid import GRID, train_and_compare

pytestmark = pytest.mark.accelerator

# Cells have all pairs on a GPU, and there are some left; simulated kernels take longer.
EVERY_PAIR = max(map(len, GRID.values())) if IS_SIMULATED else 40
# Where the model is trained unsharded, several times for each cell: simulated kernels give the numbers of the CPU.
UNSHARDED_ON = "cpu" if IS_SIMULATED else ACCELERATOR


@parametrize_cases(at_most=EVERY_PAIR, **GRID)
def test_training_over_gloo_equals_the_unsharded_model_in_the_same_precision(
    accelerator_ranks: AcceleratorRanks, tmp_path: Path, case: Case
) -> None:
    accelerator_ranks(2).run(train_and_compare, case, str(tmp_path), ACCELERATOR, UNSHARDED_ON)


@parametrize_cases(at_most=EVERY_PAIR, **GRID)
def test_training_over_nccl_equals_the_unsharded_model_in_the_same_precision(
    accelerator_ranks: AcceleratorRanks, tmp_path: Path, case: Case
) -> None:
    # A world of one is not sharded; what is offloaded, and what computes in another dtype, comes and goes all the same.
    accelerator_ranks(1, backend="nccl").run(train_and_compare, case, str(tmp_path), ACCELERATOR, UNSHARDED_ON)


@parametrize_pairs(at_most=len(OFFLOADS), offload=list(OFFLOADS), make_optimizer=[sgd_with_momentum, fused_adamw])
def test_pain_point_17_all_ranks_skip_the_steps_that_one_cannot_take(
    accelerator_ranks: AcceleratorRanks, tmp_path: Path, offload: str, make_optimizer: Any
) -> None:
    options = offload_options(offload, tmp_path)
    accelerator_ranks(2).run(skip_together, options, device=ACCELERATOR, make_optimizer=make_optimizer)


@on_accelerators(2)
def test_pain_point_17_gradients_on_two_devices_are_agreed_on_in_one_reduction() -> None:
    with torch.device(ACCELERATOR):
        inner = FullyShardedDataParallel(nn.Linear(5, 5), mixed_precision=True, offload="cpu")
        model = FullyShardedDataParallel(nn.Sequential(inner, nn.Linear(5, 3)), mixed_precision=True)
    assert {param.device.type for param in model.parameters()} == {"cpu", ACCELERATOR}
    optimizer, scaler = sgd_with_momentum(model.parameters()), new_scaler(device=ACCELERATOR)
    for device in ("cpu", ACCELERATOR):
        backward(model, scaler, torch.ones(2, 5, device=ACCELERATOR))
        if torch.distributed.get_rank() == 1:
            spoil_shard(param for param in model.parameters() if param.device.type == device)
        with counted_reductions() as calls:
            assert not step_changes(scaler, optimizer)
        assert len(calls) == 1
        scaler.update()
    assert scaler.get_scale() == 256.0


@pytest.mark.parametrize("offload", ["params", "both", "disk"])
@on_accelerators(2)
def test_the_optimizer_steps_offloaded_shards_on_the_host(tmp_path: Path, offload: str) -> None:
    options = offload_options(offload, tmp_path)
    is_pinned = offload != "disk"
    with torch.device(ACCELERATOR):
        model = nested_mlp(fully_sharded(mixed_precision=True, **options))
    optimizer, scaler = torch.optim.AdamW(model.parameters()), new_scaler(device=ACCELERATOR)
    backward(model, scaler, torch.ones(2, 5, device=ACCELERATOR))
    scaler.step(optimizer)
    for param in model.parameters():
        state = [value for value in optimizer.state[param].values() if isinstance(value, Tensor)]
        assert param.grad is not None
        assert {tensor.device.type for tensor in (param, param.grad, *state)} == {"cpu"}
        assert param.is_pinned() is is_pinned


@on_accelerators(2)
def test_gradients_alone_are_offloaded_to_pinned_memory_until_the_step() -> None:
    with torch.device(ACCELERATOR):
        model = nested_mlp(fully_sharded(mixed_precision=True, move_grads_to_cpu=True))
    backward(model, new_scaler(device=ACCELERATOR), torch.ones(2, 5, device=ACCELERATOR))
    for param in model.parameters():
        assert isinstance(param, FlatParameter)
        assert param.device.type == ACCELERATOR
        assert param.held_gradient is not None
        assert param.held_gradient.is_pinned()
