"""What a wrapper is told about dtypes and what it makes of it: the policy, FairScale's flags, and what they refuse.

What needs no other rank runs in this process: `Alone` stands for a world of one.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from torch import nn

from fsdp import FullyShardedDataParallel, MixedPrecision, get_fsdp_instances
from tests.helpers.dtypes import BRAIN, DOUBLE, HALF, SINGLE
from tests.helpers.models import nested_mlp
from tests.helpers.on_ranks import on_ranks
from tests.helpers.parity import alone, fully_sharded


def layers(dtype: torch.dtype = SINGLE) -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 5)).to(dtype)


def dtypes_of(model: FullyShardedDataParallel) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """Of the only unit's shard, its gathered parameters, and its gradient on the way."""
    (handle,) = model._unit.handles
    return handle.flat_param.dtype, handle.unsharded.full.dtype, handle.gradients.dtype


# The policy


def test_a_policy_that_says_nothing_changes_nothing() -> None:
    policy = MixedPrecision()
    assert (policy.param_dtype, policy.reduce_dtype, policy.buffer_dtype, policy.output_dtype) == (None,) * 4
    assert policy.cast_forward_inputs
    assert policy.full_precision_modules == (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    assert dtypes_of(alone(layers(), mixed_precision=policy)) == (SINGLE,) * 3


def test_a_policy_cannot_be_changed() -> None:
    policy = MixedPrecision(param_dtype=BRAIN)
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.param_dtype = HALF  # type: ignore[misc]
    assert dataclasses.replace(policy, param_dtype=HALF) == MixedPrecision(param_dtype=HALF)
    assert len({policy, MixedPrecision(param_dtype=BRAIN), MixedPrecision()}) == 2


@pytest.mark.parametrize("name", ["param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype"])
@pytest.mark.parametrize("wrong", [torch.int64, torch.complex64, torch.float8_e4m3fn, "bfloat16", 16, True])
def test_a_policy_names_the_dtype_that_it_refuses(name: str, wrong: Any) -> None:
    expected = f"{name} must be torch.float16, bfloat16, float32 or float64 .*got {wrong!r}"
    with pytest.raises(ValueError, match=expected):
        MixedPrecision(**{name: wrong})


@pytest.mark.parametrize("wrong", [nn.LayerNorm, {nn.LayerNorm}, ("LayerNorm",), [nn.Linear(1, 1)], None])
def test_modules_in_full_precision_are_named_by_their_classes(wrong: Any) -> None:
    with pytest.raises(ValueError, match="full_precision_modules must be a list or tuple of module classes, got "):
        MixedPrecision(full_precision_modules=wrong)


@pytest.mark.parametrize("wrong", ["bf16", BRAIN, torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=BRAIN)])
def test_what_is_neither_a_flag_nor_our_policy_is_not_taken_for_float16(wrong: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="mixed_precision"):
        alone(layers(), mixed_precision=wrong)


# One or the other


@pytest.mark.parametrize(
    ("name", "value"),
    [("fp32_reduce_scatter", True), ("compute_dtype", HALF), ("buffer_dtype", SINGLE), ("force_input_to_fp32", True)],
)
def test_a_policy_has_no_flag_beside_it(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"mixed_precision is a MixedPrecision, .*: {name} cannot be combined with it"):
        alone(layers(), mixed_precision=MixedPrecision(), **{name: value})


@pytest.mark.parametrize("silent", [False, None])
def test_flags_that_say_nothing_are_no_contradiction(silent: Any) -> None:
    policy = MixedPrecision(param_dtype=BRAIN)
    flags: dict[str, Any] = {"fp32_reduce_scatter": silent, "force_input_to_fp32": silent, "compute_dtype": None}
    assert alone(layers(), mixed_precision=policy, **flags).compute_dtype is BRAIN


# What is made of it

