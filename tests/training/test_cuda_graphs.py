"""A whole training step in a CUDA graph: forward, backward, clipping and the optimizer's step.

A capture fails where the host waits for the device. The simulated device captures nothing, but counts that.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy, fully_shard
from tests.helpers.accelerator import ACCELERATOR, IS_SIMULATED, AcceleratorRanks, host_waits

BACKENDS = "cpu:gloo,cuda:nccl"  # small messages go over gloo
EAGER = 3  # steps before the capture, in which everything is allocated
Step = Callable[[], Tensor]

WRAPPED: dict[str, Callable[[nn.Module], Any]] = {
    **{
        f"{name}{'' if use_orig_params else ', flat'}": partial(
            FullyShardedDataParallel, sharding_strategy=ShardingStrategy[name], use_orig_params=use_orig_params
        )
        for name, use_orig_params in (
            ("NO_SHARD", False),
            ("SHARD_OPTIM", True),
            ("SHARD_GRAD_OP", False),
            ("FULL_SHARD", False),
            ("FULL_SHARD", True),
        )
    },
    "FULL_SHARD in bfloat16": partial(
        FullyShardedDataParallel, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)
    ),
    "fully_shard": fully_shard,
    "fully_shard, kept": partial(fully_shard, reshard_after_forward=False),
}


@pytest.mark.skipif(not IS_SIMULATED, reason="a GPU captures the step")
@pytest.mark.accelerator
@pytest.mark.parametrize("form", WRAPPED)
def test_the_host_does_not_wait_in_a_step(accelerator_ranks: AcceleratorRanks, form: str) -> None:
    accelerator_ranks(2).run(_count_waits, form)


def _count_waits(form: str) -> None:
    inputs, step = _training(WRAPPED[form])
    inputs.normal_()
    for _ in range(EAGER):
        step()
    before = host_waits()
    step()
    assert host_waits() == before


@pytest.mark.gpu
@pytest.mark.parametrize("form", WRAPPED)
def test_a_captured_step_gives_the_same_bits(accelerator_ranks: AcceleratorRanks, form: str) -> None:
    accelerator_ranks(2, backend=BACKENDS).run(_compare, form)


def _compare(form: str) -> None:
    inputs, step = _training(WRAPPED[form])
    batches = [torch.randn(inputs.shape, generator=torch.Generator().manual_seed(number)) for number in range(8)]
    expected = [_on(batch, inputs, step) for batch in batches]

    inputs, step = _training(WRAPPED[form])
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        found = [_on(batch, inputs, step) for batch in batches[:EAGER]]
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()

    def replay() -> Tensor:
        graph.replay()
        return loss

    found += [_on(batch, inputs, replay) for batch in batches[EAGER:]]
    assert found == expected


def _on(batch: Tensor, inputs: Tensor, step: Step) -> float:
    inputs.copy_(batch)
    return step().item()


def _training(wrap: Callable[[nn.Module], Any]) -> tuple[Tensor, Step]:
    """The tensor that a step reads, and the step, which returns its loss."""
    torch.manual_seed(0)
    with torch.device(ACCELERATOR):
        model: Any = wrap(nn.Sequential(*(wrap(nn.Sequential(nn.Linear(32, 32), nn.GELU())) for _ in range(3))))
        inputs = torch.empty(8, 32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, capturable=ACCELERATOR == "cuda")

    def step() -> Tensor:
        loss = model(inputs).float().square().mean()
        loss.backward()
        if hasattr(model, "clip_grad_norm_"):
            model.clip_grad_norm_(0.01)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss.detach()

    return inputs, step
