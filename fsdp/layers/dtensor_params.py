"""Parameters as `DTensor`s, sharded by rows, which modules list and optimizers update under `fully_shard`.

An existing `DTensor` (tensor parallelism) becomes a `DTensor` on the joint mesh. Its local part, a
plain tensor, is sharded like other parameters, over the first dimensions of this mesh.

Each `DTensor` wraps a view of this rank's rows in the shard, with a separate version counter. So an optimizer step on
the `DTensor`s updates the shard, as with other local shards (`fsdp.engine.orig_params`).
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from fsdp.distributed.dtensor import (
    MeshPart,
    become,
    beside,
    held_part,
    is_dtensor,
    joint_mesh,
    memory_of,
    set_local_part,
)
from fsdp.distributed.gather_extension import around, inner_of, values_of
from fsdp.distributed.gathered_part import count_foreach, write_parts_through
from fsdp.engine.counted_data import counted, version_of
from fsdp.engine.flat_param import FlatParameter
from fsdp.engine.ignored import Ignored
from fsdp.engine.layout import Layout, Slot
from fsdp.engine.orig_params import OrigParams
from fsdp.engine.originals import is_ours
from fsdp.engine.rows_layout import RowsLayout
from fsdp.engine.runtime import running
from fsdp.engine.user_attributes import attributes_of, give_attributes
from fsdp.layers.annotated_params import annotated_part, with_whole_shapes


@cache
def teach_dtensor() -> None:
    """Patch torch to copy, pickle and stage `DTensor`s whose local tensor is a view of a shard, as in state dicts.

    torch recognizes a `DTensor`, which has no separate memory, by the address 0. However, torch (seen in 2.13) adds the
    offset of the local tensor, and then searches for memory. Copies and pickles contain only the elements of the
    `DTensor`, not the whole shard. Parameters are copied within their shards, and cannot be pickled. In addition,
    writes to a part of a parameter are counted as writes to the parameter.
    """
    DTensor.data_ptr = lambda _: 0  # type: ignore[assignment, method-assign]
    write_parts_through(_lies_in_a_shard)
    count_foreach(lambda: running() is not None)  # outside of forward and backward, values are compared
    torchs = DTensor.__deepcopy__

    @wraps(torchs)
    def copied(self: Any, memo: dict[int, Any]) -> Any:
        if is_ours(self):
            return _copied(self, memo)
        if id(self) in memo or not self.storage_offset():
            return torchs(self, memo)
        found = memo[id(self)] = self.detach().clone().requires_grad_(self.requires_grad)
        found.grad = copy.deepcopy(self.grad, memo)
        found.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return found

    def reduced(self: Any, protocol: Any) -> Any:
        if is_ours(self):
            raise NotImplementedError(
                f"{self.fqn} is a DTensor, whose mesh belongs to these processes: a module under fully_shard cannot be "
                "pickled. Save it with fsdp.save, or its state_dict() with torch.distributed.checkpoint; copy it with "
                "copy.deepcopy."
            )
        local = held_part(self)
        has_own_memory = type(local) is Tensor and local.untyped_storage().nbytes() == local.nbytes
        is_inside = self.storage_offset() or (not has_own_memory and _lies_in_a_shard(self))
        apart = self.detach().clone().requires_grad_(self.requires_grad) if is_inside else self
        return Tensor.__reduce_ex__(apart, protocol)

    DTensor.__deepcopy__ = copied  # type: ignore[method-assign]
    DTensor.__reduce_ex__ = reduced  # type: ignore[method-assign]


_NO_DIMS: frozenset[int] = frozenset()  # shared by all units

# The shards with local tensors of `DTensor`s, and their memory at the last lookup.
_shards: weakref.WeakSet[FlatParameter] = weakref.WeakSet()
_by_memory: dict[int, weakref.ref[FlatParameter]] = {}


def _lies_in_a_shard(tensor: DTensor) -> bool:
    """Return whether a `DTensor` is a parameter of a sharded module, or a view of such a parameter."""
    if isinstance(getattr(tensor, "owner", None), FlatParameter):
        return True
    memory = memory_of(tensor)
    known = _by_memory[memory]() if memory in _by_memory else None
    if known is not None and memory_of(known) == memory:
        return True
    _by_memory.clear()
    _by_memory.update((memory_of(shard), weakref.ref(shard)) for shard in _shards)
    return memory in _by_memory


class DataParallelSpread:
    """The spread of parameters over the ranks of data parallelism: replicated, and sharded over the last dimension.

    Collective if multiple dimensions are flattened into one.

    Args:
        given: the mesh; with `dims`, the mesh may have further dimensions.
        dims: optional, the dimensions for data parallelism. Parameters may then be `DTensor`s on all of `given`.

    Attributes:
        mesh: the mesh of data parallelism, replicas first.
        is_sharded: True if there is a dimension to shard over.
    """

    def __init__(self, given: DeviceMesh, dims: Any) -> None:
        self._whole, self.mesh, self.is_sharded = None if dims is None else given, given, True
        self._data_dims = _NO_DIMS
        if dims is None:
            return
        known = given.mesh_dim_names or ()
        for name in (*dims.shard_names, *dims.replicate_names):
            if name not in known:
                raise ValueError(f"dp_mesh_dims names {name!r}, not found in mesh.mesh_dim_names: {list(known)}")
        meshes = [
            given[names[0]] if len(names) == 1 else given[names]._flatten("_".join(names))
            for names in (dims.replicate_names, dims.shard_names)
            if names
        ]
        self.mesh = meshes[0] if len(meshes) == 1 else type(given)._concatenate(meshes)
        self.is_sharded = bool(dims.shard_names)
        self._shard_dims = sorted(map(known.index, dims.shard_names))
        self._data_dims = frozenset(map(known.index, (*dims.shard_names, *dims.replicate_names)))

    def of_unsharded(self, params: Mapping[str, nn.Parameter]) -> dict[str, MeshPart | None]:
        """Return by name the records of parameters that are `DTensor`s or annotated, and None for other parameters.

        Collective over the mesh if a parameter is annotated.

        Raises:
            ValueError: if a parameter cannot be spread over the mesh.
        """
        parts = {name: self._of_unsharded(name, param) for name, param in params.items()}
        return parts | with_whole_shapes(parts, params)

    def _of_unsharded(self, name: str, param: nn.Parameter) -> MeshPart | None:
        part = MeshPart.of(param)
        if part is None:
            return annotated_part(name, param, self._whole, self._data_dims)
        if part.mesh == self._whole:
            part = replace(part, data_dims=self._data_dims)
        if not part.data_dims:
            joint_mesh(name, part, self.mesh)
        for dim in sorted(part.data_dims):
            if not part.placements[dim].is_replicate():
                known = part.mesh.mesh_dim_names or ()
                raise ValueError(
                    f"{name}: Expected Replicate() along {known[dim]!r}, a dimension for data parallelism, got "
                    f"{part.placements[dim]!r}. Redistribute it before sharding."
                )
        return part

    def of_sharded(self, slot: Slot, part: MeshPart | None) -> MeshPart:
        """Return the record of a sharded parameter.

        Args:
            slot: the slot of the parameter, or of its local part.
            part: optional, the record of the unsharded parameter. If it contains no dimensions for data parallelism,
                they are added first; else they keep their positions, and multiple shard dimensions are flattened.
        """
        replicated = [Replicate()] * (self.mesh.ndim - 1)
        if part is None:
            return MeshPart(self.mesh, (*replicated, self._last(slot, 1)), slot.shape)
        first = self._shard_dims[0] if part.data_dims and self.is_sharded else -1
        dims = [dim for dim in part.sharded_dims if dim > first and part.placements[dim].is_shard(slot.dim)]
        last = self._last(slot, math.prod(map(part.mesh.size, dims)))
        if not part.data_dims:
            return MeshPart(joint_mesh(slot.name, part, self.mesh), (*replicated, last, *part.placements), part.shape)
        if not self.is_sharded:
            return MeshPart(part.mesh, part.placements, part.shape)
        placements: list[Placement] = list(part.placements)
        if len(self._shard_dims) == 1:
            placements[first] = last
            return MeshPart(part.mesh, tuple(placements), part.shape)
        meshes, placements = [], []
        for dim, name in enumerate(part.mesh.mesh_dim_names or ()):
            if dim == first:
                meshes.append(self.mesh)
                placements += [*replicated, last]
            elif dim not in part.data_dims:
                meshes.append(part.mesh[name])
                placements.append(part.placements[dim])
        mesh = self.mesh if len(meshes) == 1 else type(self.mesh)._concatenate(meshes)
        return MeshPart(mesh, tuple(placements), part.shape)

    def _last(self, slot: Slot, shards: int) -> Placement:
        """Return the placement along the last dimension, if the other dimensions divide the tensor into `shards`."""
        if not slot.shape or not self.is_sharded:
            return Replicate()
        return Shard(slot.dim) if shards == 1 else _StridedShard(slot.dim, split_factor=shards)


def placed_elsewhere(
    module: nn.Module, mesh: DeviceMesh, placement_of: Callable[[nn.Parameter], Any], ignored: Ignored
) -> dict[nn.Module, dict[str, Any]]:
    """Return the inner modules with parameters for which a user's function specifies another mesh.

    Each module has the corresponding arguments of `fully_shard`: the mesh and its dimensions for data parallelism.
    """
    found = {}
    for inner in module.modules():
        for param in inner._parameters.values():
            if param is None or is_ours(param) or ignored.has(inner, param):
                continue
            info = getattr(placement_of(param), "mesh_info", None)  # of torch's ShardPlacementResult
            if info is not None and info.mesh != mesh:
                dims = getattr(info, "dp_mesh_dims", None)
                found[inner] = {"mesh": info.mesh if dims is None else info.spmd_mesh, "dp_mesh_dims": dims}
    return found


class DTensorParams(OrigParams):
    """This rank's rows of the original parameters of a flat parameter, as `DTensor`s.

    Existing parameters of another flat parameter (`params`) are reused for this flat parameter.
    """

    def __init__(
        self,
        flat_param: FlatParameter,
        layout: Layout,
        rank: int,
        *,
        spread: DataParallelSpread,
        params: Sequence[nn.Parameter] | None = None,
    ) -> None:
        self.spread, self._given = spread, params
        self._parts_before = flat_param.parts
        self._parts = list(map(spread.of_sharded, map(_seen, layout.slots, flat_param.examples), flat_param.parts))
        if not isinstance(layout, RowsLayout):
            raise TypeError(f"rows need a layout in rows, got {type(layout).__name__}")
        _shards.add(flat_param)
        self._rows = [layout.local_place(slot, rank) for slot in range(len(layout.slots))]
        self._held: dict[int, list[Tensor]] = {}  # the tensors in the shard of each `DTensor`
        super().__init__(flat_param, layout, rank)
        del self._given
        self._versions = self.versions

    @property
    def versions(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(map(version_of, self.params))

    @property
    def absent(self) -> list[Tensor]:  # type: ignore[override]
        """The `DTensor`s, which modules list while the parameters are sharded."""
        return list(self.params)

    def _new(self, slot: int, layout: Layout, requires_grad: bool) -> nn.Parameter:
        rows = self._of(self._flat_param.detach(), slot)
        if slot in self._flat_param.valueless:
            rows = rows.to("meta")
        if self._given is not None:
            self._given[slot].__dict__["owner"] = self._flat_param
            return self._given[slot]  # `alias` moves its rows to the new shard
        shown, example = rows.as_subclass(Tensor), self._flat_param.examples[slot]
        shown = shown if example is None else in_class(example, shown)
        made = row_parameter(self._flat_param, shown, self._parts[slot], requires_grad, layout.slots[slot].name)
        give_attributes(made, self._flat_param.attributes[slot])
        return made

    def _of(self, shard: Tensor, slot: int) -> Tensor:
        size, stride, at = self._rows[slot]
        return shard.as_strided(size, stride, shard.storage_offset() + at)  # a single view, because it is a hot path

    def _show(self, slot: int, rows: Tensor) -> Tensor:
        param, example = self.params[slot], self._flat_param.examples[slot]
        if example is not None and rows.dim() > param.dim():  # gradients of multiple inner tensors
            rows = in_class(example, rows)
        return beside(param, rows) if rows.dtype == param.dtype else self._parts[slot].dtensor(rows)

    def _have(self, slot: int, rows: Tensor) -> None:
        rows = rows.as_subclass(Tensor)
        self._lie_at(slot, rows.to("meta") if self.params[slot].is_meta else rows)

    def _lie_at(self, slot: int, rows: Tensor) -> None:
        param, example = self.params[slot], self._flat_param.examples[slot]
        shown = rows if example is None else in_class(example, rows)
        self._held[slot] = [rows] if example is None else inner_of(shown)
        if (rows.dtype, rows.device) != (param.dtype, param.device):
            become(param, self._parts[slot].dtensor(shown))
        set_local_part(param, shown)  # `_replaced` compares tensors by identity

    def note_places(self) -> None:
        pass  # `_replaced` compares local tensors, not addresses

    def _replaced(self) -> list[int]:
        held = [param._local_tensor for param in self.params]  # type: ignore[attr-defined]  # inlined `held_part`
        own, examples = self._held, self._flat_param.examples
        return [
            slot
            for slot, local in enumerate(held)
            if (
                local is not own[slot][0]
                if examples[slot] is None
                else list(map(id, inner_of(local))) != list(map(id, own[slot]))
            )
        ]

    def give_memory(self, slots: Iterable[int]) -> None:
        """Replace meta tensors by views of the shard, for parameters from the meta device."""
        versions = list(self._versions)
        for slot in slots:
            self._lie_at(slot, self._of(self._flat_param.detach(), slot).as_subclass(Tensor))
            versions[slot] = self.params[slot]._version
        self._versions = tuple(versions)

    def elements_of(self, tensor: Tensor) -> Tensor:
        return values_of(held_part(tensor)).detach().contiguous()  # an assigned tensor may be transposed

    def given_gradient(self, slot: int) -> Tensor:
        param: Any = self.params[slot]
        if not is_dtensor(param.grad):
            raise RuntimeError(
                f"{self._layout.slots[slot].name} has a gradient that is no DTensor, unlike the parameter. Distribute "
                "the tensor that is assigned to .grad (torch.distributed.tensor.distribute_tensor) with the "
                "device_mesh and the placements of the parameter. A function in backward must assign it before its "
                "unit is resharded."
            )
        if param.grad.placements != param.placements:  # autograd creates a replicated gradient for a sum
            with torch.no_grad():
                param.grad = param.grad.redistribute(param.device_mesh, param.placements)
        return super().given_gradient(slot)

    def local_shard_of(self, slot: int, value: Tensor) -> Tensor | None:
        if not is_dtensor(value) or MeshPart.of(value) == self._parts_before[slot]:
            return None
        return values_of(self._parts[slot].to_local(self._layout.slots[slot].name, value.detach())).reshape(-1)

    def absorb(self) -> list[int]:
        # If a rank writes to a DTensor, all ranks do, including ranks without rows.
        before, now = self._versions, self.versions
        super().absorb()
        self._versions = self.versions  # a move to new memory also changes them
        written = (slot for slot, version in enumerate(before) if version != now[slot])
        return [slot for slot in written if not self.params[slot].is_meta]


def _seen(slot: Slot, example: Tensor | None) -> Slot:
    """Return the slot of a parameter without the dimension of multiple inner tensors."""
    if example is None or example.dim() == len(slot.shape):
        return slot
    return replace(slot, shape=slot.shape[1:], dim=max(slot.dim - 1, 0))


def in_class(example: Tensor, values: Tensor) -> Tensor:
    """Return a tensor in the class of `example`, around values as `values_of` returns them."""
    return around(example, [values] if values.dim() == example.dim() else values.unbind())


def row_parameter(owner: FlatParameter, rows: Tensor, part: MeshPart, requires_grad: bool, fqn: str) -> nn.Parameter:
    """Return a parameter around this rank's rows: a view of the shard `owner`, or a tensor around such views.

    The parameter is an ordinary `DTensor`, because torch checks the class, with the attributes of a `LocalShard`.
    """
    param = counted(part.dtensor(rows), requires_grad)
    param.__dict__.update(owner=owner, fqn=fqn, unsharded_shape=part.shape)
    return param


def _copied(found: Any, memo: dict[int, Any]) -> nn.Parameter:
    """Return the parameter of copied rows, in the copy of their shard."""
    local, part = held_part(found), MeshPart(found.device_mesh, tuple(found.placements), found.shape)
    owner = copy.deepcopy(found.owner, memo)
    mine, moved = owner.detach().as_subclass(Tensor), int(owner.storage_offset() - found.owner.storage_offset())
    held = inner_of(local) or [local]
    inner = [mine.as_strided(one.shape, one.stride(), one.storage_offset() + moved) for one in held]
    rows = around(local, inner) if inner_of(local) else inner[0]
    copied = memo[id(found)] = row_parameter(owner, rows, part, found.requires_grad, found.fqn)
    give_attributes(copied, attributes_of(found))
    return copied
