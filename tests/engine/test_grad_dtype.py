"""`Tensor.grad_dtype`: gradients of shards have the dtype that users have set for those of the parameters.

In bfloat16, 1 + 2**-9 is 1, so a gradient that has this value was computed, sent and added in float32.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, OwnedOptimizer, fully_shard
from fsdp.distributed.dtensor import full_tensor
from tests.helpers.dtypes import BRAIN, DOUBLE, SINGLE
from tests.helpers.equality import assert_same_state
from tests.helpers.forms import FORMS, full_state, sharded
from tests.helpers.hybrid import mesh_of
from tests.helpers.on_ranks import on_ranks

TINY = 2.0**-9


class WideGradient(torch.autograd.Function):
    """A product whose gradient for the weight is in float32, as fused kernels compute it."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(inputs)
        return inputs.to(weight.dtype) @ weight.t()

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> Any:
        (inputs,) = ctx.saved_tensors
        return None, outputs[0].float().t() @ inputs


class Weights(nn.Module):
    """Two weights in bfloat16, whose gradients are the inputs; `grad_dtype` is set for the first one."""

    def __init__(self, grad_dtype: torch.dtype | None = SINGLE) -> None:
        super().__init__()
        self.wide = nn.Linear(3, 1, bias=False, dtype=BRAIN)
        self.usual = nn.Linear(3, 1, bias=False, dtype=BRAIN)
        self.wide.weight.grad_dtype = grad_dtype

    def forward(self, inputs: Tensor) -> Tensor:
        return WideGradient.apply(inputs, self.wide.weight) + self.usual(inputs.to(BRAIN))


def model_of(form: str, **options: Any) -> Any:
    torch.manual_seed(0)
    return sharded(Weights(), form, **options)


def backward(model: nn.Module, gradient: float, dtype: torch.dtype = SINGLE) -> None:
    model(torch.full((1, 3), gradient, dtype=dtype)).sum().backward()


def gradients(model: Any) -> dict[torch.dtype, Tensor]:
    """Collective. The unsharded gradients by their dtypes."""
    if not isinstance(model, FullyShardedDataParallel):
        return {param.grad.dtype: full_tensor(param.grad) for param in model.parameters()}
    with model.summon_full_params(with_grads=True):
        return {param.grad.dtype: param.grad.clone() for param in model.parameters() if param.grad is not None}


def assert_wide(model: Any, expected: float) -> None:
    found = gradients(model)
    assert set(found) == {SINGLE, BRAIN}
    torch.testing.assert_close(found[SINGLE], torch.full((1, 3), expected), rtol=0, atol=0)
    held = [param for param in model.parameters() if param.grad is not None]
    assert {param.dtype for param in held} <= {BRAIN}
    assert all(param.grad.dtype == param.grad_dtype for param in held)


@pytest.mark.parametrize("form", FORMS)
@on_ranks(1, 2)
def test_gradients_are_computed_sent_and_kept_in_the_grad_dtype_of_a_parameter(form: str) -> None:
    model = model_of(form)
    backward(model, 1 + TINY)
    assert_wide(model, 1 + TINY)
    backward(model, TINY)
    assert_wide(model, 1 + 2 * TINY)


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_they_are_averaged_in_it(form: str) -> None:
    model = model_of(form)
    backward(model, 2.0 if dist.get_rank() else 2 * TINY)
    assert_wide(model, 1 + TINY)


@pytest.mark.parametrize("form", ["flat", "orig"])
@on_ranks(2)
def test_they_accumulate_in_it_without_communication_and_offloaded(form: str) -> None:
    for options in ({"mixed_precision": MixedPrecision(reduce_dtype=SINGLE)}, {"offload": "cpu"}):
        model = model_of(form, **options)
        with model.no_sync() if "offload" not in options else nullcontext():
            backward(model, 1.0)
        backward(model, TINY)
        assert_wide(model, 1 + TINY)


@pytest.mark.parametrize("form", ["flat", "orig"])
@on_ranks(2)
def test_changes_of_the_first_rank_to_summoned_gradients_are_sent_in_it(form: str) -> None:
    model = model_of(form)
    backward(model, 1.0)
    with model.summon_full_params(with_grads=True, rank0_only=True):
        for param in model.parameters() if dist.get_rank() == 0 else ():
            param.grad += TINY
    assert_wide(model, 1 + TINY)


@on_ranks(4)
def test_they_are_summed_over_replicas_in_it() -> None:
    torch.manual_seed(0)
    model = fully_shard(Weights(), mesh=mesh_of(2, 2))
    backward(model, 4.0 if dist.get_rank() == 3 else 4 * TINY / 3)
    torch.testing.assert_close(gradients(model)[SINGLE], torch.full((1, 3), 1 + TINY), rtol=1e-6, atol=0)


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_a_reduce_dtype_sends_them_in_another_dtype(form: str) -> None:
    torch.manual_seed(0)
    model: Any = Weights()
    if form == "rows":
        fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=BRAIN))
    else:
        model = sharded(model, form, mixed_precision=MixedPrecision(reduce_dtype=BRAIN))
    backward(model, 1 + TINY)
    assert_wide(model, 1.0)


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_gradients_of_wide_parameters_are_narrow_if_the_grad_dtype_is(form: str) -> None:
    plain = nn.Linear(3, 1, bias=False)
    plain.weight.grad_dtype = BRAIN
    model = sharded(plain, form)
    backward(model, 1 + TINY)
    assert list(gradients(model)) == [BRAIN]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("reduce_dtype", [None, SINGLE], ids=str)
