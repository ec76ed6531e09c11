"""`fully_shard`: parameters become `DTensor`s in their own modules, without a wrapper.

The unit has the same schedule and collectives as a unit of `FullyShardedDataParallel`. The layout differs (every
parameter is sharded along one of its dimensions), and so do the parameters that modules list.
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
from fsdp.layers import on_demand
from fsdp.layers.foreign_names import note_fully_sharded, refuse_data_parallel, refuse_torchs_units, replicated_in
from fsdp.layers.managed_params import Found, MakeFlatParam, group, reader_message
from fsdp.layers.module_overrides import unswapped
from fsdp.layers.options import MixedPrecisionPolicy, OffloadPolicy, Options, is_offloaded, precision_of
from fsdp.layers.shard_module import ALIGNED, refuse_fake_tensors, shard_module
from fsdp.layers.sharding_strategy import Groups, group_apart, mesh_of_all
from fsdp.layers.shared_params import share, split_off, tie_assigned

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Unpack

    from fsdp.layers.dtensor_params import DataParallelSpread

    _Base = nn.Module  # which it is always mixed with
else:
    _Base = object


@dataclass
class DataParallelMeshDims:
    """The dimensions of a `DeviceMesh` that are for data parallelism; torch's class is taken too.

    Attributes:
        shard: the name of the dimension to shard over, or of several that are one for this.
        replicate: of the dimension to replicate over, if there is one.
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
    """Shard the parameters of a module that no module inside has sharded: each becomes a `DTensor`.

    Call it on inner modules first, then on those around them; one module's parameters, and the next one's (or small
    ones' of up to 1 MiB), are unsharded at a time. The module stays what it is and where it is; its class becomes
    ``FSDP<Class>``, a subclass of its own, with the methods of `FSDPModule`. Make the optimizer afterwards.

    Modules of a list are one unit: all are unsharded when the first of them computes, and resharded when each has, or
    at the end of the forward that they are in. ``fully_shard.state(module)`` returns the state of a sharded module, the
    same for all in a list; None for others.

    Every rank must do the same in the same order, with the same values; ranks compare both at the first use.

    Args:
        module: a module with a forward that is called (a plain ``ModuleList`` has none), or several modules. A module
            may have no parameters, or only parameters of inner sharded modules.
        mesh: the ranks to shard over; on a 2-D one parameters are replicated over dim 0 and sharded over dim 1. None
            means all ranks, on CUDA if a parameter is there or the default process group serves it. Parameters that
            are elsewhere are brought to the mesh's device.
        reshard_after_forward: reshard parameters after forward, and all-gather them again for backward. None does so
            but for the outermost module, which needs its own at once; True for that as well. False keeps all. A number
            shards them between forward and backward over that many neighbouring ranks, of a machine for instance, from
            which backward all-gathers: more memory. Making their groups is collective over the mesh. "host" copies
            them to host memory, from where backward takes them, see `Placements`.
        shard_placement_fn: called with each parameter; returns ``Shard(dim)`` or None, which is ``Shard(0)``; or
            torch's ``ShardPlacementResult`` with a mesh besides: modules inside that have parameters on another mesh
            are sharded over that one first.
        mp_policy: see `MixedPrecisionPolicy`.
        offload_policy: `CPUOffloadPolicy`; or `OffloadPolicy`, or None, which do not offload.
        ignored_params: are left as they are, and their gradients are not summed over the ranks.
        dp_mesh_dims: a `DataParallelMeshDims`, which names the dimensions of `mesh` to shard and to replicate over.
            Parameters that are `DTensor`s on all of `mesh` must be replicated along these; modules compute with such.
        placements: `fsdp.Placements` of the module's parameters, gradients and optimizer state, instead of
            `reshard_after_forward`.

    Returns:
        The module, or the list.

    Raises:
        RuntimeError: without a process group.
        TypeError: for what is no module, no mesh, and for parameters of torch's quantised dtypes.
        ValueError: for containers without a forward, and modules that are sharded already; for `DTensor`s that are
            not on another dimension of the same mesh; for placements that a parameter cannot have; for dtypes that
            cannot be trained as asked.
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
        mixed_precision=precision_of(mp_policy),  # the whole module in one dtype, batch norms too, as in torch
        offload="cpu" if is_offloaded(offload_policy) else None,
        compute_device=device,
    )
    form = DTensorForm(spread, groups.replicas, shard_placement_fn, mp_policy)
    ignored = Ignored.of(replicated_in(one), ignored_params)
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
        note_fully_sharded(each)
    return module


def _settle_ties(unit: Unit, *_: Any) -> None:
    """Make parameters that a user has tied one parameter, before values are loaded into it."""
    tie_assigned(each for _, each in units_in(unit))


def _take_in(unit: Unit, *_: Any) -> None:
    """Keep in the shards what was assigned, by ``load_state_dict(assign=True)`` too, so that optimizers may be made."""
    for handle in unit.handles:
        handle.absorb()


class DTensorForm:
    """The form of `fully_shard`: modules list, and optimizers see, a `DTensor` for each parameter.

    Args:
        spread: of parameters over the ranks.
        replicas: how many ranks hold the same shards.
        placement_of: says along which dimension a parameter is sharded; None is the first.
        mp_policy: for the methods of parameters that say how they are all-gathered.
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
        self._dims: dict[str, int] = {}  # along which each parameter is sharded, by its name
        self._parts: dict[str, MeshPart | None] = {}  # of those that are on a mesh already

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
        from fsdp.layers.extended_params import ExtendedParameters  # as this does

        new_orig_params, shards = partial(DTensorParams, spread=self._spread), []
        groups = [params for _, params in group(found, unit.precision_at, self._kind_of)]
        for params in groups:
            dims = tuple(self._dims[found[param][0].fqn] for param in params)
            # Scalars are unsharded on every rank, as if all ranks were replicas.
            is_replicated = params[0].dim() == 0
            ranks = {"rank": 0, "world_size": 1, "replicas": unit.comm.world_size} if is_replicated else {}
            # Where ranks are nothing but replicas, they would send each other the gaps.
            are_replicas = is_replicated or unit.comm.world_size == 1
            align = 1 if are_replicas and unit.comm.world_size * self._replicas > 1 else ALIGNED
            flat_param = make(params, align=align, layout_type=RowsLayout, dims=dims, **ranks)
            flat_param.parts = tuple(self._parts[found[param][0].fqn] for param in params)
            places = [found[param] for param in params]
            shard = Shard(flat_param, places, (), new_orig_params, is_replicated=is_replicated)
            if holds_extended(params[0]):  # what its methods make cannot be kept among a few ranks
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
        wanted = getattr(wanted, "placement", wanted)  # of torch's ShardPlacementResult
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
        """Return what tells parameters apart that do not share a flat parameter."""
        part = self._parts[name]
        return param.dim() == 0, holds_extended(param), None if part is None else part.kind


