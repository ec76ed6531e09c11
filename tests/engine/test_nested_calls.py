"""Modules that are called in the middle of their own forward, which is one call for what they hold."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp import FullyShardedDataParallel, fully_shard
from fsdp.distributed.dtensor import full_tensor
from tests.helpers.module_kinds import FORMS
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import Case, parametrize_cases
from tests.helpers.parity import adam

HOWS: list[dict[str, Any] | None] = [*FORMS, None]


class Again(nn.Module):
    """Which calls itself until `depth` is used up, and goes on with its own weights after that."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(5, 5), nn.Parameter(torch.full((5,), 0.7))

    def forward(self, inputs: Tensor, depth: int = 2) -> Tensor:
        outputs: Tensor = torch.tanh(self.layer(inputs))
        if depth:
            outputs = self(outputs, depth - 1)
        return outputs * self.scale


class Recomputed(Again):
    """Whose inner call is computed again in backward."""

    def forward(self, inputs: Tensor, depth: int = 1) -> Tensor:
        outputs: Tensor = torch.tanh(self.layer(inputs))
        if depth:
            outputs = checkpoint(self, outputs, depth - 1, use_reentrant=False)
        return outputs * self.scale


class Redirected(nn.Module):
    """Whose `step` runs through its forward, as trainers of others run it, and calls its forward in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(5, 5), nn.Parameter(torch.full((5,), 0.7))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.tanh(self.layer(inputs)) * self.scale

    def step(self, inputs: Tensor) -> Tensor:
        return self(inputs) * self.scale


@parametrize_cases(
    at_most=5,
    world_size=[2, 1],
    how=HOWS,
    kind=[Again, Redirected, Recomputed],
    inside=[False, True],
    accumulate=[1, 2],
)
@on_ranks("world_size")
def test_a_module_that_is_called_inside_its_own_call_trains_as_the_plain_one(case: Case) -> None:
    expected, _ = _trained(case.kind, case.inside, case.accumulate, lambda module: module, alone=True)
    state, _ = _trained(case.kind, case.inside, case.accumulate, lambda module: _sharded(module, case.how), alone=False)
    for name, value in expected.items():
        torch.testing.assert_close(full_tensor(state[name]), value, rtol=1e-5, atol=1e-6)


def _sharded(module: nn.Module, how: dict[str, Any] | None) -> nn.Module:
    return fully_shard(module) if how is None else FullyShardedDataParallel(module, **how)


def _trained(kind: type[nn.Module], inside: bool, accumulate: int, shard: Any, alone: bool) -> tuple[Any, nn.Module]:
    torch.manual_seed(0)
    module = kind()
    part = shard(module)
    model = shard(nn.Sequential(nn.Linear(5, 5), part)) if inside else part
    optimizer = adam(model.parameters())
    for step in range(4):
        batch = torch.randn(12, 5, generator=torch.Generator().manual_seed(step))
        inputs = batch if alone else batch.chunk(dist.get_world_size())[dist.get_rank()]
        is_last = (step + 1) % accumulate == 0
        with nullcontext() if alone or is_last else _without_sync(model):
            (_called(module, model, inputs).square().mean() / accumulate).backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict(), model


def _called(module: Any, model: nn.Module, inputs: Tensor) -> Tensor:
    if isinstance(module, Redirected):
        forward = module.forward

        def redirected(inputs: Tensor) -> Tensor:
            module.forward = forward  # type: ignore[method-assign]
            return module.step(inputs)

        module.forward = redirected  # type: ignore[method-assign]
    outputs: Tensor = model(inputs)
    return outputs


def _without_sync(model: Any) -> Any:
    if isinstance(model, FullyShardedDataParallel):
        return model.no_sync()
    model.set_requires_gradient_sync(False)

    class Restoring:
        def __enter__(self) -> None: ...

        def __exit__(self, *error: object) -> None:
            model.set_requires_gradient_sync(True)

    return Restoring()


class Trying(nn.Module):
    """Which tries to call itself, through what it was wrapped in, and goes on with its own weights where that fails."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(5, 5), nn.Parameter(torch.full((5,), 0.7))
        self.error = error
        self.outer: tuple[Any, ...] = ()  # no module of it

    def forward(self, inputs: Tensor, depth: int = 1) -> Tensor:
        outputs: Tensor = torch.tanh(self.layer(inputs))
        if not depth:
            raise self.error("on purpose")
        with pytest.raises(self.error, match="on purpose"):
            self.outer[0](outputs, depth - 1)
        return outputs * self.scale


@pytest.mark.parametrize("caught", [KeyboardInterrupt, ValueError])
@on_ranks(2)
def test_a_call_goes_on_after_a_nested_call_that_failed(caught: type[BaseException]) -> None:
    def trained(shard: Any) -> dict[str, Any]:
        torch.manual_seed(0)
        module = Trying(caught)
        part = shard(module)
        module.outer = (part,)
        model = shard(nn.Sequential(nn.Linear(5, 5), part))
        optimizer = adam(model.parameters())
        for _ in range(2):
            model(torch.ones(2, 5)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict()

    expected = trained(lambda module: module)
    for how in HOWS[: 3 if caught is KeyboardInterrupt else 4]:  # which nobody sees but the wrapper
        state = trained(partial(_sharded, how=how))
        for name, value in expected.items():
            torch.testing.assert_close(full_tensor(state[name]), value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("caught", [KeyboardInterrupt, ValueError])
@on_ranks(2)
def test_what_was_given_up_in_a_nested_call_is_no_nested_call_later(caught: type[BaseException]) -> None:
    class Raising(Again):
        error: type[BaseException] | None = None

        def forward(self, inputs: Tensor, depth: int = 2) -> Tensor:
            if not depth and self.error is not None:
                raise self.error("given up")
            return super().forward(inputs, depth)

    for how in HOWS:
        torch.manual_seed(0)
        module = Raising()
        model = _sharded(module, how)
        module.error = caught
        with pytest.raises(caught, match="given up"):
            model(torch.ones(2, 5))
        module.error = None
        model(torch.ones(2, 5)).sum().backward()
        torch.manual_seed(0)
        plain = Again()
        plain(torch.ones(2, 5)).sum().backward()
        grads = [full_tensor(param.grad) for param in model.parameters() if param.grad is not None]
        assert sum(float(grad.abs().sum()) for grad in grads) > 0
        assert all(param.grad is not None for param in plain.parameters())
