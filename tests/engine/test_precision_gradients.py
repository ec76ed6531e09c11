"""Gradients in mixed precision: computed in few bits, added and stepped in many.

Powers of two make the point exactly: in bfloat16, 1 + 2**-9 is 1, so 64 gradients of 2**-9 after one of 1 are lost if
they are added in it, and make 1.125 if they are not.
"""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP1
from torch.distributed.fsdp import MixedPrecision as TorchPolicy

from fsdp import FullyShardedDataParallel, MixedPrecision, get_fsdp_instances
from tests.helpers.dtypes import BRAIN, HALF, SINGLE
from tests.helpers.equality import assert_same_state
from tests.helpers.models import Wrap
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import Case, parametrize_cases, parametrize_pairs
from tests.helpers.parity import fully_sharded, nested_mlp
from tests.helpers.ranks import RankPool

TINY, TIMES, TOTAL = 2.0**-9, 64, 1.125

POLICIES = {
    "bfloat16": MixedPrecision(param_dtype=BRAIN),
    "bfloat16, reduced in float32": MixedPrecision(param_dtype=BRAIN, reduce_dtype=SINGLE),
    "float32, reduced in bfloat16": MixedPrecision(reduce_dtype=BRAIN),
    "float16": MixedPrecision(param_dtype=HALF),
}


class Weights(nn.Module):
    """Its weights' gradients are its inputs."""

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.inner = wrap(nn.Linear(3, 1, bias=False))
        self.outer = nn.Linear(3, 1, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs) + self.outer(inputs)


def weights(dtype: torch.dtype = SINGLE, **options: Any) -> FullyShardedDataParallel:
    wrap = fully_sharded(**options)
    model: Any = wrap(Weights(lambda module: wrap(module.to(dtype))).to(dtype))
    return model


def backward(model: nn.Module, gradient: float) -> None:
    model(torch.full((1, 3), gradient)).sum().backward()


def gradients(model: FullyShardedDataParallel) -> list[Tensor]:
    """Of the whole parameters, on every rank; without what only fills shards up to equal size."""
    whole = []
    for wrapper in get_fsdp_instances(model):
        for handle in wrapper._unit.handles:
            assert handle.flat_param.grad is not None
            shard = handle.flat_param.grad.view(-1)
            pieces = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
            dist.all_gather(pieces, shard)
            whole += handle.layout.unpack(torch.cat(pieces))
    return whole


# What the optimizer sees


@parametrize_cases(
    policy=[*POLICIES, True],
    world_size=[2, 1],
    flatten_parameters=[True, False],
    accumulate=[1, 2],
    bucket_cap_mb=[25, 0],
)
@on_ranks("world_size")
def test_the_optimizer_sees_full_precision(case: Case) -> None:
    options = case.only("flatten_parameters", "bucket_cap_mb")
    chosen = POLICIES[case.policy] if isinstance(case.policy, str) else case.policy
    model: Any = nested_mlp(fully_sharded(mixed_precision=chosen, **options))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        for turn in range(case.accumulate):
            with model.no_sync() if turn < case.accumulate - 1 else nullcontext():
                model(torch.ones(2, 5)).sum().backward()
        for param in model.parameters():
            assert (param.dtype, param.grad.dtype) == (SINGLE, SINGLE)
            assert param.grad.shape == param.shape
        optimizer.step()
        states = [value for state in optimizer.state.values() for value in state.values()]
        assert {value.dtype for value in states} == {SINGLE}
        optimizer.zero_grad()


@on_ranks(2)
def test_updates_below_the_precision_of_the_computation_add_up() -> None:
    """What the master is for: a bfloat16 weight of 1 would stay there for ever."""
    model = weights(mixed_precision=POLICIES["bfloat16"])
    with model.summon_full_params(), torch.no_grad():
        for param in model.parameters():
            param.fill_(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=TINY)
    for _ in range(TIMES):
        optimizer.zero_grad()
        backward(model, -1.0)
        optimizer.step()
    assert all(torch.equal(value, torch.full((1, 3), TOTAL)) for value in model.state_dict().values())
    assert torch.equal(model(torch.ones(1, 3)).float(), torch.tensor([[6 * TOTAL]]))


# Accumulation


