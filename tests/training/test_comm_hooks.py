"""Training with communication hooks: as without one if the hook does the same; what compression costs and saves."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import MixedPrecision, use_torch_collectives
from fsdp.distributed.comm_hooks import bf16_compress_hook
from tests.engine.test_precision_memory import sent_in_a_step, step, tower
from tests.helpers.comm_hooks import (
    CommHook,
    average,
    average_in_float32,
    torchs,
    torchs_reduce_scatter,
    torchs_state,
    with_hook,
)
from tests.helpers.dtypes import BRAIN, SINGLE
from tests.helpers.forms import WRAPPERS
from tests.helpers.models import nested_mlp, tiny_transformer
from tests.helpers.offload import on
from tests.helpers.on_ranks import on_ranks
from tests.helpers.orig_twins import (
    OrigTwins,
    branches,
    first_rank_uses_all_of_the_last_unit,
    one_sgd,
)
from tests.helpers.pairs import Case, every_pair, parametrize_cases, parametrize_pairs
from tests.helpers.parity import (
    TOKENS,
    MakeOptimizer,
    Trained,
    Training,
    adamw,
    assert_bit_equal,
    assert_parity,
    fully_sharded,
    sgd_with_momentum,
    train_sharded,
)
from tests.helpers.ranks import RankPool
from tests.helpers.traffic import by_dtype, counting_sent
from tests.helpers.twins import batch, score


def trained(hook: CommHook | None, make_optimizer: MakeOptimizer, **options: Any) -> Trained:
    """Collective. Steps of the nested model."""
    make_model = nested_mlp if hook is None else partial(with_hook, nested_mlp, hook)
    training = Training(make_model=make_model, make_optimizer=make_optimizer)
    return train_sharded(training, fully_sharded(**options))


# The same as without a hook


@pytest.mark.parametrize(("world_size", "make_optimizer"), [(1, adamw), (3, sgd_with_momentum), (4, adamw)])
def test_a_hook_that_averages_changes_nothing_to_the_bit(
    ranks: RankPool, world_size: int, make_optimizer: MakeOptimizer
) -> None:
    ranks(world_size).run(_compare_with_no_hook, average, make_optimizer)


def _compare_with_no_hook(hook: CommHook, make_optimizer: MakeOptimizer, **options: Any) -> None:
    assert_bit_equal(trained(hook, make_optimizer, **options), trained(None, make_optimizer, **options))


@pytest.mark.parametrize(("world_size", "make_optimizer"), [(1, sgd_with_momentum), (2, adamw), (3, adamw)])
@on_ranks("world_size")
def test_torchs_reduce_scatter_hook_trains_as_torchs_collectives_do_to_the_bit(make_optimizer: MakeOptimizer) -> None:
    use_torch_collectives()
    try:
        # A bucket would be summed in another order.
        _compare_with_no_hook(torchs_reduce_scatter, make_optimizer, bucket_cap_mb=0)
    finally:
        use_torch_collectives(False)


POLICIES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16_mixed": {"mixed_precision": MixedPrecision(param_dtype=BRAIN)},
    "reduced_in_float32": {"mixed_precision": MixedPrecision(param_dtype=BRAIN, reduce_dtype=SINGLE)},
}
OFFLOADS: dict[str, dict[str, Any]] = {
    "on_device": {},
    "cpu": {"offload": "cpu"},
    "params_to_cpu": {"move_params_to_cpu": True, "move_grads_to_cpu": False},
    "disk": {"offload": "disk"},
}


@parametrize_cases(
    at_most=6,
    world_size=[2, 1],
    policy=list(POLICIES),
    layout=list(WRAPPERS),
    offload=list(OFFLOADS),
    machine=["of CPUs only", "accelerated"],
    training=every_pair(accumulate=[1, 2], no_sync=[True, False], clip=[None, 0.3]),
    recompute=["no", "inside", "outside"],
    reshard_after_forward=[True, False],
)
@on_ranks("world_size")
def test_a_hook_goes_with_other_options_to_the_bit(tmp_path: Path, case: Case) -> None:
    options = (
        POLICIES[case.policy]
        | WRAPPERS[case.layout]
        | OFFLOADS[case.offload]
        | {"reshard_after_forward": case.reshard_after_forward}
    )
    if case.offload == "disk":
        options["offload_folder"] = os.fspath(tmp_path)
    make_model = partial(tiny_transformer, recompute=case.recompute)
    plan = partial(Training, make_optimizer=adamw, task=TOKENS, **case.training)
    with on(case.machine):
        plain = train_sharded(plan(make_model=make_model), fully_sharded(**options))
        hooked = partial(with_hook, make_model, average_in_float32)
        assert_bit_equal(train_sharded(plan(make_model=hooked), fully_sharded(**options)), plain)


@on_ranks(2, 3)
def test_ranks_that_use_different_parameters_of_small_units_call_the_hook_in_one_order() -> None:
    """torch's collectives could not tell two units apart."""
    twins = OrigTwins(partial(with_hook, branches, torchs_reduce_scatter), one_sgd)
    for number in range(3):
        twins.step(number, first_rank_uses_all_of_the_last_unit)
        twins.assert_close_gradients()
    twins.assert_close_weights()


