"""Parameters as `DTensor`s that are sharded by rows: modules list them, and optimizers see them, under `fully_shard`.

A parameter that is a `DTensor` already (tensor parallelism) becomes one on the mesh of both: its local part, which is a
plain tensor, is sharded like any other, over the dimensions that come first in that mesh.

Each is made around this rank's rows, which lie in the shard, with a version counter of its own; so a step on the
`DTensor`s is a step on the shard, as it is with other local shards (`fsdp.engine.orig_params`).
"""

from __future__ import annotations

import copy
import math
import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial, wraps
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from fsdp.distributed.dtensor import MeshPart, become, beside, held_part, is_dtensor, joint_mesh, set_local_part
from fsdp.distributed.gather_extension import around, values_of
from fsdp.engine.flat_param import FlatParameter, ParamInfo, attributes_of, give_attributes
from fsdp.engine.layout import Layout, Slot
from fsdp.engine.managed_params import Ignored, is_ours
from fsdp.engine.orig_params import OrigParams
from fsdp.engine.rows_layout import RowsLayout


@cache
def teach_dtensor() -> None:
    """Have `copy.deepcopy` copy `DTensor`s whose local tensor begins inside of its memory, as in state dicts here.

    torch (seen in 2.13) takes them for tensors with memory of their own, which `DTensor`s do not have.
    """
    torchs = DTensor.__deepcopy__

    @wraps(torchs)
    def copied(self: Any, memo: dict[int, Any]) -> Any:
        if id(self) in memo or not self.storage_offset():
            return torchs(self, memo)
        found = memo[id(self)] = self.detach().clone().requires_grad_(self.requires_grad)
        found.grad = copy.deepcopy(self.grad, memo)
        found.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return found

    DTensor.__deepcopy__ = copied  # type: ignore[method-assign]


def data_parallel_mesh(mesh: DeviceMesh, dims: Any) -> DeviceMesh:
    """Collective where several dimensions are one. Return the mesh to shard over, replicas first."""
    known = mesh.mesh_dim_names or ()
    for name in (*dims.shard_names, *dims.replicate_names):
        if name not in known:
            raise ValueError(f"dp_mesh_dims names {name!r}, and the mesh has the dimensions {list(known)}")
    if not dims.shard_names:
        raise NotImplementedError(
            "dp_mesh_dims without `shard` would shard nothing: for replicas alone use torch's "
            "torch.distributed._composable.replicate, or DistributedDataParallel"
        )
    parts = [
        mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names))
        for names in (dims.replicate_names, dims.shard_names)
        if names
    ]
    return parts[0] if len(parts) == 1 else type(mesh)._concatenate(parts)


def take_off(modules: Sequence[nn.Module], mesh: DeviceMesh, dims: set[str]) -> None:
    """Have parameters that are `DTensor`s on all of a mesh be so on its other dimensions alone."""
    named = list(enumerate(mesh.mesh_dim_names or ()))
    kept = [number for number, name in named if name not in dims]
    found: dict[nn.Parameter, nn.Parameter] = {}
    places = [(inner, name) for module in modules for inner in module.modules() for name in inner._parameters]
    for inner, name in places:
        param: Any = inner._parameters[name]
        if param is None or not is_dtensor(param) or is_ours(param) or param.device_mesh != mesh:
            continue
        for number, dim in named:
            if dim in dims and not param.placements[number].is_replicate():
                raise ValueError(
                    f"{name} of a {type(inner).__name__} is {param.placements[number]} along {dim!r}, a dimension for "
                    "data parallelism: it must be Replicate() there"
                )
        if param not in found:
            value = param.detach().to_local()
            if kept:
                rest = mesh[tuple(mesh.mesh_dim_names[number] for number in kept)]  # type: ignore[index]
                placements = [param.placements[number] for number in kept]
                shape, stride = param.shape, param.stride()
                how: Any = {"run_check": False, "shape": shape, "stride": stride}
                value = type(param.data).from_local(value, rest, placements, **how)
            found[param] = nn.Parameter(value, param.requires_grad)
        inner._parameters[name] = found[param]


