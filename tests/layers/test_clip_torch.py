"""`torch.nn.utils` on a sharded model's parameters gives what it gives on the unsharded one, or says what to use.

Its functions get parameters and gradients without the model, and would take this rank's shards for all there is.
"""

from __future__ import annotations

import math
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn.utils import (  # as scripts do, before anything is wrapped
    clip_grad_norm_,
    clip_grad_value_,
    clip_grads_with_norm_,
    get_total_norm,
    parameters_to_vector,
)

import fsdp
from fsdp.testing import World, WorldError
from tests.helpers.dtensor_twins import whole
from tests.helpers.equality import assert_close
from tests.helpers.forms import sharded, trained_rows
from tests.helpers.models import keep, nested_mlp
from tests.helpers.module_kinds import FORMS
from tests.helpers.on_ranks import on_ranks
from tests.helpers.parity import fully_sharded, trained_gradients
from tests.helpers.traffic import Counting, Traffic
from tests.layers.test_clip import backward, twins

Twins = tuple[nn.Module, nn.Module]


def assert_close_gradients(pair: Twins, what: str) -> None:
    found, expected = map(trained_gradients, pair)
    assert_close(found, expected, what)


@pytest.mark.parametrize("options", FORMS, ids=["flat", "original", "single"])
@on_ranks(2)
def test_clips_as_on_the_unsharded_model(options: dict[str, Any]) -> None:
    torch.set_default_dtype(torch.float64)
    for norm_type, clip in ((2.0, clip_grad_norm_), (math.inf, nn.utils.clip_grad_norm_), (1.0, clip_grad_norm_)):
        pair = twins(**options)
        sharded, plain = (clip(model.parameters(), 1e-2, norm_type) for model in pair)
        assert_close(sharded, plain, f"norm {norm_type}")
        assert_close_gradients(pair, f"norm {norm_type}")
    pair = twins(**options)
    norms = [get_total_norm([param.grad for param in model.parameters()]) for model in pair]
    assert_close(*norms, "total norm")
    assert_close(*(get_total_norm(list(model.parameters())) for model in pair), "norm of the parameters")
    for model, norm in zip(pair, norms, strict=True):
        clip_grads_with_norm_(model.parameters(), 1e-2, norm)
    assert_close_gradients(pair, "in two calls")
    pair = twins(**options)
    for model in pair:
        clip_grad_value_(model.parameters(), 1e-2)
    assert_close_gradients(pair, "by value")


@pytest.mark.parametrize("options", FORMS[:2], ids=["flat", "original"])
@on_ranks(2)
def test_clips_parts_of_models_and_several_models(options: dict[str, Any]) -> None:
    torch.set_default_dtype(torch.float64)
    pair = twins(**options)
    assert_close(*(clip_grad_norm_(model.trunk.parameters(), 1e-2) for model in pair), "a part")
    assert_close(*(clip_grad_norm_(next(iter(model.gate.parameters())), 1e-2) for model in pair), "a single parameter")
    assert_close_gradients(pair, "a part")
    pair = twins(**options)
    for model in pair:  # as trainers freeze what another optimizer steps, whose gradients stay
        model.trunk.requires_grad_(False)
    given = ([param for param in model.parameters() if param.requires_grad] for model in pair)
    assert_close(*(clip_grad_norm_(params, 1e-2) for params in given), "what is not frozen")
    assert_close_gradients(pair, "what is not frozen")

    first, second = twins(**options), twins(**options)
    plain_beside = [nn.Linear(3, 2), nn.Linear(3, 2)]  # one for each twin, the same on every rank
    for linear in plain_beside:
        linear.weight.grad = torch.full_like(linear.weight, 0.5)
    for norm_type in (2.0, math.inf):
        norms = [
            clip_grad_norm_(chain(one.parameters(), other.parameters(), beside.parameters()), 1e-2, norm_type)
            for one, other, beside in zip(first, second, plain_beside, strict=True)
        ]
        assert_close(*norms, f"two models and what is not sharded, {norm_type}")
    assert_close_gradients(first, "two models")
    assert_close(*(linear.weight.grad for linear in plain_beside), "what is not sharded")


