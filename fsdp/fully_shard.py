"""`fully_shard`: parameters become `DTensor`s in their own modules, without a wrapper.

The unit uses the same schedule and collectives as a unit of `FullyShardedDataParallel`. The layout differs (every
parameter is sharded along one of its dimensions), and so do the listed parameters.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch
from torch import nn

from fsdp.distributed.collectives import Communicator, communicator
from fsdp.distributed.communicator import behind, uncompiled
from fsdp.distributed.devices import current_device, run_after
from fsdp.distributed.dtensor import MeshPart, spread_loaded
from fsdp.distributed.gather_extension import holds_extended
from fsdp.engine.autograd import outside_modes
from fsdp.engine.forward_hooks import has_forward
from fsdp.engine.grad_buffer import GradientSync
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.ignored import Ignored
from fsdp.engine.originals import lender_of, note_stale, take_over
from fsdp.engine.phase import Phase
from fsdp.engine.placeholder import under_way
from fsdp.engine.placements import Placements, ShardingStrategy, check_reshard
from fsdp.engine.rows_layout import RowsLayout
from fsdp.engine.runtime import Runtime, runtime_of, runtime_of_root
from fsdp.engine.shard import Shard
from fsdp.engine.unit import ModuleGroup, TrainingState, Unit, unit_of, unit_of_wrapper, units_in, units_of
from fsdp.layers import foreign_names, on_demand
from fsdp.layers.managed_params import Found, MakeFlatParam, group, reader_message
from fsdp.layers.module_overrides import reshard, unswapped
from fsdp.layers.options import MixedPrecisionPolicy, OffloadPolicy, Options, is_offloaded, precision_of
from fsdp.layers.shard_module import ALIGNED, refuse_fake_tensors, shard_module
from fsdp.layers.sharding_strategy import Groups, group_apart, mesh_of_all
from fsdp.layers.shared_params import share, split_off, tie_assigned

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Unpack

    from fsdp.layers.dtensor_params import DataParallelSpread

    _Base = nn.Module  # always the other base class
else:
    _Base = object


@dataclass
class DataParallelMeshDims:
    """The dimensions of a `DeviceMesh` for data parallelism; torch's class is accepted as well.

    Attributes:
        shard: the name of the dimension to shard over, or of multiple dimensions used as one.
        replicate: the name of the dimension to replicate over, if any.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise ValueError("At least one of shard or replicate must be named in DataParallelMeshDims")

    @property
    def shard_names(self) -> tuple[str, ...]:
        """The dimensions to shard over, in a tuple."""
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """The dimensions to replicate over, in a tuple."""
        return _names(self.replicate)


def _names(given: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given or ())


class _Arguments(TypedDict, total=False):
    mesh: DeviceMesh | None
    reshard_after_forward: bool | int | Literal["host"] | None
    shard_placement_fn: Callable[[nn.Parameter], Any] | None
    mp_policy: Any
    offload_policy: Any
    ignored_params: Iterable[nn.Parameter] | None
    dp_mesh_dims: Any
    placements: Placements | None