def placed_elsewhere(
    module: nn.Module, mesh: DeviceMesh, placement_of: Callable[[nn.Parameter], Any], ignored: Ignored
) -> dict[nn.Module, DeviceMesh]:
    """Return the modules inside with parameters that a user's function puts on other meshes, and these meshes."""
    found = {}
    for inner in module.modules():
        for param in inner._parameters.values():
            if param is None or is_ours(param) or ignored.has(inner, param):
                continue
            info = getattr(placement_of(param), "mesh_info", None)  # of torch's ShardPlacementResult
            if info is not None and info.mesh != mesh:
                found[inner] = info.mesh
    return found


def spread_over(mesh: DeviceMesh, slot: Slot, part: MeshPart | None) -> MeshPart:
    """Return the record of a parameter that is sharded over a mesh's last dimension, and replicated over the others.

    Args:
        mesh: of data parallelism.
        slot: of the parameter, or of its local part.
        part: what it is a part of if it is a `DTensor`; its mesh comes last then.
    """
    last: Placement = Shard(slot.dim) if slot.shape else Replicate()
    replicated = [Replicate()] * (mesh.ndim - 1)
    if part is None:
        return MeshPart(mesh, (*replicated, last), slot.shape)
    dims = [number for number in part.sharded_dims if part.placements[number].is_shard(slot.dim)]
    shards = math.prod(map(part.mesh.size, dims))
    if shards > 1:
        last = _StridedShard(slot.dim, split_factor=shards)
    return MeshPart(joint_mesh(slot.name, part, mesh), (*replicated, last, *part.placements), part.shape)


class DTensorParams(OrigParams):
    """This rank's rows of the original parameters of one flat parameter, as `DTensor`s.

    Args:
        flat_param: this rank's shard.
        layout: in which all is in rows.
        rank: this rank.
        places: for each parameter, where it is used.
        mesh: over whose last dimension the rows are spread.
        params: made before, for another flat parameter that these were in; they are to be of this one.
    """

    def __init__(
        self,
        flat_param: FlatParameter,
        layout: Layout,
        rank: int,
        places: Sequence[Sequence[ParamInfo]],
        *,
        mesh: DeviceMesh,
        params: Sequence[nn.Parameter] | None = None,
    ) -> None:
        self.mesh, self._given = mesh, params
        self._slots = layout.slots
        self._parts_before = flat_param.parts
        self._parts = [spread_over(mesh, *one) for one in zip(layout.slots, flat_param.parts, strict=True)]
        if not isinstance(layout, RowsLayout):
            raise TypeError(f"rows need a layout in rows, got {type(layout).__name__}")
        self._shapes = [layout.local_shape(slot, rank) for slot in range(len(layout.slots))]
        self._held: dict[int, Tensor] = {}
        super().__init__(flat_param, layout, rank, places)
        del self._given
        self._versions = self.versions

    @property
    def versions(self) -> tuple[int, ...]:
        return tuple(map(_version_of, self.params))

    @property
    def absent(self) -> list[Tensor]:  # type: ignore[override]
        """Modules see the `DTensor`s themselves."""
        return list(self.params)

    def _new(self, slot: int, layout: Layout, requires_grad: bool) -> nn.Parameter:
        rows = self._rows(slot, self._of(self._flat_param.detach(), slot))
        if slot in self._flat_param.valueless:
            rows = rows.to("meta")
        if self._given is not None:
            self._given[slot].__dict__["owner"] = self._flat_param
            return self._given[slot]  # `alias` has it lie in the new shard
        made = row_parameter(self._flat_param, rows, self._parts[slot], requires_grad, layout.slots[slot].name)
        give_attributes(made, self._flat_param.attributes[slot])
        return made

    def _show(self, slot: int, local: Tensor) -> Tensor:
        rows, param = self._rows(slot, local), self.params[slot]
        return beside(param, rows) if rows.dtype == param.dtype else self._parts[slot].dtensor(rows)

    def _have(self, slot: int, local: Tensor) -> None:
        rows, param = self._rows(slot, local.as_subclass(Tensor)), self.params[slot]
        self._lie_at(slot, rows.to("meta") if param.is_meta else rows)

    def _lie_at(self, slot: int, rows: Tensor) -> None:
        param, shown = self.params[slot], as_shown(self._flat_param, rows)
        self._held[slot] = rows
        if (rows.dtype, rows.device) == (param.dtype, param.device):
            set_local_part(param, shown)
        else:
            become(param, self._parts[slot].dtensor(shown))

    def _replaced(self) -> list[int]:
        held = [param._local_tensor for param in self.params]  # type: ignore[attr-defined]  # `held_part`, asked often
        held = held if self._flat_param.example is None else list(map(values_of, held))
        return [slot for slot, local in enumerate(held) if local is not self._held[slot]]

    def give_memory(self, slots: Iterable[int]) -> None:
        """Have parameters that came from the meta device lie in the shard."""
        versions = list(self._versions)
        for slot in slots:
            self._lie_at(slot, self._rows(slot, self._of(self._flat_param.detach(), slot).as_subclass(Tensor)))
            versions[slot] = self.params[slot]._version
        self._versions = tuple(versions)

    def _flat(self, slot: int, tensor: Tensor) -> Tensor:
        return values_of(held_part(tensor)).detach().reshape(-1)

    def local_shard_of(self, slot: int, value: Tensor) -> Tensor | None:
        if not is_dtensor(value) or MeshPart.of(value) == self._parts_before[slot]:
            return None
        return values_of(self._parts[slot].to_local(self._slots[slot].name, value.detach())).reshape(-1)

    def _rows(self, slot: int, part: Tensor) -> Tensor:
        """A local shard, from where it lies."""
        return part.view(self._shapes[slot])

    def absorb(self) -> list[int]:
        super().absorb()
        # Every rank writes to a DTensor when any does, also those that have no rows of it.
        before, self._versions = self._versions, self.versions
        if before == self._versions:
            return []
        written = (slot for slot, version in enumerate(before) if version != self._versions[slot])
        return [slot for slot in written if not self.params[slot].is_meta]


