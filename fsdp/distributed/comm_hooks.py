"""Communication hooks for `FullyShardedDataParallel.register_comm_hook`, and what is needed to write one.

A hook that does what the library does without one:

    def average(state, gradient, shard):
        ranks = gradient.numel() // shard.numel()
        shard.copy_(reduce_scatter(gradient)).div_(ranks)

A hook may also call `torch.distributed`, as torch's own do. `reduce_scatter` goes the way of the library instead: on
gloo it moves half the bytes, sums in the order of ranks (so that runs repeat to the bit), and its messages and errors
carry the unit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fsdp.distributed.collectives import communicator
from fsdp.distributed.comm_hook import running_call
from fsdp.distributed.process_groups import Group, default_group


def reduce_scatter(tensor: Tensor, group: Group | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Collective. For use inside of a hook: sum a tensor over the ranks, of which each gets its part.

    Args:
        tensor: ``[world_size * n]``, the same shape and dtype on every rank; it is sent in its own dtype and may be
            overwritten.
        group: the ranks; None means those of the unit that the hook was called for.
        dtype: of the result; None means that of `tensor`. On gloo the sum is taken in the wider of the two; other
            backends take it in the dtype of `tensor`.

    Returns:
        ``[n]``, the sum of elements ``rank * n`` to ``(rank + 1) * n``. It may share memory with `tensor`.

    Raises:
        RuntimeError: outside of a hook, or if another rank did not answer.
        TypeError: for a `group` that is no process group that this rank is in.
        ValueError: for a tensor that cannot be cut into equal parts.
    """
    call = running_call()
    if call is None:
        raise RuntimeError(
            "reduce_scatter is for communication hooks while they run, because its messages carry the "
            "number of a unit. Elsewhere use torch.distributed."
        )
    comm = call.comm if group is None else communicator(default_group(group), tensor.device)
    if tensor.dim() != 1 or tensor.numel() % comm.world_size:
        raise ValueError(f"a tensor of shape {list(tensor.shape)} cannot be cut into {comm.world_size} equal parts")
    return comm.reduce_scatter(tensor, f"reduce-scatter for {call.name}", call.tag, dtype).wait()


def bf16_compress_hook(state: Group | None, gradient: Tensor, shard: Tensor) -> None:
    """Collective. Average gradients that are sent in bfloat16: half of the bytes of float32.

    Each rank's gradient is rounded to bfloat16, which is off by at most 2**-8 of each element. On gloo the rounded ones
    are added up in float32, in the order of ranks, so that the average is off by no more than that of the average of
    their absolute values (besides float32's own rounding). NCCL and other backends add in bfloat16, and round at each
    addition: up to ``world_size - 1`` times as much again. The result is then rounded to the unit's reduce dtype.

    The range is float32's, so nothing overflows and nothing need be scaled. A world of one rounds as others do.

    Args:
        state: the process group to average over; None means the wrapper's.
        gradient: ``[world_size * n]``, see `FullyShardedDataParallel.register_comm_hook`.
        shard: ``[n]``.

    Raises:
        TypeError: for complex gradients.
    """
    if gradient.is_complex():
        raise TypeError(f"a gradient of {gradient.dtype} would lose its imaginary part in bfloat16")
    ranks = gradient.numel() // shard.numel()
    shard.copy_(reduce_scatter(gradient.to(torch.bfloat16), state, dtype=torch.float32).div_(ranks))
