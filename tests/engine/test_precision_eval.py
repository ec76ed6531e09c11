"""Full precision in `eval()`: `MixedPrecision.full_precision_in_eval`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp import FullyShardedDataParallel, MixedPrecision, get_fsdp_instances
from fsdp.distributed.collectives import DirectExchange
from tests.helpers.dtypes import BRAIN, HALF, SINGLE
from tests.helpers.models import Wrap, nested_mlp
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.parity import alone, fully_sharded, sgd_with_momentum
from tests.helpers.twins import assert_at_rest

FULL_IN_EVAL = MixedPrecision(param_dtype=BRAIN, full_precision_in_eval=True)
OPTIONS: list[dict[str, Any]] = [{}, {"reshard_after_forward": False}, {"flatten_parameters": False}]
every_option = pytest.mark.parametrize("options", OPTIONS, ids=["default", "kept", "unflattened"])


def batch(number: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(number))


def evaluate(model: nn.Module, inputs: Tensor, mode: Callable[[], Any] = torch.no_grad) -> Tensor:
    with mode():
        output = model.eval()(inputs)
    model.train()
    return output


def score(output: Tensor) -> Tensor:
    return output.float().sin().sum()


def gradients(model: nn.Module) -> list[Tensor]:
    """This rank's, which are taken away."""
    found = [param.grad for param in model.parameters() if param.grad is not None]
    model.zero_grad()
    return found


# Equal to the unsharded model


@parametrize_pairs(mode=[torch.no_grad, torch.inference_mode, nullcontext], world_size=[2, 1], options=OPTIONS)
@on_ranks("world_size")
def test_evaluation_equals_the_unsharded_model_bit_for_bit(mode: Callable[[], Any], options: dict[str, Any]) -> None:
    """Also between steps, when the forward before was in training and the order of units is known."""
    model, plain = nested_mlp(fully_sharded(mixed_precision=FULL_IN_EVAL, **options)), nested_mlp()
    optimizer = sgd_with_momentum(model.parameters())
    for number in range(2):
        found = evaluate(model, batch(number), mode)
        assert found.dtype is SINGLE
        assert torch.equal(found, evaluate(plain, batch(number)))
        low = model(batch(number))
        assert low.dtype is BRAIN
        score(low).backward()
        optimizer.step()
        optimizer.zero_grad()
        plain.load_state_dict(model.state_dict())
        assert_at_rest(model)


@every_option
@on_ranks(2)
def test_training_takes_no_notice_of_evaluations_between_steps(options: dict[str, Any]) -> None:
    weights = []
    for evaluates in (False, True):
        model = nested_mlp(fully_sharded(mixed_precision=FULL_IN_EVAL, **options))
        optimizer = sgd_with_momentum(model.parameters())
        for number in range(4):
            optimizer.zero_grad()
            score(model(batch(10 * number + dist.get_rank()))).backward()
            if evaluates:
                evaluate(model, batch(number))
            optimizer.step()
            if evaluates:
                evaluate(model, batch(number))
        weights.append(model.state_dict())
    for name, value in weights[0].items():
        assert torch.equal(weights[1][name], value), name


def test_the_output_dtype_holds_in_evaluation_too() -> None:
    policy = MixedPrecision(param_dtype=BRAIN, output_dtype=HALF, full_precision_in_eval=True)
    assert evaluate(alone(nn.Linear(5, 3), mixed_precision=policy), batch(0)).dtype is HALF


@pytest.mark.parametrize("dtype", [HALF, BRAIN])
def test_inputs_of_16_bits_are_widened_in_evaluation(dtype: torch.dtype) -> None:
    model = alone(nn.Linear(5, 3), mixed_precision=FULL_IN_EVAL)
    assert evaluate(model, batch(0).to(dtype)).dtype is SINGLE


@pytest.mark.parametrize("options", [{"mixed_precision": True}, {"mixed_precision": MixedPrecision(param_dtype=HALF)}])
def test_unless_asked_evaluation_is_as_training(options: dict[str, Any]) -> None:
    model = alone(nn.Linear(5, 3), **options)
    assert evaluate(model, batch(0)).dtype is HALF


# Forwards and backwards in both modes