def _placements(given: Placements | None, reshard_after_forward: Any, spread: DataParallelSpread) -> Placements:
    """Return where the parameters are to be; the mesh decides whether they are sharded at all."""
    reshards = True if reshard_after_forward is None else reshard_after_forward
    check_reshard(reshards)
    if given is None:
        strategy = ShardingStrategy.FULL_SHARD if spread.is_sharded else ShardingStrategy.NO_SHARD
        return Placements.from_strategy(strategy).resharded(reshards)
    return Placements.resolve(given, None, reshards).in_rows(is_sharded=spread.is_sharded)


def _outermost(given: Any) -> list[Any]:
    """Return the modules that were given, without those that are inside of others among them."""
    if not isinstance(given, (list, tuple)):
        return [given]
    if not given:
        raise ValueError("fully_shard was given no modules: give one, or a list of some")
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
        raise ValueError(f"this {kind} is sharded already: call fully_shard once, and on the modules around it")
    wrapped = next((type(inner).__name__ for inner in module.modules() if unit_of_wrapper(inner) is not None), None)
    if wrapped is not None:
        raise ValueError(f"{kind} has a {wrapped} inside: use fully_shard for all modules of a model, or the wrapper")
    refuse_torchs_units(module)
    refuse_fake_tensors(module)
    _fsdp_class(type(module))  # type: ignore[arg-type]  # whose class may allow no subclass


