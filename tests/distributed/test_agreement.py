"""Before ranks trust each other's shards they compare all that has to be alike, and name the first difference."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from fsdp.distributed.communicator import LONE_RANK
from fsdp.distributed.consensus import new_group
from tests.helpers.on_ranks import on_ranks

INPUTS = torch.ones(2, 5)


@on_ranks(3)
def test_a_group_that_only_its_members_create_does_not_need_the_other_ranks() -> None:
    """NCCL splits the group of all ranks for each new one if it has a device, together with ranks that are in none."""
    rank, world, device = dist.get_rank(), dist.group.WORLD, torch.device("cuda", 0)
    assert world is not None
    create, seen, found = dist.new_group, [], torch.ones(1)

    def noted(*args: Any, **options: Any) -> Any:
        seen.append(world.bound_device_id)
        return create(*args, **options)

    world.bound_device_id = device
    try:
        with mock.patch.object(dist, "new_group", noted):
            if rank < 2:
                dist.all_reduce(found, group=new_group([LONE_RANK], [0, 1]))
        assert world.bound_device_id == device
    finally:
        world.bound_device_id = None
    assert (seen, found.item()) == (([None], 2) if rank < 2 else ([], 1))


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


def model_of(**options: Any) -> Any:
    return FullyShardedDataParallel(layers(), dist.new_group(timeout=timedelta(seconds=20)), **options)


def refused(message: str, model: Any, use: Callable[[Any], Any]) -> None:
    with pytest.raises(RuntimeError, match=rf"(?s)rank {dist.get_rank()}: the ranks have built different.*{message}"):
        use(model)


def forward(model: Any) -> Any:
    return model(INPUTS)


DIFFERENT_OPTIONS = [
    ({"gradient_predivide_factor": 1.0}, {"gradient_predivide_factor": 2.0}, "gradient_predivide_factor 1.0 on"),
    ({"bucket_cap_mb": 0}, {"bucket_cap_mb": 25}, "bucket_cap_mb 0 on rank 0 and 25 on rank 1"),
    ({"reshard_after_forward": True}, {"reshard_after_forward": False}, "reshard_after_forward True on rank 0"),
    ({"sharding_strategy": ShardingStrategy.SHARD_OPTIM}, {"sharding_strategy": ShardingStrategy.SHARD_OPTIM_GRADS},
     r"placement of gradients \(PARTIAL, PARTIAL\) on rank 0 and \(SHARDED, REPLICATED\) on rank 1"),
    ({"use_orig_params": True}, {"use_orig_params": False}, "use_orig_params True on rank 0 and False on rank 1"),
    ({"disable_reshard_on_root": True}, {"disable_reshard_on_root": False}, "disable_reshard_on_root True on rank 0"),
    ({"state_dict_on_rank_0_only": True}, {}, "state_dict_on_rank_0_only True on rank 0 and False on rank 1"),
    ({"no_broadcast_optim_state": True}, {}, "no_broadcast_optim_state True on rank 0 and False on rank 1"),
    (
        {"mixed_precision": MixedPrecision(buffer_dtype=torch.float64)},
        {"mixed_precision": MixedPrecision(buffer_dtype=torch.float16)},
        "mixed_precision.buffers torch.float64 on rank 0 and torch.float16 on rank 1",
    ),
]  # fmt: skip


@on_ranks(2)
def test_options_that_differ_are_named() -> None:
    for first, second, message in DIFFERENT_OPTIONS:
        options = first if dist.get_rank() == 0 else second
        refused(f"has {message}", model_of(**options), forward)


@on_ranks(2)
def test_modes_buffers_and_versions_that_differ_are_named() -> None:
    is_odd = dist.get_rank() == 1
    model = model_of()
    model.train(not is_odd)
    refused(r"has mode train\(\) on rank 0 and eval\(\) on rank 1", model, forward)

    model = model_of()
    model.module.module[2].register_buffer("seen", torch.zeros(2 + is_odd))
    refused(r"has buffers .*2\.seen\[2\].* on rank 0 and .*2\.seen\[3\].* on rank 1", model, forward)

    for name in ("torch.__version__", "fsdp.layers.verify.__version__"):
        with mock.patch(name, "1.2.3" if is_odd else "1.2.4"):
            refused(r"has (torch|fsdp) 1\.2\.4 on rank 0 and 1\.2\.3 on rank 1", model_of(), forward)


@on_ranks(2)
def test_settings_of_torch_that_differ_are_named() -> None:
    is_odd = dist.get_rank() == 1
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_odd):
        refused(r"has torch\.autocast off on rank 0 and torch\.bfloat16 on rank 1", model_of(), forward)
        model_of().state_dict()  # which computes nothing
    torch.set_float32_matmul_precision("high" if is_odd else "highest")
    try:
        refused(r"_matmul_precision\(\) highest on rank 0 and high on rank 1", model_of(), forward)
    finally:
        torch.set_float32_matmul_precision("highest")


@on_ranks(2)
def test_a_parameter_frozen_among_others_is_named() -> None:
    model = model_of(use_orig_params=True)
    if dist.get_rank() == 1:
        dict(model.named_parameters())["2.bias"].requires_grad_(False)
    refused(r"2\.bias\[3\]'\] on rank 0 and .*2\.bias\[3\] frozen'\] on rank 1", model, forward)


@on_ranks(2)
def test_what_may_differ_is_not_compared() -> None:
    is_odd = dist.get_rank() == 1
    model = model_of(verbose=is_odd, state_dict_device=torch.device("cpu") if is_odd else None)
    model.module.module[2].register_buffer("cache", torch.zeros(2 + is_odd), persistent=False)
    version = torch.__version__.split("+")[0]
    with mock.patch("torch.__version__", version + ("+cpu" if is_odd else "+cu130")):
        model.train(is_odd).state_dict()  # which does nothing that depends on the mode
        model.train()
        forward(model)
