"""Parameters that are already `DTensor`s: their local parts on this rank, and the conversion back to `DTensor`s.

Tensor parallelism shards parameters over a separate device mesh. The library shards each rank's local part over the
data-parallel ranks, and modules see `DTensor`s around the gathered local parts. All code that depends on `DTensor`s is
in this module. `torch.distributed.tensor` takes a second to import, so it is imported only if a `DTensor` exists.
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
    """Return whether a plain tensor is annotated with its place on a mesh, by the package `spmd_types`."""
    module = sys.modules.get("spmd_types")
    return module is not None and not is_dtensor(tensor) and bool(module.get_local_type(tensor))


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's local part of a `DTensor`, in the same memory; a plain tensor is its own."""
    if is_dtensor(tensor):
        with torch.no_grad():
            tensor = tensor.to_local()  # type: ignore[attr-defined]
    return tensor


def held_part(tensor: Tensor) -> Tensor:
    """The very tensor that a `DTensor` holds, at no cost."""
    return tensor._local_tensor  # type: ignore[attr-defined]  # private, see `set_local_part`


def set_local_part(tensor: Tensor, local: Tensor) -> None:
    """Set the local tensor of a `DTensor` to `local`, without copying it."""
    if is_dtensor(tensor):
        tensor._local_tensor = local  # type: ignore[attr-defined]  # private; no public way (torch 2.11 to 2.15)
    else:
        tensor.data = local


def beside(tensor: Tensor, local: Tensor) -> Tensor:
    """A `DTensor` around another local part of the same shape and dtype, quickly; shares its memory."""
    # private, as `from_local` takes 60 us (torch 2.11 to 2.15); of `__init__`, which does nothing, dynamo makes 10
    made: Tensor = type(tensor).__new__(type(tensor), local, tensor._spec, requires_grad=False)  # type: ignore[attr-defined]
    return made


def become(tensor: Tensor, other: Tensor) -> None:
    """Turn a `DTensor` into another `DTensor`, of any dtype and device, without changing its object identity."""
    with torch.no_grad():
        if tensor.is_meta is other.is_meta:
            tensor.data = other
        else:  # which no `.data` crosses; private, what torch.utils.swap_tensors does (torch 2.11 to 2.15)
            torch._C._swap_tensor_impl(tensor, other.detach().requires_grad_(tensor.requires_grad))
    for name in ("_local_tensor", "_spec"):  # private; swap_tensors refuses what is held weakly (torch 2.11 to 2.15)
        setattr(tensor, name, getattr(other, name))


def arrived(tensor: Tensor) -> Tensor:
    """A tensor that may be the result of a collective of `DTensor`'s in flight, when it is there."""
    return tensor.wait() if _is_in_flight(tensor) else tensor  # type: ignore[attr-defined]