class MixedDtypes(nn.Module):
    """The first rank alone has an element of the float64 parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale, self.linear = nn.Parameter(torch.ones(1, dtype=torch.float64)), nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(inputs) * self.scale.float()


@on_ranks(2)
def test_ranks_whose_elements_have_other_dtypes_agree_on_the_norm() -> None:
    """As if an optimizer is given local shards with elements only."""
    plain, sharded = MixedDtypes(), fully_sharded(use_orig_params=True)(MixedDtypes())
    for model in (plain, sharded):
        model(torch.ones(2, 4)).sum().backward()
    given = [param for param in sharded.parameters() if param.numel()]
    assert {param.dtype for param in given} == {torch.float32, torch.float64} or dist.get_rank() > 0
    norms = [get_total_norm([param.grad for param in each]) for each in (list(plain.parameters()), given)]
    norms += [clip_grad_norm_(given, 1e-2), clip_grad_norm_(plain.parameters(), 1e-2)]
    assert {norm.dtype for norm in norms[1:3]} == {torch.float64}
    for norm in norms:
        torch.testing.assert_close(norm.double(), norms[0].double(), rtol=1e-6, atol=0.0)
    for param in given:
        param.grad = None
    norm = sharded.clip_grad_norm_(1.0)  # the other rank has a gradient without elements left
    assert norm == 0
    assert norm.dtype is torch.float64


@on_ranks(2)
def test_rows_are_clipped_also_where_a_rank_has_none() -> None:
    torch.set_default_dtype(torch.float64)
    for norm_type in (2.0, math.inf):
        sharded, plain = nested_mlp(_rows), nested_mlp(keep)
        backward(sharded, 0)
        backward(plain, 0)
        for params in (lambda model: model.parameters(), lambda model: model.trunk.parameters()):
            totals = [get_total_norm([param.grad for param in params(model)], norm_type) for model in (sharded, plain)]
            assert_close(totals[0].full_tensor(), totals[1], f"total norm {norm_type}")
            norms = [clip_grad_norm_(params(model), 1e-2, norm_type) for model in (sharded, plain)]
            assert_close(norms[0].full_tensor(), norms[1], f"norm {norm_type}")
            for model, total in zip((sharded, plain), totals, strict=True):
                clip_grads_with_norm_(params(model), 1e-3, total)
        for mine, expected in zip(sharded.parameters(), plain.parameters(), strict=True):
            assert_close(mine.grad.full_tensor(), expected.grad, "gradient")


@on_ranks(2, 3)
def test_gradients_that_were_assigned_with_other_placements() -> None:
    torch.set_default_dtype(torch.float64)
    sharded, plain = nested_mlp(_rows), nested_mlp(keep)
    backward(sharded, 0)
    backward(plain, 0)
    first, second, *_ = sharded.parameters()
    first.grad = first.grad.redistribute(placements=[Replicate()])
    mean = second.grad.full_tensor() / dist.get_world_size()
    second.grad = DTensor.from_local(mean, second.device_mesh, [Partial()])
    norms = [get_total_norm([param.grad for param in model.parameters()]) for model in (sharded, plain)]
    assert_close(norms[0].full_tensor(), norms[1], "total norm")
    norms = [clip_grad_norm_(model.parameters(), 1e-2) for model in (sharded, plain)]
    assert_close(norms[0].full_tensor(), norms[1], "norm")


@on_ranks(2)
def test_modules_that_are_sharded_without_a_root_exchange_one_norm() -> None:
    torch.set_default_dtype(torch.float64)
    sharded, plain = (nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))) for _ in range(2))
    sharded.load_state_dict(plain.state_dict())
    for layer in sharded:
        fsdp.fully_shard(layer)
    for model in (sharded, plain):
        model(torch.ones(2, 4)).sum().backward()
    with Counting(traffic := Traffic()):
        norm = clip_grad_norm_(sharded.parameters(), 1e-2)
    assert_close(norm.full_tensor(), clip_grad_norm_(plain.parameters(), 1e-2), "norm")
    assert traffic.values == torch.float64.itemsize


@on_ranks(2)
def test_hooks_clip_single_parameters_inside_of_backward() -> None:
    torch.set_default_dtype(torch.float64)
    sharded, plain = nested_mlp(_rows), nested_mlp(keep)
    for model in (sharded, plain):
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(_clip)
        backward(model, 0)
    for mine, expected in zip(sharded.parameters(), plain.parameters(), strict=True):
        assert_close(mine.grad.full_tensor(), expected.grad, "gradient")


def _clip(param: Tensor) -> None:
    clip_grad_norm_(param, 1e-2)


def _rows(module: nn.Module) -> nn.Module:
    return fsdp.fully_shard(module)


@pytest.mark.parametrize("norm_type", [0, -1.0, -math.inf, math.nan])
@on_ranks(2)
def test_orders_that_are_not_positive_are_an_error_on_every_rank(norm_type: float) -> None:
    # Padding would count, and the smallest element is not the largest of the ranks' smallest.
    models = [nested_mlp(fully_sharded(**options)) for options in FORMS]
    rows = nn.Linear(5, 1)  # of which the second rank has nothing, and a norm of order -inf is an error there
    fsdp.fully_shard(rows)
    for model in (*models, rows):
        model(torch.randn(2, 5)).sum().backward()
        with pytest.raises(ValueError, match="norm_type must be positive"):
            clip_grad_norm_(model.parameters(), 1.0, norm_type)
        with pytest.raises(ValueError, match="norm_type must be positive"):
            get_total_norm([param.grad for param in model.parameters() if param.grad is not None], norm_type)


@on_ranks(2)
def test_parameters_that_are_given_twice_count_twice() -> None:
    """As with tied weights in two lists that are put together."""
    torch.set_default_dtype(torch.float64)
    for wrap in (*(fully_sharded(**options) for options in FORMS), _rows):
        sharded, plain = nested_mlp(wrap), nested_mlp(keep)
        for model in (sharded, plain):
            backward(model, 0)
        norms = [clip_grad_norm_([*model.parameters(), *model.parameters()], 1e-2) for model in (sharded, plain)]
        assert_close(whole(norms[0]), norms[1], "norm")
        norms = [clip_grad_norm_(model.parameters(), 1e-2) for model in (sharded, plain)]
        assert_close(whole(norms[0]), norms[1], "norm of gradients that were scaled twice")


@pytest.mark.parametrize("rows", [False, True])
def test_ranks_that_clip_a_part_to_different_norms_are_told(rows: bool) -> None:
    with pytest.raises(WorldError, match=r"max_norm=0\.01"):
        World(2).run(_clip_a_part_to_different_norms, rows)


def _clip_a_part_to_different_norms(rows: bool) -> None:
    model = nested_mlp(_rows if rows else fully_sharded())
    backward(model, 0)
    clip_grad_norm_(model.trunk.parameters(), 0.01 * (1 + dist.get_rank()))


class Beside(nn.Module):
    """Rank 0 alone has a gradient of a parameter that is not sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.own = nn.Linear(5, 3), nn.Parameter(torch.ones(3))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(inputs) * (self.own if dist.get_rank() == 0 else 1.0)