@overload
def fully_shard(module: nn.Module, **arguments: Unpack[_Arguments]) -> FSDPModule: ...
@overload
def fully_shard(module: Sequence[nn.Module], **arguments: Unpack[_Arguments]) -> list[FSDPModule]: ...
@foreign_names.refuses_wrappers_keywords
def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | Literal["host"] | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: Any = MixedPrecisionPolicy(),
    offload_policy: Any = OffloadPolicy(),
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
    placements: Placements | None = None,
) -> Any:
    """Shard all parameters of a module that no inner module sharded: each becomes a `DTensor`.

    Call this on inner modules first, then on outer modules; only the running module and the next module (or small
    modules of up to 1 MiB) are unsharded at a time. The module is changed in place; its class becomes ``FSDP<Class>``,
    a subclass with the methods of `FSDPModule`. Create the optimizer afterwards.

    A list of modules becomes a single unit: all are unsharded when the first module computes, and resharded when all
    have computed, or at the end of the outer forward. ``fully_shard.state(module)`` returns the state of a sharded
    module, which is the same for all modules of a list; None for other modules.

    Every rank must make the same calls in the same order, with the same values; ranks compare both at the first use.

    Args:
        module: a module whose forward is called (not a plain ``ModuleList``), or multiple modules. A module
            may have no parameters, or only parameters of inner sharded modules.
        mesh: the ranks to shard over; on a 2-D mesh, parameters are replicated over dim 0 and sharded over dim 1.
            Default: all ranks, on CUDA if any parameter is there or the default process group supports it. Parameters
            on other devices are moved to the mesh's device.
        reshard_after_forward: whether to reshard parameters after forward, and all-gather them again for backward. None
            excludes the outermost module, which backward uses first; True includes it. False keeps all unsharded. A
            number shards them over that many neighbouring ranks, for example of a machine, from which backward gathers:
            more memory. Creating groups is collective over the mesh. "host" uses host memory, see `Placements`.
        shard_placement_fn: called with each parameter; returns ``Shard(dim)``, or None for ``Shard(0)``; or torch's
            ``ShardPlacementResult``, which may contain another mesh: inner modules with parameters on another mesh are
            sharded over that mesh first.
        mp_policy: see `MixedPrecisionPolicy`.
        offload_policy: `CPUOffloadPolicy`; `OffloadPolicy` and None do not offload.
        ignored_params: parameters that are not sharded, and whose gradients are not summed over ranks.
        dp_mesh_dims: a `DataParallelMeshDims` with the names of dimensions of `mesh` to shard and to replicate over.
            `DTensor` parameters on all of `mesh` must be replicated along these; modules compute with such `DTensor`s.
        placements: `fsdp.Placements` of the module's parameters, gradients and optimizer state, instead of
            `reshard_after_forward`.

    Returns:
        The module, or the list.

    Raises:
        RuntimeError: without a process group.
        TypeError: for a value other than a module or mesh, and for parameters of torch's quantised dtypes.
        ValueError: for containers without a forward, and modules that are sharded already; for `DTensor`s that are
            not on another dimension of the same mesh; for placements that a parameter does not support; for dtypes that
            cannot be trained with the given policy.
        NotImplementedError: for parameters without dimensions on a 2-D mesh.
    """
    modules = _outermost(module)
    for each in modules:
        _check_module(each)
    one = modules[0] if len(modules) == 1 else ModuleGroup(modules)
    mesh = mesh_of_all(one) if mesh is None else mesh
    if not hasattr(mesh, "get_coordinate"):
        raise TypeError(f"mesh must be a DeviceMesh, of init_device_mesh() for instance, got a {type(mesh).__name__}")
    # Imports DTensor, which takes a second.
    from fsdp.layers.dtensor_params import DataParallelSpread, placed_elsewhere, teach_dtensor

    teach_dtensor()
    spread = DataParallelSpread(mesh, dp_mesh_dims)
    mesh = spread.mesh
    groups = Groups.resolve(mesh, _placements(placements, reshard_after_forward, spread))
    device = current_device(mesh.device_type)
    options = Options(
        disable_reshard_on_root=reshard_after_forward is None,
        mixed_precision=precision_of(mp_policy),  # the whole module in one dtype, including batch norms, as in torch
        offload="cpu" if is_offloaded(offload_policy) else None,
        compute_device=device,
    )
    form = DTensorForm(spread, groups.replicas, shard_placement_fn, mp_policy)
    ignored = Ignored.of(foreign_names.replicated_in(one), ignored_params, "ignored_params")
    places = {} if shard_placement_fn is None else placed_elsewhere(one, mesh, shard_placement_fn, ignored)
    for inner, its_own in places.items():
        _check_inside(inner, modules, its_own["mesh"], mesh)
        alike: dict[str, Any] = {"mp_policy": mp_policy, "offload_policy": offload_policy, "placements": placements}
        alike |= {"reshard_after_forward": reshard_after_forward, "shard_placement_fn": shard_placement_fn}
        fully_shard(inner, ignored_params=ignored_params, **its_own, **alike)
    unit, _ = shard_module(one, options, groups, None, ignored, form)
    for own in units_of(places):
        own.policy.part_of = unit
    for tied in list(unit.wanted):
        share(unit, tied.handle.flat_param)
    for inner in dict.fromkeys(place.module for each in unit.visible_handles for used in each.places for place in used):
        if any(any(handle.flat_param.packings) for handle in unit.visible_handles):
            inner.register_load_state_dict_pre_hook(partial(on_demand.pack_loaded, unit))
        inner.register_load_state_dict_pre_hook(spread_loaded)
    for each in modules:
        each.register_load_state_dict_pre_hook(partial(_settle_ties, unit))
        each.register_load_state_dict_post_hook(partial(_take_in, unit))
        each.__class__ = _fsdp_class(type(each))  # type: ignore[arg-type]  # a subclass of its own
        foreign_names.note_fully_sharded(each)
    return module


