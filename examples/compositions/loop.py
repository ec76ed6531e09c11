"""The training loop of the recipes that name it: clipped steps, and a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def train(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    loss_of: Callable[[nn.Module, int, int], Tensor],
    steps: range,
    own: Sequence[int],
    parts: int,
) -> list[tuple[float, float]]:
    """Train on this rank's `own` of the `parts` of each step's batch.

    Collective, unless all parts are this rank's. `loss_of(model, part, parts)` returns
    the mean loss of a part; the step is the seed.

    Returns:
        The loss of the whole batch, and the norm of its gradient, of each step.
    """
    found = []
    for step in steps:
        total = torch.zeros((), dtype=torch.double)
        for part in own:
            torch.manual_seed(step)
            loss = loss_of(model, part, parts) / len(own)
            loss.backward()
            total += loss.detach().cpu() * len(own) / parts
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if len(own) < parts:
            dist.all_reduce(total)
        whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
        found.append((total.item(), whole.item()))
    return found


def run(recipe: Any, steps: int = 20) -> None:
    """Collective. Train the model of a recipe (a module), and print the losses."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same weights on every rank
    model = recipe.shard(recipe.build())
    made = recipe.make_optimizer(model)
    optimizers = made if isinstance(made, list) else [made]
    own, parts = [dist.get_rank()], dist.get_world_size()
    found = train(model, optimizers, recipe.loss_of, range(steps), own, parts)
    if dist.get_rank() == 0:
        print(
            f"loss {found[0][0]:.4f} in step 0, {found[-1][0]:.4f} in step {steps - 1}"
        )
    dist.destroy_process_group()
