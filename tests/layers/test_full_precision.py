"""`fsdp.full_precision`: inside the context, a model computes as if it had no mixed precision."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp
from fsdp import MixedPrecision, ShardingStrategy, get_fsdp_instances
from tests.helpers.dtypes import BRAIN, HALF, SINGLE
from tests.helpers.models import nested_mlp
from tests.helpers.on_ranks import on_ranks
from tests.helpers.owned import under_fully_shard
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.parity import alone, fully_sharded, sgd_with_momentum
from tests.helpers.twins import assert_at_rest

LOW = MixedPrecision(param_dtype=BRAIN)
LOW_BUFFERS = MixedPrecision(param_dtype=BRAIN, buffer_dtype=BRAIN)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"reshard_after_forward": False},
    {"use_orig_params": True},
    {"flatten_parameters": False},
    {"offload": "cpu"},
    {"sharding_strategy": ShardingStrategy.SHARD_OPTIM},
]


def batch(number: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(number))


def evaluate(model: nn.Module, inputs: Tensor, mode: Callable[[], Any] = torch.no_grad) -> Tensor:
    with fsdp.full_precision(model), mode():
        output = model.eval()(inputs)
    model.train()
    return output


def score(output: Tensor) -> Tensor:
    return output.float().sin().sum()


@parametrize_pairs(mode=[torch.no_grad, torch.inference_mode, nullcontext], world_size=[2, 1], options=OPTIONS)
@on_ranks("world_size")
def test_evaluation_equals_the_unsharded_model_bit_for_bit(mode: Callable[[], Any], options: dict[str, Any]) -> None:
    """Also between steps, when the order of units is known."""
    model, plain = nested_mlp(fully_sharded(mixed_precision=LOW, **options)), nested_mlp()
    optimizer = sgd_with_momentum(model.parameters())
    for number in range(2):
        found = evaluate(model, batch(number), mode)
        assert found.dtype is SINGLE
        assert torch.equal(found, evaluate_plain(plain, batch(number)))
        low = model(batch(number))
        assert low.dtype is BRAIN
        score(low).backward()
        optimizer.step()
        optimizer.zero_grad()
        plain.load_state_dict(model.state_dict())
        assert_at_rest(model)


def evaluate_plain(plain: nn.Module, inputs: Tensor) -> Tensor:
    with torch.no_grad():
        return plain(inputs)


@on_ranks(2)
def test_under_fully_shard_too() -> None:
    policy = torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=BRAIN)
    model, plain = under_fully_shard(nested_mlp(), mp_policy=policy), nested_mlp()
    assert model(batch(0)).dtype is BRAIN
    assert torch.equal(evaluate(model, batch(0)), evaluate_plain(plain, batch(0)))
    assert model(batch(0)).dtype is BRAIN


@parametrize_pairs(options=OPTIONS, accumulates=[False, True])
@on_ranks(2)
def test_training_takes_no_notice_of_evaluations_between_steps(options: dict[str, Any], accumulates: bool) -> None:
    weights = []
    for evaluates in (False, True):
        model: Any = nested_mlp(fully_sharded(mixed_precision=LOW, **options))
        optimizer = sgd_with_momentum(model.parameters())
        for number in range(4):
            optimizer.zero_grad()
            with model.no_sync() if accumulates else nullcontext():
                score(model(batch(10 * number + dist.get_rank()))).backward()
            if evaluates:
                evaluate(model, batch(number))
            if accumulates:
                score(model(batch(10 * number + dist.get_rank()))).backward()
            optimizer.step()
            if evaluates:
                evaluate(model, batch(number))
        weights.append(model.state_dict())
    for name, value in weights[0].items():
        assert torch.equal(weights[1][name], value), name


@on_ranks(2)
def test_gradients_inside_are_those_of_the_unsharded_model() -> None:
    policy = MixedPrecision(param_dtype=BRAIN, reduce_dtype=SINGLE)  # what is sent stays as it is
    model, exact = (nested_mlp(fully_sharded(mixed_precision=each)) for each in (policy, False))
    with fsdp.full_precision(model):
        score(model(batch(0))).backward()
    score(exact(batch(0))).backward()
    found, expected = ([param.grad for param in each.parameters() if param.grad is not None] for each in (model, exact))
    assert found
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks("world_size")
def test_a_backward_of_a_forward_outside_is_refused_and_the_model_is_usable_afterwards() -> None:
    model = nested_mlp(fully_sharded(mixed_precision=LOW))
    score(model(batch(0))).backward()
    expected = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    model.zero_grad()
    loss = score(model(batch(0)))
    evaluate(model, batch(0))
    with pytest.raises(RuntimeError, match=r"parameters were changed .* between forward and backward"):
        loss.backward()
    model.zero_grad()
    score(model(batch(0))).backward()
    assert all(map(torch.equal, [param.grad for param in model.parameters() if param.grad is not None], expected))


@pytest.mark.parametrize("dtype", [HALF, BRAIN])
def test_inputs_of_16_bits_are_widened(dtype: torch.dtype) -> None:
    model = alone(nn.Linear(5, 3), mixed_precision=LOW)
    assert evaluate(model, batch(0).to(dtype)).dtype is SINGLE


def test_the_output_dtype_holds_inside_too() -> None:
    policy = MixedPrecision(param_dtype=BRAIN, output_dtype=HALF)
    assert evaluate(alone(nn.Linear(5, 3), mixed_precision=policy), batch(0)).dtype is HALF


def test_a_model_in_16_bits_without_mixed_precision_stays_so() -> None:
    model = alone(nn.Linear(5, 3).bfloat16())
    assert evaluate(model, batch(0).bfloat16()).dtype is BRAIN


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.register_buffer("table", torch.full((3,), 1 + 2**-6))

    def forward(self, inputs: Tensor) -> Tensor:
        assert self.get_buffer("table").dtype is inputs.dtype
        return self.layer(inputs) * self.get_buffer("table")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_buffers_have_their_own_dtype_inside_and_after_states_were_taken(mode: Callable[[], Any]) -> None:
    model = alone(Table(), mixed_precision=LOW_BUFFERS)
    table = model.module.module
    for _ in range(2):
        model(batch(0))
        assert table.get_buffer("table").dtype is BRAIN
        with fsdp.full_precision(model), mode():
            model(batch(0))
            model.load_state_dict(model.state_dict())
            with model.summon_full_params():
                assert {value.dtype for value in (*model.parameters(), *model.buffers())} == {SINGLE}
            model(batch(0))
            assert torch.equal(table.get_buffer("table"), torch.full((3,), 1 + 2**-6))
    assert not table.get_buffer("table").is_inference()
    score(model(batch(0))).backward()


@on_ranks(2)
def test_what_was_gathered_is_freed_at_both_ends() -> None:
    model = nested_mlp(fully_sharded(mixed_precision=LOW, reshard_after_forward=False))
    handles = [handle for wrapper in get_fsdp_instances(model) for handle in wrapper._unit.handles]
    buffers = []
    model(batch(0))
    with torch.no_grad():
        buffers += [handle.unsharded.full for handle in handles]
        with fsdp.full_precision(model):
            model(batch(0))
            buffers += [handle.unsharded.full for handle in handles]
    assert [buffer.dtype for buffer in buffers] == [BRAIN] * len(handles) + [SINGLE] * len(handles)
    assert [buffer.untyped_storage().nbytes() for buffer in buffers] == [0] * len(buffers)


@on_ranks(2)
def test_an_exception_inside_ends_it() -> None:
    model = nested_mlp(fully_sharded(mixed_precision=LOW))

    def fail() -> None:
        with fsdp.full_precision(model):
            model(batch(0))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert model(batch(0)).dtype is BRAIN


@on_ranks(2)
def test_it_nests() -> None:
    model = nested_mlp(fully_sharded(mixed_precision=LOW))
    with fsdp.full_precision(model):
        evaluate(model, batch(0))
        assert model(batch(0)).dtype is SINGLE
    assert model(batch(0)).dtype is BRAIN


@on_ranks(2)
def test_in_resident_units() -> None:
    model, plain = nested_mlp(fully_sharded(mixed_precision=LOW)), nested_mlp()
    with fsdp.full_precision(model), fsdp.resident(model), torch.no_grad():
        assert torch.equal(model(batch(0)), plain(batch(0)))


@on_ranks(2)
def test_what_it_refuses() -> None:
    with pytest.raises(TypeError, match=r"fsdp\.full_precision"), fsdp.full_precision(nn.Linear(2, 2)):
        pass
    model: Any = nested_mlp(fully_sharded(mixed_precision=LOW))
    inner = get_fsdp_instances(model, skip_empty=True)[-1]
    model(batch(0))
    with pytest.raises(RuntimeError, match="is for the outermost"), fsdp.full_precision(inner):
        pass
    fsdp.compress(model, gather=fsdp.QuantizedGather())
    with pytest.raises(NotImplementedError, match="is not all-gathered in its own form"), fsdp.full_precision(model):
        pass
    model(batch(0))


@on_ranks(2)
def test_a_parameter_that_cannot_be_kept_is_named_at_the_end_of_it() -> None:
    first, last = nn.Linear(5, 5), nn.Linear(5, 5)
    model = fsdp.shard(nn.Sequential(first, last), units={nn.Linear}, mixed_precision=LOW, use_orig_params=True)

    def replace() -> None:
        with fsdp.full_precision(model):
            model(batch(0))
            first.weight = nn.Parameter(torch.zeros(3))

    with pytest.raises(RuntimeError, match=r"weight: expected shape \(5, 5\), got \(3,\)"):
        replace()
    assert {handle.unsharded.full.dtype for handle in fsdp.flat_param_handles(model)} == {BRAIN}
    first.weight = nn.Parameter(torch.ones(5, 5))
    assert model(batch(0)).dtype is BRAIN
    assert torch.equal(model.state_dict()["0.weight"], torch.ones(5, 5))
