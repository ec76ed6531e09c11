"""One model in each of the three forms (flat, original parameters, rows of `fully_shard`), beside the plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel, fully_shard
from fsdp.distributed.dtensor import full_tensor
from tests.helpers.equality import assert_close, assert_close_state
from tests.helpers.models import Wrap
from tests.helpers.module_kinds import FLAT, ORIGINAL, UNFLATTENED, seeded

FORMS = ["flat", "orig", "rows"]
WRAPPERS = {"flat": FLAT, "orig": ORIGINAL, "single": UNFLATTENED}  # the forms of the wrapper


def sharded(model: nn.Module, form: str, units: tuple[type[nn.Module], ...] = (), **options: Any) -> Any:
    """Shard a model in a form; modules of the classes `units` become units, and so does the model."""
    if form == "rows":
        for module in reversed(list(model.modules())):  # inner ones first
            if isinstance(module, units) and module is not model:
                fully_shard(module, **options)
        return fully_shard(model, **options)
    options |= {"use_orig_params": True} if form == "orig" else {}

    def wrap(module: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(module, **options)

    _wrap_inside(model, units, wrap)
    return wrap(model)


def trained_rows(make_optimizer: Callable[[Any], torch.optim.Optimizer]) -> tuple[Any, torch.optim.Optimizer]:
    """A model of `fully_shard` whose order of units is known, so that forwards leave the last one unsharded."""
    torch.manual_seed(0)
    model = sharded(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), "rows", (nn.Linear,))
    optimizer = make_optimizer(model)
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def _wrap_inside(model: nn.Module, units: tuple[type[nn.Module], ...], wrap: Wrap) -> None:
    for name, child in list(model.named_children()):
        _wrap_inside(child, units, wrap)
        if isinstance(child, units):
            setattr(model, name, wrap(child))


def inside(model: Any) -> Any:
    """The user's module, in whatever it is wrapped."""
    while isinstance(model, FullyShardedDataParallel):
        model = model.module.module
    return model


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """Collective. The unsharded values, under the plain model's names."""
    return {name: full_tensor(value).detach().clone() for name, value in model.state_dict().items()}


def batch(step: int, rank: int, rows: int = 3, width: int = 5) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


# A step of a training on one rank's batch: it calls the model, and backward.
Body = Callable[[Any, Tensor, int], Any]


@dataclass
class Beside:
    """A model in one form and the plain one, which take the same steps with the mean gradient over the ranks."""

    make: Callable[[], nn.Module]
    form: str
    units: tuple[type[nn.Module], ...] = ()
    lr: float = 0.1

    def start(self, **options: Any) -> None:
        torch.set_default_dtype(torch.float64)
        self.plain: Any = seeded(self.make)
        self.model: Any = sharded(copy.deepcopy(self.plain), self.form, self.units, **options)
        self.optimizers = [self._optimizer(model.parameters()) for model in (self.model, self.plain)]

    def _optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=self.lr, momentum=0.5)

    def backward(self, body: Body, step: int) -> None:
        """Collective. What the body returns on this rank is the same for both models."""
        found = body(self.model, batch(step, dist.get_rank()), step)
        for rank in range(dist.get_world_size()):
            gradients = [param.grad for param in self.plain.parameters()]
            for param in self.plain.parameters():
                param.grad = None
            expected = body(self.plain, batch(step, rank), step)
            for param, before in zip(self.plain.parameters(), gradients, strict=True):
                new = None if param.grad is None else param.grad / dist.get_world_size()
                param.grad = new if before is None else before if new is None else before + new
            if rank == dist.get_rank() and found is not None:
                assert_close(found, expected, f"step {step}")

    def step(self, body: Body, step: int) -> None:
        self.backward(body, step)
        self.optimize()

    def optimize(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def assert_equal(self) -> None:
        assert_close_state(full_state(self.model), self.plain.state_dict())


def assert_trains(
    make: Callable[[], nn.Module],
    form: str,
    body: Body,
    units: tuple[type[nn.Module], ...] = (),
    *,
    steps: int = 2,
    **options: Any,
) -> None:
    """Collective. What the body returns, and all weights, are those of the unsharded model; and some have changed."""
    both = Beside(make, form, units)
    both.start(**options)
    before = {name: value.clone() for name, value in both.plain.state_dict().items()}
    for step in range(steps):
        both.step(body, step)
    both.assert_equal()
    assert any(not torch.equal(value, before[name]) for name, value in both.plain.state_dict().items())
