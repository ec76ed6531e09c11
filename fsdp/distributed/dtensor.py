"""Parameters that are already `DTensor`s: their local parts on this rank, and the conversion back to `DTensor`s.

Tensor parallelism shards parameters over a separate device mesh. The library shards each rank's local part across the
data-parallel ranks, and modules see `DTensor`s around the gathered local parts. `torch.distributed.tensor` takes a
second to import, so this module imports it only if a `DTensor` exists.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp.distributed.communicator import Group, backend_names, ranks_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor.placement_types import Placement


def is_dtensor(value: Any) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def is_annotated(tensor: Tensor) -> bool:
    """Return whether a plain tensor has placements on a mesh, as annotated by the package `spmd_types`."""
    module = sys.modules.get("spmd_types")
    return module is not None and not is_dtensor(tensor) and bool(module.get_local_type(tensor))


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's local part of a `DTensor`, in the same memory; return a plain tensor unchanged."""
    if is_dtensor(tensor):
        with torch.no_grad():
            tensor = tensor.to_local()  # type: ignore[attr-defined]
    return tensor


def held_part(tensor: Tensor) -> Tensor:
    """Return the local tensor object of a `DTensor`, without a call of torch."""
    return tensor._local_tensor  # type: ignore[attr-defined]  # private, see `set_local_part`


def set_local_part(tensor: Tensor, local: Tensor) -> None:
    """Set the local tensor of a `DTensor`, or the data of a plain tensor, to `local` without a copy."""
    if is_dtensor(tensor):
        tensor._local_tensor = local  # type: ignore[attr-defined]  # private; no public way (torch 2.11 to 2.15)
    else:
        tensor.data = local


def beside(tensor: Tensor, local: Tensor) -> Tensor:
    """Return a `DTensor` like `tensor` around another local part of the same shape and dtype, in the same memory."""
    # private: `from_local` takes 60 us (torch 2.11 to 2.15). `__init__` does nothing, but dynamo makes it take 10 us.
    made: Tensor = type(tensor).__new__(type(tensor), local, tensor._spec, requires_grad=False)  # type: ignore[attr-defined]
    return made


def become(tensor: Tensor, other: Tensor) -> None:
    """Turn a `DTensor` into another `DTensor`, of any dtype and device, without changing its object identity."""
    with torch.no_grad():
        if tensor.is_meta is other.is_meta:
            tensor.data = other
        else:  # not possible with `.data`; private, as in torch.utils.swap_tensors (torch 2.11 to 2.15)
            torch._C._swap_tensor_impl(tensor, other.detach().requires_grad_(tensor.requires_grad))
    for name in ("_local_tensor", "_spec"):  # private; swap_tensors rejects weak references (torch 2.11 to 2.15)
        setattr(tensor, name, getattr(other, name))


def arrived(tensor: Tensor) -> Tensor:
    """Wait for a tensor if it is the result of a `DTensor` collective in flight, and return it."""
    return tensor.wait() if _is_in_flight(tensor) else tensor  # type: ignore[attr-defined]