def memory_of(tensor: Tensor) -> int:
    """The address of the storage that a tensor lies in; 0 if it lies in none, and so in none of ours."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # private, as is all of it (torch 2.11 to 2.15)
        tensor = torch._C._functorch.get_unwrapped(tensor)
    tensor = local_part(tensor)
    if _is_in_flight(tensor) or tensor.layout is not torch.strided:
        return 0
    if hasattr(type(tensor), "__tensor_flatten__"):  # a class around others
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
    dim: int  # of the tensor
    total: int  # its size before it is sharded so
    each: int  # the size of a part; of the last ones less is left, or nothing
    place: int  # the number of this rank's part, by its coordinate in the mesh, in which ranks may have any order

    def range(self, place: int) -> tuple[int, int]:
        """Return the first element of a part, and its length."""
        start = min(place * self.each, self.total)
        return start, min(self.each, self.total - start)


@dataclass(frozen=True)
class MeshPart:
    """The mesh, placements and shape of a `DTensor`, without its local part."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]  # for each dimension of the mesh
    shape: torch.Size  # of the unsharded tensor
    # The dimensions for data parallelism, along which a gradient is still to be summed: that is a reduce-scatter.
    data_dims: frozenset[int] = field(default=frozenset(), compare=False)

    @classmethod
    def of(cls, tensor: Tensor) -> MeshPart | None:
        """None for a plain tensor."""
        if not is_dtensor(tensor):
            return None
        return cls(tensor.device_mesh, tuple(tensor.placements), tensor.shape)  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, Any]) -> MeshPart:
        return self  # the ranks are the same ones

    @cached_property
    def sharded_dims(self) -> tuple[int, ...]:
        """The dimensions of the mesh along which ranks hold different elements, in the order in which they shard.

        A `_StridedShard` divides the parts of the dimensions to its right, so it follows them.
        """
        dims = [number for number, placement in enumerate(self.placements) if hasattr(placement, "dim")]
        strided = [number for number in dims if not self.placements[number].is_shard()]
        return (*(number for number in dims if number not in strided), *reversed(strided))

    @cached_property
    def shardings(self) -> tuple[DimSharding, ...]:
        """The shardings, in the order of `sharded_dims`: each divides the part that the previous shardings give."""
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
        """A key that parameters of a flat parameter share; it identifies the ranks that hold the same elements."""
        return self.mesh, self.sharded_dims

    @property
    def spread(self) -> str:
        """Shape and placements as text, the same on all ranks of the mesh."""
        names = self.mesh.mesh_dim_names or [f"dim {number}" for number in range(self.mesh.ndim)]
        dims = enumerate(zip(self.placements, names, strict=True))
        over = [f"{placement!r} over {name} of {self.mesh.size(number)}" for number, (placement, name) in dims]
        return f"of {list(self.shape)}, {', '.join(over)}"

    def __str__(self) -> str:
        # With this rank's place in the mesh: equal parts of other places must not be taken for the same.
        place = enumerate(self.mesh.get_coordinate() or ())
        return f"{self.spread}, at {[number for dim, number in place if dim not in self.data_dims]}"

    def dtensor(self, local: Tensor) -> DTensor:
        """A `DTensor` around a local part; shares its memory, and has no graph."""
        from torch.distributed.tensor import DTensor

        made: DTensor = DTensor.__new__(DTensor, local.detach(), self._spec(local.dtype), requires_grad=False)
        return made

    def shown(self, local: Tensor) -> Tensor:
        """Return the tensor that modules compute with, around the unsharded local part."""
        return self.dtensor(local)

    @cached_property
    def _placements_text(self) -> str:
        return repr(self.placements)

    def _spec(self, dtype: torch.dtype) -> DTensorSpec:
        """The specification of a contiguous `DTensor`, which equal parameters share, as results of operators do."""
        from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta  # private, see `beside`

        # Meshes of ended process groups may be equal. Hashes of placements fail while the interpreter shuts down.
        key = (id(self.mesh), self._placements_text, self.shape, dtype)
        spec = _specs.get(key)
        if spec is None:
            meta = TensorMeta(self.shape, torch.empty(self.shape, device="meta").stride(), dtype)
            spec = _specs[key] = DTensorSpec(self.mesh, self.placements, tensor_meta=meta)
        return spec

    def gradient(self, gradient: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return this rank's part of a gradient. Collective over the mesh if the gradient is not yet summed over it.

        Args:
            dtype: in which it is summed, if that is wider than its own.
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
        """This rank's part of an unsharded value, sharing its memory, or of a `DTensor` of whatever placements.

        Collective over the value's mesh if it is a `DTensor` of other placements. Another shape is a ValueError.
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
        """This rank's part of an unsharded, plain value; shares its memory."""
        for sharding in self.shardings:
            value = value.narrow(sharding.dim, *sharding.range(sharding.place))
        return value


_specs: weakref.WeakValueDictionary[Any, DTensorSpec] = weakref.WeakValueDictionary()  # as long as they are in use


def full_tensor(tensor: Tensor) -> Tensor:
    """Collective over the mesh. Return a `DTensor` as a plain tensor, which may share memory, or the plain tensor."""
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
    """Return a copy on a mesh of CPUs with the same process groups.

    torch's all-gather of a `DTensor` on CUDA over gloo ends the process with SIGSEGV (torch 2.11, see
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
    """Return this rank's part of an unsharded parameter's gradient, to be modified in place; None without a gradient.

    Collective over the parameter's mesh if the parameter is a `DTensor` and its gradient is not yet summed over the
    mesh.
    """
    grad, part = param.grad, MeshPart.of(param)
    if grad is not None and part is not None:
        if tuple(grad.placements) != part.placements:  # type: ignore[attr-defined]
            param.grad = grad = part.dtensor(part.gradient(grad))
        return arrived(local_part(grad))
    return grad


def refuse_part_of_others(name: str, value: Any) -> None:
    """Raise RuntimeError for a `DTensor` of a file of another rank: torch loads it with its mesh, as of that rank."""
    if not is_dtensor(value) or (place := value.device_mesh.get_coordinate()) is None:
        return
    ranks = value.device_mesh.mesh
    if (saved_by := int(ranks[tuple(place)])) != (rank := dist.get_rank()):
        raise RuntimeError(
            f"{name} is a DTensor that was saved by rank {saved_by}, and this is rank {rank}, which has another part. "
            "Let each rank load the file that it has saved itself; or save with fsdp.save or "
            "torch.distributed.checkpoint, and load with the same."
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
            f"{name} is a DTensor on {part.mesh}, and rank {dist.get_rank()} is not in that mesh: it has no part of it."
        )
    for number in part.sharded_dims:
        if bool((part.mesh.mesh.movedim(number, -1).diff() < 0).any()):
            raise ValueError(
                f"{name} is a DTensor on {part.mesh}, along which ranks do not rise: torch shards tensors in the order "
                "of the mesh and puts them together in that of the ranks. Make the mesh with rising ranks."
            )


def check_ranks(name: str, param: Tensor, group: Group, device: torch.device) -> None:
    """Raise ValueError if a parameter is spread already over ranks of `group`, or is for another kind of device."""
    part = MeshPart.of(param)
    if part is None:
        return
    if part.mesh.device_type != device.type:
        raise ValueError(
            f"{name} is a DTensor on a mesh of {part.mesh.device_type} and would be computed with on {device}. Make "
            f"the mesh for {device.type} (init_device_mesh), or compute on {part.mesh.device_type}."
        )
    both = set(ranks_of(group)) & set(part.mesh.mesh.flatten().tolist()) - {dist.get_rank()}
    if both:
        raise ValueError(
            f"{name} is a DTensor ({part}) on ranks {part.mesh.mesh.tolist()}, and it is to be sharded over "
            f"{sorted(both)} of them as well: what is spread for tensor parallelism cannot be sharded over the same "
            'ranks. Shard over the data-parallel dimension of the mesh, mesh["dp"], and have DTensors on the other '
            'dimensions only, mesh["tp"].'
        )


def joint_mesh(name: str, part: MeshPart, mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh of the ranks over which a `DTensor` is spread when its local part is sharded over `mesh`.

    Raises:
        ValueError: if the `DTensor` is already on some of these ranks, or the meshes have different roots.
    """
    try:
        return mesh._concatenate([mesh, part.mesh])  # private, as in torch's `fully_shard` (torch 2.11 to 2.15)
    except (RuntimeError, ValueError, TypeError) as error:  # one root, dimensions of their own, names
        raise ValueError(
            f"{name} is a DTensor ({part}), and its local parts cannot be sharded over {mesh}, which is no other "
            'dimension of the same mesh. Make one mesh of both, init_device_mesh(..., mesh_dim_names=("dp", "tp")), '
            'have DTensors on mesh["tp"], and pass mesh=mesh["dp"] to fully_shard.'
        ) from error


def check_device(name: str, parts: Iterable[MeshPart | None], device: torch.device) -> None:
    """Raise ValueError if gathered parts would be on another kind of device than the mesh."""
    for part in parts:
        if part is not None and part.mesh.device_type != device.type:
            raise ValueError(
                f"{name} has DTensors on a mesh of {part.mesh.device_type}: the module cannot be moved to {device}. "
                f"Build it on a mesh of {device.type} instead."
            )


@dataclass(frozen=True)
class MeshGroups:
    """The groups of ranks that a model's `DTensor`s are spread over: together, the tensor-parallel ranks.

    Attributes:
        groups: by their ranks.
        inside: those among the ranks of data parallelism, as expert parallelism has them; not in `groups`.
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
                        f"DTensors on meshes that overlap in part, over ranks {list(ranks)} and {list(other)}: their "
                        "gradients have no common norm yet. Take both meshes from one init_device_mesh."
                    )
        inside = frozenset(ranks for ranks in groups if set(ranks) <= set(data_ranks))
        return cls({ranks: group for ranks, group in groups.items() if ranks not in inside}, inside)

    def copies(self, part: MeshPart | None) -> int:
        """On how many of the tensor-parallel ranks each element of a parameter is found."""
        own = groups_of(part.mesh) if part is not None else {}
        spread = {own[dim][0] for dim in part.sharded_dims} if part is not None else set()
        within = {ranks for ranks, _ in own.values() if ranks in self.inside}
        return math.prod(len(ranks) for ranks in self.groups.keys() | within if ranks not in spread)

    def inside_of(self, part: MeshPart | None) -> int:
        """Return over how many of the data-parallel ranks a `DTensor` is spread, or replicated, by its own mesh."""
        own = groups_of(part.mesh).values() if part is not None else ()
        return math.prod(len(ranks) for ranks, _ in own if ranks in self.inside)


def groups_of(mesh: DeviceMesh) -> dict[int, tuple[tuple[int, ...], Any]]:
    """Return for each dimension of a mesh this rank's group, with its ranks."""
    groups = {number: mesh.get_group(number) for number in range(mesh.ndim)}
    return {number: (tuple(sorted(dist.get_process_group_ranks(group))), group) for number, group in groups.items()}


def is_on_many_ranks(parts: Iterable[MeshPart | None]) -> bool:
    """Return whether other ranks hold the same parameters, or other parts of them."""
    return any(part is not None and part.mesh.size() > 1 for part in parts)


def missing_ranks(parts: Iterable[MeshPart | None], group: Group) -> list[int]:
    """Return the ranks outside `group` that hold parts of the same parameters as this rank."""
    ranks = {rank for part in parts if part is not None for rank in part.mesh.mesh.flatten().tolist()}
    return sorted(ranks - set(ranks_of(group)))


def spread_loaded(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Hook: replace unsharded tensors for `DTensor`s by this rank's part; torch reports tensors that do not fit."""
    for name, own in (*module._parameters.items(), *module._buffers.items()):
        value, part = state_dict.get(prefix + name), None if own is None else MeshPart.of(own)
        if part is not None and isinstance(value, Tensor) and value.shape == part.shape:
            local = part.to_local(prefix + name, value)
            state_dict[prefix + name] = part.dtensor(local if local.is_meta else local.to(part.mesh.device_type))
