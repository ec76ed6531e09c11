"""`fully_shard`: parameters become `DTensor`s in their own modules, without a wrapper.

It is the same unit, with the same schedule and collectives, as that of `FullyShardedDataParallel`. What differs is the
layout (every parameter is sharded along one of its dimensions) and what the modules list.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from fsdp.distributed.collectives import Communicator, communicator
from fsdp.distributed.communicator import Group, default_group, served_device
from fsdp.distributed.dtensor import MeshPart, joint_mesh, spread_loaded
from fsdp.engine.copying import prepare_to_copy
from fsdp.engine.deferred_init import require_values_everywhere
from fsdp.engine.foreign_names import refuse_data_parallel
from fsdp.engine.forward_hooks import Hook
from fsdp.engine.handle import Phase
from fsdp.engine.layout import RowsLayout
from fsdp.engine.managed_params import Ignored, group, lender_of, note_stale, take_over
from fsdp.engine.options import Options
from fsdp.engine.placeholder import under_way
from fsdp.engine.precision import MixedPrecision
from fsdp.engine.runtime import runtime_of, runtime_of_root
from fsdp.engine.shard_module import ALIGNED, Found, MakeFlatParam, Shard, shard_module
from fsdp.engine.sharding_strategy import Groups, post_forward_group
from fsdp.engine.shared_params import share, split_off
from fsdp.engine.unit import TrainingState, Unit, unit_of, unit_of_wrapper, units_in
from fsdp.state_dict.full import explain

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes that a module under `fully_shard` computes and communicates in; torch's class is taken too.

    Attributes:
        param_dtype: of the unsharded parameters and so of the computation; None leaves the parameters' own.
        reduce_dtype: in which gradients are summed over ranks; None means as `param_dtype`.
        output_dtype: of the module's floating-point outputs; None leaves them.
        cast_forward_inputs: cast the module's floating-point inputs to `param_dtype`.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass(frozen=True)
class OffloadPolicy:
    """Offload nothing."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Keep shards, their gradients and the optimizer's state in host memory, from where they are copied when needed.

    Attributes:
        pin_memory: in pinned memory, where there is an accelerator. It always is, so False is an error.
    """

    pin_memory: bool = True


def fully_shard(
    module: Module,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = True,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: Any = MixedPrecisionPolicy(),
    offload_policy: Any = OffloadPolicy(),
    ignored_params: Iterable[nn.Parameter] | None = None,
) -> Module:
    """Shard the parameters of a module that no module inside has sharded: each becomes a `DTensor`.

    Call it on inner modules first, then on those around them; one module's parameters, and the next one's, are
    unsharded at a time. The module stays what it is and where it is; its class becomes ``FSDP<Class>``, a subclass of
    its own, with the methods of `FSDPModule`. Make the optimizer afterwards.

    Every rank must do the same in the same order, with the same values; ranks compare both at the first use.

    Args:
        module: with a forward that is called (no ``ModuleList`` and the like).
        mesh: the ranks to shard over; on a 2-D one parameters are replicated over dim 0 and sharded over dim 1. None
            means all ranks, on CUDA if a parameter is there or the default process group serves it. Parameters that
            are elsewhere are brought to the mesh's device.
        reshard_after_forward: reshard parameters after forward, and all-gather them again for backward; the outermost
            module, which needs its own at once, keeps them. False keeps all. A number shards them between forward and
            backward over that many neighbouring ranks, of a machine for instance, from which backward all-gathers:
            more memory. Making their groups is collective over the mesh. None is True.
        shard_placement_fn: called with each parameter; returns ``Shard(dim)`` or None, which is ``Shard(0)``.
        mp_policy: see `MixedPrecisionPolicy`.
        offload_policy: `CPUOffloadPolicy`, or `OffloadPolicy`, which is none.
        ignored_params: are left as they are, and their gradients are not summed over the ranks.

    Returns:
        The module.

    Raises:
        RuntimeError: without a process group.
        TypeError: for what is no module, and for integer parameters.
        ValueError: for containers without a forward, modules that are sharded already, or without parameters; for
            placements that a parameter cannot have; for dtypes that cannot be trained as asked.
        NotImplementedError: for parameters without dimensions on a 2-D mesh.
    """
    ignored = Ignored.of(None, ignored_params)
    _check_module(module, ignored)
    mesh = _mesh_of_all(module) if mesh is None else mesh
    groups = Groups.resolve(mesh, None)
    is_resharded, kept_by = _resharding(reshard_after_forward, groups)
    on_cuda = mesh.device_type == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
    options = Options(
        reshard_after_forward=is_resharded,
        mixed_precision=_policy(mp_policy),
        offload="cpu" if _is_offloaded(offload_policy) else None,
        compute_device=device,
    )
    post_forward = None if kept_by is None else communicator(kept_by, device)
    form = DTensorForm(mesh, groups.replicas, shard_placement_fn, post_forward)
    unit, _ = shard_module(module, options, groups, None, ignored, form)
    for one in list(unit.wanted):
        share(unit, one.handle.flat_param)
    for inner in dict.fromkeys(
        place.module for handle in unit.visible_handles for used in handle.places for place in used
    ):
        inner.register_load_state_dict_pre_hook(spread_loaded)
    module.register_load_state_dict_post_hook(Hook(partial(_take_in, unit)))
    module.__class__ = _fsdp_class(type(module))  # type: ignore[assignment, arg-type]  # a subclass of its own
    return module


def _take_in(unit: Unit, *_: Any) -> None:
    """Keep in the shards what ``load_state_dict(assign=True)`` assigned, so that optimizers may be made now."""
    for handle in unit.handles:
        handle.absorb()


class DTensorForm:
    """The form of `fully_shard`: modules list, and optimizers see, a `DTensor` for each parameter.

    Args:
        mesh: over whose last dimension parameters are sharded.
        replicas: how many ranks hold the same shards.
        placement_of: says along which dimension a parameter is sharded; None is the first.
        post_forward: the ranks that keep parameters unsharded between forward and backward.
    """

    takes_tied = lists_parts = True
    names_shards = False

    def __init__(
        self,
        mesh: DeviceMesh,
        replicas: int,
        placement_of: Callable[[nn.Parameter], Any] | None,
        post_forward: Communicator | None,
    ) -> None:
        self._mesh, self._replicas = mesh, replicas
        self._placement_of, self._post_forward = placement_of, post_forward
        self._dims: dict[str, int] = {}  # along which each parameter is sharded, by its name

    def prepare(self, found: Found, tied: Found, module: nn.Module) -> None:
        for param, places in found.items():
            name = places[0].fqn
            if param.dim() == 0 and self._replicas > 1:
                raise NotImplementedError(
                    f"{name} has no dimensions, and so no rows: on a 2-D mesh make it of shape [1] (and use it as it "
                    "is, by broadcasting), or pass it in ignored_params"
                )
            part = MeshPart.of(param)
            if part is not None:
                joint_mesh(name, part, self._mesh)  # raises an error if there is none
            self._dims[name] = self._dim_of(name, param)
        for param in tied:
            split_off(param, lender_of(param))

    def shard(self, found: Found, unit: Unit, make: MakeFlatParam) -> list[Shard]:
        from fsdp.engine.dtensor_params import DTensorParams  # imports DTensor, which takes a second

        new_orig_params, shards = partial(DTensorParams, mesh=self._mesh), []
        groups = [params for _, params in group(found, unit.precision_at, lambda _, param: param.dim() == 0)]
        for params in groups:
            dims = tuple(self._dims[found[param][0].fqn] for param in params)
            # What has no dimensions is unsharded on every rank, as if all were replicas.
            is_replicated = params[0].dim() == 0
            ranks = {"rank": 0, "world_size": 1, "replicas": unit.comm.world_size} if is_replicated else {}
            flat_param = make(params, align=ALIGNED, layout_type=RowsLayout, dims=dims, **ranks)
            places = [found[param] for param in params]
            shards.append(Shard(flat_param, places, (), new_orig_params, self._post_forward, is_replicated))
        ordered = {param: found[param] for params in groups for param in params}
        take_over(ordered, [shard.flat_param for shard in shards], unit.name, unit)
        return shards

    def _dim_of(self, name: str, param: nn.Parameter) -> int:
        """Return the dimension along which a parameter is sharded."""
        wanted = None if self._placement_of is None or param.dim() == 0 else self._placement_of(param)
        if wanted is None:
            return 0
        dim = getattr(wanted, "dim", None)
        if not isinstance(dim, int) or not -param.dim() <= dim < param.dim():
            raise ValueError(
                f"shard_placement_fn returned {wanted!r} for {name}, of shape {list(param.shape)}: it must be "
                "Shard(dim) of one of its dimensions, or None"
            )
        return dim % param.dim()


def _resharding(asked: Any, groups: Groups) -> tuple[bool, Group | None]:
    """Return whether to reshard after forward, and among which ranks to keep parameters unsharded then."""
    if asked is None or isinstance(asked, bool):
        return asked is not False, None
    if not isinstance(asked, int):
        raise TypeError(f"reshard_after_forward must be True, False, None or a number of ranks, got {asked!r}")
    return asked > 1, post_forward_group(groups.shard, asked)


def _mesh_of_all(module: nn.Module) -> DeviceMesh:
    """Return the mesh of all ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    if not dist.is_initialized():
        raise RuntimeError(
            "fully_shard needs a process group: call torch.distributed.init_process_group() first, or pass a mesh"
        )
    kind = "cuda" if any(param.is_cuda for param in module.parameters()) else served_device(default_group(None)).type
    key = (dist.group.WORLD, kind)
    if key not in _meshes:
        _meshes.clear()
        _meshes[key] = init_device_mesh(kind, (dist.get_world_size(),))
    return _meshes[key]


