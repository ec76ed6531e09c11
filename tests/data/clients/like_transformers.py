"""FairScale's FSDP as a general trainer used it: all of its names imported at the top, the model wrapped by size."""

from __future__ import annotations

import functools
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import fairscale
import torch
from fairscale.nn.data_parallel import FullyShardedDataParallel as FullyShardedDDP
from fairscale.nn.data_parallel import ShardedDataParallel as ShardedDDP
from fairscale.nn.wrap import auto_wrap, default_auto_wrap_policy, enable_wrap
from fairscale.optim import OSS
from fairscale.optim.grad_scaler import ShardedGradScaler

from tests.data.clients.task import Net, loss_of, mean_over_ranks, own_batches, trained_alone

MAX_NORM = 0.5


def unwrap(model: Any) -> Any:
    while hasattr(model, "module"):
        model = model.module
    return model


def main() -> dict[str, Any]:
    assert find_spec("fairscale") is not None
    assert fairscale.__version__ >= "0.3.9"
    assert version("fairscale") >= "0.3"
    assert auto_wrap_outside_of_a_context()
    device = torch.device("cpu")
    policy = functools.partial(default_auto_wrap_policy, min_num_params=100)
    with enable_wrap(auto_wrap_policy=policy, wrapper_cls=FullyShardedDDP, compute_device=device):
        model: Any = auto_wrap(Net())
    if not isinstance(model, FullyShardedDDP):
        model = FullyShardedDDP(
            model, mixed_precision=False, reshard_after_forward=True, cpu_offload=False, compute_device=device
        ).to(device)
    scaler = ShardedGradScaler(enabled=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    assert not isinstance(model, ShardedDDP)
    assert not isinstance(optimizer, OSS)
    losses = []
    for inputs, targets in own_batches():
        loss = loss_of(model, inputs, targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        assert hasattr(model, "clip_grad_norm_")
        model.clip_grad_norm_(MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        model.zero_grad()
        losses.append(mean_over_ranks(loss))
    assert isinstance(unwrap(model), Net)
    return {"losses": losses, "state": {name: value.clone() for name, value in model.state_dict().items()}}


def auto_wrap_outside_of_a_context() -> bool:
    """Without a context nothing is wrapped."""
    net = Net()
    return auto_wrap(net) is net


def plain() -> dict[str, Any]:
    net = Net()
    return trained_alone(net, torch.optim.AdamW(net.parameters(), lr=1e-2), MAX_NORM)
