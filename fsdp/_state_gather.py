"""A `DTensor` made whole, with as little memory as that takes.

`DTensor.full_tensor` (torch 2.11 and 2.13) pads what does not divide evenly and keeps the padding in the result's
storage, where `torch.save` writes it as well; it holds up to three whole tensors on every rank, also where nobody wants
the result; it fails for dtypes that the backend does not have; and it takes the order of ranks for that of the mesh.
Here the parts go, as bytes, into one buffer of whole size; ranks that want the result put it together from that, and
others drop it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp._comm import Communicator, communicator
from fsdp._dtensors import MeshPart, arrived, local_part, whole


def gathered(tensor: Tensor, is_wanted: bool, used: set[Communicator]) -> Tensor | None:
    """Collective over the tensor's mesh. The whole of it where its local part is, or None if it is not wanted.

    A plain tensor is whole already. The result has no memory beside its elements, unless it shares that of `tensor`.

    Args:
        used: is given the ways to other ranks that were used; parts may be written again when all have settled.
    """
    tensor = tensor.detach()
    part = MeshPart.of(tensor)
    if part is None:
        return tensor if is_wanted else None
    home = local_part(tensor).device
    if home.type != part.mesh.device_type:  # offloaded: only the mesh's device can talk to the other ranks
        tensor = tensor.to(part.mesh.device_type)
    if any(placement.is_partial() for placement in part.placements):
        tensor, part = _reduced(tensor, part)
    if has_only_usual_placements(part):
        full = _joined(arrived(local_part(tensor)), part, is_wanted, used)
    else:
        full = _put_together_by_torch(tensor, part)
    return full.to(home) if is_wanted and full is not None else None


def has_only_usual_placements(part: MeshPart) -> bool:
    """Whether it is cut into plain pieces, of which this rank's place is known without asking torch."""
    from torch.distributed.tensor import Replicate, Shard

    return all(type(placement) in (Replicate, Shard) for placement in part.placements)


def usual_part(value: Tensor, part: MeshPart) -> Tensor:
    """Of a whole value, this rank's plain piece; shares memory."""
    for cut in cuts(part):
        value = value.narrow(cut.dim, *cut.range(cut.place))
    return value


def _reduced(tensor: Tensor, part: MeshPart) -> tuple[Tensor, MeshPart]:
    from torch.distributed.tensor import Replicate

    placements = tuple(Replicate() if placement.is_partial() else placement for placement in part.placements)
    reduced = tensor.redistribute(placements=placements)  # type: ignore[attr-defined]
    return reduced, MeshPart(part.mesh, placements, part.shape)


def _put_together_by_torch(tensor: Tensor, part: MeshPart) -> Tensor:
    # Interleaved parts (fully_shard over tensor parallelism) are to be sorted, which torch knows how to do.
    ranks = part.mesh.mesh.flatten().tolist()
    if ranks != sorted(ranks):
        raise NotImplementedError(
            f"placements {list(part.placements)} on a mesh of ranks {part.mesh.mesh.tolist()}: torch puts interleaved "
            "parts together in the order of ranks. Make the mesh with init_device_mesh."
        )
    # As bytes, in a dimension of their own behind all others, so that the placements remain true.
    local = arrived(local_part(tensor)).resolve_conj().resolve_neg().contiguous().unsqueeze(-1).view(torch.uint8)
    shape = torch.Size([*part.shape, tensor.dtype.itemsize])
    sent = MeshPart(part.mesh, part.placements, shape).dtensor(local)
    full = whole(sent).contiguous().view(tensor.dtype).squeeze(-1)
    return full.clone() if full.untyped_storage().nbytes() > full.nbytes else full