def memory_of(tensor: Tensor) -> int:
    """Return the address of a tensor's storage; 0 without a strided storage, or if the tensor is in flight."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # private, like all of functorch (2.11 to 2.15)
        tensor = torch._C._functorch.get_unwrapped(tensor)
    tensor = local_part(tensor)
    if _is_in_flight(tensor) or tensor.layout is not torch.strided:
        return 0
    if hasattr(type(tensor), "__tensor_flatten__"):  # a subclass with inner tensors
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        return memory_of(getattr(tensor, names[0])) if names else 0
    return tensor.untyped_storage().data_ptr()


def _is_in_flight(tensor: Tensor) -> bool:
    module = sys.modules.get("torch.distributed._functional_collectives")
    return module is not None and isinstance(tensor, module.AsyncCollectiveTensor)


@dataclass(frozen=True)
class DimSharding:
    """The sharding of a tensor along a mesh dimension; outer mesh dimensions may have divided the tensor already."""

    mesh_dim: int
    dim: int  # the sharded dimension of the tensor
    total: int  # the size of this dimension before this sharding
    each: int  # the size of a part; the last parts may be smaller or empty
    place: int  # the index of this rank's part: its coordinate in the mesh, whose ranks may be in any order

    def range(self, place: int) -> tuple[int, int]:
        """Return the first element of a part, and its length."""
        start = min(place * self.each, self.total)
        return start, min(self.each, self.total - start)


@dataclass(frozen=True)
class MeshPart:
    """The mesh, placements and shape of a `DTensor`, without its local part."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]  # one for each dimension of the mesh
    shape: torch.Size  # the shape of the unsharded tensor
    # The data-parallel dimensions of the mesh. The library's reduce-scatter sums gradients along these dimensions.
    data_dims: frozenset[int] = field(default=frozenset(), compare=False)

    @classmethod
    def of(cls, tensor: Tensor) -> MeshPart | None:
        """Return the part of a `DTensor`; None for a plain tensor."""
        if not is_dtensor(tensor):
            return None
        return cls(tensor.device_mesh, tuple(tensor.placements), tensor.shape)  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, Any]) -> MeshPart:
        return self  # copies use the same ranks

    @cached_property
    def sharded_dims(self) -> tuple[int, ...]:
        """The mesh dimensions along which ranks hold different elements, in the order of sharding.

        A `_StridedShard` divides the parts of the mesh dimensions to its right, so these dimensions are first.
        """
        dims = [number for number, placement in enumerate(self.placements) if hasattr(placement, "dim")]
        strided = [number for number in dims if not self.placements[number].is_shard()]
        return (*(number for number in dims if number not in strided), *reversed(strided))

    @cached_property
    def shardings(self) -> tuple[DimSharding, ...]:
        """The shardings in the order of `sharded_dims`. Each sharding divides the part of the previous shardings."""
        return self._shardings_at(self.mesh.get_coordinate() or ())

    def _shardings_at(self, place: Sequence[int]) -> tuple[DimSharding, ...]:
        sizes, found = list(self.shape), []
        for number in self.sharded_dims:
            dim = self.placements[number].dim  # type: ignore[attr-defined]
            sharding = DimSharding(number, dim, sizes[dim], -(-sizes[dim] // self.mesh.size(number)), place[number])
            sizes[dim] = sharding.range(sharding.place)[1]
            found.append(sharding)
        return tuple(found)

    def shape_at(self, place: Sequence[int]) -> torch.Size:
        """Return the shape of the local part of a rank with these coordinates in the mesh."""
        sizes = dict(enumerate(self.shape))
        sizes |= {sharding.dim: sharding.range(sharding.place)[1] for sharding in self._shardings_at(place)}
        return torch.Size(sizes.values())

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The first index of the local part along each dimension of the unsharded tensor."""
        found = [0] * len(self.shape)
        for sharding in self.shardings:
            found[sharding.dim] += sharding.range(sharding.place)[0]
        return tuple(found)

    @property
    def kind(self) -> Hashable:
        """A key that must be equal for all parameters of a flat parameter: the mesh and its sharded dimensions."""
        return self.mesh, self.sharded_dims

    @property
    def spread(self) -> str:
        """The shape and placements as text, the same on all ranks of the mesh."""
        names = self.mesh.mesh_dim_names or [f"dim {number}" for number in range(self.mesh.ndim)]
        dims = enumerate(zip(self.placements, names, strict=True))
        over = [f"{placement!r} over {name} of {self.mesh.size(number)}" for number, (placement, name) in dims]
        return f"of {list(self.shape)}, {', '.join(over)}"

    def __str__(self) -> str:
        # Contains this rank's coordinates in the mesh, to distinguish parts on different ranks.
        place = enumerate(self.mesh.get_coordinate() or ())
        return f"{self.spread}, at {[number for dim, number in place if dim not in self.data_dims]}"

    def dtensor(self, local: Tensor) -> DTensor:
        """Return a `DTensor` around a local part, in the same memory and without a graph."""
        from torch.distributed.tensor import DTensor

        made: DTensor = DTensor.__new__(DTensor, local.detach(), self._spec(local.dtype), requires_grad=False)
        return made

    def shown(self, local: Tensor) -> Tensor:
        """Return the tensor for computation in modules, around the unsharded local part."""
        return self.dtensor(local)

    @cached_property
    def _placements_text(self) -> str:
        return repr(self.placements)

    def _spec(self, dtype: torch.dtype) -> DTensorSpec:
        """Return the specification of a contiguous `DTensor`; equal parameters share a single object."""
        from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta  # private, see `beside`

        # Meshes of destroyed groups may compare equal. Hashes of placements fail during interpreter shutdown.
        key = (id(self.mesh), self._placements_text, self.shape, dtype)
        spec = _specs.get(key)
        if spec is None:
            meta = TensorMeta(self.shape, torch.empty(self.shape, device="meta").stride(), dtype)
            spec = _specs[key] = DTensorSpec(self.mesh, self.placements, tensor_meta=meta)
        return spec

    def gradient(self, gradient: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return this rank's part of a gradient. Collective over the mesh if the gradient's placements differ.

        Args:
            gradient: a plain local gradient, which is returned unchanged, or a `DTensor`.
            dtype: the dtype of the sum, if wider than the gradient's dtype.
        """
        if not is_dtensor(gradient):
            return gradient
        found: Sequence[Placement] = gradient.placements  # type: ignore[attr-defined]
        both = enumerate(zip(found, self.placements, strict=True))
        wanted = [one if dim in self.data_dims and not one.is_shard() else own for dim, (one, own) in both]
        if wanted != list(found):
            with torch.no_grad():
                if dtype is not None:
                    gradient = gradient.to(torch.promote_types(dtype, gradient.dtype))
                gradient = gradient.redistribute(placements=wanted)  # type: ignore[attr-defined]
        return arrived(local_part(gradient))

    def to_local(self, name: str, value: Tensor) -> Tensor:
        """Return this rank's part of an unsharded value, in the same memory, or of a `DTensor` with any placements.

        Collective over the value's mesh for a `DTensor` with different placements. Raises ValueError for another shape.
        """
        if value.shape != self.shape:
            raise ValueError(f"{name}: expected shape {tuple(self.shape)}, got {tuple(value.shape)}")
        if is_dtensor(value):
            refuse_part_of_others(name, value)
            if MeshPart.of(value) == self:
                return arrived(local_part(value))
            value = full_tensor(value)
        return self.held_of(value)

    def held_of(self, value: Tensor) -> Tensor:
        """Return this rank's part of an unsharded plain tensor, in the same memory."""
        for sharding in self.shardings:
            value = value.narrow(sharding.dim, *sharding.range(sharding.place))
        return value


_specs: weakref.WeakValueDictionary[Any, DTensorSpec] = weakref.WeakValueDictionary()  # the specifications in use


def full_tensor(tensor: Tensor) -> Tensor:
    """Collective over the mesh. Return a `DTensor` as a plain tensor, maybe in the same memory; or a plain tensor."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        found, device = cast("DTensor", tensor), tensor.device
        if device.type != "cpu" and any(
            backend_names(group).get(device.type) == "gloo" for group in found.device_mesh.get_all_groups()
        ):
            found = _in_host_memory(found)
        return arrived(found.full_tensor()).to(device)


def _in_host_memory(tensor: DTensor) -> DTensor:
    """Return a copy on a CPU mesh with the same process groups.

    Otherwise, torch's all-gather of a `DTensor` on CUDA over gloo ends the process with SIGSEGV (torch 2.11, see
    https://github.com/pytorch/pytorch/issues/152645).
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    mesh, local = tensor.device_mesh, local_part(tensor).cpu()
    names = mesh.mesh_dim_names or tuple(f"dim{number}" for number in range(mesh.ndim))
    host = DeviceMesh.from_group(mesh.get_all_groups(), "cpu", mesh=mesh.mesh, mesh_dim_names=names)
    return DTensor.from_local(
        local, host, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def settled_gradient(param: Tensor) -> Tensor | None:
    """Return this rank's part of an unsharded parameter's gradient, for in-place changes; None without a gradient.

    Collective over the parameter's mesh if the parameter is a `DTensor` and the placements of its gradient differ.
    """
    grad, part = param.grad, MeshPart.of(param)
    if grad is not None and part is not None:
        if tuple(grad.placements) != part.placements:  # type: ignore[attr-defined]
            param.grad = grad = part.dtensor(part.gradient(grad))
        return arrived(local_part(grad))
    return grad


def refuse_part_of_others(name: str, value: Any) -> None:
    """Raise RuntimeError for a `DTensor` from the file of another rank, whose coordinates are in the mesh."""
    if not is_dtensor(value) or (place := value.device_mesh.get_coordinate()) is None:
        return
    ranks = value.device_mesh.mesh
    if (saved_by := int(ranks[tuple(place)])) != (rank := dist.get_rank()):
        raise RuntimeError(
            f"{name} is a DTensor that was saved by rank {saved_by}, but this is rank {rank}, which has another part. "
            "Load on each rank the file that this rank saved; or use fsdp.save and fsdp.load, or "
            "torch.distributed.checkpoint."
        )


def check_placements(name: str, param: Tensor) -> None:
    """Raise TypeError or ValueError for a `DTensor` with a local part that cannot be flattened."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    part = MeshPart.of(param)
    if part is None:
        return
    if type(param) is not DTensor or any(type(placement) not in (Shard, Replicate) for placement in part.placements):
        raise TypeError(
            f"{name} is a {type(param).__name__} with placements {list(part.placements)}: only DTensors of Shard and "
            "Replicate can be flattened. Redistribute it before sharding."
        )
    if part.mesh.get_coordinate() is None:
        raise ValueError(
            f"{name} is a DTensor on {part.mesh}, but rank {dist.get_rank()} is not in that mesh: shard only on the "
            "mesh's ranks."
        )
    for number in part.sharded_dims:
        if bool((part.mesh.mesh.movedim(number, -1).diff() < 0).any()):
            raise ValueError(
                f"{name} is a DTensor on {part.mesh}, whose ranks are not in ascending order: torch shards tensors in "
                "the order of the mesh, but gathers them in the order of ranks. Create the mesh with ascending ranks."
            )


def check_ranks(name: str, param: Tensor, group: Group, device: torch.device) -> None:
    """Raise ValueError if the mesh of a `DTensor` contains other ranks of `group`, or uses another device type."""
    part = MeshPart.of(param)
    if part is None:
        return
    if part.mesh.device_type != device.type:
        raise ValueError(
            f"{name} is a DTensor on a mesh of {part.mesh.device_type} but the module computes on {device}. Create the "
            f"mesh for {device.type} (init_device_mesh), or compute on {part.mesh.device_type}."
        )
    both = set(ranks_of(group)) & set(part.mesh.mesh.flatten().tolist()) - {dist.get_rank()}
    if both:
        raise ValueError(
            f"{name} is a DTensor ({part}) on ranks {part.mesh.mesh.tolist()}, and it is to be sharded over "
            f"{sorted(both)} of them as well: tensor parallelism and sharding must use different dimensions of a mesh. "
            'Shard over the data-parallel dimension, mesh["dp"], and use DTensors on the other dimensions only, '
            'mesh["tp"].'
        )


def joint_mesh(name: str, part: MeshPart, mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh of all ranks of a `DTensor` whose local part is sharded over `mesh`.

    Raises:
        ValueError: if the `DTensor` is already on some ranks of `mesh`, or if the meshes have different roots.
    """
    try:
        return mesh._concatenate([mesh, part.mesh])  # private, as in torch's `fully_shard` (torch 2.11 to 2.15)
    except (RuntimeError, ValueError, TypeError) as error:  # requires a common root, separate dimensions, and names
        raise ValueError(
            f"{name} is a DTensor ({part}), and its local parts cannot be sharded over {mesh}, which is not another "
            'dimension of the same mesh. Create one mesh of both, init_device_mesh(..., mesh_dim_names=("dp", "tp")), '
            'use mesh["tp"] for DTensors, and pass mesh=mesh["dp"] to fully_shard.'
        ) from error


def check_device(name: str, parts: Iterable[MeshPart | None], device: torch.device) -> None:
    """Raise ValueError if the device type of gathered parts would differ from the device type of the mesh."""
    for part in parts:
        if part is not None and part.mesh.device_type != device.type:
            raise ValueError(
                f"{name} has DTensors on a mesh of {part.mesh.device_type}: the module cannot be moved to {device}. "
                f"Build it on a mesh of {device.type} instead."
            )


@dataclass(frozen=True)
class MeshGroups:
    """The process groups of a model's `DTensor`s, which together contain the tensor-parallel ranks.

    Attributes:
        groups: the groups by ranks.
        inside: the ranks of groups within the data-parallel ranks, as in expert parallelism; not in `groups`.
    """

    groups: dict[tuple[int, ...], Any]
    inside: frozenset[tuple[int, ...]]

    @classmethod
    def of(cls, parts: Iterable[MeshPart | None], data_ranks: Collection[int]) -> MeshGroups:
        """Return the groups of the given parameters. Two different groups may have at most a single rank in common."""
        groups: dict[tuple[int, ...], Any] = {}
        for mesh, data_dims in {(part.mesh, part.data_dims): None for part in parts if part is not None}:
            found = groups_of(mesh).items()
            groups |= {ranks: group for dim, (ranks, group) in found if len(ranks) > 1 and dim not in data_dims}
        for ranks in groups:
            for other in groups:
                if ranks != other and len(set(ranks) & set(other)) > 1:
                    raise NotImplementedError(
                        f"DTensors on meshes that overlap in part, over ranks {list(ranks)} and {list(other)}: the "
                        "norm of their gradients is not supported yet. Create both meshes with one init_device_mesh."
                    )
        inside = frozenset(ranks for ranks in groups if set(ranks) <= set(data_ranks))
        return cls({ranks: group for ranks, group in groups.items() if ranks not in inside}, inside)

    def copies(self, part: MeshPart | None) -> int:
        """Return the number of tensor-parallel ranks that hold each element of a parameter."""
        own = groups_of(part.mesh) if part is not None else {}
        spread = {own[dim][0] for dim in part.sharded_dims} if part is not None else set()
        within = {ranks for ranks, _ in own.values() if ranks in self.inside}
        return math.prod(len(ranks) for ranks in self.groups.keys() | within if ranks not in spread)

    def inside_of(self, part: MeshPart | None) -> int:
        """Return the number of data-parallel ranks over which a `DTensor`'s mesh shards or replicates the tensor."""
        own = groups_of(part.mesh).values() if part is not None else ()
        return math.prod(len(ranks) for ranks, _ in own if ranks in self.inside)


def groups_of(mesh: DeviceMesh) -> dict[int, tuple[tuple[int, ...], Any]]:
    """Return the sorted ranks and the process group of this rank for each dimension of a mesh."""
    groups = {number: mesh.get_group(number) for number in range(mesh.ndim)}
    return {number: (tuple(sorted(dist.get_process_group_ranks(group))), group) for number, group in groups.items()}


def is_on_many_ranks(parts: Iterable[MeshPart | None]) -> bool:
    """Return whether other ranks hold the same parameters, or other parts of them."""
    return any(part is not None and part.mesh.size() > 1 for part in parts)


def missing_ranks(parts: Iterable[MeshPart | None], group: Group) -> list[int]:
    """Return the ranks outside `group` with parts of the same parameters as this rank."""
    ranks = {rank for part in parts if part is not None for rank in part.mesh.mesh.flatten().tolist()}
    return sorted(ranks - set(ranks_of(group)))


def spread_loaded(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Hook: replace unsharded tensors for `DTensor`s by this rank's part; torch reports tensors of other shapes."""
    for name, own in (*module._parameters.items(), *module._buffers.items()):
        value, part = state_dict.get(prefix + name), None if own is None else MeshPart.of(own)
        if part is not None and isinstance(value, Tensor) and value.shape == part.shape:
            local = part.to_local(prefix + name, value)
            state_dict[prefix + name] = part.dtensor(local if local.is_meta else local.to(part.mesh.device_type))
