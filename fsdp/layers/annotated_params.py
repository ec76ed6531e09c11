"""Plain parameters with annotations of the `spmd_types` package, which define their placements on a device mesh.

Modules compute with plain tensors, each rank with its part. Under `fully_shard`, optimizers and checkpoints see a
`DTensor` on the whole mesh. A gradient is summed over the dimensions on which the annotation makes it partial. torch's
`fully_shard` (since 2.15) defines this translation; torchtitan uses these annotations.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress, product
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from fsdp.distributed.collectives import communicator
from fsdp.distributed.consensus import from_everyone, numbers_of, require_same
from fsdp.distributed.dtensor import MeshPart, check_placements, is_annotated, is_dtensor


@dataclass(frozen=True)
class AnnotatedPart(MeshPart):
    """The mesh, placements and shape of a plain tensor with an annotation.

    Args:
        grad_placements: the placement of the gradient, for each dimension of the mesh.
    """

    grad_placements: tuple[Placement, ...] = ()

    def shown(self, local: Tensor) -> Tensor:
        return local

    def gradient(self, gradient: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        both = enumerate(zip(self.grad_placements, self.placements, strict=True))
        if not is_dtensor(gradient) and any(dim not in self.data_dims and one != own for dim, (one, own) in both):
            gradient = DTensor.from_local(gradient, self.mesh, self.grad_placements, run_check=False)
        return super().gradient(gradient, dtype)

    def to_local(self, name: str, value: Tensor) -> Tensor:
        is_part = not is_dtensor(value) and value.shape == self.held_of(torch.empty(self.shape, device="meta")).shape
        return value if is_part else super().to_local(name, value)


def annotated_part(name: str, param: Tensor, mesh: DeviceMesh | None, data_dims: Collection[int]) -> MeshPart | None:
    """Return the record of an annotated parameter; None for a parameter without annotation.

    Args:
        name: the parameter's name, for messages.
        mesh: the mesh of all ranks that hold parts of the parameter; None if the user gave no such mesh.
        data_dims: the numbers of the mesh's dimensions for data parallelism.

    Raises:
        ValueError: without a mesh, or if the annotation does not define a placement for each dimension of the mesh.
    """
    if not is_annotated(param):
        return None
    if mesh is None:
        raise ValueError(
            f"{name} has annotations of spmd_types: pass fully_shard the whole mesh of the parameter, and which of its "
            "dimensions are for data parallelism, as in dp_mesh_dims=DataParallelMeshDims(shard='dp')."
        )
    spmd: Any = sys.modules["spmd_types"]
    axes = {spmd.MeshAxis.of(mesh.get_group(dim)): dim for dim in range(mesh.ndim) if mesh.size(dim) > 1}
    annotated = dict(spmd.get_local_type(param)) | _shards(spmd, name, param, axes)
    placements: list[Placement] = [Replicate()] * mesh.ndim
    grad_placements = [Partial() if dim in data_dims else own for dim, own in enumerate(placements)]
    missing = {axis: dim for axis, dim in axes.items() if dim not in data_dims and axis not in annotated}
    apart = tuple(axis for axis, dim in axes.items() if dim in data_dims)
    summed = spmd._mesh_axis.flatten_axes(apart) if apart else None  # private, also used by torch
    for axis, kind in annotated.items():
        dim = axes.get(axis)
        if dim is not None and dim not in data_dims:
            if kind is spmd.P:
                raise ValueError(
                    f"{name} is annotated as P over {axis}: ranks would hold partial sums of its elements, which "
                    "optimizers cannot step. Annotate it as spmd_types.S(dim), R or I."
                )
            placements[dim] = _placement(spmd, name, kind)
            grad_placements[dim] = _placement(spmd, name, kind.backward_type())
        # An axis may also combine multiple dimensions for data parallelism, or be a part of one.
        elif summed is None or not axis <= summed:
            raise ValueError(
                f"{name} is annotated as {kind!r} over {axis}, which is no dimension of the mesh: gradients would not "
                "be summed over it. Pass fully_shard the whole mesh of the parameter."
            )
        elif kind is not spmd.R:
            raise ValueError(
                f"{name} is annotated as {kind!r} over {axis}, a dimension for data parallelism, where only "
                "spmd_types.R is possible: fully_shard sums gradients over it."
            )
    if missing:
        known = mesh.mesh_dim_names or range(mesh.ndim)
        raise ValueError(
            f"{name} has annotations of spmd_types, but none for {[known[dim] for dim in missing.values()]} of the "
            "mesh: annotate it for each dimension that is not in dp_mesh_dims (spmd_types.assert_type)."
        )
    if summed is not None:
        # For type checks of computations, in which the parameter is replicated across data parallelism.
        others = [axis for axis in spmd.current_mesh() or axes if axis <= summed and axis.isorthogonal(*annotated)]
        spmd.assert_type(param, dict.fromkeys(others, spmd.R))
    local = DTensor.from_local(param.detach(), mesh, placements, run_check=False)
    check_placements(name, local)
    return AnnotatedPart(mesh, tuple(placements), local.shape, frozenset(data_dims), tuple(grad_placements))


def with_whole_shapes(parts: Mapping[str, MeshPart | None], local: Mapping[str, Tensor]) -> dict[str, AnnotatedPart]:
    """Return the records of annotated parameters with their whole shapes.

    If ranks do not divide a dimension evenly, their parts have different sizes. Collective over the dimensions of the
    mesh that are not for data parallelism, if a parameter is annotated.

    Raises:
        RuntimeError: on all ranks, if the annotated parameters or the annotations differ between ranks.
        ValueError: on all ranks, if sizes do not match a `DTensor`'s parts, or if a parameter has no annotation.
    """
    annotated = {name: part for name, part in parts.items() if isinstance(part, AnnotatedPart)}
    first = next(iter(annotated.values()), None)
    if first is None:
        return {}
    mesh = first.mesh
    dims = [dim for dim in range(mesh.ndim) if dim not in first.data_dims and mesh.size(dim) > 1]
    if not dims:
        return annotated
    ranks = [communicator(mesh.get_group(dim), torch.device(mesh.device_type)) for dim in dims]
    told = from_everyone(ranks, {name: (repr(part.placements), local[name].shape) for name, part in annotated.items()})
    texts = [", ".join(f"{name} ({len(shape)}-D) {how}" for name, (how, shape) in each.items()) for each in told]
    require_same(ranks, "annotated parameters", [(text, text) for text in texts])
    _refuse_plain(parts, next(iter(annotated)))
    sizes = [comm.world_size for comm in reversed(ranks)]
    places = [dict(zip(reversed(dims), place, strict=True)) for place in product(*map(range, sizes))]
    found = {}
    for name, part in annotated.items():
        shapes = [each[name][1] for each in told]
        whole = found[name] = replace(part, shape=_whole_shape(part, places, shapes))
        wanted = [whole.shape_at([place.get(dim, 0) for dim in range(part.mesh.ndim)]) for place in places]
        wrong = next((number for number, shape in enumerate(shapes) if shape != wanted[number]), None)
        if wrong is not None:
            raise ValueError(
                f"{name} is annotated as a parameter {whole.spread}. Rank {numbers_of(ranks)[wrong]} has a part of "
                f"shape {list(shapes[wrong])} instead of {list(wanted[wrong])}: parts must be equal, or as torch.chunk "
                "returns them."
            )
    return found


def _refuse_plain(parts: Mapping[str, MeshPart | None], annotated: str) -> None:
    for name, part in parts.items():
        if part is None:
            raise ValueError(
                f"{name} has no annotations of spmd_types, unlike {annotated}: its gradient would be summed over the "
                "dimensions for data parallelism only. Annotate it too (spmd_types.assert_type): as R where ranks use "
                "it for different parts of the batch, and as I where they compute the same with it."
            )


def _whole_shape(part: MeshPart, places: Sequence[Mapping[int, int]], shapes: Sequence[torch.Size]) -> torch.Size:
    """Return the shape of all parts together: along each dimension, the sum over the ranks that divide it."""
    sizes = []
    for dim in range(len(shapes[0])):
        over = {number for number in part.sharded_dims if part.placements[number].is_shard(dim)}
        line = [not any(at for number, at in place.items() if number not in over) for place in places]
        sizes.append(sum(shape[dim] for shape in compress(shapes, line)))
    return torch.Size(sizes)


def _shards(spmd: Any, name: str, param: Tensor, axes: Mapping[Any, int]) -> dict[Any, Any]:
    """Return the shardings along each axis from a `PartitionSpec`, which must use mesh dimensions in their order."""
    found: dict[Any, Any] = {}
    spec = spmd.get_partition_spec(param)
    for dim, entry in enumerate(() if spec is None else spmd.normalize_partition_spec(spec)):
        each = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
        numbers = [axes[axis] for axis in each if axis in axes]
        if numbers != sorted(numbers):
            raise NotImplementedError(
                f"{name} is annotated with {spec}: dimension {dim} is not divided in the order of the mesh. Annotate "
                "it in the order of the mesh."
            )
        found |= {axis: spmd.S(dim) for axis in each}
    return found


def _placement(spmd: Any, name: str, kind: Any) -> Placement:
    try:
        found: Placement = spmd.spmd_type_to_dtensor_placement(kind)
    except ValueError as error:
        raise ValueError(f"{name} is annotated as {kind!r}, which is no placement of a DTensor: {error}") from error
    return found