@on_ranks(2)
def test_gradients_of_any_dtype_stay_in_the_dtype_of_their_reduction(
    form: str, reduce_dtype: torch.dtype | None
) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"mixed_precision": MixedPrecision(reduce_dtype=reduce_dtype)}
    if form == "rows":
        options = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=reduce_dtype)}
    model = sharded(Weights(grad_dtype=None), form, **options)
    backward(model, 1 + TINY)
    assert set(gradients(model)) == {reduce_dtype or BRAIN, BRAIN}


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_a_step_is_as_of_the_plain_model(form: str) -> None:
    torch.manual_seed(0)
    plain = Weights()
    model = model_of(form)
    for each in (plain, model):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.5, momentum=0.5)
        for gradient in (1 + TINY, TINY):
            optimizer.zero_grad()
            backward(each, gradient)
            optimizer.step()
    assert_same_state(full_state(model), plain.state_dict())


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_a_copy_of_the_model_has_it_too(form: str) -> None:
    model = copy.deepcopy(model_of(form))
    backward(model, 1 + TINY)
    assert_wide(model, 1 + TINY)


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_it_stays_when_the_model_is_cast(form: str) -> None:
    plain = nn.Linear(3, 1, bias=False, dtype=BRAIN)
    plain.weight.grad_dtype = SINGLE
    model = sharded(plain, form)
    backward(model, 1.0, BRAIN)
    model.to(DOUBLE)
    backward(model, TINY, DOUBLE)
    assert {param.dtype for param in model.parameters()} == {DOUBLE}
    assert list(gradients(model)) == [SINGLE]


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_a_cast_of_the_model_keeps_gradients_that_are_in_it(form: str) -> None:
    model = model_of(form)
    backward(model, 1 + TINY)
    model.bfloat16()
    assert_wide(model, 1 + TINY)


@pytest.mark.parametrize("form", FORMS)
@on_ranks(1, 2)
def test_it_may_be_set_after_sharding_and_before_the_first_use(form: str) -> None:
    torch.manual_seed(0)
    model = sharded(Weights(grad_dtype=None), form)
    for param in model.parameters():
        param.grad_dtype = SINGLE
    backward(model, 1 + TINY)
    assert list(gradients(model)) == [SINGLE]
    expected = [torch.full((1, 3), 1 + TINY), torch.full((1, 3), 1.0)]  # the usual product has 16 bits
    if form == "rows":
        for param, each in zip(model.parameters(), expected, strict=True):
            assert torch.equal(full_tensor(param.grad), each)
    else:
        with model.summon_full_params(with_grads=True):
            for param, each in zip(model.parameters(), expected, strict=True):
                assert torch.equal(param.grad, each)


@pytest.mark.parametrize("form", ["orig", "rows"])
@on_ranks(2)
def test_different_ones_for_parameters_that_are_sharded_together_are_an_error(form: str) -> None:
    model = sharded(Weights(grad_dtype=BRAIN), form)
    next(model.parameters()).grad_dtype = SINGLE
    with pytest.raises(
        ValueError, match=r"different values of grad_dtype, set after sharding \(torch.bfloat16, torch.float32"
    ):
        backward(model, 1.0)


@on_ranks(2)
def test_optimizers_of_torch_that_cannot_take_them_say_so() -> None:
    model = model_of("flat")
    backward(model, 1.0)
    with pytest.raises(RuntimeError, match=r"AdamW requires .*bfloat16.*grad_dtype keeps them in torch\.float32"):
        torch.optim.AdamW(model.parameters()).step()


class Recorded(torch.optim.SGD):
    """SGD that keeps the gradients that it was given."""

    def step(self, closure: Any = None) -> Any:
        params = [param for group in self.param_groups for param in group["params"]]
        self.given = [param.grad.clone() for param in params if param.grad is not None]
        return super().step(closure)


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_owners_step_with_gradients_in_it(form: str) -> None:
    model = model_of(form)
    optimizer = OwnedOptimizer(model, [{"params": list(model.parameters()), "optimizer": Recorded, "lr": 0.1}])
    backward(model, 1 + TINY)
    optimizer.step()
    given = [grad for one in optimizer.optimizers for grad in getattr(one, "given", ())]
    held: list[Any] = [None, None]
    dist.all_gather_object(held, given)
    wide = [grad for grads in held for grad in grads if grad.dtype == SINGLE]
    assert [grad.tolist() for grad in wide] == [[[1 + TINY] * 3]]


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_ranks_with_different_ones_are_an_error_that_names_the_parameter(form: str) -> None:
    torch.manual_seed(0)
    model = sharded(Weights(grad_dtype=SINGLE if dist.get_rank() else BRAIN), form)
    with pytest.raises(RuntimeError, match=r"gradients in torch\.float32.*: wide\.weight"):
        backward(model, 1.0)


@pytest.mark.parametrize("form", FORMS)
@on_ranks(1)
def test_a_dtype_of_eight_bits_is_an_error_that_names_the_parameter(form: str) -> None:
    with pytest.raises(ValueError, match=r"grad_dtype of wide\.weight must be .*float8"):
        sharded(Weights(grad_dtype=torch.float8_e4m3fn), form)
