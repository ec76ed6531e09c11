"""FairScale's FSDP as an NLP library used it: behind an interface of its own, with checkpoints of shards."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from fairscale.nn import FullyShardedDataParallel as FS_FSDP
from fairscale.nn.wrap import enable_wrap, wrap
from fairscale.optim.grad_scaler import GradScaler
from torch import nn

from tests.data.clients.task import Net, loss_of, mean_over_ranks, own_batches, trained_alone

MAX_NORM = 0.6


class ShardedModule:
    """What the library asks of whatever shards."""

    @staticmethod
    def get_original_module(module: Any) -> nn.Module:
        return module.module


class _FSDP(FS_FSDP, ShardedModule):
    def __init__(self, module: nn.Module, **kwargs: Any) -> None:
        super().__init__(module, **kwargs)


class Accelerator:
    def __init__(self) -> None:
        self.settings = {
            "compute_device": torch.device("cpu"),
            "mixed_precision": False,
            "reshard_after_forward": True,
            "flatten_parameters": True,
            "move_params_to_cpu": False,
            "move_grads_to_cpu": None,
            "compute_dtype": None,
            "clear_autocast_cache": False,
        }

    def wrap_model(self, model: nn.Module) -> Any:
        wrapped = _FSDP(model, **self.settings)
        wrapped._reset_lazy_init()
        return wrapped

    def wrapping(self) -> Any:
        return enable_wrap(wrapper_cls=_FSDP, **self.settings)


def main() -> dict[str, Any]:
    accelerator = Accelerator()
    with accelerator.wrapping():
        net = Net(wrap)
    model = accelerator.wrap_model(net)
    scaler = GradScaler(enabled=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for inputs, targets in own_batches():
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model, inputs, targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        losses.append(mean_over_ranks(loss))
    own = copy.deepcopy({"weights": model.local_state_dict(), "metadata": model.local_metadata_dict()})
    shards: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shards, own)
    state = _FSDP.consolidate_shard_weights(
        [shard["weights"] for shard in shards], [shard["metadata"] for shard in shards]
    )
    model.load_local_state_dict(own["weights"])
    assert isinstance(_FSDP.get_original_module(model).module, Net)
    return {"losses": losses, "state": state}


def plain() -> dict[str, Any]:
    net = Net()
    return trained_alone(net, torch.optim.AdamW(net.parameters(), lr=1e-2), MAX_NORM)
