"""`fully_shard`: parameters become `DTensor`s in their own modules, without a wrapper.

It is the same unit, with the same schedule and collectives, as that of `FullyShardedDataParallel`. What differs is the
layout (every parameter is cut into rows) and what the modules list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from fsdp.distributed.collectives import communicator
from fsdp.distributed.dtensor import is_dtensor, spread_loaded
from fsdp.distributed.process_groups import Group, default_group, reduce_group, served_device
from fsdp.engine.flat_param import FlatParameter
from fsdp.engine.forward_hooks import ForwardHooks, Hook
from fsdp.engine.layout import RowsLayout
from fsdp.engine.managed_params import Ignored, Places, collect, device_of, group, lender_of, names_of, take_over
from fsdp.engine.module_overrides import guard, refuse_shared_modules
from fsdp.engine.nn_utils import teach_torch
from fsdp.engine.offload import Offload
from fsdp.engine.optimizer_hooks import watch_optimizers
from fsdp.engine.options import Options
from fsdp.engine.precision import MixedPrecision, Precision
from fsdp.engine.runtime import Runtime
from fsdp.engine.sharding_strategy import Groups, post_forward_group
from fsdp.engine.shared_params import claimed_in, share, wanted
from fsdp.engine.unit import Policy, Unit, own_modules, unit_of, unit_of_wrapper
from fsdp.fsdp_module import FSDPModule, fsdp_class

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_ALIGNED = 8  # elements; see `engine.shard_module`
_BUCKET_BYTES = 25 * 2**20
Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """In which dtypes a module under `fully_shard` computes and communicates; torch's class of that name is taken too.

    Attributes:
        param_dtype: of the gathered parameters and so of the computation; None leaves the parameters' own.
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
    """Nothing is offloaded."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, their gradients and the optimizer's state live in host memory, and are brought over when needed.

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
    """Shard the parameters of a module that no module inside has sharded: each becomes a `DTensor` of its rows.

    Call it on inner modules first, then on those around them; one module's parameters, and the next one's, are whole at
    a time. The module stays what it is and where it is; its class becomes ``FSDP<Class>``, a subclass of its own, with
    the methods of `FSDPModule`. Make the optimizer afterwards.

    Every rank must do the same in the same order, with the same values; ranks compare both at the first use.

    Args:
        module: with a forward that is called (no ``ModuleList`` and the like).
        mesh: the ranks to shard over; on a 2-D one parameters are replicated over dim 0 and sharded over dim 1. None
            means all ranks, on CUDA if a parameter is there or the default process group serves it. Parameters that
            are elsewhere are brought to the mesh's device.
        reshard_after_forward: free whole parameters after forward, and gather them again for backward; the outermost
            module, which needs its own at once, keeps them. False keeps all. A number keeps them between forward and
            backward among that many neighbouring ranks, of a machine for instance: more memory, and backward gathers
            from those only. Making their groups is collective over the mesh. None is True.
        shard_placement_fn: called with each parameter; returns ``Shard(dim)`` or None, which is ``Shard(0)``.
        mp_policy: see `MixedPrecisionPolicy`.
        offload_policy: `CPUOffloadPolicy`, or `OffloadPolicy`, which is none.
        ignored_params: are left as they are, and their gradients are not summed over the ranks.

    Returns:
        The module.

    Raises:
        RuntimeError: without a process group.
        TypeError: for what is no module; for integer parameters, and `DTensor`s.
        ValueError: for containers without a forward, modules that are sharded already, or without parameters; for
            placements that a parameter cannot have; for dtypes that cannot be trained as asked.
        NotImplementedError: for parameters without dimensions on a 2-D mesh.
    """
    ignored = Ignored.of(None, ignored_params)
    _check_module(module, ignored)
    refuse_shared_modules(module)
    watch_optimizers()
    teach_torch()
    tied: dict[nn.Parameter, Places] = {}
    found = collect(module, ignored, tied, claimed_in(module), with_values=False)
    mesh = _whole_mesh(module) if mesh is None else mesh
    groups = Groups.resolve(mesh, None)
    _check_params(found, groups.replicas)
    dims = {param: _dim_of(places[0].fqn, param, shard_placement_fn) for param, places in found.items()}
    reshards, post_forward_ranks = _resharding(reshard_after_forward, groups)
    params_are_on = device_of(found) or served_device(groups.shard)
    device = torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")
    if tied:
        from fsdp.engine.splitting import split_off  # imports DTensor

        for param in tied:
            split_off(param, lender_of(param))
    unit = _make_unit(module, groups, device, ignored, _precision(mp_policy), reshards)
    try:
        _shard(unit, groups, found, dims, mesh, _offload(offload_policy), post_forward_ranks)
    except BaseException:
        unit.withdraw()
        raise
    if device != params_are_on:
        _move_buffers(module, device)
    unit.rename(type(module).__name__)
    unit.wanted = wanted(tied)
    unit.restore_order()
    guard(unit, lists_parts=True)
    for one in list(unit.wanted):
        share(unit, one.handle.flat_param)
    for inner in dict.fromkeys(place.module for handle in unit.seen for used in handle.places for place in used):
        inner.register_load_state_dict_pre_hook(spread_loaded)
    module.register_load_state_dict_post_hook(Hook(partial(_take_in, unit)))
    module.__class__ = fsdp_class(type(module))  # type: ignore[assignment, arg-type]  # a subclass of its own
    return module


def _take_in(unit: Unit, *_: Any) -> None:
    """Hook: keep in the shards what ``load_state_dict(assign=True)`` assigned, so that optimizers may be made now."""
    for handle in unit.handles:
        handle.absorb()


def _make_unit(
    module: nn.Module,
    groups: Groups,
    device: torch.device,
    ignored: Ignored,
    precision: Precision,
    reshards: bool,
) -> Unit:
    averaged = groups.shard.size() * groups.replicas
    predivide = Options().predivide_factor(averaged)
    unit = Unit(
        module,
        *groups.communicators(device),
        groups.ranks,
        precision,
        device,
        ignored,
        policy=Policy(reshards),
        predivide=predivide,
        postdivide=averaged / predivide,
        settings={},
        new_runtime=partial(Runtime, keep_root=True, bucket_bytes=_BUCKET_BYTES),
    )
    ForwardHooks(unit, clear_autocast_cache=False).register()
    return unit


def _shard(
    unit: Unit,
    groups: Groups,
    found: dict[nn.Parameter, Places],
    dims: dict[nn.Parameter, int],
    mesh: DeviceMesh,
    offload: Offload,
    post_forward_ranks: Group | None,
) -> None:
    """Cut the parameters, take them out of their modules, and have the unit run what they have become."""
    from fsdp.engine.dtensor_params import RowPieces  # imports DTensor, which takes a second

    for param, places in found.items():
        unit.precision_at(places).check(places[0].fqn, param.dtype, param.requires_grad)
    rank, world_size = groups.shard.rank(), groups.shard.size()
    new_storage = offload.storage_on(unit.device)
    members = [params for _, params in group(found, unit.precision_at, lambda _, param: param.dim() == 0)]
    flat_params = []
    for params in members:
        # What has no rows is whole on every rank, as if all were replicas.
        number, of, replicas = (0, 1, world_size) if params[0].dim() == 0 else (rank, world_size, groups.replicas)
        names, cut_at = names_of(params, found), tuple(dims[param] for param in params)
        flat_params.append(
            FlatParameter.shard_of(params, names, number, of, new_storage(), _ALIGNED, replicas, RowsLayout, cut_at)
        )
    near = None if post_forward_ranks is None else communicator(post_forward_ranks, unit.device)
    reduce_comm = communicator(reduce_group(groups.shard, unit.device), unit.device)
    taken = [[found[param] for param in params] for params in members]
    ordered = {param: found[param] for params in members for param in params}
    take_over(ordered, flat_params, type(unit.module).__name__, unit)
    found.clear()  # the shards are cut: let the originals go before more memory is taken
    dims.clear()
    for flat_param, used in zip(flat_params, taken, strict=True):
        is_whole = not flat_param.metadata()[1][0]
        unit.add_handle(flat_param, used, [], reduce_comm, partial(RowPieces, mesh=mesh), near, is_whole)


def _resharding(asked: Any, groups: Groups) -> tuple[bool, Group | None]:
    """Whether to give whole parameters back after forward, and among which ranks to keep them then."""
    if asked is None or isinstance(asked, bool):
        return asked is not False, None
    if not isinstance(asked, int):
        raise TypeError(f"reshard_after_forward must be True, False, None or a number of ranks, got {asked!r}")
    return asked > 1, post_forward_group(groups.shard, asked)


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    for inner in own_modules(module):
        for name, buffer in inner._buffers.items():
            if buffer is not None and not buffer.is_meta:
                inner._buffers[name] = buffer.to(device)


def _whole_mesh(module: nn.Module) -> DeviceMesh:
    """Of all ranks."""
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


_meshes: dict[Any, Any] = {}  # of the default process group: every call wants the same


def _check_module(module: Any, ignored: Ignored) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"fully_shard shards an nn.Module, got a {type(module).__name__}")
    kind = type(module).__name__
    if type(module).forward is nn.Module.forward or isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        raise ValueError(
            f"{kind} has no forward, so nothing would gather its parameters: call fully_shard on the modules in it, or "
            "on the module around it"
        )
    if isinstance(module, FSDPModule) or unit_of(module) is not None:
        raise ValueError(f"this {kind} is sharded already: call fully_shard once, and on the modules around it")
    wrapped = next((type(inner).__name__ for inner in module.modules() if unit_of_wrapper(inner) is not None), None)
    if wrapped is not None:
        raise ValueError(f"{kind} has a {wrapped} inside: use fully_shard for all modules of a model, or the wrapper")
    if all(ignored.has(inner, param) for inner in module.modules() for param in inner.parameters(recurse=False)):
        raise ValueError(f"{kind} has no parameters to shard: leave it, and call fully_shard on the module around it")


def _check_params(found: dict[nn.Parameter, Places], replicas: int) -> None:
    for param, places in found.items():
        name = places[0].fqn
        if param.dim() == 0 and replicas > 1:
            raise NotImplementedError(
                f"{name} has no dimensions, and so no rows: on a 2-D mesh make it of shape [1] (and use it as it is, "
                "by broadcasting), or pass it in ignored_params"
            )
        if is_dtensor(param):
            raise TypeError(
                f"{name} is a DTensor already: for tensor parallelism wrap the module in FullyShardedDataParallel"
            )


def _dim_of(name: str, param: nn.Parameter, placement_of: Callable[[nn.Parameter], Any] | None) -> int:
    """The dimension along which a parameter is cut."""
    wanted = None if placement_of is None or param.dim() == 0 else placement_of(param)
    if wanted is None:
        return 0
    dim = getattr(wanted, "dim", None)
    if not isinstance(dim, int) or not -param.dim() <= dim < param.dim():
        raise ValueError(
            f"shard_placement_fn returned {wanted!r} for {name}, of shape {list(param.shape)}: it must be Shard(dim) "
            "of one of its dimensions, or None"
        )
    return dim % param.dim()


def _precision(policy: Any) -> Precision:
    names = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
    if not all(hasattr(policy, name) for name in names):
        raise TypeError(f"mp_policy must be a MixedPrecisionPolicy, got a {type(policy).__name__}")
    # As `fully_shard` is known: all that is in the module computes in one dtype, batch norms too.
    return Precision.of_policy(
        MixedPrecision(**{name: getattr(policy, name) for name in names}, full_precision_modules=())
    )


def _offload(policy: Any) -> Offload:
    kinds = {kind.__name__ for kind in type(policy).__mro__}  # torch's are taken too
    if "CPUOffloadPolicy" in kinds:
        if not policy.pin_memory and torch.cuda.is_available():
            raise ValueError("CPUOffloadPolicy(pin_memory=False): host memory is always pinned; leave it out")
        return Offload(params=True, grads=True)
    if "OffloadPolicy" not in kinds:
        raise TypeError(f"offload_policy must be CPUOffloadPolicy() or OffloadPolicy(), got {policy!r}")
    return Offload()