# Flags; the dtypes of shard, gathered parameters and sent gradients; compute_dtype and buffer_dtype.
FLAGS: list[tuple[dict[str, Any], tuple[torch.dtype, ...], tuple[torch.dtype, ...]]] = [
    ({}, (SINGLE, SINGLE, SINGLE), (SINGLE, SINGLE)),
    ({"compute_dtype": SINGLE}, (SINGLE, SINGLE, SINGLE), (SINGLE, SINGLE)),
    ({"buffer_dtype": HALF}, (SINGLE, SINGLE, SINGLE), (SINGLE, HALF)),
    ({"mixed_precision": True}, (SINGLE, HALF, HALF), (HALF, HALF)),
    ({"mixed_precision": True, "buffer_dtype": SINGLE}, (SINGLE, HALF, HALF), (HALF, SINGLE)),
    ({"mixed_precision": True, "fp32_reduce_scatter": True}, (SINGLE, HALF, SINGLE), (HALF, HALF)),
    ({"mixed_precision": True, "compute_dtype": BRAIN}, (SINGLE, BRAIN, BRAIN), (BRAIN, BRAIN)),
    ({"mixed_precision": True, "compute_dtype": SINGLE}, (SINGLE, SINGLE, SINGLE), (SINGLE, SINGLE)),
    (
        {"mixed_precision": True, "compute_dtype": BRAIN, "buffer_dtype": HALF, "fp32_reduce_scatter": True},
        (SINGLE, BRAIN, SINGLE),
        (BRAIN, HALF),
    ),
]


@pytest.mark.parametrize(("flags", "dtypes", "shown"), FLAGS, ids=lambda value: str(value) if value == {} else None)
def test_flags_mean_what_they_mean_in_fairscale(
    flags: dict[str, Any], dtypes: tuple[torch.dtype, ...], shown: tuple[torch.dtype, ...]
) -> None:
    model = alone(layers(), **flags)
    assert dtypes_of(model) == dtypes
    assert (model.compute_dtype, model.buffer_dtype) == shown
    assert model.mixed_precision is flags.get("mixed_precision", False)
    assert model.fp32_reduce_scatter is flags.get("fp32_reduce_scatter", False)
    assert model.force_input_to_fp32 is False


POLICIES: list[tuple[dict[str, Any], tuple[torch.dtype, ...], tuple[torch.dtype | None, ...]]] = [
    ({"param_dtype": BRAIN}, (SINGLE, BRAIN, BRAIN), (BRAIN, None)),
    ({"param_dtype": HALF, "reduce_dtype": SINGLE}, (SINGLE, HALF, SINGLE), (HALF, None)),
    ({"param_dtype": HALF, "reduce_dtype": BRAIN}, (SINGLE, HALF, BRAIN), (HALF, None)),
    ({"reduce_dtype": BRAIN}, (SINGLE, SINGLE, BRAIN), (SINGLE, None)),
    ({"buffer_dtype": BRAIN}, (SINGLE, SINGLE, SINGLE), (SINGLE, BRAIN)),
]


@pytest.mark.parametrize(("policy", "dtypes", "shown"), POLICIES)
def test_policies_are_shown_under_fairscales_names(
    policy: dict[str, Any], dtypes: tuple[torch.dtype, ...], shown: tuple[torch.dtype | None, ...]
) -> None:
    model = alone(layers(), mixed_precision=MixedPrecision(**policy))
    assert dtypes_of(model) == dtypes
    assert (model.compute_dtype, model.buffer_dtype) == shown
    assert model.mixed_precision == MixedPrecision(**policy)
    assert model.fp32_reduce_scatter is False
    assert "mixed_precision=True" in repr(model)


@pytest.mark.parametrize("dtype", [HALF, BRAIN, DOUBLE])
def test_without_a_word_parameters_keep_their_dtype(dtype: torch.dtype) -> None:
    model = alone(layers(dtype))
    assert dtypes_of(model) == (dtype,) * 3
    assert (model.compute_dtype, model.mixed_precision) == (dtype, False)


