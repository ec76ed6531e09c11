"""The contestants: all ways of training a module on multiple ranks, with the same interface.

A contestant takes a plain module and the list of its units, and returns the module to train. All differences between
libraries, including precision and offload, are handled here; the benchmarks use names only.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP1
from torch.distributed.fsdp import MixedPrecision as TorchMixedPrecision
from torch.nn.parallel import DistributedDataParallel

import fsdp
from benchmarks._skipping import set_ddp_reduction
from fsdp import FullyShardedDataParallel, MixedPrecision


class Kind(Enum):
    FLOOR = "floor"  # no communication: what the others' computation costs by itself
    REPLICATED = "replicated"  # every rank holds and steps all parameters
    PEER = "peer"  # sharded, somebody else's
    OURS = "ours"


@dataclass(frozen=True)
class Policy:
    """The settings of every sharded contestant, independent of the library.

    Args:
        compute_dtype: the dtype of gathered parameters, computation and reduced gradients; the optimizer always
            updates float32.
        offload: whether shards and their gradients are kept in host memory.
    """

    compute_dtype: torch.dtype = torch.float32
    offload: bool = False

    @property
    def is_mixed(self) -> bool:
        return self.compute_dtype != torch.float32


@dataclass(frozen=True)
class Contestant:
    """A way of training.

    Args:
        name: its name in the output and on the command line.
        kind: the kind of contestant, which determines its baseline.
        wrap: `(module, units, device, policy) -> module to train`; may change both in place.
        is_lossy: whether its losses differ from those of other contestants.
    """

    name: str
    kind: Kind
    wrap: Callable[[nn.Module, nn.ModuleList, torch.device, Policy], nn.Module]
    is_lossy: bool = False

    @property
    def is_sharded(self) -> bool:
        return self.kind in (Kind.PEER, Kind.OURS)

    def can_do(self, policy: Policy, device: str) -> bool:
        """Return whether the policy is supported: FSDP1 pins offloaded memory, and fails without an accelerator."""
        return not (policy.offload and device == "cpu" and self.name in (FSDP1_FLAT, FSDP1_ORIG, FSDP1_APART))


# --- the floors


def _wrap_floor(module: nn.Module, units: nn.ModuleList, device: torch.device, policy: Policy) -> nn.Module:
    return module  # in float32 whatever the policy: DDP, whose floor it is, knows no other


class ShardedFloor(nn.Module):
    """The plain module with an optimizer that sees only this rank's part of every trained parameter.

    This floor runs the computation of sharded training on a single rank without communication: the whole forward and
    backward, and 1/W of the optimizer's work and of the casts. Without it, the optimizer work that sharding saves
    would be counted as cheap communication.
    """

    def __init__(self, module: nn.Module, world_size: int, rank: int, policy: Policy) -> None:
        super().__init__()
        # Not a submodule: its parameters must not be found by an optimizer.
        self._inner = [module]
        self.slices = nn.ParameterList()
        self._casts: list[tuple[Tensor, Tensor]] = []  # where it differs: what is computed with, what is stepped
        for param in module.parameters():
            if not param.requires_grad:
                if policy.is_mixed:
                    param.data = param.detach().to(policy.compute_dtype)
                continue
            start, stop = (param.numel() * r // world_size for r in (rank, rank + 1))
            part = nn.Parameter(param.detach().view(-1)[start:stop])
            if policy.is_mixed:
                part.data = part.detach().clone()
                param.data = param.detach().to(policy.compute_dtype)
                self._casts.append((param.detach().view(-1)[start:stop], part.detach()))
            self.slices.append(part)
            param.register_post_accumulate_grad_hook(functools.partial(self._keep_part, part, start, stop))

    @staticmethod
    def _keep_part(part: Tensor, start: int, stop: int, param: Tensor) -> None:
        if param.grad is not None:
            part.grad = param.grad.view(-1)[start:stop].to(part.dtype)
            param.grad = None

    def forward(self, *args: Any) -> Any:
        for computed, stepped in self._casts:
            computed.copy_(stepped)
        return self._inner[0](*args)


def _wrap_sharded_floor(module: nn.Module, units: nn.ModuleList, device: torch.device, policy: Policy) -> nn.Module:
    return ShardedFloor(module, dist.get_world_size(), dist.get_rank(), policy)


# --- the peers


def _wrap_ddp(module: nn.Module, units: nn.ModuleList, device: torch.device, policy: Policy) -> nn.Module:
    ddp = DistributedDataParallel(module, device_ids=None if device.type == "cpu" else [device.index])
    if device.type == "sim":  # whose collectives have no futures, which DDP's own reduction asks for
        set_ddp_reduction(ddp, lambda gradients: dist.all_reduce(gradients.div_(dist.get_world_size())))
    return ddp


def _wrap_fsdp1(
    module: nn.Module,
    units: nn.ModuleList,
    device: torch.device,
    policy: Policy,
    *,
    use_orig_params: bool,
    trained_apart: bool = False,
) -> nn.Module:
    dtype = policy.compute_dtype
    mixed = TorchMixedPrecision(param_dtype=dtype, reduce_dtype=dtype) if policy.is_mixed else None
    offload = CPUOffload(offload_params=True) if policy.offload else None

    def wrap(inner: nn.Module) -> TorchFSDP1:
        return TorchFSDP1(
            inner, device_id=device, use_orig_params=use_orig_params, mixed_precision=mixed, cpu_offload=offload
        )

    for index, unit in enumerate(units):
        for parent, name, part in _trained_parts(unit) if trained_apart else ():
            setattr(parent, name, wrap(part))
        units[index] = wrap(unit)
    return wrap(module)


def _trained_parts(unit: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """Return the outermost modules of a unit whose parameters are all trained, each with its parent and name."""
    parts = []
    for name, part in unit.named_children():
        trained = [param.requires_grad for param in part.parameters()]
        if trained and all(trained):
            parts.append((unit, name, part))
        elif any(trained):
            parts += _trained_parts(part)
    return parts


@functools.cache
def _mesh(device_type: str, world_size: int) -> DeviceMesh:
    return init_device_mesh(device_type, (world_size,))


def _wrap_fsdp2(
    module: nn.Module, units: nn.ModuleList, device: torch.device, policy: Policy, *, explicit_prefetch: bool
) -> nn.Module:
    dtype = policy.compute_dtype
    shard = functools.partial(
        fully_shard,
        # An explicit mesh, because the default mesh uses the accelerator if there is one.
        mesh=_mesh(device.type, dist.get_world_size()),
        mp_policy=MixedPrecisionPolicy(dtype, dtype) if policy.is_mixed else MixedPrecisionPolicy(),
        offload_policy=CPUOffloadPolicy(pin_memory=device.type != "cpu") if policy.offload else OffloadPolicy(),
    )
    wrapped = [shard(unit) for unit in units]
    root = shard(module)
    if explicit_prefetch:
        for current, following in itertools.pairwise([root, *wrapped]):
            current.set_modules_to_forward_prefetch([following])
        for earlier, current in itertools.pairwise(wrapped):
            current.set_modules_to_backward_prefetch([earlier])
    return module


# --- ours


def _wrap_ours(
    module: nn.Module, units: nn.ModuleList, device: torch.device, policy: Policy, *, use_orig_params: bool
) -> nn.Module:
    wrap = functools.partial(
        FullyShardedDataParallel,
        mixed_precision=MixedPrecision(param_dtype=policy.compute_dtype) if policy.is_mixed else False,
        offload="cpu" if policy.offload else None,
        use_orig_params=use_orig_params,
        state_dict_device=torch.device("cpu"),
    )
    for index, unit in enumerate(units):
        units[index] = wrap(unit)
    return wrap(module)


def _wrap_ours_int8(module: nn.Module, units: nn.ModuleList, device: torch.device, policy: Policy) -> nn.Module:
    """Quantise the frozen linear layers of the units by torchao, and shard them beside the trained parameters."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    def is_frozen(inner: nn.Module, name: str) -> bool:
        return isinstance(inner, nn.Linear) and not inner.weight.requires_grad

    quantize_(units, Int8WeightOnlyConfig(), filter_fn=is_frozen)
    for param in units.parameters():
        if type(param) is not nn.Parameter:
            param.requires_grad_(False)
    return _wrap_ours(module, units, device, policy, use_orig_params=True)


