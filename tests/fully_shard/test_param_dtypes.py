"""`MixedPrecisionPolicy.param_dtype_override_fn`: some parameters of a unit are unsharded in their own dtype."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.torch_version import TorchVersion

import fsdp
from fsdp import MixedPrecisionPolicy
from fsdp.layers.options import precision_of
from tests.helpers.on_ranks import on_ranks

BF16, FLOAT = torch.bfloat16, torch.float32


class Gated(nn.Module):
    """A linear layer in the dtype of its inputs, and a gate that is computed in the dtype of its own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gate = nn.Linear(5, 5), nn.Parameter(torch.linspace(0.1, 1.3, 5))

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen = self.linear.weight.dtype, self.gate.dtype, inputs.dtype
        return (self.linear(inputs) * torch.sigmoid(self.gate).to(inputs.dtype)).float()


def gates(param: nn.Parameter) -> torch.dtype | None:
    return param.dtype if param.dim() == 1 and param[0] == 0.1 else None


def gated() -> Gated:
    torch.manual_seed(0)
    return Gated()


@pytest.mark.parametrize("reduce_dtype", [None, FLOAT])
@on_ranks(2)
def test_a_parameter_is_computed_and_trained_in_its_own_dtype(reduce_dtype: torch.dtype | None) -> None:
    plain, asked = gated(), []

    def override(param: nn.Parameter) -> torch.dtype | None:
        asked.append(param)
        return gates(param)

    policy = MixedPrecisionPolicy(BF16, reduce_dtype, param_dtype_override_fn=override)
    model: Any = fsdp.fully_shard(gated(), mp_policy=policy)
    assert len(asked) == 3  # each once
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        inputs = torch.randn(4, 5, generator=generator)
        model(inputs[2 * dist.get_rank() :][:2]).square().mean().backward()
        assert model.seen == (BF16, FLOAT, BF16)
        for part in inputs.split(2):
            low = copy.deepcopy(plain.linear).to(BF16)
            out = (low(part.to(BF16)) * torch.sigmoid(plain.gate).to(BF16)).float()
            (out.square().mean() / 2).backward()
        # In float32 on each rank, where a gradient in bfloat16 would be rounded.
        torch.testing.assert_close(model.gate.grad.full_tensor(), plain.gate.grad, rtol=1e-6, atol=0)
        assert {param.grad.dtype for param in model.parameters()} == {FLOAT}
    assert len(asked) == 3


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        self.seen = hidden.dtype
        return self.head(hidden.to(self.head.weight.dtype))


@pytest.mark.parametrize("whole", [True, False])
@on_ranks(2)
def test_a_parameter_that_two_units_share_is_in_its_own_dtype_in_both(whole: bool) -> None:
    policy = MixedPrecisionPolicy(BF16, cast_forward_inputs=False, param_dtype_override_fn=lambda param: FLOAT)
    model: Any = Tied()
    for each in (model.embedding, model.head, model) if not whole else (model,):
        fsdp.fully_shard(each, mp_policy=policy)
    assert model(torch.arange(3)).dtype == model.seen == FLOAT


@on_ranks(2)
def test_another_dtype_is_an_error_that_leaves_the_module_as_it_was() -> None:
    model, policy = gated(), MixedPrecisionPolicy(BF16, param_dtype_override_fn=lambda param: torch.float64)
    before = copy.deepcopy(model.state_dict())
    wrong = (
        r"param_dtype_override_fn returned torch.float64 for gate: .*torch.float32\), param_dtype \(torch.bfloat16\)"
    )
    with pytest.raises(ValueError, match=wrong):
        fsdp.fully_shard(model, mp_policy=policy)
    assert type(model) is Gated
    assert {name: value.tolist() for name, value in model.state_dict().items()} == {
        name: value.tolist() for name, value in before.items()
    }
    fsdp.fully_shard(model, mp_policy=MixedPrecisionPolicy(BF16))


@on_ranks(2)
def test_ranks_whose_functions_return_different_dtypes_are_an_error() -> None:
    def override(param: nn.Parameter) -> torch.dtype | None:
        return gates(param) if dist.get_rank() else None

    model: Any = fsdp.fully_shard(gated(), mp_policy=MixedPrecisionPolicy(BF16, param_dtype_override_fn=override))
    with pytest.raises(RuntimeError, match=r"different models.*requires_grad=True in rows over 2 ranks by \w+: gate"):
        model(torch.ones(2, 5))


@on_ranks(2)
def test_without_a_dtype_to_cast_to_nothing_changes() -> None:
    model: Any = fsdp.fully_shard(gated(), mp_policy=MixedPrecisionPolicy(param_dtype_override_fn=gates))
    model(torch.ones(2, 5))
    assert model.seen == (FLOAT, FLOAT, FLOAT)
    assert len(fsdp.flat_param_handles(model)) == 1  # one all-gather


@on_ranks(1)
def test_torchs_policy_is_followed() -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy as Torchs

    if not hasattr(Torchs(), "param_dtype_override_fn"):
        pytest.skip("torch has it since 2.15")
    model: Any = fsdp.fully_shard(gated(), mp_policy=Torchs(BF16, param_dtype_override_fn=gates))
    model(torch.ones(2, 5))
    assert model.seen == (BF16, FLOAT, BF16)


@pytest.mark.parametrize(("version", "expected"), [("2.14.1", BF16), ("2.15.0", FLOAT), ("2.15.0+cpu", FLOAT)])
def test_gradients_are_sent_in_the_dtype_that_the_installed_torch_sends_them_in(
    version: str, expected: torch.dtype
) -> None:
    with mock.patch.object(torch, "__version__", TorchVersion(version)):
        found = precision_of(MixedPrecisionPolicy(BF16))
    assert found.reduce_dtype(FLOAT) == expected
    assert found.reduce_dtype(BF16) == BF16
    assert precision_of(MixedPrecisionPolicy(BF16, FLOAT)).reduce_dtype(FLOAT) == FLOAT