# Of the default process group: every call wants the same.
_meshes: dict[Any, Any] = {}


def _check_module(module: Any, ignored: Ignored) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"fully_shard shards an nn.Module, got a {type(module).__name__}")
    kind = type(module).__name__
    if type(module).forward is nn.Module.forward or isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        raise ValueError(
            f"{kind} has no forward, so nothing would unshard its parameters: call fully_shard on the modules in it, "
            "or on the module around it"
        )
    if isinstance(module, FSDPModule) or unit_of(module) is not None:
        raise ValueError(f"this {kind} is sharded already: call fully_shard once, and on the modules around it")
    wrapped = next((type(inner).__name__ for inner in module.modules() if unit_of_wrapper(inner) is not None), None)
    if wrapped is not None:
        raise ValueError(f"{kind} has a {wrapped} inside: use fully_shard for all modules of a model, or the wrapper")
    if all(ignored.has(inner, param) for inner in module.modules() for param in inner.parameters(recurse=False)):
        raise ValueError(f"{kind} has no parameters to shard: leave it, and call fully_shard on the module around it")


def _policy(given: Any) -> MixedPrecision:
    names = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
    if not all(hasattr(given, name) for name in names):
        raise TypeError(f"mp_policy must be a MixedPrecisionPolicy, got a {type(given).__name__}")
    # As `fully_shard` is known: all that is in the module computes in one dtype, batch norms too.
    return MixedPrecision(**{name: getattr(given, name) for name in names}, full_precision_modules=())