# bfloat16


@parametrize_pairs(world_size=[1, 2, 3], state_is_the_group=[False, True])
@on_ranks("world_size")
def test_bf16_compress_hook_averages_rounded_gradients_in_float32(state_is_the_group: bool) -> None:
    world_size = dist.get_world_size()
    model: Any = fully_sharded()(nn.Linear(5, 7))
    state = model.state_dict()
    model.register_comm_hook(dist.group.WORLD if state_is_the_group else None, bf16_compress_hook)
    score(model(batch(0, dist.get_rank()).float())).backward()
    gradients = [_plain_gradient(state, rank) for rank in range(world_size)]
    expected = gradients[0].bfloat16().float()
    for gradient in gradients[1:]:  # in rank order, so that it is the same to the bit
        expected = expected + gradient.bfloat16().float()
    expected /= world_size
    found = _whole_gradient(model)
    assert torch.equal(found, expected)
    exact = torch.stack(gradients).double()
    error = (found.double() - exact.mean(dim=0)).abs()
    assert (error <= exact.abs().mean(dim=0) * (2**-8 + 2**-20)).all()
    assert error.any()


def _plain_gradient(state: dict[str, Tensor], rank: int) -> Tensor:
    plain = nn.Linear(5, 7)
    plain.load_state_dict(state)
    score(plain(batch(0, rank).float())).backward()
    return torch.cat([param.grad.reshape(-1) for param in plain.parameters() if param.grad is not None])


def _whole_gradient(model: Any) -> Tensor:
    (shard,) = model.params
    pieces = [torch.empty_like(shard.grad) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, shard.grad)
    return torch.cat(pieces)[:42]


@parametrize_pairs(world_size=[2, 3], bucket_cap_mb=[25, 0])
@on_ranks("world_size")
def test_bf16_compress_hook_halves_the_bytes_of_reductions(bucket_cap_mb: float) -> None:
    """With one gather for each reduction, these are half of what is sent."""
    options = {"bucket_cap_mb": bucket_cap_mb, "reshard_after_forward": False}
    full = sent_in_a_step(**options)
    sent = {}
    for hook in (average, bf16_compress_hook):
        model = tower(**options)
        model.register_comm_hook(None, hook)  # the ranks also agree
        with counting_sent(by_dtype) as sent[hook]:
            step(model)
    assert full.keys() == {SINGLE}
    assert sent[average] == full
    assert sent[bf16_compress_hook] == {SINGLE: full[SINGLE] // 2, BRAIN: full[SINGLE] // 4}


@parametrize_pairs(make_optimizer=[sgd_with_momentum, adamw], world_size=[2, 3])
@on_ranks("world_size")
def test_training_in_bf16_gradients_stays_close(make_optimizer: MakeOptimizer) -> None:
    """Ten steps of the unsharded model, within what rounding of gradients explains; and not closer, by accident."""
    make_model = partial(with_hook, nested_mlp, bf16_compress_hook)
    distance = assert_parity(make_model, make_optimizer, 10, tolerance=0.03).distance
    assert distance.weight > 1e-5


# torch's own


@parametrize_pairs(
    at_most=4, world_size=[2, 1], layout=list(WRAPPERS), name=["bf16_compress_hook", "fp16_compress_hook"]
)
@on_ranks("world_size")
def test_torchs_compressing_hooks_work_unchanged(layout: str, name: str) -> None:
    options = WRAPPERS[layout]
    make_model = partial(with_hook, nested_mlp, torchs(name), state=torchs_state(name))
    # torch's hooks end by recording a stream for their result, which raises for any tensor on CPU.
    with mock.patch.object(Tensor, "record_stream"):
        assert_parity(make_model, sgd_with_momentum, 10, wrap=fully_sharded(**options), tolerance=0.03)