@pytest.mark.parametrize("dtype", [HALF, BRAIN])
def test_16_bit_parameters_can_be_reduced_in_float32(dtype: torch.dtype) -> None:
    """FairScale has no flags for this, and the error of the nearest ones says what to write."""
    with pytest.raises(ValueError, match=r"mixed_precision=MixedPrecision\(reduce_dtype=torch.float32\)"):
        alone(layers(dtype), compute_dtype=dtype, fp32_reduce_scatter=True)
    model = alone(layers(dtype), mixed_precision=MixedPrecision(reduce_dtype=SINGLE))
    assert dtypes_of(model) == (dtype, dtype, SINGLE)


# What is refused


def test_reducing_in_float32_is_for_mixed_precision() -> None:
    with pytest.raises(ValueError, match="fp32_reduce_scatter=True needs mixed_precision=True"):
        alone(layers(), fp32_reduce_scatter=True)


def test_widening_inputs_is_for_full_precision() -> None:
    with pytest.raises(ValueError, match="force_input_to_fp32=True is for units that compute in full precision"):
        alone(layers(), mixed_precision=True, force_input_to_fp32=True)


@pytest.mark.parametrize("name", ["compute_dtype", "buffer_dtype"])
@pytest.mark.parametrize("mixed_precision", [True, False])
@pytest.mark.parametrize("wrong", [torch.int32, "half"])
def test_flags_name_the_dtype_that_they_refuse(name: str, mixed_precision: bool, wrong: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be torch.float16"):
        alone(layers(), mixed_precision=mixed_precision, **{name: wrong})


@pytest.mark.parametrize("flatten_parameters", [True, False])
@pytest.mark.parametrize("compute_dtype", [HALF, BRAIN, DOUBLE])
def test_a_compute_dtype_alone_is_what_parameters_must_have(
    compute_dtype: torch.dtype, flatten_parameters: bool
) -> None:
    odd = layers(compute_dtype)
    odd[1].float()
    with pytest.raises(ValueError, match=f"1.weight is torch.float32, but compute_dtype={compute_dtype} without mixed"):
        alone(odd, compute_dtype=compute_dtype, flatten_parameters=flatten_parameters)
    even = alone(layers(compute_dtype), compute_dtype=compute_dtype, flatten_parameters=flatten_parameters)
    assert {param.dtype for param in even.params} == {compute_dtype}
    assert (even.compute_dtype, even.buffer_dtype) == (compute_dtype, compute_dtype)


@pytest.mark.parametrize("dtype", [HALF, BRAIN, DOUBLE])
def test_fairscales_master_is_float32(dtype: torch.dtype) -> None:
    odd = layers()
    odd[1].to(dtype)
    with pytest.raises(ValueError, match=f"1.weight is {dtype}, but mixed_precision=True keeps float32 parameters"):
        alone(odd, mixed_precision=True)


@pytest.mark.parametrize(
    ("own", "param_dtype"), [(BRAIN, HALF), (HALF, BRAIN), (BRAIN, SINGLE), (HALF, SINGLE), (SINGLE, DOUBLE)]
)
def test_a_policys_master_holds_what_is_computed(own: torch.dtype, param_dtype: torch.dtype) -> None:
    odd = layers()
    odd[1].to(own)
    with pytest.raises(ValueError, match=f"weight is {own}, which cannot represent .* param_dtype={param_dtype}"):
        alone(odd, mixed_precision=MixedPrecision(param_dtype=param_dtype))


@pytest.mark.parametrize("own", [BRAIN, HALF, DOUBLE])
def test_frozen_parameters_need_no_master(own: torch.dtype) -> None:
    """Of a 16-bit base with float32 adapters only the adapters are stepped; all compute in one dtype."""
    adapted = layers()
    adapted[0].to(own).requires_grad_(False)
    model = alone(adapted, mixed_precision=True, compute_dtype=BRAIN)
    assert {(param.dtype, param.requires_grad) for param in model.params} == {(own, False), (SINGLE, True)}
    assert {handle.unsharded.full.dtype for handle in model._unit.handles} == {BRAIN}
    model(torch.ones(2, 5)).sum().backward()
    assert [param.grad is None for param in model.params] == [not param.requires_grad for param in model.params]


def test_a_module_that_was_refused_is_left_as_it_was() -> None:
    module = layers()
    module.append(nn.BatchNorm1d(5)).register_buffer("table", torch.full((5,), 1 + 2**-10))
    module[1].half()
    with pytest.raises(ValueError, match=r"1\.weight"):
        alone(module, mixed_precision=True)
    module[1].float()
    assert module.get_buffer("table").dtype is SINGLE
    assert torch.equal(module.get_buffer("table"), torch.full((5,), 1 + 2**-10))
    assert module(torch.ones(2, 5)).dtype is SINGLE
    assert [type(param) for param in module.parameters()] == [nn.Parameter] * 6
    assert alone(module, mixed_precision=True)(torch.ones(2, 5)).dtype is HALF


# Casting what is wrapped already

CASTS = [nn.Module.half, nn.Module.bfloat16, nn.Module.double]


@pytest.mark.parametrize("cast", CASTS)
def test_fairscales_master_cannot_be_cast(cast: Any) -> None:
    model = alone(layers(), mixed_precision=True)
    with pytest.raises(ValueError, match=r"after this cast .* mixed_precision=True keeps float32 parameters"):
        cast(model)
    assert dtypes_of(model) == (SINGLE, HALF, HALF)
    assert model(torch.ones(2, 5)).dtype is HALF


def test_a_policys_master_can_be_cast_to_what_holds_more() -> None:
    model = alone(layers(), mixed_precision=MixedPrecision(param_dtype=BRAIN)).double()
    assert dtypes_of(model) == (DOUBLE, BRAIN, BRAIN)
    model(torch.ones(2, 5)).sum().backward()
    assert [param.grad.dtype for param in model.params if param.grad is not None] == [DOUBLE]


def test_a_policys_master_cannot_be_cast_to_what_holds_less() -> None:
    model = alone(layers(), mixed_precision=MixedPrecision(param_dtype=BRAIN))
    with pytest.raises(
        ValueError, match=r"after this cast .*float16, which cannot represent values computed in param_dtype"
    ):
        model.half()
    assert dtypes_of(model) == (SINGLE, BRAIN, BRAIN)


@pytest.mark.parametrize("cast", [*CASTS, nn.Module.float])
def test_without_mixed_precision_all_follows_a_cast(cast: Any) -> None:
    model = cast(alone(layers(BRAIN)))
    expected = cast(layers())[0].weight.dtype
    assert dtypes_of(model) == (expected,) * 3
    assert model.compute_dtype is expected
    assert model(torch.ones(2, 5, dtype=expected)).dtype is expected


@pytest.mark.parametrize("mixed", [0, 1, 2])
def test_a_cast_that_one_unit_refuses_changes_no_unit(mixed: int) -> None:
    units = [alone(nn.Linear(5, 5), mixed_precision=number == mixed) for number in range(3)]
    model = alone(nn.Sequential(*units, nn.Linear(5, 5)))
    with pytest.raises(ValueError, match="keeps float32 parameters"):
        model.half()
    assert [param.dtype for wrapper in get_fsdp_instances(model) for param in wrapper.params] == [SINGLE] * 4


# Agreement


@pytest.mark.parametrize(
    ("name", "values"),
    [("param_dtype", [BRAIN, HALF]), ("param_dtype", [None, BRAIN]), ("reduce_dtype", [SINGLE, None])],
)
@on_ranks(2)
def test_ranks_with_different_policies_are_told(name: str, values: list[Any]) -> None:
    """Else they would exchange each other's bytes, of different sizes or, worse, of the same."""
    policy = {"param_dtype": BRAIN, name: values[torch.distributed.get_rank()]}
    model = nested_mlp(fully_sharded(mixed_precision=MixedPrecision(**policy)))
    with pytest.raises(RuntimeError, match=r"torch\.bfloat16"):
        model(torch.ones(2, 5))
