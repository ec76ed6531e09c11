"""`shard_module` makes a module a unit. `FullyShardedDataParallel` and `fully_shard` both use it.

The function finds the parameters that belong to no inner unit, with all their uses. Ranks and device are determined,
and similar parameters are grouped. Each group becomes this rank's shard of a flat parameter. The original parameters
are removed from their modules, and their memory is freed. The unit creates a handle for each flat parameter, and
methods of the modules are overridden. The two interfaces differ in the parameters that optimizers see and modules
list; a `ParamForm` defines them.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from fsdp.distributed.collectives import communicator
from fsdp.distributed.communicator import Group, served_device
from fsdp.distributed.dtensor import check_ranks, is_annotated
from fsdp.engine.flat_param import FlatParameter
from fsdp.engine.forward_hooks import ForwardHooks
from fsdp.engine.ignored import Ignored
from fsdp.engine.names import named_modules
from fsdp.engine.orig_params import OrigParams
from fsdp.engine.originals import take_over
from fsdp.engine.policy import Policy
from fsdp.engine.precision import Precision
from fsdp.engine.shard import Shard
from fsdp.engine.unit import Unit, own_modules, unit_of, units_of
from fsdp.layers.flatten_params_wrapper import ShardedParamsWrapper, free_suffixes
from fsdp.layers.foreign_names import refuse_torchs_units
from fsdp.layers.managed_params import (
    Found,
    GroupKey,
    MakeFlatParam,
    Sharder,
    collect,
    device_of,
    group,
    is_packed,
    key_of,
    names_of,
    refuse_aliases_of_units,
)
from fsdp.layers.module_overrides import guard, move_values, refuse_shared_modules
from fsdp.layers.options import Options
from fsdp.layers.sharding_strategy import Groups, group_to_reduce_over
from fsdp.layers.shared_params import check_share, claimed_by, refuse_nothing_own, wanted

if TYPE_CHECKING:
    from fsdp.engine.runtime import Runtime

# In elements: at least 16 bytes for each dtype used in training. Compiled CUDA kernels copy tensors with a smaller
# alignment at every call. Not used for flat parameters whose shards FairScale's checkpoints contain.
ALIGNED = 8


class ParamForm(Sharder, Protocol):
    """The form in which optimizers and modules see the parameters of a unit."""

    @property
    def lists_parts(self) -> bool:
        """Return whether modules list `DTensor`s, which can be saved and loaded without a conversion.

        If True, units behave as with torch's `fully_shard`: the inputs of the outermost module are moved to its compute
        device, and units that are not resharded after a forward stay unsharded even if no backward runs.
        """

    @property
    def names_shards(self) -> bool:
        """Return whether modules list and save a shard of each parameter under the parameter's name."""


@torch.inference_mode(False)  # shards that are inference tensors could not be trained
def shard_module(
    module: nn.Module, options: Options, groups: Groups, reduce_over: Any, ignored: Ignored, form: ParamForm
) -> tuple[Unit, Group]:
    """Make a module a unit with this form of parameters; return the unit and the group for reducing gradients."""
    refuse_shared_modules(module)
    inner = units_of(inside for _, inside in named_modules(module))
    ignored.check([place for unit in inner for place in unit.places()])
    meet_torch()
    _make_way(module, inner)
    inner = [unit for unit in inner if unit.module is not module]
    unit, reduce_group, shards = _shard_params(module, inner, options, groups, reduce_over, ignored, form)
    # The original parameters are freed by now. Handles allocate memory.
    reduce_comm = communicator(reduce_group, unit.device)
    for shard in shards:
        unit.add_handle(shard, reduce_comm, groups.new_kept_shard(unit.device) if shard.is_kept else None)
    unit.rename(type(module).__name__)
    guard(unit, lists_parts=form.lists_parts, names_shards=form.names_shards)
    return unit, reduce_group


def meet_torch() -> None:
    """Register with torch's optimizers and clipping functions, which users call with shards from now on."""
    from fsdp.layers.optimizer_hooks import watch_optimizers  # not required without a sharded model
    from fsdp.layers.torch_functions import teach_torch

    watch_optimizers()
    teach_torch()


def _new_runtime(root: Unit) -> Runtime:
    from fsdp.layers.first_use import new_runtime  # the checks of a tree, not required before its first use

    return new_runtime(root)


def _make_way(module: nn.Module, units: Iterable[Unit]) -> None:
    """Detach an earlier unit of the module, and reset the runtimes of inner units, before a new unit is created."""
    for unit in units:
        if unit.module is module:
            unit.withdraw()
        elif unit.runtime is not None:
            unit.runtime.forget()