def _settle_ties(unit: Unit, *_: Any) -> None:
    """Merge parameters that a user has tied into a single parameter, before values are loaded into it."""
    tie_assigned(units_in(unit))


def _take_in(unit: Unit, *_: Any) -> None:
    """Store assigned values in the shards, also of ``load_state_dict(assign=True)``, before optimizers are created."""
    for handle in unit.handles:
        handle.absorb()


class DTensorForm:
    """The form of `fully_shard`: modules list a `DTensor` for each parameter, which optimizers step.

    Args:
        spread: the distribution of parameters over ranks.
        replicas: the number of ranks that hold the same shards.
        placement_of: returns along which dimension a parameter is sharded. Default: the first.
        mp_policy: passed to methods of parameters that customize the all-gather.
    """

    lists_parts, names_shards = True, False

    def __init__(
        self,
        spread: DataParallelSpread,
        replicas: int,
        placement_of: Callable[[nn.Parameter], Any] | None,
        mp_policy: Any,
    ) -> None:
        self._spread, self._replicas = spread, replicas
        self._placement_of, self._mp_policy = placement_of, mp_policy
        self._dims: dict[str, int] = {}  # the sharded dimension of each parameter, by name
        self._parts: dict[str, MeshPart | None] = {}  # of parameters already on a mesh

    def prepare(self, found: Found, tied: Found, module: nn.Module) -> Found:
        for param, places in found.items():
            name = places[0].fqn
            if param.dim() == 0 and self._replicas > 1:
                raise NotImplementedError(
                    f"{name} has no dimensions, and so no rows: on a 2-D mesh make it of shape [1] (and use it as it "
                    "is, by broadcasting), or pass it in ignored_params"
                )
            self._dims[name] = self._dim_of(name, param)
        self._parts = self._spread.of_unsharded({places[0].fqn: param for param, places in found.items()})
        for param in tied:
            split_off(param, lender_of(param))
        return found

    def shard(self, found: Found, unit: Unit, make: MakeFlatParam) -> list[Shard]:
        from fsdp.layers.dtensor_params import DTensorParams  # imports DTensor, which takes a second
        from fsdp.layers.extended_params import ExtendedParameters  # like this import

        new_orig_params, shards = partial(DTensorParams, spread=self._spread), []
        groups = [params for _, params in group(found, unit.precision_at, self._kind_of)]
        for params in groups:
            dims = tuple(self._dims[found[param][0].fqn] for param in params)
            # Scalars are unsharded on every rank, as if all ranks were replicas.
            is_replicated = params[0].dim() == 0
            ranks = {"rank": 0, "world_size": 1, "replicas": unit.comm.world_size} if is_replicated else {}
            # If ranks are only replicas, gaps would be sent.
            are_replicas = is_replicated or unit.comm.world_size == 1
            align = 1 if are_replicas and unit.comm.world_size * self._replicas > 1 else ALIGNED
            flat_param = make(params, align=align, layout_type=RowsLayout, dims=dims, **ranks)
            flat_param.parts = tuple(self._parts[found[param][0].fqn] for param in params)
            places = [found[param] for param in params]
            shard = Shard(flat_param, places, (), new_orig_params, is_replicated=is_replicated)
            if holds_extended(params[0]):  # results of its methods cannot be kept on fewer ranks
                modules = {used[0].fqn: used[0].module for used in places}
                given = {"modules": modules, "mesh": self._spread.mesh, "mp_policy": self._mp_policy}
                shard = replace(shard, is_kept=False, new_unsharded=partial(ExtendedParameters, **given))
            shards.append(shard)
        ordered = {param: found[param] for params in groups for param in params}
        take_over(ordered, [shard.flat_param for shard in shards], unit.name, unit)
        return shards

    def _dim_of(self, name: str, param: nn.Parameter) -> int:
        """Return the dimension along which a parameter is sharded."""
        wanted = None if self._placement_of is None or param.dim() == 0 else self._placement_of(param)
        wanted = getattr(wanted, "placement", wanted)  # for torch's ShardPlacementResult
        if wanted is None:
            return 0
        dim = getattr(wanted, "dim", None)
        if not isinstance(dim, int) or not -param.dim() <= dim < param.dim():
            raise ValueError(
                f"shard_placement_fn returned {wanted!r} for {name}, of shape {list(param.shape)}: it must be "
                "Shard(dim) of one of its dimensions, or None"
            )
        return dim % param.dim()

    def _kind_of(self, name: str, param: nn.Parameter) -> Hashable:
        """Return a key; only parameters with the same key share a flat parameter."""
        part = self._parts[name]
        return param.dim() == 0, holds_extended(param), None if part is None else part.kind


