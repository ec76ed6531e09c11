"""A `DTensor` made whole, with as little memory as that takes.

`DTensor.full_tensor` pads what does not divide evenly and keeps the padding in the result's storage, where `torch.save`
writes it as well; it holds up to three whole tensors on every rank, also where nobody wants the result; and it fails
for dtypes that the backend does not have. Here the parts go, as bytes, into one buffer of whole size; ranks that want
the result put it together from that, and others drop it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fsdp._comm import Communicator, communicator
from fsdp._dtensors import MeshPart, arrived, local_part, whole


def gathered(tensor: Tensor, is_wanted: bool = True) -> Tensor | None:
    """Collective over the tensor's mesh. The whole of it where its local part is, or None if it is not wanted.

    A plain tensor is whole already. The result has no memory beside its elements, unless it shares that of `tensor`.
    """
    tensor = tensor.detach()
    part = MeshPart.of(tensor)
    if part is None:
        return tensor if is_wanted else None
    home = local_part(tensor).device
    if home.type != part.mesh.device_type:  # offloaded: only the mesh's device can talk to the other ranks
        tensor = tensor.to(part.mesh.device_type)
    if has_only_usual_placements(part):
        full = _joined(arrived(local_part(tensor)), part, is_wanted)
    else:
        full = _put_together_by_torch(tensor)
    return full.to(home) if is_wanted and full is not None else None


def has_only_usual_placements(part: MeshPart) -> bool:
    """Whether it is cut into plain pieces, of which this rank's place is known without asking torch."""
    from torch.distributed.tensor import Replicate, Shard

    return all(type(placement) in (Replicate, Shard) for placement in part.placements)


def _put_together_by_torch(tensor: Tensor) -> Tensor:
    # Partial ones are to be reduced, and interleaved ones (fully_shard over tensor parallelism) sorted.
    part = MeshPart.of(tensor)
    if part is None or any(placement.is_partial() for placement in part.placements):
        full = whole(tensor)
    else:
        # As bytes, in a dimension of their own behind all others, so that the placements remain true.
        local = arrived(local_part(tensor)).resolve_conj().resolve_neg().contiguous().unsqueeze(-1).view(torch.uint8)
        shape = torch.Size([*part.shape, tensor.dtype.itemsize])
        sent = MeshPart(part.mesh, part.placements, shape).dtensor(local)
        full = whole(sent).contiguous().view(tensor.dtype).squeeze(-1)
    return full.clone() if full.untyped_storage().nbytes() > full.nbytes else full


def _joined(local: Tensor, part: MeshPart, is_wanted: bool) -> Tensor | None:
    """Over one mesh dimension after the other, from the innermost, which was cut last."""
    cuts, shape = [], list(part.shape)
    for number in part.sharded_dims:
        dim = part.placements[number].dim  # type: ignore[attr-defined]
        cuts.append((number, dim, shape[dim]))
        each = -(-shape[dim] // part.mesh.size(number))
        shape[dim] = max(0, min(each, shape[dim] - part.mesh.get_local_rank(number) * each))
    full: Tensor | None = local
    for left, (number, dim, total) in reversed(list(enumerate(cuts))):
        comm = communicator(part.mesh.get_group(number), local.device)
        full = _joined_along(comm, local, dim, total, is_wanted or left > 0)
        local = local if full is None else full
    return full


def _joined_along(comm: Communicator, local: Tensor, dim: int, total: int, is_wanted: bool) -> Tensor | None:
    if comm.world_size == 1:
        return local
    each = -(-total // comm.world_size)
    sizes = [max(0, min(each, total - rank * each)) for rank in range(comm.world_size)]
    piece = local.resolve_conj().resolve_neg().contiguous()
    if piece.shape[dim] < each:
        piece = _padded(piece, dim, each)
    pieces = piece.new_empty([comm.world_size, *piece.shape])
    if piece.numel():
        # As bytes: no backend has all dtypes, and nothing is computed.
        comm.all_gather(_as_bytes(pieces), _as_bytes(piece), "the gather of a state dict", comm.talk_tag).wait()
        comm.settle()
    if not is_wanted:
        return None
    if dim == 0 and total == comm.world_size * each:
        return pieces.flatten(0, 1)
    full = piece.new_empty([total if number == dim else size for number, size in enumerate(piece.shape)])
    for target, source, size in zip(full.split(sizes, dim), pieces, sizes, strict=True):
        target.copy_(source.narrow(dim, 0, size))
    return full


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
    ours, theirs = local_part(tensor).shape, part.cut("value", torch.empty(part.shape, device="meta")).shape
    if ours == theirs:
        return None
    return f"the local part is {list(ours)}, and {list(part.placements)} of {list(part.shape)} makes it {list(theirs)}"