def _is_offloaded(policy: Any) -> bool:
    kinds = {kind.__name__ for kind in type(policy).__mro__}  # torch's are taken too
    if "CPUOffloadPolicy" in kinds:
        if not policy.pin_memory and torch.cuda.is_available():
            raise ValueError("CPUOffloadPolicy(pin_memory=False): host memory is always pinned; leave it out")
        return True
    if "OffloadPolicy" not in kinds:
        raise TypeError(f"offload_policy must be CPUOffloadPolicy() or OffloadPolicy(), got {policy!r}")
    return False


class UnshardHandle:
    """An all-gather of `FSDPModule.unshard` that is on its way."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Return when the module sees unsharded parameters (on CUDA: for work on the current stream)."""
        self._unit.wait_for_unshard()


class FSDPModule:
    """The class, mixed into ``FSDP<Class>``, of modules whose parameters are sharded by `fully_shard`."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # ``type(module)(...)`` makes another module of the original class, which nobody has sharded.
        return cls.__mro__[2](*args, **kwargs)

    # --- parameters ---------------------------------------------------------------------------------------------

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield what `nn.Module` does: of modules that are unsharded, the unsharded parameters, otherwise `DTensor`s.

        Between passes a `DTensor` that has a gradient is listed in any case, for who clips, zeroes or steps it.
        """
        shown = _unsharded_in(self)
        for name, param in super().named_parameters(*args, **kwargs):  # type: ignore[misc]
            yield name, shown.get(param, param)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Collective. Unshard the module's own parameters, until `reshard`, or the end of its next forward.

        Inner sharded modules keep theirs sharded. ``parameters()`` lists the unsharded ones until then.

        Args:
            async_op: return at once; the next forward waits by itself, everybody else by the handle's ``wait()``.

        Raises:
            RuntimeError: naming parameters without values.
        """
        unit = _of(self)
        runtime_of(unit)
        require_values_everywhere(unit, "unshard", recurse=False)
        unit.unshard()
        if async_op:
            return UnshardHandle(unit)
        unit.wait_for_unshard()
        return None

    def wait_for_unshard(self) -> None:
        """Return when an ``unshard(async_op=True)`` is done."""
        if _of(self).is_unsharding:
            _of(self).wait_for_unshard()

    def reshard(self) -> None:
        """Free the memory of the module's own unsharded parameters.

        Raises:
            RuntimeError: while the module computes.
        """
        unit = _of(self)
        if unit.state is TrainingState.FORWARD:
            raise RuntimeError(f"cannot reshard {unit.name} in the middle of its forward")
        unit.reshard()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether to reshard after forward, for this module and, with `recurse`, those inside."""
        for unit in _units(self, recurse):
            unit.policy.set_reshard_after_forward(reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Set whether to reshard after backward. Otherwise parameters stay unsharded until the end of the next forward.

        For several backwards with the same weights. A changed shard is all-gathered again in any case.
        """
        for unit in _units(self, recurse):
            unit.policy.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Unshard these ahead in this module's forward, in this order, instead of what is expected to come next."""
        _of(self).policy.forward_prefetch = [_of(module) for module in modules]

    def set_modules_to_backward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Unshard these ahead in this module's backward, in this order, instead of what is expected to come next."""
        _of(self).policy.backward_prefetch = [_of(module) for module in modules]

    # --- gradients ----------------------------------------------------------------------------------------------

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set whether backwards reduce gradients over the ranks, or accumulate unsharded ones on each rank.

        Raises:
            RuntimeError: on an inner module, or inside a forward or backward.
            ValueError: for ``recurse=False`` on a module with others inside.
        """
        runtime = runtime_of_root(_of(self), "set_requires_gradient_sync", "module under fully_shard")
        if not recurse and len(runtime.units) > 1:
            raise ValueError("set_requires_gradient_sync(recurse=False): all modules under one root reduce, or none")
        runtime.ensure_idle("change whether gradients are reduced", is_served=True)
        runtime.sync_gradients = requires_gradient_sync

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Do nothing: each backward leaves complete gradients behind, whatever comes next. The name is torch's."""

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of gradients over ranks by this number, and not by that of the ranks.

        Raises:
            ValueError: if it is not positive.
        """
        if factor <= 0:
            raise ValueError(f"gradients are divided by this: it must be positive, got {factor}")
        _of(self).set_divide_factors(1.0, float(factor))

    # --- other --------------------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load a state dict as the module does by itself; of unsharded tensors each rank keeps its shard."""
        try:
            return super().load_state_dict(state_dict, *args, **kwargs)  # type: ignore[misc]
        except RuntimeError as error:
            explain(error, self, state_dict)
            raise

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        for unit in _units(self, recurse=True):
            prepare_to_copy(unit)
        copied = memo[id(self)] = object.__new__(type(self))
        with under_way():
            copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        _of(copied).wake()
        return copied

    def _replicate_for_data_parallel(self) -> Any:
        refuse_data_parallel(f"a {type(self).__name__}", "the module itself")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotImplementedError(
            f"a {type(self).__name__} cannot be pickled: its parameters are DTensors, whose mesh is of these "
            "processes. Save it with fsdp.save, or its state_dict() with torch.distributed.checkpoint."
        )


# Functions, and no methods: a user's module may have those names.


def _of(module: Any) -> Unit:
    unit = unit_of(module)
    if unit is None:
        raise RuntimeError(f"this {type(module).__name__} was not sharded: call fully_shard on it")
    return unit


def _units(module: Any, recurse: bool) -> list[Unit]:
    return [unit for _, unit in units_in(_of(module))] if recurse else [_of(module)]


def _unsharded_in(module: Any) -> dict[nn.Parameter, nn.Parameter]:
    """Return the unsharded parameters that stand for those that modules list."""
    found: dict[nn.Parameter, nn.Parameter] = {}
    for unit in _units(module, recurse=True):
        for handle in unit.visible_handles:
            if handle.phase is Phase.UNSHARDED and handle.orig_params is not None:
                for slot, param in enumerate(handle.orig_params.params):
                    if unit.state is not TrainingState.IDLE or param.grad is None:
                        found[param] = leaf = handle.unsharded.leaves[slot]
                        # Optimizers are to refuse it.
                        note_stale(leaf, f"{handle.param_infos[slot].fqn} of {unit.name}, unsharded")
    return found


@cache
def _fsdp_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class that a module of this one gets."""
    return type(f"FSDP{kind.__name__}", (FSDPModule, kind), {"__module__": kind.__module__})