@parametrize_cases(
    at_most=5,
    policy=list(POLICIES),
    world_size=[2, 1],
    reduces_at=["every one", "the last", "some"],
    flatten_parameters=[True, False],
)
@on_ranks("world_size")
def test_tiny_gradients_of_many_micro_batches_are_not_lost(case: Case) -> None:
    policy = POLICIES[case.policy]
    model = weights(mixed_precision=policy, flatten_parameters=case.flatten_parameters)
    for turn in range(1 + TIMES):
        is_reduced = {"every one": True, "the last": turn == TIMES, "some": turn % 16 == 0}[case.reduces_at]
        with nullcontext() if is_reduced else model.no_sync():
            backward(model, TINY if turn else 1.0)
    assert all(torch.equal(value, torch.full((1, 3), TOTAL)) for value in gradients(model))


@pytest.mark.parametrize("reduces_at_once", [True, False])
@on_ranks(2)
def test_16_bit_parameters_reduced_in_float32_accumulate_in_it(reduces_at_once: bool) -> None:
    """Under `no_sync`; what is reduced must be of the parameters' own dtype, since torch wants that of gradients."""
    model = weights(BRAIN, mixed_precision=MixedPrecision(param_dtype=BRAIN, reduce_dtype=SINGLE))
    for turn in range(1 + TIMES):
        with nullcontext() if reduces_at_once or turn == TIMES else model.no_sync():
            backward(model, TINY if turn else 1.0)
    expected = 1.0 if reduces_at_once else TOTAL
    assert all(torch.equal(value, torch.full((1, 3), expected).bfloat16()) for value in gradients(model))


@on_ranks(2)
def test_gradients_that_cancel_between_micro_batches_are_added_before_they_are_rounded() -> None:
    model = weights(mixed_precision=POLICIES["bfloat16"])
    for gradient in (1.0, TINY, -1.0):
        with model.no_sync() if gradient > 0 else nullcontext():
            backward(model, gradient)
    assert all(torch.equal(value, torch.full((1, 3), TINY)) for value in gradients(model))


# Sums over ranks


@parametrize_pairs(policy=list(POLICIES), bucket_cap_mb=[25, 0])
@on_ranks(4)
def test_the_ranks_gradients_are_added_in_the_masters_dtype(policy: str, bucket_cap_mb: float) -> None:
    """In bfloat16, the mean of 1 and three times 2**-9 would be 1/4."""
    policy = POLICIES[policy]
    model = weights(mixed_precision=policy, bucket_cap_mb=bucket_cap_mb)
    backward(model, TINY if dist.get_rank() else 1.0)
    assert all(torch.equal(value, torch.full((1, 3), (1 + 3 * TINY) / 4)) for value in gradients(model))


@parametrize_pairs(policy=[MixedPrecision(param_dtype=HALF), MixedPrecision(reduce_dtype=HALF)], accumulate=[1, 2])
def test_gradients_are_divided_before_they_could_overflow(
    ranks: RankPool, policy: MixedPrecision, accumulate: int
) -> None:
    """Their sum of 240,000 is beyond float16, which ends at 65,504."""
    ranks(4).run(_overflow, policy, accumulate, 60_000.0)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_of_more_bits_are_divided_before_they_are_narrowed(ranks: RankPool, accumulate: int) -> None:
    """What a float32 computation gives may be beyond float16 before it is divided, and not after."""
    ranks(4).run(_overflow, MixedPrecision(reduce_dtype=HALF), accumulate, 120_000.0)


def _overflow(policy: MixedPrecision, accumulate: int, gradient: float) -> None:
    model = weights(mixed_precision=policy, gradient_predivide_factor=4.0)
    for turn in range(accumulate):
        with model.no_sync() if turn < accumulate - 1 else nullcontext():
            backward(model, gradient / accumulate)
    assert all(torch.equal(value, torch.full((1, 3), gradient)) for value in gradients(model))


@pytest.mark.parametrize("reduce_dtype", [SINGLE, BRAIN])
@on_ranks(4)
def test_sums_of_wider_range_are_divided_before_they_are_narrowed(reduce_dtype: torch.dtype) -> None:
    """The sum, which is divided once more by the square root of the world size, is beyond the float16 of the shard."""
    model = weights(HALF, mixed_precision=MixedPrecision(param_dtype=HALF, reduce_dtype=reduce_dtype))
    backward(model, 40_960.0)
    assert all(torch.equal(value, torch.full((1, 3), 40_960.0).half()) for value in gradients(model))


@on_ranks(2)
def test_gradients_of_fewer_bits_are_widened_before_they_are_divided() -> None:
    """The smallest float16 divided by two is nothing in float16."""
    smallest = 2.0**-24
    model = weights(mixed_precision=MixedPrecision(param_dtype=HALF, reduce_dtype=SINGLE))
    backward(model, smallest)
    assert all(torch.equal(value, torch.full((1, 3), smallest)) for value in gradients(model))


# Clipping


