"""`use_orig_params=True` trains as the plain model does, with optimizers that treat parameters differently.

Twins are in float64, so that nothing is hidden by rounding and AdamW does not blow noise up. What the option has no
business with (precision, offload, accumulation) is compared with flat parameters, to the bit.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import ShardedGradScaler, auto_wrap, enable_wrap
from tests.helpers.models import Wrap, keep, nested_mlp, tiny_transformer
from tests.helpers.offload import on
from tests.helpers.on_ranks import on_ranks
from tests.helpers.orig_twins import (
    CallModel,
    MakeOptimizers,
    OrigTwins,
    a_rate_for_each,
    branches,
    decay_matrices_only,
    first_rank_uses_all_of_the_last_unit,
    half_frozen,
    is_matrix,
    one_adamw,
    one_sgd,
    one_toolbox,
    original,
    two_optimizers,
    use_a,
)
from tests.helpers.pairs import Case, every_pair, parametrize_cases, parametrize_pairs
from tests.helpers.parity import (
    TOKENS,
    Training,
    adamw,
    assert_bit_equal,
    assert_parity,
    distance,
    sgd_with_momentum,
    train_sharded,
)
from tests.helpers.precision_twins import PRECISIONS
from tests.helpers.ranks import RankPool
from tests.helpers.twins import toolbox

# Optimizers that treat parameters differently


MAKE_OPTIMIZERS = [one_sgd, one_adamw, decay_matrices_only, a_rate_for_each, two_optimizers]
HOW = [{}, {"fused": True}, {"foreach": True}]


# Against the plain model


@parametrize_pairs(at_most=6, world_size=[3, 2, 1], make_optimizers=MAKE_OPTIMIZERS)
def test_training_equals_the_plain_model(ranks: RankPool, world_size: int, make_optimizers: MakeOptimizers) -> None:
    ranks(world_size).run(_train_nested, make_optimizers, {})


@parametrize_pairs(
    at_most=4, world_size=[2, 1], how=[{"fused": True}, {"foreach": True}], offload=[None, "cpu", "disk"]
)
def test_fused_and_foreach_optimizers_step_pieces(
    ranks: RankPool, tmp_path: Path, world_size: int, how: dict[str, Any], offload: str | None
) -> None:
    folder = {"offload_folder": tmp_path} if offload == "disk" else {}
    ranks(world_size).run(_train_nested, partial(decay_matrices_only, **how), {"offload": offload, **folder})


def _train_nested(make_optimizers: MakeOptimizers, options: dict[str, Any]) -> None:
    twins = OrigTwins(nested_mlp, make_optimizers, **options)
    for number in range(2):
        twins.step(number)
        twins.assert_close_gradients()
    twins.assert_close_weights()


@parametrize_cases(
    at_most=5,
    world_size=[3, 2],
    make_optimizer=[sgd_with_momentum, adamw],
    model=[{}, {"tied": True}, {"recompute": "inside"}, {"recompute": "outside", "reentrant": True, "nested": False}],
    training=[{"clip": 0.3}, {"accumulate": 2, "clip": 0.3}, {"accumulate": 2, "no_sync": False}],
    options=[{}, {"reshard_after_forward": False}, {"bucket_cap_mb": 0}],
)
@on_ranks("world_size")
def test_a_transformer_trains_as_on_one_process(case: Case) -> None:
    make_model = partial(tiny_transformer, **case.model)
    assert_parity(make_model, case.make_optimizer, wrap=original(**case.options), task=TOKENS, **case.training)


@on_ranks(2)
def test_units_of_auto_wrap_train() -> None:
    twins = OrigTwins(_auto_wrapped, decay_matrices_only)
    for number in range(2):
        twins.step(number)
    twins.assert_close_weights()


def _auto_wrapped(wrap: Wrap) -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 9), nn.LayerNorm(9), nn.Linear(9, 5))
    if wrap is keep:
        return module
    assert isinstance(wrap, partial)
    with enable_wrap(wrapper_cls=wrap.func, auto_wrap_policy=_linears, **wrap.keywords):
        return wrap(auto_wrap(module))


def _linears(module: nn.Module, recurse: bool, **_: Any) -> bool:
    return recurse or isinstance(module, nn.Linear)


# Parameters that are not used, or not everywhere


def each_rank_its_own(model: nn.Module, inputs: Tensor, rank: int) -> Tensor:
    return model(inputs, ("a", "ab", "b")[rank % 3])


@pytest.mark.parametrize(
    ("world_size", "make", "forward"),
    [(1, one_toolbox, use_a), (2, one_toolbox, use_a), (2, toolbox, use_a), (3, one_toolbox, each_rank_its_own)],
    ids=["alone", "parts of a unit", "whole units", "used on one rank"],
)
@on_ranks("world_size")
def test_weight_decay_does_not_touch_unused_parameters(make: Callable[[Wrap], nn.Module], forward: CallModel) -> None:
    twins = OrigTwins(make, partial(one_adamw, foreach=False))
    before = {name: value.clone() for name, value in twins.plain.state_dict().items()}
    for number in range(2):
        twins.step(number, forward)
        twins.assert_close_gradients()
    twins.assert_close_weights()
    assert torch.equal(twins.sharded.state_dict()["tools.c.0.weight"], before["tools.c.0.weight"])
    for optimizer in twins.optimizers[0]:
        assert twins.pieces["tools.c.0.weight"] not in optimizer.state


@pytest.mark.parametrize("bucket_cap_mb", [25, 0])
@on_ranks(2)
def test_ranks_whose_gradients_complete_in_different_orders_agree(bucket_cap_mb: float) -> None:
    # On one rank the last unit's gradients are complete first, on the other only when backward ends.
    twins = OrigTwins(branches, one_sgd, bucket_cap_mb=bucket_cap_mb)
    for number in range(3):
        twins.step(number, first_rank_uses_all_of_the_last_unit)
        twins.assert_close_gradients()
    twins.assert_close_weights()


# Frozen and trained


@parametrize_pairs(world_size=[1, 2, 3], make_optimizers=[one_sgd, decay_matrices_only])
@on_ranks("world_size")
def test_pain_point_04_frozen_parameters_beside_trained_ones(make_optimizers: MakeOptimizers) -> None:
    twins = OrigTwins(half_frozen, make_optimizers)
    for number in range(2):
        twins.step(number)
        twins.assert_close_gradients()
    twins.assert_close_weights()
    for frozen in (piece for piece in twins.pieces.values() if not piece.requires_grad):
        assert frozen.grad is None
        assert all(frozen not in optimizer.state for optimizer in twins.optimizers[0])


# Param groups


@on_ranks(2, 3)
def test_pain_point_05_no_weight_decay_on_biases_and_norms() -> None:
    model = nested_mlp(original())
    (optimizer,) = decay_matrices_only(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    (model(torch.zeros(2, 5)).sum() * 0).backward()
    optimizer.step()
    for name, value in model.state_dict().items():  # the decay alone is left: 1 - lr * weight_decay
        expected = before[name] * (1 - 1e-2 * 0.3) if is_matrix(name) else before[name]
        torch.testing.assert_close(value, expected, msg=partial("{}: {}".format, name))


# Against flat parameters, which the other tests of the project compare with unsharded ones


OFFLOADS: dict[str, dict[str, Any]] = {
    "on_device": {},
    "cpu": {"offload": "cpu"},
    "params_to_cpu": {"move_params_to_cpu": True, "move_grads_to_cpu": False},
    "disk": {"offload": "disk"},
}


@parametrize_cases(
    at_most=6,
    world_size=[3, 2, 1],
    precision=list(PRECISIONS),
    offload=list(OFFLOADS),
    machine=["of CPUs only", "accelerated"],
    how=[{}, {"foreach": True}],  # fused ones round in another way at the end of a tensor
    training=every_pair(accumulate=[1, 2], no_sync=[True, False], clip=[None, 0.3]),
    model=[{"recompute": how} for how in ("no", "inside", "outside")],
    reshard_after_forward=[True, False],
)
@on_ranks("world_size")
def test_training_is_that_of_flat_parameters_to_the_bit(tmp_path: Path, case: Case) -> None:
    options = OFFLOADS[case.offload] | {"reshard_after_forward": case.reshard_after_forward}
    if case.offload == "disk":
        options["offload_folder"] = os.fspath(tmp_path)
    precision = PRECISIONS[case.precision]
    plan = precision.training(
        Training(
            make_model=partial(tiny_transformer, **case.model),
            make_optimizer=partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, **case.how),
            task=TOKENS,
            **case.training,
        )
    )
    with on(case.machine):
        flat = train_sharded(plan, precision.wrap(**options))
        original = train_sharded(plan, precision.wrap(use_orig_params=True, **options))
        if plan.clip is None:
            assert_bit_equal(original, flat)
        else:  # ranks hold other parts, because of the gaps, so norms are added up in another order
            assert distance(original, flat).weight < 1e-5


@pytest.mark.parametrize("how", HOW, ids=["default", "fused", "foreach"])
@on_ranks(2)
def test_an_infinity_on_one_rank_skips_the_step_on_all(how: dict[str, Any]) -> None:
    model = nested_mlp(original(mixed_precision=True))
    (optimizer,) = decay_matrices_only(model, **how)
    scaler = ShardedGradScaler(init_scale=2.0**10, device="cpu")
    before = model.state_dict()
    scaler.scale(model(torch.ones(2, 5)).float().sum()).backward()
    if dist.get_rank() == 1:  # in one piece of one rank
        largest = max(model.parameters(), key=torch.numel)
        assert largest.grad is not None
        largest.grad[0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**9
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(2, 5)).float().sum()).backward()
    scaler.step(optimizer)
    assert any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())