def _shard_params(
    module: nn.Module,
    inner: Sequence[Unit],
    options: Options,
    groups: Groups,
    reduce_over: Any,
    ignored: Ignored,
    form: ParamForm,
) -> tuple[Unit, Group, list[Shard]]:
    tied: Found = {}
    found = collect(
        module,
        ignored,
        tied if form.lists_parts or form.names_shards else None,  # flat parameters cannot be shared between units
        claimed_by(inner),
        for_unit=True,
        takes_all=form.lists_parts,
    )
    uncast = _uncast(options.precision, found | tied)
    sharder: Sharder = form
    if packed := [param for param in found if is_packed(param, in_rows=form.lists_parts)]:
        from fsdp.layers.packed_params import PackedForm  # for quantised and integer parameters

        sharder = PackedForm(form, packed)
    found = sharder.prepare(found, tied, module)
    params_are_on = _device_of(found, inner, groups.replicate or groups.shard)  # the shard group may be a `LoneGroup`
    device = options.device_for(params_are_on)
    reduce_group = group_to_reduce_over(reduce_over, groups.shard, device)
    if options.sync_module_states:
        from fsdp.layers.module_states import take_states_of_first  # only for this option

        found = take_states_of_first(module, found, ignored, groups.communicators(device), device)
    unit = _make_unit(module, options, groups, device, ignored, form)
    unit.wanted, unit.uncast = wanted(tied), uncast
    new_storage = options.storage_on(device)

    def make(params: Sequence[nn.Parameter], **how: Any) -> FlatParameter:
        from fsdp.layers.fingerprints import take_fingerprints  # compared at the first use

        comm, copies = unit.everyone
        replicas = how.pop("replicas", copies.world_size)
        how = {"rank": comm.rank, "world_size": comm.world_size, "block": unit.placements.block_numel, **how}
        made = FlatParameter.shard_of(params, names_of(params, found), storage=new_storage(), **how)
        take_fingerprints(made, params, how["rank"], how["world_size"], replicas)
        return made

    try:
        _check_params(found, unit, () if form.lists_parts else (groups.shard, reduce_group, groups.replicate))
        refuse_aliases_of_units(unit, found)
        for one in unit.wanted if form.lists_parts else ():
            check_share(unit, one)  # `fully_shard` shares the parameter immediately
        shards = sharder.shard(found, unit, make)
    except BaseException:
        unit.withdraw()
        raise
    lacks_values = any(tensor.is_meta for tensor in (*found, *module.buffers()))
    if device != params_are_on or options.compute_device is not None or lacks_values:
        (_move_buffers if form.lists_parts else move_values)(module, device)
    return unit, reduce_group, shards


def _check_params(found: Found, unit: Unit, groups: Iterable[Group | None]) -> None:
    """Raise an error for parameters that cannot be used in computation, or are `DTensor`s over ranks of these groups.

    The mesh of parameters that stay `DTensor`s is checked by `prepare` instead.
    """
    for param, places in found.items():
        unit.precision_at(places).check(places[0].fqn, param.dtype, param.requires_grad)
        for over in filter(None, groups):
            check_ranks(places[0].fqn, param, over, unit.device)


def _uncast(precision: Precision, found: Found) -> Collection[tuple[nn.Module, str]]:
    """Return the places of the parameters that a policy does not cast."""
    if precision.override is None:
        return ()
    left = (places for param, places in found.items() if precision.leaves(places[0].fqn, param))
    return {place[:2] for places in left for place in places}


def _device_of(found: Iterable[nn.Parameter], inner: Iterable[Unit], over: Group) -> torch.device:
    """Return the device of a module's own parameters, or the compute device of its inner units."""
    devices = (unit.device for unit in inner if unit.owned_handles or unit.borrowed_handles)
    if not found and (device := next(devices, None)) is not None:
        return device
    return device_of(found) or served_device(over)


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    """Move the buffers with values; ignored parameters are not moved."""
    for inner in own_modules(module):
        for name, buffer in inner._buffers.items():
            if buffer is not None and not buffer.is_meta:
                inner._buffers[name] = buffer.to(device)


def _make_unit(
    module: nn.Module, options: Options, groups: Groups, device: torch.device, ignored: Ignored, form: ParamForm
) -> Unit:
    averaged = groups.shard.size() * groups.replicas
    predivide = options.predivide_factor(averaged)
    unit = Unit(
        module,
        groups.placements,
        *groups.communicators(device),
        groups.axes(device),
        groups.ranks,
        options.precision,
        device,
        ignored,
        policy=Policy.of(
            groups.placements,
            keeps_as_root=options.disable_reshard_on_root,
            keeps_without_backward=form.lists_parts,
            predivide=predivide,
            postdivide=averaged / predivide,
            bucket_bytes=options.bucket_bytes,
        ),
        settings=options.compared,
        new_runtime=_new_runtime,
    )
    for each in unit.modules:
        hooks = ForwardHooks(
            unit, each, clear_autocast_cache=options.clear_autocast_cache, brings_inputs=form.lists_parts
        )
        hooks.register()
    return unit


