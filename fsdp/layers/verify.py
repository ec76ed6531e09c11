"""Comparisons of units across ranks before the first use; otherwise shards of different models could be combined.

At the first use of a tree, all ranks must have the same units with the same options (`agree`), and the same values at
wrapping (`agree_on_values`, using `layers.fingerprints`). On each rank, all trained parameters must be sharded, by a
single library (`refuse_strangers`, `refuse_ddp`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from fsdp import __version__
from fsdp.distributed.collectives import Communicator
from fsdp.distributed.communicator import own_rank
from fsdp.distributed.consensus import Ranks, from_everyone, numbers_of
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.layout import ContiguousLayout
from fsdp.engine.names import join, named_modules
from fsdp.engine.originals import is_ours, refuse_held
from fsdp.engine.precision import autocast_dtype
from fsdp.engine.unit import Unit, own_modules, unit_of, unit_of_wrapper
from fsdp.layers.fingerprints import first_difference
from fsdp.layers.managed_params import ddp_message, text_of_key

# For each unit's name, the properties to be compared across ranks, by their names in messages.
Plan = list[tuple[str, dict[str, Any]]]

# Replaces the fingerprint of a value not written by a rank. The fingerprint of zeros is 0.
NOT_WRITTEN = -1

# The units compared by all ranks.
agreed: WeakSet[Unit] = WeakSet()


def require_sharded(model: Any, what: str) -> Unit:
    """Return the unit of a wrapper or of a module under `fully_shard`; raise TypeError for other objects."""
    unit = (unit_of_wrapper(model) or unit_of(model)) if isinstance(model, nn.Module) else None
    if unit is None:
        raise TypeError(
            f"{what} needs the outermost FullyShardedDataParallel, or the outermost module under fully_shard; got a "
            f"{type(model).__name__}"
        )
    return unit


def agree(root: Unit, units: Mapping[Unit, str], *, to_run: bool = False) -> None:
    """Collective. Check that all ranks have the same units with the same parameters, and assign equal numbers to them.

    The tags of a handle are unique on its communicators, so messages of different units are never confused.

    Args:
        root: the outermost unit.
        units: the units of its tree, with their names.
        to_run: the ranks are about to compute, so their training modes must be equal too.

    Raises:
        RuntimeError: with the first rank that differs from rank 0, the unit, and the values of both ranks; or if a
            handle has no communicator for the ranks.
    """
    for unit in units:
        for handle in unit.handles:
            for comm in (handle.comm, handle.reduce_comm, handle.replica_axis):
                comm.ensure_connected()
    outside = "none, outside of forward"
    plan: Plan = [
        (name, describe_unit(unit) | {"mode": unit.mode if to_run else outside}) for unit, name in units.items()
    ]
    agree_on_plan(root.everyone, [(plan[0][0], plan[0][1] | _environment(root.device, to_run)), *plan[1:]])
    _agree_on_parts(units)
    agreed.update(units)
    for number, handle in enumerate(handle for unit in units for handle in unit.handles):
        handle.number_as(number)


def _environment(device: torch.device, to_run: bool) -> dict[str, Any]:
    autocast = autocast_dtype(device.type) if to_run else None
    return {
        "torch": torch.__version__.split("+")[0],  # for any build
        "fsdp": __version__,
        "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision(),
        "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled(),
        "torch.autocast": "off" if autocast is None else autocast,
    }


def describe_unit(unit: Unit) -> dict[str, Any]:
    """Return the properties of a unit to be compared across ranks, by their names in messages."""
    return {
        "parameters": [describe_handle(handle, unit) for handle in unit.handles],
        **unit.settings,
        "placement of parameters": str(unit.placements.parameters),
        "placement of gradients": str(unit.placements.gradients),
        "placement of optimizer state": str(unit.placements.optimizer),
        "block_numel": str(unit.placements.block_numel),
        "reshard_after_forward": unit.policy.reshard_after_forward,
        "reshard_after_backward": unit.policy.reshard_after_backward,
        "unshard_in_backward": unit.policy.unshard_in_backward,
        "gradients summed over ranks": unit.policy.sync.name,
        "gradient_predivide_factor": unit.policy.predivide,
        "a divisor of summed gradients of": unit.policy.postdivide,
        **{f"mixed_precision.{name}": value for name, value in unit.precision.describe().items()},
        "buffers": [*_saved_buffers(unit)],
    }


def _saved_buffers(unit: Unit) -> Iterator[str]:
    """Yield a unit's persistent buffers; other buffers, such as caches, may differ between ranks."""
    names = {inner: name for name, inner in named_modules(unit.module)}
    for inner in own_modules(unit.module):
        for name, buffer in inner._buffers.items() if inner not in unit.ignored.modules else ():
            if buffer is not None and name not in inner._non_persistent_buffers_set and not is_lazy(buffer):
                yield f"{join(names[inner], name)}{list(buffer.shape)} {buffer.dtype}"