def _wrap_ours_rows(module: nn.Module, units: nn.ModuleList, device: torch.device, policy: Policy) -> nn.Module:
    precision = fsdp.MixedPrecisionPolicy(param_dtype=policy.compute_dtype if policy.is_mixed else None)
    offload = fsdp.CPUOffloadPolicy() if policy.offload else fsdp.OffloadPolicy()
    for part in (*units, module):
        fsdp.fully_shard(part, mp_policy=precision, offload_policy=offload)
    return module


def _wrap_ours_quantised(
    module: nn.Module, units: nn.ModuleList, device: torch.device, policy: Policy, *, bits: int
) -> nn.Module:
    model = _wrap_ours(module, units, device, policy, use_orig_params=False)
    fsdp.compress(model, reduce=fsdp.QuantizedReduce(bits), gather=fsdp.QuantizedGather())
    return model


OURS = "ours"
OURS_8_BIT = "ours-8-bit"
OURS_4_BIT = "ours-4-bit"
OURS_ROWS = "ours-rows"
OURS_ORIG = "ours-orig"
OURS_INT8 = "ours-int8"
FSDP1_FLAT = "fsdp1-flat"
FSDP1_ORIG = "fsdp1-orig"
FSDP1_APART = "fsdp1-orig-apart"
DDP = "ddp"
FLOOR = "floor"
SHARDED_FLOOR = "floor-sharded"
FSDP2 = "fsdp2"
FSDP2_PREFETCH = "fsdp2-prefetch"

