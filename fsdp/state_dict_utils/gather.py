"""Gather a `DTensor` into a plain tensor with minimal memory.

`DTensor.full_tensor` (torch 2.11 to 2.15) pads uneven shards and keeps the padding in the result's storage, where
`torch.save` also writes it. The method holds up to three unsharded tensors on every rank, even if the rank does not
need the result. The method fails for dtypes that the backend does not support, and uses the order of ranks instead of
the order of the mesh. This module sends each part as bytes directly to the ranks that need the result.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp.distributed.collectives import Communicator, communicator
from fsdp.distributed.communicator import Group
from fsdp.distributed.devices import byte_view
from fsdp.distributed.dtensor import DimSharding, MeshPart, arrived, local_part

_WHAT = "the gather of a state dict"


class Gathering:
    """The gather of a tree for the ranks of the group in `ranks_only`, or for all ranks if it is empty."""

    def __init__(self, group: Group | None, ranks_only: Collection[int]) -> None:
        rank, size = (group.rank(), group.size()) if group is not None else (0, 1)
        for each in ranks_only:
            if not 0 <= each < size:
                raise ValueError(f"ranks_only={tuple(ranks_only)}: there is no rank {each}, only 0 to {size - 1}")
        self._ranks_only = tuple(sorted(set(ranks_only)))
        self.is_wanted = not ranks_only or rank in ranks_only
        members = dist.get_process_group_ranks(group) if ranks_only and group is not None else []  # type: ignore[arg-type]
        self._wants = {member: number in ranks_only for number, member in enumerate(members)}

    def ways(self, tensors: Iterable[Tensor]) -> list[tuple[Communicator, str]]:
        """Return a communicator for each dimension of these tensors' meshes.

        Each has a description of the gather of the mesh, which must be equal on all ranks of the communicator.
        """
        found: dict[Any, list[str]] = {}
        for tensor in tensors:
            part = MeshPart.of(tensor)
            if part is not None and part.mesh.get_coordinate() is not None:
                found.setdefault(part.mesh, []).append(f"{tuple(tensor.shape)} {tensor.dtype} {part.placements}")
        return [
            (communicator(mesh.get_group(dim), torch.device(mesh.device_type)), self._described(kinds))
            for mesh, kinds in found.items()
            for dim in range(mesh.ndim)
        ]

    def _described(self, kinds: list[str]) -> str:
        digest = hashlib.sha256(repr(kinds).encode()).hexdigest()
        return f"{self._ranks_only} and {digest[:8]}"

    def whole(self, tensor: Tensor) -> Tensor | None:
        """Collective over the tensor's mesh. Return the unsharded tensor, or None if it is not needed.

        The result is on the local part's device. A plain tensor is returned unchanged. The storage of the result
        contains only its elements, unless it shares the memory of `tensor`.
        """
        tensor = tensor.detach()
        part = MeshPart.of(tensor)
        if part is None:
            return tensor if self.is_wanted else None
        home = local_part(tensor).device
        if home.type != part.mesh.device_type:  # offloaded: only tensors on the mesh's device can be sent
            tensor = tensor.to(part.mesh.device_type)
        if any(placement.is_partial() for placement in part.placements):
            from torch.distributed.tensor import Replicate

            placements = tuple(Replicate() if each.is_partial() else each for each in part.placements)
            tensor = tensor.redistribute(placements=placements)  # type: ignore[attr-defined]
            part = MeshPart(part.mesh, placements, part.shape)
        full = self._put_together(arrived(local_part(tensor)), part)
        return full.to(home) if self.is_wanted and full is not None else None

    def _put_together(self, local: Tensor, part: MeshPart) -> Tensor | None:
        """Gather over the mesh dimensions sequentially, from the innermost, which was sharded last."""
        full: Tensor | None = local
        for left, sharding in reversed(list(enumerate(part.shardings))):
            group = part.mesh.get_group(sharding.mesh_dim)
            comm = communicator(group, local.device)
            if comm.world_size == 1:
                continue
            ranks = dist.get_process_group_ranks(group)
            wants = [left > 0 or self._wants.get(rank, False) for rank in ranks]
            if not all(rank in self._wants for rank in ranks):
                wants = [True] * len(ranks)  # this rank does not know what some ranks need
            piece = local.resolve_conj().resolve_neg().contiguous()
            full = _joined(comm, sharding, piece, _places(part, sharding, ranks), wants)
            comm.settle()  # parts may be overwritten, and copies for sending must not accumulate
            local = local if full is None else full
        return full


def _joined(
    comm: Communicator, sharding: DimSharding, piece: Tensor, places: list[int], wants: list[bool]
) -> Tensor | None:
    """Send each part to the ranks that need it, directly into the result if its destination is contiguous."""
    outgoing = {rank: [byte_view(piece)] for rank, wanted in enumerate(wants) if wanted and rank != comm.rank}
    incoming: dict[int, list[Tensor]] = {}
    beside: list[tuple[Tensor, Tensor]] = []
    full: Tensor | None = None
    if wants[comm.rank]:
        full = piece.new_empty(
            [sharding.total if dim == sharding.dim else size for dim, size in enumerate(piece.shape)]
        )
        for rank, place in enumerate(places):
            target = full.narrow(sharding.dim, *sharding.range(place))
            if rank == comm.rank:
                target.copy_(piece)
            elif target.numel():
                # Not empty_like, which would keep the strides.
                received = target if target.is_contiguous() else target.new_empty(target.shape)
                incoming[rank] = [byte_view(received)]
                beside.append((target, received))
    # As bytes: no backend supports all dtypes, and there is no arithmetic.
    comm.exchange(incoming, outgoing if piece.numel() else {}, _WHAT, "state dict").wait()
    for target, received in beside:
        if target is not received:
            target.copy_(received)
    return full


def _places(part: MeshPart, sharding: DimSharding, ranks: list[int]) -> list[int]:
    """Return the number of the part for each rank of a mesh dimension's group, in the order of the group."""
    line = list(part.mesh.get_coordinate() or ())
    lines = part.mesh.mesh.movedim(sharding.mesh_dim, -1)
    del line[sharding.mesh_dim]
    in_mesh = lines[tuple(line)].tolist()
    return [in_mesh.index(rank) for rank in ranks]


def odd_parts(tensor: Tensor) -> str | None:
    """Return an error if parts of a manually created `DTensor` differ from torch's in size or place; or None."""
    part = MeshPart.of(tensor)
    if part is None or part.mesh.get_coordinate() is None:
        return None
    placements = list(part.placements)
    for number, placement in enumerate(placements):
        # `fully_shard` over tensor parallelism creates interleaved shards that divide the parts of the mesh dimensions
        # behind theirs, so each shard is contiguous. Other interleaved shards are not supported.
        behind = [dim for dim in range(number + 1, len(placements)) if _dim_of(placements[dim]) == _dim_of(placement)]
        parts = math.prod(map(part.mesh.size, behind))
        if getattr(placement, "split_factor", parts) != parts:
            return f"{placements} interleaves other parts than those of the mesh dimensions behind it"
    ours, theirs = local_part(tensor).shape, part.held_of(torch.empty(part.shape, device="meta")).shape
    if ours == theirs:
        return None
    return f"the local part is {list(ours)}, and {placements} of {list(part.shape)} makes it {list(theirs)}"


def _dim_of(placement: Any) -> int | None:
    return getattr(placement, "dim", None)
