"""`summed` sums over ranks in stages, between which something else may be started."""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor

from fsdp.distributed.communicator import Communicator, Tag


def summed(
    comm: Communicator, tensor: Tensor, dtype: torch.dtype, what: str, tag: Tag
) -> Generator[None, None, Tensor]:
    """Collective, in stages. The sum of all ranks' tensors ``[n]``, the same bits on all of them.

    Moves 2 (W - 1) / W of the tensor's bytes per rank, as a ring does.

    Args:
        comm: the ranks.
        tensor: may be overwritten.
        dtype: in which it is sent.
        what, tag: see `Communicator`.
    """
    if not comm.sends_pieces:
        pending = comm.all_reduce(tensor.to(dtype), what=what)
        del tensor
        yield
        return pending.wait()
    numel, wide = tensor.numel(), tensor.dtype
    tensor = tensor.to(dtype)
    if numel % comm.world_size:
        tensor = torch.cat([tensor, tensor.new_zeros(-numel % comm.world_size)])
    pending = comm.reduce_scatter(tensor, what, tag, wide)
    del tensor
    yield
    shard = pending.wait().to(dtype)
    pending = comm.all_gather(shard.new_empty(comm.world_size * shard.numel()), shard, what, tag)
    yield
    return pending.wait()[:numel]