@pytest.mark.parametrize("policy", ["bfloat16", "float16"])
@on_ranks(2)
def test_the_norm_is_that_of_the_float32_gradients(policy: str) -> None:
    policy = POLICIES[policy]
    model: Any = nested_mlp(fully_sharded(mixed_precision=policy))
    model(torch.ones(2, 5)).float().square().sum().backward()
    before = gradients(model)
    norm = model.clip_grad_norm_(0.1)
    assert norm.dtype is SINGLE
    torch.testing.assert_close(norm, torch.cat([value.flatten() for value in before]).norm())
    torch.testing.assert_close(gradients(model), [value * 0.1 / norm for value in before])


# Gradients that stay in few bits


def every_kind(policy: MixedPrecision) -> dict[str, dict[str, Any]]:
    return {
        "flat": {"mixed_precision": policy},
        "orig": {"mixed_precision": policy, "use_orig_params": True},
        "offloaded": {"mixed_precision": policy, "offload": "cpu"},
    }


LOW = MixedPrecision(param_dtype=BRAIN, keep_low_precision_grads=True)


@pytest.mark.parametrize("kind", every_kind(LOW))
@on_ranks(2)
def test_gradients_are_kept_in_the_dtype_of_the_computation_if_asked_for(kind: str) -> None:
    torch.manual_seed(0)
    low = weights(**every_kind(LOW)[kind])
    torch.manual_seed(0)
    wide = weights(**every_kind(MixedPrecision(param_dtype=BRAIN))[kind])
    for model in (low, wide):
        for _ in range(2):
            backward(model, 0.1)
        model.clip_grad_norm_(0.5)
    with_grad = [param for param in low.parameters() if param.grad is not None]
    assert with_grad
    assert {param.grad.dtype for param in with_grad if param.grad is not None} == {BRAIN}
    assert {param.dtype for param in with_grad} == {SINGLE}
    for model in (low, wide):
        torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9).step()
    low_state = low.state_dict()
    for name, value in wide.state_dict().items():
        torch.testing.assert_close(low_state[name], value, rtol=2.0**-7, atol=0)


@parametrize_pairs(kind=list(every_kind(LOW)), reduce_dtype=[None, SINGLE, BRAIN])
@on_ranks(2)
def test_gradients_that_are_kept_low_can_be_summoned(kind: str, reduce_dtype: torch.dtype | None) -> None:
    policy = MixedPrecision(param_dtype=BRAIN, reduce_dtype=reduce_dtype, keep_low_precision_grads=True)
    model = weights(**every_kind(policy)[kind])
    backward(model, 0.5)
    for scale in (1, 2):
        with model.summon_full_params(with_grads=True):
            for param in model.parameters():
                assert param.grad is not None
                assert param.dtype == SINGLE
                torch.testing.assert_close(param.grad, torch.full((1, 3), 0.5 * scale, dtype=BRAIN))
                param.grad *= 2
    assert {param.grad.dtype for param in model.parameters() if param.grad is not None} == {BRAIN}
    backward(model, 0.5)  # which adds to what is there
    with model.summon_full_params(with_grads=True):
        for param in model.parameters():
            torch.testing.assert_close(param.grad, torch.full((1, 3), 2.5, dtype=BRAIN))


@on_ranks(2)
def test_gradients_are_kept_low_as_in_fsdp1() -> None:
    for param_dtype, reduce_dtype in itertools.product([None, BRAIN], [None, SINGLE, BRAIN]):
        dtypes: dict[str, Any] = {"param_dtype": param_dtype, "reduce_dtype": reduce_dtype}
        found = []
        torchs = partial(TorchFSDP1, device_id=torch.device("cpu"))
        for kind, policy in ((FullyShardedDataParallel, MixedPrecision), (torchs, TorchPolicy)):
            given: Any = policy(**dtypes, keep_low_precision_grads=True)
            model: Any = kind(nn.Linear(4, 4), mixed_precision=given)
            model(torch.ones(2, 4)).float().sum().backward()
            found.append({param.grad.dtype for param in model.parameters()})
        assert found[0] == found[1], dtypes


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adagrad])
@on_ranks(2)
def test_optimizers_that_cannot_take_them_say_so(optimizer: Any) -> None:
    model = weights(mixed_precision=LOW)
    backward(model, 1.0)
    before = model.state_dict()
    with pytest.raises(
        RuntimeError, match=rf"{optimizer.__name__} requires .*float32.*keep_low_precision_grads=True.*bfloat16"
    ):
        optimizer(model.parameters()).step()
    assert_same_state(model.state_dict(), before)
