"""`clip_grad_norm_` is torch's on the unsharded model: the same norm, and the same gradients afterwards."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.helpers.equality import assert_close, assert_close_state
from tests.helpers.models import Wrap, keep, nested_mlp
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import Case, parametrize_cases, parametrize_pairs
from tests.helpers.parity import Alone, fully_sharded, trained_gradients
from tests.helpers.ranks import RankPool

NORM_TYPES = [2.0, 1.0, 3.0, math.inf, 2, 0.5]


def backward(model: nn.Module, rank: int) -> None:
    inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(rank))
    model(inputs).square().mean().backward()


def twins(nested: bool = True, **options: Any) -> tuple[Any, nn.Module]:
    """A sharded model and its plain twin after a backward, with the same gradients."""
    sharded, plain = nested_mlp(fully_sharded(**options), nested=nested), nested_mlp(keep)
    backward(sharded, dist.get_rank())
    for rank in range(dist.get_world_size()):
        backward(plain, rank)
    for param in plain.parameters():
        param.grad /= dist.get_world_size()
    return sharded, plain


@parametrize_cases(
    at_most=8,
    norm_type=NORM_TYPES,
    world_size=[3, 1, 2, 4],
    max_norm=[0.1, 1000.0, 0.0],
    nested=[True, False],
    flatten_parameters=[True, False],
)
@on_ranks("world_size")
def test_norm_and_gradients_are_those_of_the_unsharded_model(case: Case) -> None:
    torch.set_default_dtype(torch.float64)
    sharded, plain = twins(**case.only("nested", "flatten_parameters"))
    found = sharded.clip_grad_norm_(case.max_norm, case.norm_type)
    assert_close(found, nn.utils.clip_grad_norm_(plain.parameters(), case.max_norm, case.norm_type))
    assert_close_state(trained_gradients(sharded), trained_gradients(plain))


class Mixed(nn.Module):
    """Frozen, unused and bfloat16 parameters beside ordinary ones."""

    def __init__(self, wrap: Wrap, dtype: torch.dtype) -> None:
        super().__init__()
        self.entry = wrap(nn.Linear(5, 7))
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.unused = wrap(nn.Linear(7, 7))
        self.odd = wrap(nn.Linear(7, 3, dtype=dtype))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.frozen(self.entry(inputs))
        return self.odd(hidden.to(self.odd.bias.dtype)).to(inputs.dtype)


def mixed(wrap: Wrap) -> nn.Module:
    torch.manual_seed(0)
    return wrap(Mixed(wrap, torch.float64))


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@on_ranks(3)
def test_frozen_unused_and_wider_parameters(norm_type: float) -> None:
    sharded, plain = mixed(fully_sharded()), mixed(keep)
    backward(sharded, 0)
    backward(plain, 0)
    for _ in range(2):  # the second time they are clipped already
        found = sharded.clip_grad_norm_(0.1, norm_type)
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type)
        assert found.dtype is torch.float64
        torch.testing.assert_close(found, expected, check_dtype=False, rtol=1e-5, atol=1e-7)
    assert all(param.grad is None for param in sharded.unused.parameters())


@on_ranks(2)
def test_narrow_gradients_are_summed_in_float32() -> None:
    torch.set_default_dtype(torch.bfloat16)
    model = nn.Linear(64, 64, bias=False)
    nn.init.ones_(model.weight)
    model = fully_sharded()(model)
    model(torch.ones(1, 64)).sum().backward()
    norm = model.clip_grad_norm_(1.0)
    assert norm.dtype is torch.float32
    assert norm.item() == pytest.approx(64.0, rel=1e-6)  # in bfloat16 the sum would stop at a few
    torch.testing.assert_close(model.params[0].grad.float(), torch.full((2048,), 1 / 64, dtype=torch.float32))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@on_ranks(2)
def test_narrow_gradients_are_scaled_by_a_float32_number(dtype: torch.dtype) -> None:
    model = fully_sharded()(nn.Linear(64, 64, bias=False, dtype=dtype))
    model(torch.full((1, 64), 200.0, dtype=dtype)).sum().backward()
    norm = model.clip_grad_norm_(2e-4)
    expected = torch.full((2048,), 200.0) * (2e-4 / (norm + 1e-6))  # the factor is zero in float16
    assert torch.equal(model.params[0].grad, expected.to(dtype))


def test_every_rank_gets_the_same_norm(ranks: RankPool) -> None:
    for norm_type in (1.0, 2.0, math.inf):
        assert len(set(ranks(4).run(_norm, norm_type))) == 1


def _norm(norm_type: float) -> float:
    model = nested_mlp(fully_sharded())
    backward(model, dist.get_rank())
    return float(model.clip_grad_norm_(0.1, norm_type))


@on_ranks(2)
def test_without_gradients_the_norm_is_zero() -> None:
    model = nested_mlp(fully_sharded())
    for norm_type in (1.0, 2.0, math.inf):
        assert float(model.clip_grad_norm_(1.0, norm_type)) == 0.0


@parametrize_pairs(at_most=4, norm_type=[1.0, 2.0, math.inf], value=[math.nan, math.inf], world_size=[2, 3])
def test_a_gradient_that_is_not_finite_shows_on_every_rank(
    ranks: RankPool, world_size: int, value: float, norm_type: float
) -> None:
    # It lies in the shard of one rank only; torch's norm of the whole is then NaN or infinite.
    for holder in range(world_size):
        norms = ranks(world_size).run(_clip_not_finite, holder, value, norm_type)
        assert all(math.isnan(norm) if math.isnan(value) else math.isinf(norm) for norm in norms), norms


def _clip_not_finite(holder: int, value: float, norm_type: float) -> float:
    model = nested_mlp(fully_sharded())
    backward(model, dist.get_rank())
    if dist.get_rank() == holder:
        model.params[0].grad[0] = value
    return float(model.clip_grad_norm_(1.0, norm_type))


# Errors


@on_ranks(2)
def test_on_an_inner_wrapper() -> None:
    model = nested_mlp(fully_sharded())
    backward(model, 0)
    before = model.trunk.params[0].grad.clone()
    with pytest.raises(RuntimeError, match=r"clip_grad_norm_ is for the outermost .*'trunk'.*Call it there"):
        model.trunk.clip_grad_norm_(1e-3)
    assert torch.equal(model.trunk.params[0].grad, before)


@pytest.mark.parametrize("sync_first", [False, True])
@on_ranks(2)
def test_gradients_that_are_not_reduced(sync_first: bool) -> None:
    model = nested_mlp(fully_sharded())
    if sync_first:
        backward(model, 0)
    with model.no_sync():
        backward(model, 0)
    with pytest.raises(RuntimeError, match=r"under no_sync\(\).*not reduced"):
        model.clip_grad_norm_(1.0)
    backward(model, 0)
    assert float(model.clip_grad_norm_(1.0)) > 0


@on_ranks(2)
def test_units_that_span_more_ranks_than_the_root() -> None:
    inner = fully_sharded()(nn.Linear(5, 5))
    model = fully_sharded(process_group=Alone())(nn.Sequential(inner, nn.Linear(5, 5)))
    backward(model, 0)
    before = inner.params[0].grad.clone()
    with pytest.raises(ValueError, match=r"outermost unit \(\[\d\]\), but inner units .* \(0\).*over all these ranks"):
        model.clip_grad_norm_(1e-3)
    assert torch.equal(inner.params[0].grad, before)
