"""A model of which every rank runs other parts in every step, and its unsharded twin, which runs those of all ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp
from fsdp import FullyShardedDataParallel
from tests.helpers.equality import assert_close_state
from tests.helpers.forms import full_state
from tests.helpers.models import Wrap, keep

WIDTH = 6
PARTS = ["tower", "left", "right", "inner", "layer", "plain"]
Choice = dict[str, bool]


def directly(module: nn.Module, run_here: bool, *args: Any) -> Any:
    """`fsdp.cond` of a world of one."""
    return module(*args) if run_here else None


class Expert(nn.Module):
    """Two units, and a third one inside that not every rank that runs the expert runs."""

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.enter = wrap(nn.Linear(WIDTH, 2 * WIDTH))
        self.inner = wrap(nn.Linear(2 * WIDTH, 2 * WIDTH))
        self.leave = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, inputs: Tensor, choice: Choice, cond: Callable[..., Any]) -> Tensor:
        hidden = self.enter(inputs).tanh()
        more = cond(self.inner, choice["inner"], hidden)
        return self.leave(hidden if more is None else hidden + more)


class Choosing(nn.Module):
    """A trunk of three units with parts in between that are run by choice."""

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.tower = nn.Sequential(wrap(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), wrap(nn.Linear(WIDTH, WIDTH)))
        self.enter = wrap(nn.Linear(WIDTH, WIDTH))
        self.left = wrap(Expert(wrap))
        self.right = wrap(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
        self.middle = wrap(nn.Linear(WIDTH, WIDTH))
        self.layer = wrap(nn.Linear(WIDTH, WIDTH))
        self.plain = nn.Linear(WIDTH, WIDTH)
        self.head = wrap(nn.Linear(WIDTH, 1))

    def forward(self, inputs: Tensor, choice: Choice, cond: Callable[..., Any], recompute: bool | None = None) -> Any:
        seen = cond(self.tower, choice["tower"], inputs)
        hidden = self.enter(inputs if seen is None else inputs + seen)
        if recompute is None:
            hidden = self._experts(hidden, choice, cond)
        else:
            hidden = checkpoint(self._experts, hidden, choice, cond, use_reentrant=recompute)
        hidden = self.middle(hidden).tanh()
        for name in ("layer", "plain"):
            changed = cond(getattr(self, name), choice[name], hidden)
            hidden = hidden if changed is None else changed
        return self.head(hidden)

    def _experts(self, hidden: Tensor, choice: Choice, cond: Callable[..., Any]) -> Tensor:
        for out in (cond(self.left, choice["left"], hidden, choice, cond), cond(self.right, choice["right"], hidden)):
            hidden = hidden if out is None else hidden + out
        return hidden


def choose(generator: torch.Generator) -> list[Choice]:
    """What each rank runs: each part with a probability of its own, so that often all do, or nobody."""
    world_size = dist.get_world_size()
    odds = torch.rand(len(PARTS), generator=generator).mul(1.6).sub(0.3)
    draws = torch.rand(world_size, len(PARTS), generator=generator) < odds
    return [dict(zip(PARTS, row, strict=True)) for row in draws.tolist()]


class Pair:
    """A sharded model and its twin, which every rank trains on the batches and choices of all."""

    def __init__(
        self, seed: int = 0, recompute: bool | None = None, shard: Wrap = FullyShardedDataParallel, **options: Any
    ) -> None:
        torch.set_default_dtype(torch.float64)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.recompute = recompute
        torch.manual_seed(seed)
        self.plain: nn.Module = Choosing(keep)
        source = copy.deepcopy(self.plain.state_dict())
        self.model: Any = shard(Choosing(lambda module: shard(module, **options)), **options)
        self.model.load_state_dict(source)
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (self.plain, self.model)]
        self.generator = torch.Generator().manual_seed(seed)

    def backward(self, choices: list[Choice] | None = None, sync: bool = True) -> None:
        """One backward of both, by these choices of the ranks or by chance."""
        choices = choices or choose(self.generator)
        batches = torch.randn(self.world_size, 2, WIDTH, generator=self.generator)
        for batch, choice in zip(batches, choices, strict=True):
            (self.plain(batch, choice, directly).square().mean() / self.world_size).backward()
        if is_rows := isinstance(self.model, fsdp.FSDPModule):
            self.model.set_requires_gradient_sync(sync)
        with nullcontext() if sync or is_rows else self.model.no_sync():
            output = self.model(batches[self.rank], choices[self.rank], fsdp.cond, self.recompute)
            output.square().mean().backward()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def train(self, steps: int, accumulate: int) -> None:
        """Take steps, each after so many backwards."""
        for _ in range(steps):
            for turn in range(accumulate):
                self.backward(sync=turn == accumulate - 1)
            self.step()

    def assert_close(self) -> None:
        assert_close_state(full_state(self.model), self.plain.state_dict(), atol=1e-12)