def _placements(given: Placements | None, reshard_after_forward: Any, spread: DataParallelSpread) -> Placements:
    """Return the placements of the unit; the mesh determines whether parameters are sharded at all."""
    reshards = True if reshard_after_forward is None else reshard_after_forward
    check_reshard(reshards)
    if given is None:
        strategy = ShardingStrategy.FULL_SHARD if spread.is_sharded else ShardingStrategy.NO_SHARD
        return Placements.from_strategy(strategy).resharded(reshards)
    return Placements.resolve(given, None, reshards).in_rows(is_sharded=spread.is_sharded)


def _outermost(given: Any) -> list[Any]:
    """Return the given modules without modules inside other given modules."""
    if not isinstance(given, (list, tuple)):
        return [given]
    if not given:
        raise ValueError("fully_shard got no modules: pass a module, or a list of modules")
    inside = {inner for module in given if isinstance(module, nn.Module) for inner in list(module.modules())[1:]}
    return [module for module in dict.fromkeys(given) if module not in inside]


def _check_module(module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"fully_shard shards an nn.Module, got a {type(module).__name__}")
    kind = type(module).__name__
    if not has_forward(module):
        raise ValueError(
            f"{kind} has no forward, so nothing would unshard its parameters: call fully_shard on the modules in it, "
            "or on the module around it"
        )
    if isinstance(module, FSDPModule) or unit_of(module) is not None:
        raise ValueError(f"this {kind} is sharded already: call fully_shard only once on a module")
    wrapped = next((type(inner).__name__ for inner in module.modules() if unit_of_wrapper(inner) is not None), None)
    if wrapped is not None:
        raise ValueError(f"{kind} has a {wrapped} inside: use fully_shard or the wrapper for all modules")
    foreign_names.refuse_torchs_units(module)
    refuse_fake_tensors(module)
    _fsdp_class(type(module))  # type: ignore[arg-type]  # raises if the class cannot be subclassed


def _check_inside(inner: nn.Module, modules: Sequence[nn.Module], its_mesh: DeviceMesh, mesh: DeviceMesh) -> None:
    if inner in modules:
        raise ValueError(
            f"shard_placement_fn puts parameters of the {type(inner).__name__} itself on {its_mesh}, but it is sharded "
            f"over {mesh}: move them to an inner module, which is then a separate unit"
        )


def _state(module: nn.Module) -> on_demand.FSDPState | None:
    return on_demand.FSDPState(_of(module)) if isinstance(module, FSDPModule) else None


