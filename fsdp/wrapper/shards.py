"""How a wrapper makes its unit and its shards, once it is clear what there is to be wrapped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fsdp.distributed.collectives import communicator
from fsdp.distributed.dtensor import check_ranks
from fsdp.engine.flat_param import FlatParameter
from fsdp.engine.flatten_params_wrapper import ShardedParamsWrapper
from fsdp.engine.forward_hooks import ForwardHooks
from fsdp.engine.ignored import Ignored
from fsdp.engine.managed_params import GroupKey, Places, group, key_of, take_over
from fsdp.engine.options import ALIKE
from fsdp.engine.orig_params import Pieces
from fsdp.engine.runtime import Runtime
from fsdp.engine.sharding_strategy import Groups
from fsdp.engine.unit import Policy, Unit
from fsdp.wrapper.local import WrapperLocal
from fsdp.wrapper.optim import WrapperOptim
from fsdp.wrapper.private import WrapperPrivate
from fsdp.wrapper.sharded import WrapperSharded

# Elements: 16 bytes of any dtype that is trained in. Compilers of CUDA kernels copy what lies less well at every call.
# Only where no checkpoint of FairScale's flat shards is to be read or written.
_ALIGNED = 8


class WrapperShards(WrapperPrivate, WrapperLocal, WrapperSharded, WrapperOptim):
    """The part of `FullyShardedDataParallel`'s construction that makes what it holds."""

    def _make_unit(self, module: nn.Module, device: torch.device, ignored: Ignored, groups: Groups) -> Unit:
        averaged = self.world_size * groups.replicas
        predivide = self._options.predivide_factor(averaged)
        unit = Unit(
            module,
            *groups.communicators(device),
            groups.ranks,
            self._options.precision,
            device,
            ignored,
            policy=Policy(self._options.reshard_after_forward),
            predivide=predivide,
            postdivide=averaged / predivide,
            settings={name: getattr(self._options, name) for name in ALIKE},
            new_runtime=self._new_runtime,
        )
        ForwardHooks(unit, self._options.clear_autocast_cache).register()
        return unit

    def _cut(self, module: nn.Module, found: dict[nn.Parameter, Places], key: GroupKey | None) -> list[FlatParameter]:
        """Make the shards: of groups, which the wrapper inside then holds, or (returned) of each parameter alone."""
        for param, places in found.items():
            self._unit.precision_at(places).check(places[0].fqn, param.dtype, param.requires_grad)
            for over in filter(None, (self.process_group, self.process_group_reduce_scatter, self.replicate_group)):
                check_ranks(places[0].fqn, param, over, self._unit.device)
        groups = group(found, self._unit.precision_at, key) if self.flatten_parameters else []
        new_storage = self._options.offload.storage_on(self._unit.device)
        members = [params for _, params in groups]
        align = _ALIGNED if self._options.use_orig_params else 1
        ranks, replicas = (self.rank, self.world_size), self._unit.replicas.world_size
        self._fsdp_wrapped_module = ShardedParamsWrapper(module, members, found, *ranks, new_storage, align, replicas)
        for flat_param, (name, _) in zip(self.module.flat_params, groups, strict=True):
            flat_param.group = name
        if self.flatten_parameters:
            return []
        alone = [self.module.cut_alone(param, places[0].fqn) for param, places in found.items()]
        for flat_param, (param, places) in zip(alone, found.items(), strict=True):
            flat_param.group = key_of(param, places, key)
        return alone

    def _shard_flattened(self, found: dict[nn.Parameter, Places]) -> None:
        found.clear()  # the shards are cut: let the originals go before more memory is taken
        outer, inner = self.module, self.module.module
        for name, flat_param, places in zip(outer.flat_param_names, outer.flat_params, outer.param_infos, strict=True):
            # On the user's module as well, so that its own `parameters()`, `dtype` and `device` go on working.
            if self._options.use_orig_params:
                del outer._parameters[name]
                self._shard(flat_param, places, [])
            else:
                self._shard(flat_param, places, [(outer, name), (inner, name)])

    def _shard_one_by_one(self, found: dict[nn.Parameter, Places], flat_params: Sequence[FlatParameter]) -> None:
        take_over(found, flat_params, type(self.module.module).__name__, self._unit)
        for flat_param, places in zip(flat_params, found.values(), strict=True):
            self._shard(flat_param, [places], [(place.module, place.name) for place in places])

    def _shard(self, flat_param: FlatParameter, places: Any, registered: list[tuple[nn.Module, str]]) -> None:
        reduce_comm = communicator(self.process_group_reduce_scatter, self.compute_device)
        new_pieces = Pieces if self._options.use_orig_params else None
        self._unit.add_handle(flat_param, places, registered, reduce_comm, new_pieces)

    def _new_runtime(self, root: Unit) -> Runtime:
        return Runtime(root, keep_root=self._options.disable_reshard_on_root, bucket_bytes=self._options.bucket_bytes)