@parametrize_pairs(world_size=[2, 1], mode=[torch.no_grad, nullcontext], options=OPTIONS)
@on_ranks("world_size")
def test_an_evaluation_between_forward_and_backward_changes_no_gradient(
    mode: Callable[[], Any], options: dict[str, Any]
) -> None:
    model = nested_mlp(fully_sharded(mixed_precision=FULL_IN_EVAL, **options))
    for number in range(3):
        score(model(batch(number))).backward()
        expected = gradients(model)
        loss = score(model(batch(number)))
        evaluate(model, batch(number), mode)
        loss.backward()
        assert all(map(torch.equal, gradients(model), expected))
        assert_at_rest(model)


class Recomputing(nn.Module):
    """Two units that are checkpointed from outside."""

    def __init__(self, wrap: Wrap, reentrant: bool) -> None:
        super().__init__()
        self.entry = nn.Linear(5, 5)
        self.units = nn.ModuleList(wrap(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))) for _ in range(2))
        self.reentrant = reentrant

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.entry(inputs)
        for unit in self.units:
            hidden = checkpoint(unit, hidden, use_reentrant=self.reentrant)
        return hidden


@pytest.mark.parametrize("reentrant", [True, False])
@on_ranks(2)
def test_an_evaluation_between_forward_and_recomputation_changes_no_gradient(reentrant: bool) -> None:
    """What is recomputed must be in the precision of its forward."""
    torch.manual_seed(0)
    wrap = fully_sharded(mixed_precision=FULL_IN_EVAL)
    model = wrap(Recomputing(wrap, reentrant))
    for number in range(3):
        score(model(batch(number))).backward()
        expected = gradients(model)
        loss = score(model(batch(number)))
        evaluate(model, batch(number))
        loss.backward()
        assert all(map(torch.equal, gradients(model), expected))


@on_ranks(2)
def test_each_mode_has_its_own_backward() -> None:
    """Losses of both, each with a backward, in either order; in full precision gradients are the unsharded ones."""
    policy = replace(FULL_IN_EVAL, reduce_dtype=SINGLE)  # what is sent is a matter of its own
    model, alone = (nested_mlp(fully_sharded(mixed_precision=each)) for each in (policy, False))
    expected = []
    for each in (model, alone):
        score(each(batch(0))).backward()
        expected.append(gradients(each))
    for order in ((0, 1), (1, 0)):
        losses = [score(model(batch(0))), score(evaluate(model, batch(0), nullcontext))]
        for number in order:
            losses[number].backward()
            assert all(map(torch.equal, gradients(model), expected[number]))


