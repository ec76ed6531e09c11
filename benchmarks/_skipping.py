"""Skipping communication, for timing the remaining work, which requires a separate method for each library."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fsdp.distributed.collectives import Communicator, Pending


class Skip(Enum):
    NOTHING = "nothing"
    GATHERS = "gathers"
    REDUCTIONS = "reductions"


class _Done:
    """A finished collective, as far as the caller of `torch.distributed` looks at it."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _own_part_only(output: Tensor | list[Tensor], shard: Tensor, group: Any = None, async_op: bool = False) -> Any:
    """An all-gather that copies only this rank's shard."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    pieces = output if isinstance(output, list) else output.view(-1).chunk(world_size)
    pieces[rank].copy_(shard.view_as(pieces[rank]))
    return _Done() if async_op else None


def _own_sum_only(output: Tensor, input: Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> Any:
    """A reduce-scatter that copies this rank's part of its own input, without a sum."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    output.copy_(input.view(-1).chunk(world_size)[rank].view_as(output))
    return _Done() if async_op else None


# The functions that FSDP1 and FSDP2 call, under the names of torch 2.11 and 2.13.
_PEER_GATHERS = ("all_gather", "all_gather_into_tensor", "all_gather_single")
_PEER_REDUCTIONS = ("reduce_scatter_tensor", "reduce_scatter_single")


def set_ddp_reduction(ddp: DistributedDataParallel, reduce: Callable[[Tensor], object]) -> None:
    """Make DDP call `reduce` on its flat gradients and use the result; can be set once."""

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
        reduce(bucket.buffer())
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    ddp.register_comm_hook(None, hook)


def _our_gather(self: Any, full: Tensor, shard: Tensor, what: str, tag: int) -> Any:
    full.view(self.world_size, -1)[self.rank].copy_(shard)
    return Pending(what, (), lambda: full)


def _our_reduction(self: Any, full: Tensor, what: str, tag: int, dtype: torch.dtype | None = None) -> Any:
    own = full.view(self.world_size, -1)[self.rank]
    own = own.to(dtype or full.dtype, copy=True)  # `full` may be freed before the result is used
    return Pending(what, (), lambda: own)


_OUR_REPLACEMENTS = {"all_gather": _our_gather, "reduce_scatter": _our_reduction}


def _our_ways(skip: Skip) -> Iterator[tuple[type, str]]:
    """Every class of ours that gathers (or reduces) in a way of its own, with the method's name."""
    method = "all_gather" if skip is Skip.GATHERS else "reduce_scatter"
    classes = [Communicator]
    while classes:
        owner = classes.pop()
        classes += owner.__subclasses__()
        if method in vars(owner):
            yield owner, method


@contextlib.contextmanager
def skipping(skip: Skip, modules: Iterable[nn.Module]) -> Iterator[None]:
    """Skip every gather or every reduction of the steps in this block, for timing; results are wrong.

    Args:
        skip: the collectives to skip.
        modules: the wrapped modules that will be trained; DDP, which has no gathers, uses a communication hook that
            stays registered.
    """
    with contextlib.ExitStack() as stack:
        if skip is not Skip.NOTHING:
            # Skipped parts contain old contents of the buffer; computing with subnormal numbers is slow.
            torch.set_flush_denormal(True)
            names = _PEER_GATHERS if skip is Skip.GATHERS else _PEER_REDUCTIONS
            replacement = _own_part_only if skip is Skip.GATHERS else _own_sum_only
            for name in names:
                if hasattr(dist, name):
                    stack.enter_context(mock.patch.object(dist, name, replacement))
            for owner, method in _our_ways(skip):
                stack.enter_context(mock.patch.object(owner, method, _OUR_REPLACEMENTS[method]))
        if skip is Skip.REDUCTIONS:
            for module in modules:
                if isinstance(module, DistributedDataParallel):
                    set_ddp_reduction(module, lambda gradients: None)
        yield