CONTESTANTS: dict[str, Contestant] = {
    contestant.name: contestant
    for contestant in (
        Contestant(OURS, Kind.OURS, functools.partial(_wrap_ours, use_orig_params=False)),
        Contestant(OURS_ORIG, Kind.OURS, functools.partial(_wrap_ours, use_orig_params=True)),
        Contestant(OURS_INT8, Kind.OURS, _wrap_ours_int8),
        Contestant(OURS_ROWS, Kind.OURS, _wrap_ours_rows),
        Contestant(OURS_8_BIT, Kind.OURS, functools.partial(_wrap_ours_quantised, bits=8), is_lossy=True),
        Contestant(OURS_4_BIT, Kind.OURS, functools.partial(_wrap_ours_quantised, bits=4), is_lossy=True),
        Contestant(FSDP1_FLAT, Kind.PEER, functools.partial(_wrap_fsdp1, use_orig_params=False)),
        Contestant(FSDP1_ORIG, Kind.PEER, functools.partial(_wrap_fsdp1, use_orig_params=True)),
        Contestant(FSDP1_APART, Kind.PEER, functools.partial(_wrap_fsdp1, use_orig_params=True, trained_apart=True)),
        Contestant(FSDP2, Kind.PEER, functools.partial(_wrap_fsdp2, explicit_prefetch=False)),
        Contestant(FSDP2_PREFETCH, Kind.PEER, functools.partial(_wrap_fsdp2, explicit_prefetch=True)),
        Contestant(DDP, Kind.REPLICATED, _wrap_ddp),
        Contestant(FLOOR, Kind.FLOOR, _wrap_floor),
        Contestant(SHARDED_FLOOR, Kind.FLOOR, _wrap_sharded_floor),
    )
}


def choose(only: Collection[str] | None, among: Iterable[str], always: Collection[str]) -> list[str]:
    """The names in `only` and `always`, or all of `among` when none are given; in the order of `among`."""
    return [name for name in among if only is None or name in only or name in always]