fully_shard.state = _state  # type: ignore[attr-defined]


class UnshardHandle:
    """An all-gather in flight, started by `FSDPModule.unshard`."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    @uncompiled
    def wait(self) -> None:
        """Return when the module sees unsharded parameters (on CUDA: for work on the current stream)."""
        with outside_modes():
            self._unit.wait_for_unshard()


class GradientReductionHandle:
    """A completed reduction of `FSDPModule.finalize_backward`."""

    def wait(self) -> None:
        """Return immediately, because the gradients are complete."""


class _RefusesDistributedDataParallel:
    """The names that `DistributedDataParallel` should ignore: an error, unless a user set them on the module."""

    def __get__(self, module: nn.Module | None, owner: type) -> Any:
        if module is None:
            return self
        raise RuntimeError(reader_message(_of(module).name))


class FSDPModule(_Base):
    """The class of modules sharded by `fully_shard`, mixed into ``FSDP<Class>``."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # ``type(module)(...)`` creates a module of the original class, which is not sharded.
        return cls.__mro__[2](*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """Yield the same as `nn.Module.named_modules`."""
        on_demand.refuse_separate_backwards(_of(self))
        return super().named_modules(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the same as `nn.Module`: unsharded parameters of modules that are unsharded, otherwise `DTensor`s.

        Between passes, a `DTensor` with a gradient is always listed, for clipping, zeroing and optimizer steps. A
        tensor assigned by a user to a parameter is stored in the shard first.
        """
        on_demand.refuse_separate_backwards(_of(self))
        units = _units(self, recurse=True)
        _of(self).end_left_forward()
        with suppress(RuntimeError):  # the next forward raises it
            tie_assigned(units)
        for handle in [handle for unit in units if unit.state is TrainingState.IDLE for handle in unit.handles]:
            with suppress(RuntimeError):  # the next forward raises it
                handle.absorb_noticed()
        shown = _unsharded_in(units)
        for name, param in super().named_parameters(*args, **kwargs):
            yield name, shown.get(param, param)

    def extra_repr(self) -> str:
        """Return the module's line of ``print(model)``, with its parameters and the bytes on this rank."""
        own, sharded = super().extra_repr(), on_demand.summary(unit_of(self))
        return ", ".join(filter(None, [own, sharded and f"sharded: {sharded}"]))

    @uncompiled
    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Collective. Unshard the module's own parameters, until `reshard` or the end of its next forward.

        Inner sharded modules remain sharded. ``parameters()`` lists the unsharded parameters until then.

        Args:
            async_op: If True, return at once. The next forward waits; other users must call ``wait()`` of the result.

        Raises:
            RuntimeError: naming parameters without values.
        """
        unit = _of(self)
        if not (runtime := runtime_of(unit)).is_computing:
            runtime.ensure_idle("unshard")  # a failed backward may leave units unsharded on some ranks only
        on_demand.require_values_everywhere(unit, "unshard", recurse=False)
        with outside_modes():
            unit.unshard()
        started = UnshardHandle(unit)
        if async_op:
            return started
        started.wait()
        return None

    @uncompiled
    def wait_for_unshard(self) -> None:
        """Wait until an ``unshard(async_op=True)`` is complete."""
        if _of(self).is_unsharding:
            UnshardHandle(_of(self)).wait()

    @uncompiled
    def reshard(self) -> None:
        """Free the memory of the module's own unsharded parameters. Written values are stored in the shards.

        Raises:
            RuntimeError: while the module computes; for a written value that the shards cannot store.
        """
        (unit := _of(self)).end_left_forward()
        if unit.state is TrainingState.FORWARD:
            raise RuntimeError(f"cannot reshard {unit.name} in the middle of its forward")
        reshard(unit)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether to reshard after forward, also as the outermost module, and with `recurse` for inner modules.

        Raises:
            ValueError: for any other type than bool.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward must be True or False here, got {reshard_after_forward!r}")
        for unit in _units(self, recurse):
            unit.policy.set_reshard_after_forward(reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Set whether to reshard after backward. If False, parameters stay unsharded until the end of the next forward.

        For multiple backwards with the same weights. A changed shard is always all-gathered again.
        """
        for unit in _units(self, recurse):
            unit.policy.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Prefetch these modules in forward, in this order, instead of the expected module; the same on every rank."""
        _of(self).policy.forward_prefetch = _sharded(modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Prefetch these modules in backward, in this order, instead of the expected module; the same on every rank."""
        _of(self).policy.backward_prefetch = _sharded(modules)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether backward unshards the module's parameters, which, for example, an embedding does not require.

        If autograd saved parameters, backward raises an error about changed tensors. A recomputed forward always
        unshards them.
        """
        _of(self).policy.unshard_in_backward = unshard_in_backward

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Make all-gathers wait for an event recorded after the optimizer's step.

        All-gathers are ordered after work on the current stream. This stream waits for the event now, so all-gathers
        are ordered after a step on another stream. On CPU this has no effect.
        """
        run_after(event, _of(self).device)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set whether backwards reduce gradients over ranks, or accumulate unsharded gradients on each rank.

        The next backward that reduces includes the accumulated gradients. With replicas, the setting concerns both the
        reduce-scatter and the all-reduce. The setting takes effect with the next backward, for this module and, with
        `recurse`, for inner modules.
        """
        for unit in _units(self, recurse):
            unit.policy.sync = GradientSync.FULL if requires_gradient_sync else GradientSync.NONE

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether backwards all-reduce reduce-scattered gradients over replicas, or accumulate them on each rank.

        Accumulating shards takes 1/W of the memory of unsharded gradients. There is no effect without replicas,
        or while gradients are not reduced at all.
        """
        for unit in _units(self, recurse):
            if unit.policy.sync is not GradientSync.NONE:
                unit.policy.sync = GradientSync.FULL if requires_all_reduce else GradientSync.SHARDS

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Do nothing: all-gathers are always asynchronous here. The name is torch's."""

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether the next backward is the last backward of a step; each backward leaves complete gradients.

        After False, while gradients accumulate without a reduction, `parameters()` lists the unsharded parameters of
        all modules, also of resharded modules. torch's pipelines compute the gradients of these parameters.
        """
        for unit in _units(self, recurse=True):
            unit.policy.is_last_backward = is_last_backward

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Set whether `finalize_backward` will end the backwards of a step. torch's pipeline schedules call both.

        True has the effect of ``set_is_last_backward(False)``.

        Raises:
            RuntimeError: on a module that is not outermost.
        """
        _runtime(self, "set_manual_backward_finalization")
        self.set_is_last_backward(not enabled)

    @uncompiled
    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Collective. Reduce accumulated gradients of modules for which `set_requires_gradient_sync` is True.

        Gradients assigned to unsharded parameters are also reduced. Before the first forward there are none.

        Args:
            async_op: If True, return a handle, for torch's schedules; the gradients are complete already.

        Raises:
            RuntimeError: on a module that is not outermost, or while a module computes.
        """
        if _runtime(self, "finalize_backward") is not None:
            on_demand.finalize_backward(_of(self))
        return GradientReductionHandle() if async_op else None

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Set whether resharding keeps the memory of unsharded parameters, at the same addresses.

        CUDA graphs require the same addresses. The values are always gathered again.
        """
        for unit in _units(self, recurse):
            unit.policy.keeps_memory = keep

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of gradients over ranks, including replicas, by this number instead of the number of ranks.

        Raises:
            ValueError: if `factor` is not positive.
        """
        if factor <= 0:
            raise ValueError(f"gradients are divided by this: it must be positive, got {factor}")
        _of(self).set_divide_factors(1.0, float(factor))

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Deprecated name of `set_gradient_divide_factor`."""
        warnings.warn("Use `set_gradient_divide_factor` instead", FutureWarning, stacklevel=2)
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Do nothing: all collectives here only sum, and gradients are divided separately. The name is torch's."""

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Set whether a parameter not used on any rank gets a gradient of zeros instead of None.

        If any rank used a parameter, all other ranks always contribute zeros.
        """
        for unit in _units(self, recurse):
            unit.policy.fills_unused = reduce_scatter_unused_params

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Set the maximum number of reductions in flight, each with its unsharded gradient, when another starts.

        More reductions hide slow communication, but use more memory. The maximum over all modules of a root is used.

        Raises:
            TypeError: for any other type than int.
            ValueError: if it is less than 1.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers must be an int, got a {type(max_input_buffers).__name__}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be at least 1, got {max_input_buffers}")
        for unit in _units(self, recurse):
            unit.policy.reductions_in_flight = max_input_buffers

    def set_custom_all_gather(self, comm: on_demand.Collective) -> None:
        """All-gather the module's parameters using an object with the interface of torch's ``AllGather``.

        The object allocates send and receive buffers. A world size of 1 requires no all-gather.
        """
        _of(self).connect(lambda handle: (on_demand.CustomAllGather.of(handle.comm, comm), handle.reduce_comm))

    def set_custom_reduce_scatter(self, comm: on_demand.Collective) -> None:
        """Reduce-scatter the module's gradients using an object with the interface of torch's ``ReduceScatter``.

        The object allocates send and receive buffers, and always sums; gradients are divided separately. A world size
        of 1 requires no reduction.
        """
        _of(self).connect(lambda handle: (handle.comm, on_demand.CustomReduceScatter.of(handle.reduce_comm, comm)))

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: Any = None) -> None:
        """Call a function with each reduced gradient of the module, which the function may change in place.

        Args:
            hook: called with this rank's flat shard of the gradients, in the reduce dtype, averaged over all ranks
                including replicas. All ranks call it in the same order.
            stream: the stream of the call; only supported without replicas.

        Raises:
            ValueError: for a stream with replicas.
        """
        if stream is not None and _of(self).replicas.world_size > 1:
            raise ValueError("set_all_reduce_hook: a stream is not supported for a module with replicas: omit it")
        _of(self).policy.all_reduce_hook = on_demand.AllReduceHook(hook, stream)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Collective. Set whether gradients are reduced over a separate process group, or the group of all-gathers.

        On NCCL, all-gathers and reductions can then overlap. There is one group for each set of ranks; on NCCL, modules
        that are sharded over all ranks use it by default.
        """
        for unit in _units(self, recurse):
            to = partial(_reduced_apart, unit.device) if enable else lambda handle: handle.comm
            unit.connect(lambda handle, to=to: (handle.comm, on_demand.moved(handle.reduce_comm, to(handle))))  # type: ignore[misc]

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Allocate communication buffers from the process group; no effect if the backend does not support this.

        Raises:
            NotImplementedError: on NCCL, which does: all-gathers write directly to the parameters' memory here.
        """
        comm, device = _of(self).comm, _of(self).device
        if enable and comm.group is not None and behind(comm.group)._get_backend(device).supports_tensor_alloc(device):
            raise NotImplementedError(_no_buffers("set_allocate_memory_from_process_group_for_comm"))

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Raise an error: all-gathers write directly to the parameters' memory, not to buffers.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(_no_buffers("set_symm_mem_for_comm"))

    def reset_iter_state(self) -> None:
        """Discard a failed forward or backward, and all gradients of the step, reduced or not.

        The micro-batches of the step must be repeated. The next forward also discards the failed pass, but keeps
        gradients.

        Raises:
            RuntimeError: on a module that is not outermost, or while a module computes.
        """
        if (runtime := _runtime(self, "reset_iter_state")) is not None:
            runtime.reset_iteration()
            for handle in runtime.handles:
                handle.zero_grad()

    def _get_fsdp_state(self) -> on_demand.FSDPState:
        return on_demand.FSDPState(_of(self))

    @torch.inference_mode(False)  # in inference mode, `DTensor`s cannot be detached
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Reshard, and return the state dict of `nn.Module.state_dict`."""
        (unit := _of(self)).end_left_forward()
        if unit.state is TrainingState.IDLE:
            self.reshard()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load a state dict, like `nn.Module.load_state_dict`; each rank keeps its shards of unsharded tensors."""
        _of(self).end_left_forward()
        try:
            with unswapped():
                return super().load_state_dict(state_dict, *args, **kwargs)
        except RuntimeError as error:
            on_demand.explain(error, self, state_dict)
            raise

    def stream_weights(self, sink: Any, **options: Any) -> Any:
        """Collective. Send all weights to a sink in bounded buckets, see `fsdp.stream_weights` for the arguments."""
        return on_demand.stream_weights(self, sink, **options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        for unit in _units(self, recurse=True):
            on_demand.copying.prepare_to_copy(unit)
        copied = memo[id(self)] = object.__new__(type(self))
        with under_way():
            # Without the result of `compile()`, as in torch's copies of modules: it would call this module.
            copied.__dict__.update(copy.deepcopy(nn.Module.__getstate__(self), memo))
        _of(copied).wake()
        return copied

    _ddp_params_and_buffers_to_ignore = _RefusesDistributedDataParallel()

    def _replicate_for_data_parallel(self) -> Any:
        foreign_names.refuse_data_parallel(f"a {type(self).__name__}", "the module itself")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotImplementedError(
            f"a {type(self).__name__} cannot be pickled: its parameters are DTensors, whose mesh belongs to these "
            "processes. Save it with fsdp.save, or its state_dict() with torch.distributed.checkpoint."
        )


# Functions, not methods, because a user's module may use these names.
def _of(module: Any) -> Unit:
    unit = unit_of(module)
    if unit is None:
        raise RuntimeError(f"this {type(module).__name__} was not sharded: call fully_shard on it")
    return unit


def _runtime(module: Any, method: str) -> Runtime | None:
    """Return the runtime of an outermost module, None before its first use; RuntimeError for an inner module."""
    unit = _of(module)
    return None if unit.runtime is None else runtime_of_root(unit, method)


def _sharded(modules: Iterable[Any]) -> list[Unit]:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"got a {type(module).__name__} that is not sharded: call fully_shard on it first")
    return list(dict.fromkeys(map(_of, modules)))


def _no_buffers(method: str) -> str:
    return (
        f"{method}: large units are all-gathered directly into their parameters, without the buffers that it sets. "
        "Omit it, or pass set_custom_all_gather an object whose `allocate` returns such memory."
    )


def _reduced_apart(device: torch.device, handle: FlatParamHandle) -> Communicator:
    return communicator(group_apart(handle.comm.group), device)


def share_comm_ctx(modules: Sequence[FSDPModule]) -> None:
    """Do nothing: there are no communication streams that modules could share. The name is torch's.

    Raises:
        ValueError: for a module that is not sharded.
    """
    _sharded(modules)


def _units(module: Any, recurse: bool) -> list[Unit]:
    return list(units_in(_of(module))) if recurse else [_of(module)]


def _unsharded_in(units: Iterable[Unit]) -> dict[nn.Parameter, nn.Parameter]:
    """Return the unsharded parameters that replace listed parameters between passes."""
    found: dict[nn.Parameter, nn.Parameter] = {}
    for unit in units:
        is_idle, is_pending = unit.state is TrainingState.IDLE, unit.policy.awaits_backwards
        for handle in unit.visible_handles:
            if (handle.phase is Phase.UNSHARDED or is_pending) and handle.orig_params is not None:
                for slot, param in enumerate(handle.orig_params.params):
                    if is_idle and (is_pending or (param.grad is None and not unit.is_spare)):
                        found[param] = leaf = handle.unsharded.leaves[slot]
                        note_stale(leaf, f"{handle.param_infos[slot].fqn} of {unit.name}, unsharded")  # to refuse
    return found


@cache
def _fsdp_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class ``FSDP<Class>`` for modules of a class."""
    return on_demand.explain_methods(type(f"FSDP{kind.__name__}", (FSDPModule, kind), {"__module__": kind.__module__}))