class Picky(nn.Module):
    """Leaves a layer out unless told, so that its backward never has all gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.unused = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, inputs: Tensor, everything: bool = True) -> Tensor:
        hidden = self.layer(inputs)
        return self.unused(hidden) if everything else hidden


@pytest.mark.parametrize("train_first", [True, False])
@on_ranks(2)
def test_a_backward_through_calls_in_both_modes_is_refused(train_first: bool) -> None:
    """Where one call's gradients are not complete before the other's begin: their leaves have different dtypes."""
    model = FullyShardedDataParallel(Picky(), mixed_precision=FULL_IN_EVAL)
    score(model(batch(0))).backward()
    expected = gradients(model)
    losses = [score(model.train(mode)(batch(0), everything=False)) for mode in (train_first, not train_first)]
    with pytest.raises(RuntimeError, match=r"one backward goes through calls of it in train\(\) and in eval\(\)"):
        torch.stack(losses).sum().backward()
    model.train()
    model.zero_grad()
    score(model(batch(0))).backward()
    assert all(map(torch.equal, gradients(model), expected)), "and the model is usable afterwards"


@parametrize_pairs(train_first=[True, False], world_size=[1, 2])
@on_ranks("world_size")
def test_calls_in_both_modes_that_are_completed_one_by_one_add_up(train_first: bool) -> None:
    model = FullyShardedDataParallel(Picky(), mixed_precision=FULL_IN_EVAL)
    for mode in (True, False):
        score(model.train(mode)(batch(0))).backward()
    expected = gradients(model)
    losses = [score(model.train(mode)(batch(0))) for mode in (train_first, not train_first)]
    torch.stack(losses).sum().backward()
    torch.testing.assert_close(gradients(model), expected, rtol=1e-2, atol=1e-2)


# A part of the model


def test_only_units_in_evaluation_are_in_full_precision() -> None:
    units = [alone(nn.Linear(5, 5), mixed_precision=FULL_IN_EVAL) for _ in range(3)]
    model = alone(nn.Sequential(*units), mixed_precision=FULL_IN_EVAL)
    units[1].eval()
    score(model(batch(0))).backward()
    assert [handle.unsharded.full.dtype for unit in units for handle in unit._unit.handles] == [BRAIN, SINGLE, BRAIN]
    assert all(gradient.dtype is SINGLE for gradient in gradients(model))


# Buffers, states and memory


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.register_buffer("table", torch.full((3,), 1 + 2**-6))

    def forward(self, inputs: Tensor) -> Tensor:
        assert self.get_buffer("table").dtype is inputs.dtype
        return self.layer(inputs) * self.get_buffer("table")


def test_buffers_are_in_full_precision_too() -> None:
    policy = MixedPrecision(param_dtype=BRAIN, buffer_dtype=BRAIN, full_precision_in_eval=True)
    model = alone(Table(), mixed_precision=policy)
    table = model.module.module
    for _ in range(2):
        model(batch(0))
        assert table.get_buffer("table").dtype is BRAIN
        evaluate(model, batch(0))
        assert table.get_buffer("table").dtype is SINGLE
        assert torch.equal(table.get_buffer("table"), torch.full((3,), 1 + 2**-6))


@pytest.mark.parametrize("mode", [True, False])
def test_looking_at_the_state_does_not_change_the_precision(mode: bool) -> None:
    policy = MixedPrecision(param_dtype=BRAIN, buffer_dtype=BRAIN, full_precision_in_eval=True)
    model = alone(Table(), mixed_precision=policy).train(mode)
    expected = model(batch(0))
    assert {value.dtype for value in model.state_dict().values()} == {SINGLE}
    assert torch.equal(model(batch(0)), expected)
    with model.summon_full_params():
        assert {value.dtype for value in (*model.parameters(), *model.buffers())} == {SINGLE}
    assert torch.equal(model(batch(0)), expected)
    model.load_state_dict(model.state_dict())
    assert torch.equal(model(batch(0)), expected)


def test_buffers_that_were_widened_in_inference_mode_are_ordinary_ones() -> None:
    """An inference tensor could not be loaded into, or updated, outside of inference mode."""
    policy = MixedPrecision(param_dtype=BRAIN, buffer_dtype=BRAIN, full_precision_in_eval=True)
    model = alone(Table(), mixed_precision=policy)
    evaluate(model, batch(0), torch.inference_mode)
    assert not model.module.module.get_buffer("table").is_inference()
    model.load_state_dict(model.state_dict())
    score(model(batch(0))).backward()


@on_ranks(2)
def test_changing_the_mode_frees_what_was_gathered() -> None:
    model = nested_mlp(fully_sharded(mixed_precision=FULL_IN_EVAL, reshard_after_forward=False))
    for _ in range(2):
        loss = score(model(batch(0)))
        evaluate(model, batch(0))
        loss.backward()
        handles = [handle for wrapper in get_fsdp_instances(model) for handle in wrapper._unit.handles]
        buffers = [each.full for handle in handles for each in handle.forms.values()]
        assert {buffer.dtype for buffer in buffers} == {BRAIN, SINGLE}
        assert [buffer.untyped_storage().nbytes() for buffer in buffers] == [0] * len(buffers)


@on_ranks(2)
def test_changing_the_mode_gathers_nothing_twice() -> None:
    """What is prefetched for the next unit is in the precision that it will compute in."""
    model = nested_mlp(fully_sharded(mixed_precision=FULL_IN_EVAL, bucket_cap_mb=0))
    gathered: list[torch.dtype] = []
    all_gather = DirectExchange.all_gather

    def gather(comm: DirectExchange, full: Tensor, *args: Any) -> Any:
        gathered.append(full.dtype)
        return all_gather(comm, full, *args)

    units = len(get_fsdp_instances(model))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DirectExchange, "all_gather", gather)
        for number in range(4):
            gathered.clear()
            with torch.no_grad():
                model.train(number % 2 == 0)(batch(0))
            assert gathered == [BRAIN if number % 2 == 0 else SINGLE] * units


def test_a_handle_computes_in_the_precision_of_the_unit_that_runs_it() -> None:
    """Of units that share a parameter, another one may run it after a new root."""
    first, second = (alone(nn.Linear(2, 2), mixed_precision=FULL_IN_EVAL) for _ in range(2))
    first._unit.compute_in_full(True)
    (handle,) = first._unit.handles
    assert handle.dtype == SINGLE
    first._unit.give_up(handle)
    second._unit.adopt(handle)
    assert handle.dtype == BRAIN