def describe_handle(handle: FlatParamHandle, unit: Unit | None = None) -> str:
    """Return the properties of a flat parameter to be compared across ranks, as text."""
    # A handle without elements is not connected. With expert parallelism, other ranks may have elements.
    connected = handle if handle.layout.numel or unit is None else unit
    flat_param, own, layout = handle.flat_param, handle.flat_param.dtype, handle.layout
    slots = ", ".join(
        (
            f"{slot.name} ({part.spread})"
            if part
            else f"{slot.name} ({packing.description})"
            if packing
            else f"{slot.name}{list(slot.shape)}"
        )
        + ("" if example is None else f" of class {type(example).__name__}")
        + (f" along {slot.dim}" if slot.dim else "")
        + (" frozen" if handle.requires_grad and not needs else "")
        for slot, part, packing, example, needs in zip(
            layout.slots,
            flat_param.parts,
            flat_param.packings,
            flat_param.examples,
            handle.requires_grad_each,
            strict=True,
        )
    )
    kind = f"{own} requires_grad={handle.requires_grad}"
    if handle.is_cast or handle.gradients.dtype != own:
        kind += f" computed in {handle.precision.compute_dtype(own)}, reduced in {handle.gradients.dtype},"
    if handle.kept_grad_dtype != own:
        kind += f" with gradients in {handle.kept_grad_dtype},"
    if flat_param.group is not None:
        kind += f" of group {text_of_key(flat_param.group)}"
    kind += "" if isinstance(layout, ContiguousLayout) else " in rows"
    ranks = f"over {connected.comm.world_size} ranks by {type(connected.comm).__name__}"
    if connected.replicas.world_size > 1:
        ranks += f" and {connected.replicas.world_size} replicas by {type(connected.replicas).__name__}"
    if handle.kept_shard is not None:
        ranks += f", {handle.kept_shard}"
    return f"{kind} {ranks}: {slots}"


def _agree_on_parts(units: Mapping[Unit, str]) -> None:
    """Collective. Check that all ranks of a handle shard the same local part of a `DTensor`.

    Other ranks may have different parts: with expert parallelism, a unit's ranks are a subset of the root's.
    """
    plans: dict[tuple[Communicator, Communicator], Plan] = {}
    for unit, name in units.items():
        for handle in unit.handles:
            described = zip(handle.layout.slots, handle.flat_param.parts, strict=True)
            if parts := [f"{slot.name} ({part})" for slot, part in described if part]:
                plans.setdefault((handle.comm, handle.replicas), []).append((name, {"parts": parts}))
    for ranks, plan in plans.items():
        agree_on_plan(ranks, plan)


def agree_on_plan(ranks: Ranks, plan: Plan) -> None:
    """Collective. Check that all ranks have the same units with the same properties.

    The error includes the first rank that differs from rank 0, the unit, and the values of both ranks.
    """
    text = json.dumps(plan, default=str).encode()
    digests = from_everyone(ranks, hashlib.sha256(text).digest())
    if len(set(digests)) == 1:
        return
    plans = [json.loads(other) for other in from_everyone(ranks, text)]
    for number, other in enumerate(plans):
        if other != plans[0]:
            numbers = numbers_of(ranks)  # collective, and all ranks run this
            raise RuntimeError(
                f"rank {own_rank()}: the ranks have built different models. "
                f"{_difference(plans[0], other, numbers[0], numbers[number])} "
                "Build and shard the same modules in the same order and with the same options on every rank."
            )


def _difference(first: Plan, other: Plan, zero: int, rank: int) -> str:
    for number, (ours, theirs) in enumerate(zip(first, other, strict=False)):
        if ours[0] != theirs[0]:
            return f"Unit number {number} is '{ours[0]}' on rank {zero} and '{theirs[0]}' on rank {rank}."
        for what, value in ours[1].items():
            if theirs[1].get(what) != value:
                return f"Unit '{ours[0]}' has {what} {value} on rank {zero} and {theirs[1].get(what)} on rank {rank}."
    longer, more, fewer = (zero, first, other) if len(first) > len(other) else (rank, other, first)
    missing = more[len(fewer)][0]
    counts = f"Rank {zero} has {len(first)} units and rank {rank} has {len(other)}"
    return f"{counts}: unit '{missing}' is only on rank {longer}."


def settle_fingerprints(handle: FlatParamHandle) -> None:
    """Delete the fingerprints of parameters written without a call of `note_written`."""
    if handle.values.fingerprints is not None and handle.flat_param.numel() == handle.layout.shard_numel:
        handle.values.fingerprints.forget_written(handle.values.local_shards)
        handle.storage.release()