@on_ranks(2)
def test_a_parameter_that_is_not_sharded_has_a_gradient_on_one_rank() -> None:
    torch.set_default_dtype(torch.float64)
    model = Beside()
    fsdp.fully_shard(model, ignored_params={model.own})
    model(torch.ones(2, 5)).sum().backward()
    norm = clip_grad_norm_([param for param in model.parameters() if param.grad is not None], 1e9)
    squares = [whole(param.grad).square().sum() for param in model.linear.parameters()]
    own = torch.zeros(()) if model.own.grad is None else model.own.grad.square().sum()
    dist.all_reduce(own)
    assert_close(whole(norm), (sum(squares) + own / 2).sqrt(), "the mean of the ranks, for what is not sharded")


@pytest.mark.parametrize("form", ["flat", "orig", "rows"])
@on_ranks(2)
def test_parameters_from_before_sharding_are_refused(form: str) -> None:
    """Their gradients are those of the shards, and would be left out."""
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    before = list(plain.parameters())
    assert clip_grad_norm_(before, 1.0) == 0
    model = sharded(plain, form, (nn.Linear,), **({"sync_module_states": True} if form != "rows" else {}))
    model(torch.ones(2, 4))
    assert clip_grad_norm_(before, 1.0) == 0  # of nothing
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(RuntimeError, match=r"clip_grad_norm_: .*weight of .* get no gradients"):
        clip_grad_norm_(before, 1.0)
    assert whole(clip_grad_norm_(model.parameters(), 1.0)) > 0