_version_of = operator.attrgetter("_version")


def as_shown(owner: FlatParameter, rows: Tensor) -> Tensor:
    """Return rows of a shard in the class that its parameter has, if that is one with torch's all-gather extension."""
    return rows if owner.example is None else around(owner.example, rows)


def row_parameter(owner: FlatParameter, rows: Tensor, part: MeshPart, requires_grad: bool, fqn: str) -> nn.Parameter:
    """A parameter around this rank's rows, a view of the shard `owner`.

    An ordinary `DTensor`, since torch's own code asks for the class, with what a `LocalShard` has.
    """
    param = nn.Parameter(part.dtensor(as_shown(owner, rows.as_subclass(Tensor))), requires_grad)
    param.__dict__.update(owner=owner, fqn=fqn, unsharded_shape=part.shape, offset=0)
    itself = weakref.ref(param)
    param.__dict__["__deepcopy__"] = partial(_copied, itself, part)
    param.__dict__["__reduce_ex__"] = partial(_refuse_pickling, fqn)
    return param


def _copied(param: weakref.ref[Any], part: MeshPart, memo: dict[int, Any]) -> nn.Parameter:
    found: Any = param()
    rows = values_of(held_part(found))
    owner = copy.deepcopy(found.owner, memo)
    start = int(rows.storage_offset() - found.owner.storage_offset())
    mine = owner.detach().as_subclass(Tensor).as_strided(rows.shape, rows.stride(), owner.storage_offset() + start)
    copied = memo[id(found)] = row_parameter(owner, mine, part, found.requires_grad, found.fqn)
    give_attributes(copied, attributes_of(found))
    return copied


def _refuse_pickling(fqn: str, protocol: Any) -> Any:
    raise NotImplementedError(
        f"{fqn} is a DTensor, whose mesh is of these processes: a module under fully_shard cannot be pickled. Save it "
        "with fsdp.save, or its state_dict() with torch.distributed.checkpoint; copy it with copy.deepcopy."
    )
