"""Hooks on what a wrapped model lists: of `Tensor.register_hook` and `Tensor.register_post_accumulate_grad_hook`."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp import FullyShardedDataParallel, fully_shard
from tests.helpers.equality import assert_close
from tests.helpers.forms import full_state
from tests.helpers.models import Net
from tests.helpers.on_ranks import on_ranks
from tests.helpers.parity import Alone

KINDS: dict[str, dict[str, Any]] = {
    "flat": {},
    "alone": {"flatten_parameters": False},
    "pieces": {"use_orig_params": True},
    "offloaded": {"move_params_to_cpu": True},
    "rows": {},
}


def net() -> nn.Module:
    return Net(
        lambda net, x: net.last(net.first(x)), first=nn.Linear(4, 5), unused=nn.Linear(3, 3), last=nn.Linear(5, 2)
    )


def _apply_in_backward(optimizer: type[torch.optim.Optimizer], model: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, which the import uses
        from torch.distributed.optim import _apply_optimizer_in_backward
    _apply_optimizer_in_backward(optimizer, model.parameters(), {"lr": 0.1})


def _wrapped(plain: nn.Module, kind: str) -> Any:
    model: Any = copy.deepcopy(plain)
    if kind == "rows":
        return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    model.last = FullyShardedDataParallel(model.last, **KINDS[kind])
    return FullyShardedDataParallel(model, **KINDS[kind])


def _inputs(number: int, rank: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * number + rank))


def _backward(model: Any, number: int, sync: bool = True) -> None:
    accumulates = nullcontext()
    if isinstance(model, FullyShardedDataParallel):
        accumulates = nullcontext() if sync else model.no_sync()  # type: ignore[assignment]
    elif hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(sync)
    with accumulates:
        model(_inputs(number, dist.get_rank())).square().sum().backward()


def _backward_plain(plain: nn.Module, number: int) -> None:
    """The gradients of all ranks' batches, in one backward."""
    world = dist.get_world_size()
    losses = [plain(_inputs(number, rank)).square().sum() / world for rank in range(world)]
    torch.stack(losses).sum().backward()


def _assert_close(model: Any, plain: nn.Module) -> None:
    assert_close(full_state(model), dict(plain.state_dict()), rtol=1.3e-6, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_hooks_of_parameters_see_reduced_gradients(kind: str) -> None:
    torch.manual_seed(0)
    plain = net()
    model = _wrapped(plain, kind)
    _step_in_backward(plain, model)
    _change_and_count(plain, model, kind)


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_optimizers_that_torch_applies_in_backward_step(kind: str) -> None:
    """Their hooks are on nodes of the graph that gradients of shards do not pass."""
    torch.manual_seed(0)
    plain = net()
    model = _wrapped(plain, kind)
    for each in (plain, model):
        _apply_in_backward(torch.optim.Adam, each)
    for number in range(3):
        _backward(model, 2 * number, sync=False)
        _backward(model, 2 * number + 1)
        world, numbers = dist.get_world_size(), (2 * number, 2 * number + 1)
        losses = [plain(_inputs(each, rank)).square().sum() / world for each in numbers for rank in range(world)]
        torch.stack(losses).sum().backward()
        assert all(param.grad is None for param in model.parameters())
    _assert_close(model, plain)


def test_a_copy_is_not_stepped_by_the_optimizers_of_its_model() -> None:
    model = FullyShardedDataParallel(nn.Linear(4, 2), Alone())
    _apply_in_backward(torch.optim.SGD, model)
    copied = copy.deepcopy(model)
    copied(torch.ones(3, 4)).sum().backward()
    assert copied.params[0].grad is not None


def test_optimizers_in_backward_of_the_plain_model_are_refused() -> None:
    plain = nn.Linear(4, 2)
    _apply_in_backward(torch.optim.SGD, plain)
    with pytest.raises(ValueError, match=r"weight has gradient hooks, which would never run: .* register them after"):
        FullyShardedDataParallel(plain, Alone())


def _step_in_backward(plain: nn.Module, model: Any) -> None:
    """The recipe of an optimizer for each parameter, which steps as soon as there is a gradient."""
    handles = []
    for each in (plain, model):
        for param in each.parameters():
            optimizer = torch.optim.Adam([param], lr=0.1)
            handles.append(param.register_post_accumulate_grad_hook(_stepping(optimizer)))
    for number in range(3):
        _backward(model, 2 * number, sync=False)
        _backward(model, 2 * number + 1)
        world = dist.get_world_size()
        losses = [
            plain(_inputs(each, rank)).square().sum() / world
            for each in (2 * number, 2 * number + 1)
            for rank in range(world)
        ]
        torch.stack(losses).sum().backward()
        assert all(param.grad is None for param in model.parameters())
    _assert_close(model, plain)
    for handle in handles:
        handle.remove()


def _stepping(optimizer: torch.optim.Optimizer) -> Callable[[Tensor], None]:
    def step(param: Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step


def _change_and_count(plain: nn.Module, model: Any, kind: str) -> None:
    calls: dict[nn.Module, list[str]] = {plain: [], model: []}
    for each in (plain, model):
        for name, param in each.named_parameters():
            param.register_hook(lambda grad: grad.mul(2) if grad.numel() else None)
            param.register_hook(lambda grad: grad + 1)
            param.register_post_accumulate_grad_hook(lambda _, each=each, name=name: calls[each].append(name))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for _ in range(2):
        for number in range(2):  # accumulated with a reduction each: every backward's gradient is hooked by itself
            _backward(model, number)
            _backward_plain(plain, number)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    if kind in ("pieces", "rows"):  # original parameters: as without sharding, those that were not used have no hooks
        _assert_close(model, plain)
        assert sorted(calls[model]) == sorted(calls[plain])
    else:
        _assert_close(
            model.module.module.last, plain.get_submodule("last")
        )  # the others' flat vector has elements that were not used
        assert set(calls[model]) <= {name for name, _ in model.named_parameters()}
        assert all(calls[model].count(name) == 4 for name in set(calls[model]))
