"""FairScale's FSDP with its mixed precision: a trunk in float16, batch norms and a head in float32, a loss scale."""

from __future__ import annotations

from typing import Any

import torch
from fairscale.nn import FullyShardedDataParallel as FSDP
from fairscale.nn import auto_wrap, config_auto_wrap_policy, enable_wrap
from fairscale.nn.data_parallel import auto_wrap_bn, get_fsdp_instances
from fairscale.optim.grad_scaler import ShardedGradScaler
from torch import Tensor, nn

from tests.data.clients.task import Block, loss_of, mean_over_ranks, own_batches, trained_alone

CPU = torch.device("cpu")
CONFIG: dict[str, Any] = {
    "mixed_precision": True,
    "fp32_reduce_scatter": True,
    "compute_dtype": torch.float16,
    "bucket_cap_mb": 0,
    "state_dict_device": CPU,
    "compute_device": CPU,
}
FULL: dict[str, Any] = {
    "mixed_precision": False,
    "fp32_reduce_scatter": False,
    "compute_dtype": torch.float32,
    "flatten_parameters": False,
    "force_input_to_fp32": True,
    "compute_device": CPU,
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.block, self.norm = nn.Linear(6, 6), Block(), nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.norm(self.block(self.stem(inputs))))


def build() -> Any:
    model = Model()
    model.norm.eval()  # statistics of batches would differ with the ranks
    model = auto_wrap_bn(model, fsdp_config={**FULL, "reshard_after_forward": False}, wrap_it=False)
    model.head.wrapper_config = FULL
    model.block.wrapper_config = {}
    with enable_wrap(config_auto_wrap_policy, wrapper_cls=FSDP, **CONFIG):
        model = auto_wrap(model)
    return FSDP(model, **CONFIG)


def main() -> dict[str, Any]:
    model = build()
    assert len(get_fsdp_instances(model)) == 4
    assert [each.mixed_precision for each in get_fsdp_instances(model)].count(True) == 2
    scaler = ShardedGradScaler(init_scale=64.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for inputs, targets in own_batches():
        optimizer.zero_grad()
        loss = loss_of(model, inputs, targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(max_norm=1.0, norm_type=2.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(mean_over_ranks(loss))
    assert scaler.get_scale() == (64.0 if scaler.is_enabled() else 1.0)  # no step was skipped
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    return {"losses": losses, "state": {name: value.clone() for name, value in model.state_dict().items()}}


def plain() -> dict[str, Any]:
    """In float32 throughout: what 16 bits come near to."""
    net = Model()
    net.norm.eval()
    return trained_alone(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), max_norm=1.0)