def refuse_unwrappable(module: Any, fully_sharded: type[Any], ignored: Ignored) -> None:
    """Raise an error for modules that `FullyShardedDataParallel` cannot wrap, such as modules under `fully_shard`."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"FullyShardedDataParallel wraps an nn.Module, got a {type(module).__name__}")
    if module in ignored.modules:
        raise ValueError(
            f"ignored_modules contains the {type(module).__name__} that is to be wrapped, or a module around it: no "
            "parameter would be sharded, and no gradient averaged. Leave this module unwrapped, or ignore modules in it"
        )
    if any(isinstance(inner, fully_sharded) for _, inner in named_modules(module)):
        raise ValueError(
            f"{type(module).__name__} is, or contains, a module that fully_shard has sharded: use either fully_shard "
            "or the wrapper for all modules of a model"
        )
    if (unit := unit_of(module)) is not None and not unit.holds_nothing:
        raise ValueError(
            f"this {type(module).__name__} is wrapped already, and its wrapper has parameters of its own: wrap that "
            "wrapper, or the modules around it. After an error in param_init_fn there is no wrapper: build the module "
            "again"
        )
    refuse_torchs_units(module)
    refuse_fake_tensors(module)


def refuse_fake_tensors(module: nn.Module) -> None:
    """Raise RuntimeError for a module of torch's fake tensors, or under `FakeTensorMode`."""
    made = sys.modules.get("torch._subclasses.fake_tensor")  # if not imported, no fake tensors exist
    held = [param for _, inner in named_modules(module) for param in inner._parameters.values()]
    if made is not None and any(isinstance(one, made.FakeTensor) for one in (torch.empty(0, device="cpu"), *held)):
        raise RuntimeError(
            f"this {type(module).__name__} is to be sharded under FakeTensorMode, or was built there: ranks exchange "
            "values, which fake tensors do not have. For the memory and the traffic of sharded training, call "
            "fsdp.plan(model, world_size=...) on the plain model. To shard a model without values, build it on the "
            "meta device."
        )


class WrapperForm:
    """The forms of `FullyShardedDataParallel`.

    Modules list flat parameters, or with ``use_orig_params`` this rank's shard of each original parameter; with
    ``flatten_parameters=False`` each parameter is a separate flat parameter under its own name. The inner wrapper
    (`holder`) also lists flat parameters.
    """

    lists_parts = False

    def __init__(self, holder: ShardedParamsWrapper, options: Options, group_by: GroupKey | None) -> None:
        self._holder, self._group_by = holder, group_by
        self._flattens, self._shows_originals = options.flatten_parameters, options.use_orig_params

    @property
    def names_shards(self) -> bool:
        return not self._flattens

    def prepare(self, found: Found, tied: Found, module: nn.Module) -> Found:
        refuse_nothing_own(found, tied, type(module).__name__)
        for param, places in found.items():
            if is_annotated(param):
                raise NotImplementedError(
                    f"{places[0].fqn} has annotations of spmd_types, which mean that ranks hold parts of it: "
                    "FullyShardedDataParallel would treat each part as the whole parameter. Shard the module with "
                    "fsdp.fully_shard(module, mesh=..., dp_mesh_dims=...)."
                )
        return found

    def shard(self, found: Found, unit: Unit, make: MakeFlatParam) -> list[Shard]:
        return self._shard_flat(found, unit, make) if self._flattens else self._shard_singly(found, unit, make)

    def _shard_flat(self, found: Found, unit: Unit, make: MakeFlatParam) -> list[Shard]:
        groups = group(found, unit.precision_at, self._group_by)
        align = ALIGNED if self._shows_originals else 1
        flat_params = [make(params, align=align) for _, params in groups]
        places = [[found[param] for param in params] for _, params in groups]
        for flat_param, (key, _) in zip(flat_params, groups, strict=True):
            flat_param.group = key
        take_over({param: found[param] for _, params in groups for param in params}, flat_params, unit.name)
        suffixes = free_suffixes(unit.module, len(flat_params))
        self._holder.hold(flat_params, places, suffixes, is_listed=not self._shows_originals)
        if self._shows_originals:
            return [Shard(*one, new_listed=OrigParams) for one in zip(flat_params, places, strict=True)]
        # Also registered on the user's module, so that its methods `parameters()`, `dtype` and `device` still work.
        at = [[(self._holder, name), (unit.module, name)] for name in self._holder.flat_param_names]
        return [Shard(*one) for one in zip(flat_params, places, at, strict=True)]

    def _shard_singly(self, found: Found, unit: Unit, make: MakeFlatParam) -> list[Shard]:
        shards = []
        for param, places in found.items():
            flat_param = make([param], keeps_shape=True)
            flat_param.group = key_of(param, places, self._group_by)
            shards.append(Shard(flat_param, [places], [place[:2] for place in places]))
        take_over(found, [shard.flat_param for shard in shards], unit.name, unit)
        return shards
