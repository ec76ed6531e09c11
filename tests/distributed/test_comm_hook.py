"""`register_comm_hook`: when a hook is called, what it is given, and what becomes of what it leaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel, MixedPrecision
from tests.helpers.comm_hooks import average
from tests.helpers.models import Net, keep, nested_mlp
from tests.helpers.on_ranks import on_ranks
from tests.helpers.parity import alone, fully_sharded
from tests.helpers.ranks import RankPool
from tests.helpers.twins import Toolbox, batch, score


@dataclass
class Record:
    """What a hook was given, call by call."""

    gradients: list[Tensor] = field(default_factory=list)
    shards: list[Tensor] = field(default_factory=list)  # as they were given, not filled


def recording(record: Record, gradient: Tensor, shard: Tensor) -> None:
    assert not torch.is_grad_enabled()
    record.gradients.append(gradient.clone())
    record.shards.append(shard.clone())
    average(None, gradient, shard)


def recorded(module: Any) -> tuple[FullyShardedDataParallel, Record]:
    record = Record()
    module.register_comm_hook(record, recording)
    return module, record


def flat(params: Any) -> Tensor:
    return torch.cat([param.grad.reshape(-1) for param in params])


# What it is given


@on_ranks(1, 2, 3)
def test_a_hook_is_given_this_ranks_whole_gradient_undivided_and_padded() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    plain = nn.Linear(5, 7)
    model, record = recorded(fully_sharded()(nn.Linear(5, 7)))
    model.load_state_dict(plain.state_dict())
    for module in (model, plain):
        score(module(batch(0, rank).float())).backward()
    (gradient,), (shard,) = record.gradients, record.shards
    assert torch.equal(gradient[:42], flat(plain.parameters()))
    assert gradient.numel() == world_size * -(-42 // world_size)
    assert not gradient[42:].any()
    assert shard.shape == (gradient.numel() // world_size,)
    assert shard.dtype is gradient.dtype is torch.float32


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_hook_is_called_for_each_unit_in_the_same_order_on_all_ranks(ranks: RankPool, world_size: int) -> None:
    """Gradients that are small enough to go together are handed over one by one."""
    sizes = ranks(world_size).run(_sizes_of_nested_units)
    assert sizes == sizes[:1] * world_size
    padded = [world_size * -(-numel // world_size) for numel in (3, 37, 77, 47)]
    assert sorted(sizes[0]) == sorted(2 * padded)


def _sizes_of_nested_units() -> list[int]:
    model, record = recorded(nested_mlp(fully_sharded()))
    for _ in range(2):
        model(torch.ones(2, 5)).sum().backward()
    return [gradient.numel() for gradient in record.gradients]


def test_frozen_parameters_have_no_call() -> None:
    module = nn.Linear(5, 7)
    module.weight.requires_grad_(False)
    model, record = recorded(alone(module))
    model(torch.ones(2, 5)).sum().backward()
    assert [gradient.shape for gradient in record.gradients] == [(7,)]


def partly_empty() -> nn.Module:
    return Net(
        lambda net, x: net.layer(x) + net.nothing.sum(), layer=nn.Linear(5, 7), nothing=nn.Parameter(torch.empty(0))
    )


@on_ranks(2)
def test_parameters_without_elements_have_no_call() -> None:
    model, record = recorded(fully_sharded(flatten_parameters=False)(partly_empty()))
    model(torch.ones(2, 5)).sum().backward()
    assert sorted(gradient.numel() for gradient in record.gradients) == [8, 36]
    assert all(param.grad is not None for param in model.params)


def two_dtypes() -> nn.Module:
    return Net(
        lambda net, x: net.wide(net.narrow(x).double()),
        narrow=nn.Linear(5, 5),
        wide=nn.Linear(5, 5, dtype=torch.float64),
    )


def test_each_dtype_of_a_unit_has_a_call_of_its_own() -> None:
    model, record = recorded(alone(two_dtypes()))
    model(torch.ones(2, 5)).sum().backward()
    assert {gradient.dtype for gradient in record.gradients} == {torch.float32, torch.float64}
    assert {shard.dtype for shard in record.shards} == {torch.float32, torch.float64}
    assert len(record.gradients) == 2


@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_hook_works_in_the_reduce_dtype_and_the_gradient_is_of_the_parameters(reduce_dtype: torch.dtype) -> None:
    policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    model, record = recorded(alone(nn.Linear(5, 7), mixed_precision=policy))
    model(torch.ones(2, 5)).sum().backward()
    assert record.gradients[0].dtype is record.shards[0].dtype is reduce_dtype
    assert model.params[0].grad is not None
    assert model.params[0].grad.dtype is torch.float32


@on_ranks(3)
def test_a_hook_is_not_called_under_no_sync_and_is_then_given_the_sum() -> None:
    model, record = recorded(fully_sharded()(nn.Linear(5, 7)))
    inputs = torch.ones(2, 5)
    with model.no_sync():
        model(inputs).sum().backward()
    assert not record.gradients
    model(2 * inputs).sum().backward()
    (gradient,) = record.gradients
    assert torch.equal(gradient[:42], torch.tensor([6.0] * 35 + [4.0] * 7))


@on_ranks(2)
def test_a_hook_registered_in_the_middle_of_an_accumulation_has_all_of_it() -> None:
    """What was divided before it was summed, as it is without a hook, is no longer."""
    model: Any = fully_sharded()(nn.Linear(5, 7))
    with model.no_sync():
        model(torch.ones(2, 5)).sum().backward()
    model, record = recorded(model)
    model(torch.ones(2, 5)).sum().backward()
    assert torch.equal(record.gradients[0][:42], torch.full((42,), 4.0))


def test_a_hook_runs_in_no_grad_mode_also_for_what_is_complete_at_the_end_only() -> None:
    model, record = recorded(alone(Toolbox(keep)))
    score(model(torch.ones(2, 5), "a")).backward()  # `recording` asserts the mode
    assert len(record.gradients) == 1


@on_ranks(2)
def test_a_hook_has_the_factors_to_itself() -> None:
    model = nested_mlp(fully_sharded())
    assert model.gradient_postdivide_factor * model.gradient_predivide_factor == 2  # type: ignore[operator]
    recorded(model)
    for unit in (model, model.module.module.trunk):  # type: ignore[union-attr]
        assert unit.gradient_predivide_factor == unit.gradient_postdivide_factor == 1  # type: ignore[union-attr]


# What it leaves


def leave_nothing(state: Any, gradient: Tensor, shard: Tensor) -> None:
    """It forgets its task."""


def leave_double(state: Any, gradient: Tensor, shard: Tensor) -> None:
    shard.data = gradient.double()


def leave_after_overwriting(state: Any, gradient: Tensor, shard: Tensor) -> None:
    shard.copy_(gradient.mul_(3))


def gradient_after(hook: Callable[[Any, Tensor, Tensor], None], **options: Any) -> Tensor:
    model = alone(nn.Linear(5, 7), **options)
    model.register_comm_hook(None, hook)
    model(torch.ones(2, 5)).sum().backward()
    (param,) = model.params
    assert param.grad is not None
    return param.grad


def test_what_a_hook_did_not_fill_is_nan() -> None:
    assert gradient_after(leave_nothing).isnan().all()


@pytest.mark.parametrize("options", [{}, {"offload": "cpu"}])
def test_a_hook_may_put_another_dtype_in_the_place_of_its_result(options: dict[str, Any]) -> None:
    gradient = gradient_after(leave_double, **options)
    assert gradient.dtype is torch.float32
    assert torch.equal(gradient, torch.full((42,), 2.0))


def test_a_hook_may_overwrite_the_gradient() -> None:
    assert torch.equal(gradient_after(leave_after_overwriting), torch.full((42,), 6.0))


@on_ranks(2)
def test_gradients_of_several_backwards_are_added_up_after_the_hook() -> None:
    model, record = recorded(fully_sharded()(nn.Linear(5, 7)))
    for _ in range(3):
        model(torch.ones(2, 5)).sum().backward()
    assert len(record.gradients) == 3
    assert torch.equal(flat(model.parameters()), torch.full((21,), 6.0))


@on_ranks(2)
def test_a_model_without_a_hook_is_left_alone() -> None:
    """Two models in one process, of which one has a hook."""
    hooked, record = recorded(nested_mlp(fully_sharded()))
    other = nested_mlp(fully_sharded())
    other(torch.ones(2, 5)).sum().backward()
    assert not record.gradients
    hooked(torch.ones(2, 5)).sum().backward()
    assert len(record.gradients) == 4
    for ours, theirs in zip(hooked.parameters(), other.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)
