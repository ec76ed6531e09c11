"""Sends the tokens of a mixture of experts to the ranks of their experts, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.tensor import DTensor


def routed(
    compute: Callable[[Tensor, list[int]], Tensor],
    rows: Tensor,
    choice: Tensor,
    experts: int,
    group: Any = None,
) -> Tensor:
    """Collective in `group`. Return each row through the expert of its `choice`.

    `compute` receives the rows of this rank's experts, in the order of these, and the
    number of rows of each.
    """
    order = choice.argsort(stable=True)
    counts = choice.bincount(minlength=experts)
    if group is None:
        return compute(rows[order], counts.tolist())[order.argsort()]
    ranks = dist.get_world_size(group)
    counts = counts.view(ranks, -1)
    heard = torch.empty_like(counts)
    dist.all_to_all_single(heard, counts, group=group)
    sizes = heard.sum(1).tolist(), counts.sum(1).tolist()  # received, sent
    rows = all_to_all_single_autograd(rows[order], *sizes, group)
    own = torch.arange(experts // ranks, device=rows.device).repeat(ranks)
    rows = routed(
        compute, rows, own.repeat_interleave(heard.flatten()), len(own) // ranks
    )
    return all_to_all_single_autograd(rows, *sizes[::-1], group)[order.argsort()]


def local(param: Tensor) -> Tensor:
    """Return the experts of this rank, of a parameter that may be divided."""
    return param.to_local() if isinstance(param, DTensor) else param