@on_ranks(2)
def test_parameters_from_between_a_forward_and_its_backward_are_refused() -> None:
    model, _ = trained_rows(lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    outputs = model(torch.ones(2, 4))
    listed = list(model.parameters())
    assert {type(param) for param in listed} != {DTensor}
    assert whole(clip_grad_norm_(listed, 1.0)) == 0  # of nothing
    model[1].requires_grad_(False)
    outputs.sum().backward()
    assert whole(clip_grad_norm_(listed, 1.0)) > 0  # of what is not frozen
    model[1].requires_grad_(True)
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(RuntimeError, match=r"clip_grad_norm_: weight of 1, unsharded.* get no gradients"):
        clip_grad_norm_(listed, 1.0)


@on_ranks(2)
def test_what_is_not_finite_or_not_reduced_is_an_error_on_every_rank() -> None:
    model, _ = twins()
    params = list(model.parameters())
    if dist.get_rank() == 1:
        params[0].grad[0] = math.nan
    before = [param.grad.clone() for param in params]
    with pytest.raises(RuntimeError, match="norm of the gradients is nan"):
        clip_grad_norm_(params, 1.0, error_if_nonfinite=True)
    assert all(torch.equal(a.grad.nan_to_num(), b.nan_to_num()) for a, b in zip(params, before, strict=True))
    with model.no_sync():
        backward(model, 0)
    with pytest.raises(RuntimeError, match=r"under no_sync\(\).*not reduced"):
        clip_grad_norm_(params, 1.0)
    clip_grad_value_(params, 1.0)  # of each element, what is there
    with pytest.raises(RuntimeError, match=r"under no_sync\(\).*not reduced"):
        torch.optim.SGD(params, lr=0.1).step()


@on_ranks(2)
def test_before_the_first_use_there_is_nothing_to_clip() -> None:
    model = nested_mlp(fully_sharded())
    params = list(model.parameters())
    assert clip_grad_norm_(params, 1.0) == 0
    params[0].grad = torch.ones_like(params[0])
    with pytest.raises(RuntimeError, match=r"before the first forward.*model\.clip_grad_norm_"):
        clip_grad_norm_(params, 1.0)


@on_ranks(2)
def test_inside_of_join() -> None:
    model = nested_mlp(fully_sharded())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fsdp.join(model, optimizer):
        for _ in range(1 + dist.get_rank()):
            backward(model, 0)
            assert clip_grad_norm_(model.parameters(), 1e-2) > 1e-2
            model.clip_grad_value_(1e-3)
            if dist.get_world_size() == 2 and dist.get_rank() == 1:
                with pytest.raises(RuntimeError, match=r"fsdp\.join.*all parameters of one model"):
                    clip_grad_norm_(model.trunk.parameters(), 1e-2)
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(2)
def test_vectors_are_those_of_the_model_inside_of_summon_full_params() -> None:
    for options in FORMS:
        model = nested_mlp(fully_sharded(**options))
        with model.summon_full_params():
            whole = parameters_to_vector(model.parameters())
        assert_close(whole, parameters_to_vector(nested_mlp(keep).parameters()), "whole parameters")


@on_ranks(2)
def test_models_that_are_not_sharded_are_clipped_by_torch() -> None:
    twins()  # from now on torch's functions look for what is sharded
    rank = dist.get_rank()
    plain = nested_mlp(keep)
    backward(plain, rank)
    grads: list[Tensor] = [param.grad for param in plain.parameters()]
    expected = torch.cat([grad.flatten() for grad in grads]).norm()
    assert_close = torch.testing.assert_close
    assert_close(get_total_norm(grads), expected)
    assert_close(clip_grad_norm_(plain.parameters(), 1e-3), expected)  # each rank by its own
    assert_close(get_total_norm(grads), torch.tensor(1e-3), rtol=1e-3, atol=0.0)
    with pytest.warns(UserWarning, match="empty generator"):
        clip_grad_norm_((param for param in ()), 1.0)


@pytest.mark.parametrize("options", FORMS, ids=["flat", "original", "single"])
@on_ranks(2)
def test_another_model_is_clipped_while_a_sharded_one_accumulates(options: dict[str, Any]) -> None:
    """As with two networks that train against each other."""
    model, plain = nested_mlp(fully_sharded(**options)), nested_mlp(keep)
    with model.no_sync():
        backward(model, dist.get_rank())
    for clip in (clip_grad_norm_, get_total_norm):
        backward(plain, 0)
        given = [param if clip is clip_grad_norm_ else param.grad for param in plain.parameters()]
        expected = math.sqrt(sum(float(param.grad.square().sum()) for param in plain.parameters()))
        assert float(clip(given, *[0.1] * (clip is clip_grad_norm_))) == pytest.approx(expected)
        plain.zero_grad()
