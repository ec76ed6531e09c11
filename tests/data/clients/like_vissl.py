"""FairScale's FSDP as a vision library used it: policies and wrappers of its own, batch norms apart, a proxy group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from fairscale.nn import FullyShardedDataParallel as FSDP
from fairscale.nn.data_parallel import auto_wrap_bn
from fairscale.nn.data_parallel.fully_sharded_data_parallel import FullyShardedDataParallel, TrainingState
from fairscale.nn.wrap import auto_wrap, default_auto_wrap_policy, enable_wrap
from torch import Tensor, nn

from tests.data.clients.task import Block, loss_of, mean_over_ranks, own_batches, trained_alone

MAX_NORM = 0.4
CONFIG: dict[str, Any] = {
    "flatten_parameters": True,
    "mixed_precision": False,
    "fp32_reduce_scatter": False,
    "compute_dtype": torch.float32,
    "bucket_cap_mb": 0,
    "clear_autocast_cache": True,
    "verbose": True,
    "compute_device": torch.device("cpu"),
}


class TrackedGroup:
    """A proxy of a group that notes what is gathered."""

    def __init__(self, group: Any) -> None:
        self.group, self.gathered = group, 0

    def allgather(self, *args: Any, **kwargs: Any) -> Any:
        self.gathered += 1
        return self.group.allgather(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group, name)


class BigLayers:
    """A wrapper class that is only a way to make one."""

    def __new__(cls, module: nn.Module, **kwargs: Any) -> Any:
        return FullyShardedDataParallel(module, **kwargs)


def big_layers(module: nn.Module, recurse: bool, unwrapped_params: int, **_: Any) -> bool:
    if recurse:
        return not isinstance(module, tuple(default_auto_wrap_policy.FORCE_LEAF_MODULES))
    return isinstance(module, Block)


class Trunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, inputs: Tensor) -> Tensor:
        return self.blocks(self.norm(self.stem(inputs)))


class TrunkAndHead(nn.Module):
    def __init__(self, trunk: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.trunk, self.head = trunk, head

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.trunk(inputs))


def head() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 3))


def build(group: Any) -> Any:
    trunk: nn.Module = Trunk().eval()  # statistics of batches would differ with the ranks
    trunk = auto_wrap_bn(trunk, single_rank_pg=False, process_group=group, fsdp_config=unflattened(group))
    with enable_wrap(auto_wrap_policy=big_layers, wrapper_cls=BigLayers, process_group=group, **CONFIG):
        trunk.blocks = auto_wrap(trunk.blocks)
    trunk = FSDP(trunk, process_group=group, **CONFIG)
    inner = FSDP(head(), process_group=group, **{**CONFIG, "flatten_parameters": False})
    return FSDP(nn.Sequential(TrunkAndHead(trunk, inner), Bias()), process_group=group, **CONFIG)


class Bias(nn.Module):
    """So that the outermost wrapper has a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.bias


def unflattened(group: Any) -> dict[str, Any]:
    return {
        "process_group": group,
        "mixed_precision": False,
        "flatten_parameters": False,
        "reshard_after_forward": False,
        "bucket_cap_mb": 0,
        "force_input_to_fp32": False,
        "compute_device": torch.device("cpu"),
    }


def reset(model: nn.Module) -> None:
    """The modules may have been used by themselves: the next use finds the root again."""
    for module in model.modules():
        if isinstance(module, FullyShardedDataParallel):
            module._is_root = None
            module._reset_lazy_init()


def load_one_by_one(model: nn.Module, source: dict[str, Tensor]) -> None:
    """Each unit by itself is whole while its parameters are read."""
    for path, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            prefix = path.replace("_fsdp_wrapped_module.", "").replace("_fpw_module.", "")
            prefix = prefix.replace("_fsdp_wrapped_module", "").replace("_fpw_module", "")
            with module.summon_full_params(recurse=False):
                for name, param in module.named_parameters():
                    key = name.replace("_fsdp_wrapped_module.", "").replace("_fpw_module.", "")
                    key = f"{prefix}.{key}" if prefix else key
                    if "flat_param" not in key and key in source and param.shape == source[key].shape:
                        param.data.copy_(source[key])


def main() -> dict[str, Any]:
    group = TrackedGroup(dist.new_group())
    model = build(group)
    reset(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for inputs, targets in own_batches():
        optimizer.zero_grad()
        loss = loss_of(model, inputs, targets)
        loss.backward()
        model.clip_grad_norm_(max_norm=MAX_NORM, norm_type=2)
        optimizer.step()
        losses.append(mean_over_ranks(loss))
    assert model._is_root
    assert model.training_state == TrainingState.IDLE
    assert "reshard_after_forward" in repr(model)
    state = {name: value.clone() for name, value in model.state_dict().items()}

    teacher = build(group)
    with torch.no_grad():
        teacher(torch.ones(1, 6))
    keys = teacher.load_local_state_dict(model.local_state_dict(), strict=False)
    assert not keys.missing_keys
    assert not keys.unexpected_keys
    same = {name: value.clone() for name, value in teacher.state_dict().items()}
    for name, value in state.items():
        torch.testing.assert_close(same[name], value)
    load_one_by_one(teacher, {name: torch.zeros_like(value) for name, value in state.items()})
    emptied = teacher.state_dict()
    assert all(not value.any() for name, value in emptied.items() if name.startswith("0.trunk.blocks"))
    return {"losses": losses, "state": state}


def plain() -> dict[str, Any]:
    net = nn.Sequential(TrunkAndHead(Trunk().eval(), head()), Bias())
    return trained_alone(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), MAX_NORM)