def renew_fingerprints(handle: FlatParamHandle) -> None:
    """Recompute fingerprints after the shard was cast or moved, which follows `settle_fingerprints`."""
    if handle.values.fingerprints is not None:
        handle.values.fingerprints.follow(handle.values.local_shards)
        handle.storage.release()


def agree_on_values(handles: Mapping[FlatParamHandle, str]) -> None:
    """Collective while ranks have parameters with uncompared values. Check that these values were equal.

    Each group of ranks, with its replicas, compares the values at wrapping once, in a single exchange for all units.
    The comparison excludes buffers, parameters that any rank has written since, and parameters without a part on
    another rank.

    Args:
        handles: with the names of their units.

    Raises:
        RuntimeError: with the first rank that differs from rank 0, the unit and the parameter.
    """
    pending: dict[tuple[Communicator, Communicator], dict[FlatParamHandle, str]] = {}
    for handle, name in handles.items():
        if handle.values.fingerprints is not None:
            handle.absorb()
            settle_fingerprints(handle)
            pending.setdefault((handle.comm, handle.replicas), {})[handle] = name
    # All groups are compared before an error is raised, because ranks of the next groups may have no error here.
    problems = [_difference_of_values(ranks, names) for ranks, names in pending.items()]
    for problem in filter(None, problems):
        raise RuntimeError(problem)
    for handle in handles:
        handle.values.fingerprints = None


def difference_of_written(ranks: Ranks, written: Mapping[str, int]) -> str:
    """Collective. Return a description of the difference if the ranks are about to write different values; else "".

    The fingerprints `written`, by FQN, are compared with rank 0's; a parameter that a rank lacks is ignored.
    """
    told = from_everyone(ranks, dict(written))
    found = _different(ranks, [[each.get(name) for name in told[0]] for each in told], list(told[0]))
    return found and f"rank {found}. Each rank would keep its own shard of them; nothing was changed."


def _difference_of_values(ranks: Ranks, handles: Mapping[FlatParamHandle, str]) -> str:
    """Collective. Return a description of the difference if ranks have sharded different values; else ""."""
    own = [one for handle in handles if (one := handle.values.fingerprints) is not None]
    names = [f"{slot.name} of unit '{unit}'" for handle, unit in handles.items() for slot in handle.layout.slots]
    found = _different(ranks, from_everyone(ranks, [each for one in own for each in one.unsharded]), names)
    return found and (
        f"rank {own_rank()}: the ranks have sharded different values. Rank {found}: their shards belong to different "
        "models. Seed all ranks alike before the model is built (torch.manual_seed), broadcast its values (which "
        "FullyShardedDataParallel does with sync_module_states=True), or load a checkpoint before the first use."
    )


def _different(ranks: Ranks, by_rank: Sequence[Sequence[int | None]], names: Sequence[str]) -> str:
    """Collective if there is a difference. Return the first rank that differs, with the parameter's name; else ""."""
    difference = first_difference(by_rank)
    if difference is None:
        return ""
    place, number, count = difference
    more, numbers = f" (and of {count - 1} more)" if count > 1 else "", numbers_of(ranks)
    return f"{numbers[place]} has other values than rank {numbers[0]} of {names[number]}{more}"


def refuse_strangers(root: nn.Module, units: Collection[Unit]) -> None:
    """Raise RuntimeError if a parameter was added after the units were created, or an original is still used."""
    refuse_held(root)
    ours = {(place.module, place.name) for unit in units for place in unit.places()}
    # Parameters added to ignored modules later are also ignored.
    every = frozenset[nn.Module]().union(*(unit.ignored.modules for unit in units))
    ignored = {inner for module in every for inner in module.modules()}
    for path, module in named_modules(root):
        for attribute, param in module._parameters.items():
            if param is None or is_ours(param) or module in ignored or (module, attribute) in ours:
                continue
            if any(param in unit.ignored.parameters for unit in units):
                continue
            raise RuntimeError(
                f"{join(path, attribute)} became a parameter after sharding: it is not sharded, and each "
                "rank would train different values. Complete the module before sharding, shard the added module "
                "separately, or ignore the parameter (ignored_parameters, ignored_params of fully_shard)."
            )


def refuse_ddp(ddp: DistributedDataParallel, root: Unit, handles: Iterable[FlatParamHandle]) -> None:
    """Raise RuntimeError if DistributedDataParallel would treat the shards of a model as replicas."""
    ours = {id(param) for handle in handles for param in handle.listed_params}
    # All names of a parameter are checked, because DDP uses it under each name that is not to be ignored.
    for path, module in ddp.module.named_modules():
        for name, param in module.named_parameters(recurse=False):
            if id(param) in ours and join(path, name) not in ddp.parameters_to_ignore:
                raise RuntimeError(ddp_message(root.name))
