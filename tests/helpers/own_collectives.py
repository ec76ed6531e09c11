"""Collectives of the user's own, with the interface of torch's, which note what they were called with."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

# torch 2.12 renamed these.
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Allocating:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class OwnAllGather(Allocating, AllGather):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        self.calls.append((output_tensor.numel(), input_tensor.numel(), output_tensor.dtype, group.size()))
        return ALL_GATHER(output_tensor, input_tensor, group=group, async_op=async_op)


class OwnReduceScatter(Allocating, ReduceScatter):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        self.calls.append((output_tensor.numel(), input_tensor.numel(), output_tensor.dtype, group.size()))
        if op == dist.ReduceOp.AVG:  # which gloo has not
            input_tensor.div_(group.size())
            op = dist.ReduceOp.SUM
        return REDUCE_SCATTER(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
