"""In-place writes to a part of a sharded `DTensor`, such as ``weight[1].zero_()``, update the ranks' local tensors.

During a forward or backward, in-place functions of multiple tensors (``torch._foreach_mul_``) also increment the
version counters of `DTensor`s. torch (2.13) does not, so an all-gather from before the write would be used.

If a view selects along a sharded dimension, torch gathers the tensor, and in-place writes to the view are lost (seen
with torch 2.13). `GatheredPart` keeps a reference to its source. An in-place operation runs on every rank, like all
operations on `DTensor`s. Afterwards each rank copies its elements back to its local tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._redistribute import redistribute_local_tensor

from fsdp.distributed.dtensor import MeshPart, arrived, held_part

aten = torch.ops.aten
_VIEWS = (aten.select.int, aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default, aten.diagonal.default)
_EYES = (aten.eye.out, aten.eye.m_out)
LEAST_TORCH = "2.13"  # earlier versions do not dispatch to subclasses of `DTensor` (seen with torch 2.11)


@cache
def count_foreach(is_needed: Callable[[], bool]) -> None:
    """Make in-place functions of multiple tensors increment version counters while `is_needed` returns True.

    The handlers are registered once per process. Counting takes half a microsecond per tensor. Without `is_needed`,
    it would add 15 % to the host's time of an optimizer step.
    """

    def foreach(op: Any, args: Any, kwargs: Any) -> Any:
        found = _by_torch(op, args, kwargs)
        if is_needed():
            increment_version(args[0])
        return found

    names = [name for name in dir(torch) if name.startswith("_foreach_") and name.endswith("_")]
    packets = [getattr(aten, name) for name in names]
    operations = [getattr(packet, overload) for packet in packets for overload in packet.overloads()]
    # private: torch's table of custom handlers for operations (torch 2.11 to 2.15)
    DTensor._op_dispatcher._custom_op_handlers.update(dict.fromkeys(operations, foreach))


@cache
def write_parts_through(is_ours: Callable[[DTensor], bool]) -> None:
    """Register handlers of view operations once per process; they apply to `DTensor`s if `is_ours` returns True."""
    # private: torch's table of custom handlers for operations (torch 2.11 to 2.15)
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers.update(dict.fromkeys(_EYES, _eye))
    if torch.__version__ >= LEAST_TORCH:
        handlers.update({view: partial(_view, is_ours) for view in _VIEWS})


def _view(is_ours: Callable[[DTensor], bool], op: Any, args: Any, kwargs: Any) -> Any:
    source, *others = args
    if not _cuts_shards(op, source, args, kwargs) or not is_ours(source):
        return _by_torch(op, args, kwargs)
    # The meta device shows torch's placements without communication. Meanwhile, other threads have no handler.
    blank = torch.empty(held_part(source).shape, dtype=source.dtype, device="meta")
    found = _by_torch(op, (DTensor.__new__(DTensor, blank, source._spec, requires_grad=False), *others), kwargs)
    first = found[0] if isinstance(found, (list, tuple)) and found else found
    if not isinstance(first, DTensor):
        return found
    placements = [
        Replicate() if after.is_replicate() else before
        for before, after in zip(source.placements, first.placements, strict=True)
    ]
    if placements == list(source.placements):
        return _by_torch(op, args, kwargs)
    # private: an operation cannot use `redistribute`, an autograd function (torch 2.11 to 2.15)
    spec = DTensorSpec(source.device_mesh, tuple(placements), source._spec.tensor_meta)
    gathered: Any = arrived(redistribute_local_tensor(held_part(source), source._spec, spec)).contiguous()
    where = Source(source, gathered)
    found = _by_torch(op, (DTensor.__new__(DTensor, gathered, spec, requires_grad=False), *others), kwargs)
    return [_part(each, where) for each in found] if isinstance(found, (list, tuple)) else _part(found, where)


def _cuts_shards(op: Any, source: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a view selects along a dimension in which its source is sharded."""
    if not isinstance(source, DTensor) or source.is_meta:
        return False
    given = dict(enumerate(args))
    dims = [
        given.get(number, kwargs.get(each.name, each.default_value))
        for number, each in enumerate(op._schema.arguments)
        if each.name.startswith("dim")
    ]
    sharded = {placement.dim for placement in source.placements if hasattr(placement, "dim")}
    return bool(sharded) and any(dim % source.dim() in sharded for dim in dims)


def _by_torch(op: Any, args: Any, kwargs: Any) -> Any:
    handlers = DTensor._op_dispatcher._custom_op_handlers
    handler = handlers.pop(op)
    try:
        return op(*args, **kwargs)
    finally:
        handlers[op] = handler


def _eye(op: Any, args: Any, kwargs: Any) -> Any:
    """Write an identity matrix to a `DTensor`. torch 2.13 writes a separate matrix to each rank's local tensor."""
    out = kwargs["out"]
    part = MeshPart.of(out)
    if part is not None:
        full = torch.eye(*args, dtype=out.dtype, device=held_part(out).device)
        held_part(out).copy_(part.held_of(full))
    return out


class Source:
    """A sharded `DTensor` and its gathered copy; the parts are views of the copy."""

    def __init__(self, sharded: DTensor, gathered: Tensor) -> None:
        self._sharded, self._gathered = sharded, gathered

    def write_back(self, part: Tensor) -> None:
        """Copy this rank's elements of a view of the gathered copy to the sharded tensor."""
        gathered, own = self._gathered, held_part(self._sharded)
        offset = int(part.storage_offset() - gathered.storage_offset())
        written = torch.zeros_like(gathered, dtype=torch.bool)
        written.as_strided(part.shape, part.stride(), offset).fill_(True)
        mine = MeshPart(self._sharded.device_mesh, tuple(self._sharded.placements), self._sharded.shape)
        new, is_new = self._held(mine, gathered), self._held(mine, written)
        own.copy_(torch.where(is_new, new.to(own.device), own))

    def _held(self, mine: MeshPart, gathered: Tensor) -> Tensor:
        for sharding in mine.shardings:  # `gathered` is still sharded along mesh dimensions that were not gathered
            if gathered.shape[sharding.dim] == sharding.total:
                gathered = gathered.narrow(sharding.dim, *sharding.range(sharding.place))
        return gathered


class GatheredPart(DTensor):
    """A gathered part of a sharded `DTensor`; in-place operations on the part update the sharded tensor as well."""

    _source: Source

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        found = super().__torch_dispatch__(func, types, args, kwargs or {})
        changed = next((arg for arg in args[:1] if isinstance(arg, GatheredPart)), None)
        schema = func._schema.arguments
        if changed is None or not schema or schema[0].alias_info is None:
            return found
        if schema[0].alias_info.is_write:
            changed._source.write_back(held_part(changed))
            return changed
        if isinstance(found, (list, tuple)):
            return [_part(each, changed._source) for each in found]
        return _part(found, changed._source) if isinstance(found, DTensor) else found


def _part(tensor: Any, source: Source) -> Any:
    made: Any = GatheredPart.__new__(GatheredPart, held_part(tensor), tensor._spec, requires_grad=False)
    made._source = source
    return made