@dataclass(frozen=True)
class Cut:
    """How one mesh dimension cuts a tensor, of which outer mesh dimensions may have left a part.

    Attributes:
        mesh_dim: the dimension of the mesh.
        dim: that of the tensor.
        total: its size before the cut.
        each: that of a part; of the last ones less is left, or nothing.
        place: the number of this rank's part. By its coordinate in the mesh: a group numbers its ranks in rising order,
            and a mesh need not.
    """

    mesh_dim: int
    dim: int
    total: int
    each: int
    place: int

    def range(self, place: int) -> tuple[int, int]:
        """Where a part begins, and how long it is."""
        start = min(place * self.each, self.total)
        return start, min(self.each, self.total - start)


def cuts(part: MeshPart) -> list[Cut]:
    """From the outermost mesh dimension, which cuts first."""
    shape, found = list(part.shape), []
    place = part.mesh.get_coordinate() or ()
    for number in part.sharded_dims:
        dim = part.placements[number].dim  # type: ignore[attr-defined]
        cut = Cut(number, dim, shape[dim], -(-shape[dim] // part.mesh.size(number)), place[number])
        shape[dim] = cut.range(cut.place)[1]
        found.append(cut)
    return found


def _joined(local: Tensor, part: MeshPart, is_wanted: bool, used: set[Communicator]) -> Tensor | None:
    """Over one mesh dimension after the other, from the innermost, which was cut last."""
    full: Tensor | None = local
    for left, cut in reversed(list(enumerate(cuts(part)))):
        full = _joined_along(part, cut, local, is_wanted or left > 0, used)
        local = local if full is None else full
    return full


def _joined_along(part: MeshPart, cut: Cut, local: Tensor, is_wanted: bool, used: set[Communicator]) -> Tensor | None:
    group = part.mesh.get_group(cut.mesh_dim)
    comm = communicator(group, local.device)
    if comm.world_size == 1:
        return local
    piece = local.resolve_conj().resolve_neg().contiguous()
    if piece.shape[cut.dim] < cut.each:
        piece = _padded(piece, cut.dim, cut.each)
    pieces = piece.new_empty([comm.world_size, *piece.shape])
    if piece.numel():
        # As bytes: no backend has all dtypes, and nothing is computed.
        comm.all_gather(_as_bytes(pieces), _as_bytes(piece), "the gather of a state dict", comm.talk_tag).wait()
        used.add(comm)
    if not is_wanted:
        return None
    places = _places(part, cut, dist.get_process_group_ranks(group))
    if cut.dim == 0 and cut.total == comm.world_size * cut.each and places == sorted(places):
        return pieces.flatten(0, 1)
    shape = list(piece.shape)
    shape[cut.dim] = cut.total
    full = piece.new_empty(shape)
    for place, source in zip(places, pieces, strict=True):
        start, size = cut.range(place)
        full.narrow(cut.dim, start, size).copy_(source.narrow(cut.dim, 0, size))
    return full


def _places(part: MeshPart, cut: Cut, ranks: list[int]) -> list[int]:
    """For each rank of a mesh dimension's group, in the group's order, the number of its part."""
    line = list(part.mesh.get_coordinate() or ())
    lines = part.mesh.mesh.movedim(cut.mesh_dim, -1)
    del line[cut.mesh_dim]
    in_mesh = lines[tuple(line)].tolist()
    return [in_mesh.index(rank) for rank in ranks]


def _padded(piece: Tensor, dim: int, size: int) -> Tensor:
    padded = piece.new_zeros([size if number == dim else each for number, each in enumerate(piece.shape)])
    padded.narrow(dim, 0, piece.shape[dim]).copy_(piece)
    return padded


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def odd_local_part(tensor: Tensor) -> str | None:
    """What is wrong with the size of a `DTensor`'s local part, where somebody made it by hand; None if nothing is."""
    part = MeshPart.of(tensor)
    if part is None or part.mesh.get_coordinate() is None or not has_only_usual_placements(part):
        return None
    ours, theirs = local_part(tensor).shape, usual_part(torch.empty(part.shape, device="meta"), part).shape
    if ours == theirs:
        return None
    return f"the local part is {list(ours)}, and {list(part.placements)} of {list(part.shape)} makes it {list(theirs)}"
