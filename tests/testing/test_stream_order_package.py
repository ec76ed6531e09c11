"""Nothing of the package is reported by the checker of stream order, on a simulated accelerator."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp
from fsdp.testing import check_streams
from tests.helpers.offload import BOTH, GRADS, PARAMS
from tests.helpers.ranks import RankPool

DEVICE = "cuda"
Wrap = Callable[[nn.Module], Any]
WAYS = {"through_host": False, "by_torch": True}
every_way = pytest.mark.parametrize("way", WAYS)


def flat(module: nn.Module, **options: Any) -> Any:
    return fsdp.FullyShardedDataParallel(module.to(DEVICE), **options)


def rows(module: nn.Module, **options: Any) -> Any:
    return fsdp.fully_shard(module.to(DEVICE), **options)


OPTIONS: dict[str, Wrap] = {
    "flat": partial(flat, use_orig_params=False),
    "original": flat,
    "rows": rows,
    "both_on_host": partial(flat, **BOTH),
    "params_on_host": partial(flat, **PARAMS),
    "grads_on_host": partial(flat, use_orig_params=False, **GRADS),
    "rows_on_host": partial(rows, offload_policy=fsdp.CPUOffloadPolicy()),
    "not_resharded": partial(rows, reshard_after_forward=False),
    "gradients_alone": partial(flat, sharding_strategy=fsdp.ShardingStrategy.SHARD_GRAD_OP),
    "replicated": partial(flat, sharding_strategy=fsdp.ShardingStrategy.NO_SHARD),
    "half": partial(flat, mixed_precision=True, compute_dtype=torch.bfloat16),
    "half_on_host": partial(flat, mixed_precision=True, compute_dtype=torch.bfloat16, **BOTH),
    "rows_half": partial(rows, mp_policy=fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
    "recomputed": lambda module: flat(fsdp.checkpoint_wrapper(module)),
    "activations_on_host": lambda module: flat(fsdp.checkpoint_wrapper(module, offload_to_cpu=True)),
}


def build(wrap: Wrap = lambda module: module, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    layers = [nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 6)) for _ in range(3)]
    return wrap(nn.Sequential(*map(wrap, layers)))


def train(model: Any, steps: int = 2, accumulated: int = 1, *, device: str = DEVICE) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        for number in range(accumulated):
            batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + number))
            is_last = number + 1 == accumulated or not hasattr(model, "no_sync")
            with nullcontext() if is_last else model.no_sync():
                model(batch.to(device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def checked(body: Callable[..., None], way: str, *args: Any) -> None:
    fsdp.use_torch_collectives(WAYS[way])
    try:
        with check_streams():
            body(*args)
    finally:
        fsdp.use_torch_collectives(False)


def assert_equal_to_plain(model: Any, **how: int) -> None:
    plain = build()
    train(plain, **how, device="cpu")  # type: ignore[arg-type]
    state = model.state_dict()
    for name, value in plain.state_dict().items():
        whole = state[name].full_tensor() if hasattr(state[name], "full_tensor") else state[name]
        torch.testing.assert_close(whole.float().cpu(), value, rtol=1e-4, atol=1e-5)


@every_way
@pytest.mark.parametrize("options", OPTIONS)
def test_training_is_in_order(ranks: RankPool, way: str, options: str) -> None:
    ranks(2).run(checked, _train, way, options)


def _train(options: str) -> None:
    model = build(OPTIONS[options])
    train(model)
    if "half" not in options:
        assert_equal_to_plain(model)