def _check_inside(inner: nn.Module, modules: Sequence[nn.Module], its_mesh: DeviceMesh, mesh: DeviceMesh) -> None:
    if inner in modules:
        raise ValueError(
            f"shard_placement_fn puts parameters of the {type(inner).__name__} itself on {its_mesh}, and it is sharded "
            f"over {mesh}: have them in a module inside, which then is a unit of its own"
        )


def _state(module: nn.Module) -> on_demand.FSDPState | None:
    return on_demand.FSDPState(_of(module)) if isinstance(module, FSDPModule) else None


fully_shard.state = _state  # type: ignore[attr-defined]


class UnshardHandle:
    """An all-gather of `FSDPModule.unshard` that is on its way."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    @uncompiled
    def wait(self) -> None:
        """Return when the module sees unsharded parameters (on CUDA: for work on the current stream)."""
        with outside_modes():
            self._unit.wait_for_unshard()


class GradientReductionHandle:
    """A reduction of `FSDPModule.finalize_backward`, which has ended."""

    def wait(self) -> None:
        """Return: the gradients are complete."""


class _RefusesDistributedDataParallel:
    """The names that `DistributedDataParallel` is to ignore: an error, unless a user has set them on the module."""

    def __get__(self, module: nn.Module | None, owner: type) -> Any:
        if module is None:
            return self
        raise RuntimeError(reader_message(_of(module).name))


class FSDPModule(_Base):
    """The class, mixed into ``FSDP<Class>``, of modules whose parameters are sharded by `fully_shard`."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # ``type(module)(...)`` makes another module of the original class, which is not sharded.
        return cls.__mro__[2](*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """Yield as `nn.Module.named_modules`."""
        on_demand.refuse_separate_backwards(_of(self))
        return super().named_modules(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield what `nn.Module` does: of modules that are unsharded, the unsharded parameters, otherwise `DTensor`s.

        Between passes a `DTensor` that has a gradient is listed in any case, for clipping, zeroing or stepping it. A
        tensor that a user has assigned to a parameter is stored in its shard first.
        """
        on_demand.refuse_separate_backwards(_of(self))
        units = _units(self, recurse=True)
        _of(self).end_left_forward()
        with suppress(RuntimeError):  # which the next forward raises
            tie_assigned(units)
        for handle in [handle for unit in units if unit.state is TrainingState.IDLE for handle in unit.handles]:
            with suppress(RuntimeError):  # which the next forward raises
                handle.absorb_noticed()
        shown = _unsharded_in(units)
        for name, param in super().named_parameters(*args, **kwargs):
            yield name, shown.get(param, param)

    def extra_repr(self) -> str:
        """Return the module's line of ``print(model)``, with its parameters and how much of them this rank holds."""
        own, sharded = super().extra_repr(), on_demand.summary(unit_of(self))
        return ", ".join(filter(None, [own, sharded and f"sharded: {sharded}"]))

    @uncompiled
    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Collective. Unshard the module's own parameters, until `reshard`, or the end of its next forward.

        Inner sharded modules keep theirs sharded. ``parameters()`` lists the unsharded ones until then.

        Args:
            async_op: return at once; the next forward waits by itself, everybody else by the handle's ``wait()``.

        Raises:
            RuntimeError: naming parameters without values.
        """
        unit = _of(self)
        if not (runtime := runtime_of(unit)).is_computing:
            runtime.ensure_idle("unshard")  # a backward that failed has left units unsharded on some ranks only
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
        """Return when an ``unshard(async_op=True)`` is done."""
        if _of(self).is_unsharding:
            UnshardHandle(_of(self)).wait()

    @uncompiled
    def reshard(self) -> None:
        """Free the memory of the module's own unsharded parameters. The shards keep what was written to them.

        Raises:
            RuntimeError: while the module computes; for a written value that the shards cannot keep.
        """
        (unit := _of(self)).end_left_forward()
        if unit.state is TrainingState.FORWARD:
            raise RuntimeError(f"cannot reshard {unit.name} in the middle of its forward")
        for handle in unit.handles:
            handle.reshard()  # stores what was written, which the unit does not
        unit.reshard()
        unit.settle()  # `parameters()` lists the shards from now on

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether to reshard after forward, also as the outermost module, and with `recurse` for those inside.

        Raises:
            ValueError: for what is no bool.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward must be True or False here, got {reshard_after_forward!r}")
        for unit in _units(self, recurse):
            unit.policy.set_reshard_after_forward(reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Set whether to reshard after backward. Otherwise parameters stay unsharded until the end of the next forward.

        For several backwards with the same weights. A changed shard is all-gathered again in any case.
        """
        for unit in _units(self, recurse):
            unit.policy.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Prefetch these modules in forward, in this order, not the expected one. Set the same ones on every rank."""
        _of(self).policy.forward_prefetch = _sharded(modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Prefetch these modules in backward, in this order, not the expected one. Set the same ones on every rank."""
        _of(self).policy.backward_prefetch = _sharded(modules)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether backward unshards the module's parameters. An embedding's needs none, for instance.

        Where autograd has saved them, backward raises its error about changed tensors. A recomputed forward unshards
        them in any case.
        """
        _of(self).policy.unshard_in_backward = unshard_in_backward

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Make all-gathers wait for an event that was recorded after the optimizer's step.

        They are issued in the order of the stream that is current, which waits for the event now; that orders them
        after a step on another stream. On CPU there is nothing to wait for.
        """
        run_after(event, _of(self).device)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set whether backwards reduce gradients over the ranks, or accumulate unsharded ones on each rank.

        The next backward that reduces includes the accumulated gradients. With replicas, the setting concerns both the
        reduce-scatter and the all-reduce. The setting takes effect with the next backward, for this module and, with
        `recurse`, for inner modules.
        """
        for unit in _units(self, recurse):
            unit.policy.sync = GradientSync.FULL if requires_gradient_sync else GradientSync.NONE

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether backwards all-reduce reduce-scattered gradients over replicas, or accumulate them on each rank.

        Accumulating shards takes 1/W of the memory of unsharded gradients. The setting has no effect without replicas,
        or while gradients are not reduced at all.
        """
        for unit in _units(self, recurse):
            if unit.policy.sync is not GradientSync.NONE:
                unit.policy.sync = GradientSync.FULL if requires_all_reduce else GradientSync.SHARDS

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Do nothing: all-gathers here are asynchronous always. The name is torch's."""

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
            RuntimeError: on another module than the outermost.
        """
        _runtime(self, "set_manual_backward_finalization")
        self.set_is_last_backward(not enabled)

    @uncompiled
    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Collective. Reduce the gradients that backwards have accumulated, where `set_requires_gradient_sync` is True.

        Gradients that were assigned to unsharded parameters are reduced too. Before the first forward there are none.

        Args:
            async_op: return a handle, for torch's schedules; the gradients are complete already.

        Raises:
            RuntimeError: on another module than the outermost, or while one computes.
        """
        if _runtime(self, "finalize_backward") is not None:
            on_demand.finalize_backward(_of(self))
        return GradientReductionHandle() if async_op else None

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Set whether resharding keeps the memory of unsharded parameters, at the same addresses.

        CUDA graphs need the addresses. The values are gathered again in any case.
        """
        for unit in _units(self, recurse):
            unit.policy.keeps_memory = keep

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of gradients over ranks, replicas included, by this number, instead of the number of ranks.

        Raises:
            ValueError: if it is not positive.
        """
        if factor <= 0:
            raise ValueError(f"gradients are divided by this: it must be positive, got {factor}")
        _of(self).set_divide_factors(1.0, float(factor))

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Do what `set_gradient_divide_factor` does, under its old name."""
        warnings.warn("Use `set_gradient_divide_factor` instead", FutureWarning, stacklevel=2)
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Do nothing: all collectives here sum, and divide apart from that. The name is torch's."""

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Set whether a parameter that no rank has used gets a gradient of zeros, and not none.

        Where any rank has used it, the others take part with zeros in any case.
        """
        for unit in _units(self, recurse):
            unit.policy.fills_unused = reduce_scatter_unused_params

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Set how many reductions may go on, each with its unsharded gradient, while another one is started.

        More of them hide slow communication, and take memory. Of all modules under one root the most counts.

        Raises:
            TypeError: for what is no int.
            ValueError: if it is less than 1.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers must be an int, got a {type(max_input_buffers).__name__}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be at least 1, got {max_input_buffers}")
        for unit in _units(self, recurse):
            unit.policy.reductions_in_flight = max_input_buffers

    def set_custom_all_gather(self, comm: on_demand.Collective) -> None:
        """All-gather the module's parameters with an object that has the interface of torch's ``AllGather``.

        The object allocates the buffers for sending and receiving. A world size of 1 needs no all-gather.
        """
        _of(self).connect(lambda handle: (on_demand.CustomAllGather.of(handle.comm, comm), handle.reduce_comm))

    def set_custom_reduce_scatter(self, comm: on_demand.Collective) -> None:
        """Reduce-scatter the module's gradients with an object that has the interface of torch's ``ReduceScatter``.

        The object allocates the buffers for sending and receiving, and always sums; gradients are divided separately.
        A world size of 1 needs no reduction.
        """
        _of(self).connect(lambda handle: (handle.comm, on_demand.CustomReduceScatter.of(handle.reduce_comm, comm)))

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: Any = None) -> None:
        """Call a function with each reduced gradient of the module, which it may change in place.

        Args:
            hook: called with this rank's shard of the gradients, flat, in the reduce dtype: averaged over the ranks,
                replicas included. All ranks call it in the same order.
            stream: on which it runs; only without replicas.

        Raises:
            ValueError: for a stream with replicas.
        """
        if stream is not None and _of(self).replicas.world_size > 1:
            raise ValueError("set_all_reduce_hook: a stream cannot be given for a module with replicas, leave it out")
        _of(self).policy.all_reduce_hook = on_demand.AllReduceHook(hook, stream)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Collective. Set whether gradients are reduced over a separate process group, or the group of all-gathers.

        On NCCL the two can then go on at once. There is one group for each set of ranks; on NCCL a module that is
        sharded over all ranks has it from the start.
        """
        for unit in _units(self, recurse):
            to = partial(_reduced_apart, unit.device) if enable else lambda handle: handle.comm
            unit.connect(lambda handle, to=to: (handle.comm, on_demand.moved(handle.reduce_comm, to(handle))))  # type: ignore[misc]

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Let the process group allocate communication buffers; without effect if its backend cannot.

        Raises:
            NotImplementedError: on NCCL, which can: all-gathers here have no buffers besides the parameters' places.
        """
        comm, device = _of(self).comm, _of(self).device
        if enable and comm.group is not None and behind(comm.group)._get_backend(device).supports_tensor_alloc(device):
            raise NotImplementedError(_no_buffers("set_allocate_memory_from_process_group_for_comm"))

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Raise an error: all-gathers here have no buffers, besides the parameters' places, for symmetric memory.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(_no_buffers("set_symm_mem_for_comm"))

    def reset_iter_state(self) -> None:
        """Discard a forward or backward that has raised, and all gradients of the step, reduced or not.

        The micro-batches of the step have to be repeated. The next forward discards the failed pass too, but keeps
        gradients.

        Raises:
            RuntimeError: on another module than the outermost, or while one computes.
        """
        if (runtime := _runtime(self, "reset_iter_state")) is not None:
            runtime.reset_iteration()
            for handle in runtime.handles:
                handle.zero_grad()

    def _get_fsdp_state(self) -> on_demand.FSDPState:
        return on_demand.FSDPState(_of(self))

    @torch.inference_mode(False)  # in which no `DTensor` can be detached
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Reshard, and return the state dict as the module does by itself."""
        (unit := _of(self)).end_left_forward()
        if unit.state is TrainingState.IDLE:
            self.reshard()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load a state dict as the module does by itself; of unsharded tensors each rank keeps its shard."""
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
            # Without the result of `compile()`, as torch copies modules: it would call this module.
            copied.__dict__.update(copy.deepcopy(nn.Module.__getstate__(self), memo))
        _of(copied).wake()
        return copied

    _ddp_params_and_buffers_to_ignore = _RefusesDistributedDataParallel()

    def _replicate_for_data_parallel(self) -> Any:
        refuse_data_parallel(f"a {type(self).__name__}", "the module itself")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotImplementedError(
            f"a {type(self).__name__} cannot be pickled: its parameters are DTensors, whose mesh is of these "
            "processes. Save it with fsdp.save, or its state_dict() with torch.distributed.checkpoint."
        )


# Functions, not methods, because a user's module may have those names.
def _of(module: Any) -> Unit:
    unit = unit_of(module)
    if unit is None:
        raise RuntimeError(f"this {type(module).__name__} was not sharded: call fully_shard on it")
    return unit


def _runtime(module: Any, method: str) -> Runtime | None:
    """Return the runtime of an outermost module, None before its first use; RuntimeError for an inner module."""
    unit = _of(module)
    return None if unit.runtime is None else runtime_of_root(unit, method, "module under fully_shard")


def _sharded(modules: Iterable[Any]) -> list[Unit]:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"got a {type(module).__name__} that is not sharded: call fully_shard on it first")
    return list(dict.fromkeys(map(_of, modules)))


def _no_buffers(method: str) -> str:
    return (
        f"{method}: large units are all-gathered straight into their places, without the buffers that this is about. "
        "Leave it out, or give set_custom_all_gather an object whose `allocate` returns such memory."
    )


def _reduced_apart(device: torch.device, handle: FlatParamHandle) -> Communicator:
    return communicator(group_apart(handle.comm.group), device)


def share_comm_ctx(modules: Sequence[FSDPModule]) -> None:
    """Do nothing: there are no streams of communication that modules could share. The name is torch's.

    Raises:
        ValueError: for a module that is not sharded.
    """
    _sharded(modules)


def _units(module: Any, recurse: bool) -> list[Unit]:
    return [unit for _, unit in units_in(_of(module))] if recurse else [_of(module)]


def _unsharded_in(units: Iterable[Unit]) -> dict[nn.Parameter, nn.Parameter]:
    """Return the unsharded parameters that stand, between passes, for those that modules list."""
    found: dict[nn.Parameter, nn.Parameter] = {}
    for unit in units:
        is_idle, is_pending = unit.state is TrainingState.IDLE, unit.policy.awaits_backwards
        for handle in unit.visible_handles:
            if (handle.phase is Phase.UNSHARDED or is_pending) and handle.orig_params is not None:
                for slot, param in enumerate(handle.orig_params.params):
                    if is_idle and (is_pending or (param.grad is None and not unit.is_spare)):
                        found[param] = leaf = handle.unsharded.leaves[slot]
                        # Optimizers are to refuse it.
                        note_stale(leaf, f"{handle.param_infos[slot].fqn} of {unit.name}, unsharded")
    return found


@cache
def _fsdp_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class that a module of this one gets."""
    return on_demand.explain_methods(type(f"FSDP{kind.__name__}", (FSDPModule, kind), {"__module__": kind.__module__}))
