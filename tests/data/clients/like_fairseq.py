"""FairScale's FSDP as a sequence toolkit used it: optionally unflattened, metadata saved with every checkpoint."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from fairscale.nn import checkpoint_wrapper, enable_wrap, wrap
from fairscale.nn.checkpoint.checkpoint_utils import patch_batchnorm
from fairscale.nn.data_parallel import FullyShardedDataParallel as FSDP
from torch import nn

from tests.data.clients.task import Block, Net, loss_of, mean_over_ranks, own_batches, trained_alone

MAX_NORM = 0.3


class FullyShardedModel(FSDP):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.use_sharded_state = kwargs.pop("use_sharded_state", False)
        super().__init__(*args, **kwargs)

    @property
    def unwrapped_module(self) -> nn.Module:
        return self.module.module if self.flatten_parameters else self.module


def build(flatten_parameters: bool) -> Any:
    config = {
        "process_group": None,
        "reshard_after_forward": True,
        "flatten_parameters": flatten_parameters,
        "bucket_cap_mb": 25,
        "state_dict_device": torch.device("cpu"),
        "compute_device": torch.device("cpu"),
    }
    with enable_wrap(wrapper_cls=FullyShardedModel, use_sharded_state=True, **config):
        # Recomputed in backward, and then wrapped.
        return wrap(Net(lambda block: wrap(checkpoint_wrapper(block, offload_to_cpu=False))))


def train(model: Any) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for inputs, targets in own_batches():
        optimizer.zero_grad()
        loss = loss_of(model, inputs, targets)
        loss.backward()
        model.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        losses.append(mean_over_ranks(loss))
    return losses


def checkpoint_of(model: Any) -> dict[str, Any]:
    return copy.deepcopy({"model": model.local_state_dict(), "fsdp_metadata": model.local_metadata_dict()})


def load_offline(checkpoints: list[Any]) -> nn.Module:
    net = Net()
    weights = FSDP.consolidate_shard_weights(
        shard_weights=[each["model"] for each in checkpoints],
        shard_metadata=[each["fsdp_metadata"] for each in checkpoints],
    )
    net.load_state_dict(weights, strict=True)
    return net


def main() -> dict[str, Any]:
    results: dict[bool, dict[str, Any]] = {}
    for flatten_parameters in (True, False):
        model = build(flatten_parameters)
        layers = model.unwrapped_module.layers
        assert all(isinstance(layer, FSDP) for layer in layers)
        losses = train(model)
        for layer in layers:
            with layer.summon_full_params():
                inner = layer.unwrapped_module
                assert isinstance(getattr(inner, "module", inner), Block)
                assert layer.up.weight.shape == (12, 6)
        checkpoints: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(checkpoints, checkpoint_of(model))
        results[flatten_parameters] = {"losses": losses, "state": load_offline(checkpoints).state_dict()}
    norms = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    assert len(patch_batchnorm(norms)) > 0
    for name, value in results[True]["state"].items():
        torch.testing.assert_close(results[False]["state"][name], value)
    return results[True]


def plain() -> dict[str, Any]:
    net = Net()
    return trained_alone(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), MAX_NORM)
