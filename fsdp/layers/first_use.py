"""The first use of a tree of units: the runtime is created, and the ranks compare their models.

Each later forward checks for later changes: loaded values, added modules, and a `DistributedDataParallel` around
the tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain, repeat
from operator import is_, itemgetter
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fsdp.distributed.devices import is_host, return_freed_memory
from fsdp.engine.checks import Checks
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.participation import Participation
from fsdp.engine.precision import check_dtype
from fsdp.engine.runtime import Runtime
from fsdp.engine.unit import Unit, units_in
from fsdp.layers.deferred_init import have_values_everywhere, require_values_everywhere
from fsdp.layers.managed_params import forget_memory
from fsdp.layers.merged_writes import merge_written
from fsdp.layers.shared_params import settle_shares
from fsdp.layers.steps import Steps
from fsdp.layers.verify import agree, agree_on_values, refuse_ddp, refuse_strangers


def new_runtime(root: Unit) -> Runtime:
    """Collective. Return the runtime for the tree of an outermost unit, which must be the same on all ranks.

    Raises:
        RuntimeError: if an inner unit already belongs to another root, or has a communication hook; if the ranks built
            different models; or if a parameter was added after wrapping.
        ValueError: if the user has set different `grad_dtype`s on parameters that are sharded together.
    """
    units = units_in(root)
    settle_shares(root, units, all_inside=True)
    follow_grad_dtypes(handle for unit in units for handle in unit.handles)
    refuse_strangers(root.module, units)
    refuse_inner_hooks(root, units)
    agree(root, units, to_run=True)
    share_memory(units)
    forget_memory(units)
    runtime = Runtime(root, units)
    runtime.steps = Steps(root)
    runtime.checks = TreeChecks(runtime)
    runtime.participation = Participation()
    return_freed_memory()
    return runtime


def refuse_inner_hooks(root: Unit, units: Mapping[Unit, str]) -> None:
    """Raise RuntimeError for a communication hook registered only on inner units."""
    for unit, name in units.items():
        hook = unit.policy.comm_hook
        if hook is not None and root.policy.comm_hook is None:
            raise RuntimeError(
                f"the communication hook {hook.name} was registered on '{name}', or on a wrapper around it, which is "
                f"inside {root.name}: it would not average the other gradients. Call register_comm_hook on the "
                "outermost FullyShardedDataParallel, after creating it."
            )


def follow_grad_dtypes(handles: Iterable[FlatParamHandle]) -> None:
    """Keep gradients in the `grad_dtype` set by the user on sharded parameters."""
    for handle in handles:
        # For a parameter whose `.data` was replaced by a tensor of another dtype, the all-gather raises an error.
        listed = [param for param in handle.listed_params if param.dtype == handle.flat_param.dtype]
        dtypes = {param.grad_dtype or param.dtype for param in listed}
        if dtypes <= {handle.kept_grad_dtype}:
            continue
        if len(dtypes) > 1:
            raise ValueError(
                f"{handle.name}: its parameters have different values of grad_dtype, set after sharding "
                f"({', '.join(sorted(map(str, dtypes)))}). Set grad_dtype before sharding, which puts such parameters "
                "into different flat parameters; or set one grad_dtype for all parameters of a unit."
            )
        check_dtype(f"grad_dtype of {handle.name}", *dtypes)
        handle.precision = handle.precision.with_grads(*dtypes)
        handle.wake()


def share_memory(units: Iterable[Unit]) -> None:
    """Collective. Send the large messages of these units through shared memory, between ranks on one host."""
    for unit in units:
        for handle in unit.handles if is_host(unit.device) else ():
            kept = () if handle.kept_shard is None else (handle.kept_shard.comm,)
            for comm in (handle.comm, handle.reduce_comm, handle.replica_axis, *kept):
                comm.share_memory(handle.layout.shard_numel * handle.dtype.itemsize)


class Contents:
    """The child modules and parameters in all modules of a tree.

    Each forward in training compares them with the previous ones, so the loops run in C. The dictionaries are looked up
    each time, because modules may replace them, as `nn.Sequential` does when a child is deleted.
    """

    def __init__(self, root: nn.Module) -> None:
        self._modules = [module.__dict__ for module in root.modules() if not isinstance(module, torch.jit.ScriptModule)]
        self._held = self._look()

    def _look(self) -> tuple[list[Any], list[str], list[bool]]:
        children = map(dict.values, filter(None, map(itemgetter("_modules"), self._modules)))
        params = list(filter(None, map(itemgetter("_parameters"), self._modules)))
        # A name without a parameter (`bias=False`) may be assigned a parameter.
        absent = map(is_, chain.from_iterable(map(dict.values, params)), repeat(None))
        return list(chain.from_iterable(children)), list(chain.from_iterable(params)), list(absent)

    def have_changed(self) -> bool:
        """Return whether a module or parameter was added or removed since the object was created."""
        return self._look() != self._held


class TreeChecks(Checks):
    """The checks of a root's tree before its forwards.

    Args:
        runtime: the runtime of the root.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._root, self._units, self._handles = runtime.root, runtime.units, runtime.handles
        self._contents = Contents(runtime.root.module)
        self._await_values = True  # values of some units may be missing
        self._has_compared_values = False  # not compared earlier, because a checkpoint may be loaded before a forward

    def before_forward(self, unit: Unit) -> None:
        if DistributedDataParallel._active_ddp_module is not None:
            refuse_ddp(DistributedDataParallel._active_ddp_module, self._root, self._handles)
        if torch.is_grad_enabled() and self._contents.have_changed():
            units = list(units_in(self._root))
            if units != self._units:  # a new runtime, with new checks, replaces this one
                self._root.require_idle("run units that were put into the model, or taken out,")
                for runtime in dict.fromkeys(one.runtime for one in units if one.runtime is not None):
                    runtime.forget()
                self._root.ensure_runtime()
                return
            refuse_strangers(self._root.module, self._units)
            self._contents = Contents(self._root.module)
        if self._await_values or not self._has_compared_values:
            self.trust_values(unit)

    def trust_values(self, unit: Unit) -> None:
        if self._await_values:
            require_values_everywhere(unit, "compute")
            self._await_values = not have_values_everywhere(self._units)
        if not self._has_compared_values:
            agree_on_values({handle: one.name for one in self._units for handle in one.handles})
            self._has_compared_values = True
            return_freed_memory()

    def merge_written(self, handle: FlatParamHandle) -> None:
        merge_written(handle)
