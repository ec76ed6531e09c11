"""Quantised models: what can be sharded is, what cannot is refused by name, and nothing is dropped in silence."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel
from tests.helpers.models import Net
from tests.helpers.module_kinds import FORMS
from tests.helpers.on_ranks import on_ranks
from tests.helpers.parity import Alone, fully_sharded

# torch.ao.quantization is going to be replaced by torchao, and says so.
pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
]


class Scaled(Tensor):
    """A weight of 8 bits that multiplies like one of 32, in the way of torchao's."""

    @staticmethod
    def __new__(cls, values: Tensor, scale: float) -> Scaled:
        return Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)

    def __init__(self, values: Tensor, scale: float) -> None:
        self.narrow_values, self.factor = values, scale

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return "Scaled(...)"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].narrow_values, args[0].factor)
        plain = [arg.narrow_values * arg.factor if isinstance(arg, cls) else arg for arg in args]
        return func(*plain, **(kwargs or {}))


def of_torch_quantisation() -> nn.Parameter:
    return nn.Parameter(torch.quantize_per_tensor(torch.ones(4, 4), 0.1, 0, torch.qint8), requires_grad=False)


def of_a_subclass() -> nn.Parameter:
    return nn.Parameter(Scaled(torch.ones(4, 4, dtype=torch.int8), 0.5), requires_grad=False)


@pytest.mark.parametrize("options", FORMS, ids=["flat", "original", "unflattened"])
@pytest.mark.parametrize(("make_weight", "kind"), [(of_torch_quantisation, "torch.qint8"), (of_a_subclass, "Scaled")])
def test_pain_point_29_a_quantised_parameter_without_inner_tensors_is_refused_by_name(
    make_weight: Any, kind: str, options: dict[str, Any]
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = make_weight()
    weights = list(model.parameters())
    with pytest.raises(
        TypeError, match=rf"1\.weight is a .*{kind}.*ignored_parameters \(ignored_params of fully_shard"
    ):
        FullyShardedDataParallel(model, Alone(), **options)
    assert all(now is before for now, before in zip(model.parameters(), weights, strict=True))  # as it was found


def quantised() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 5))
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear})


@pytest.mark.parametrize("options", FORMS, ids=["flat", "original", "unflattened"])
@on_ranks(2)
def test_pain_point_29_packed_weights_are_kept_beside_sharded_ones(options: dict[str, Any]) -> None:
    plain, model = quantised(), fully_sharded(**options)(quantised())
    inputs = torch.linspace(-1, 1, 10).view(2, 5)
    for _ in range(2):
        assert torch.equal(model(inputs), plain(inputs))
        assert list(model.state_dict()) == list(plain.state_dict())
        nn.init.constant_(plain[1].bias, 0.3)  # type: ignore[index]
        model.load_state_dict(plain.state_dict())


@on_ranks(2)
def test_pain_point_29_quantising_a_sharded_model_is_refused() -> None:
    model = fully_sharded()(nn.Sequential(nn.Linear(4, 4)))
    for inplace in (True, False):
        with pytest.raises(RuntimeError, match=r"0\.weight is sharded"):
            torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, inplace=inplace)


def narrow_weight() -> nn.Module:
    """A frozen weight of 8 bits, cast where it is used."""
    weight = torch.linspace(-2, 2, 35).view(7, 5).to(torch.float8_e4m3fn)
    return Net(
        lambda net, x: x @ net.weight.float().T + net.bias,
        weight=nn.Parameter(weight, requires_grad=False),
        bias=nn.Parameter(torch.zeros(7)),
    )


@on_ranks(1, 2)
def test_pain_point_29_frozen_float8_parameters_are_sharded() -> None:
    plain, model = narrow_weight(), fully_sharded()(narrow_weight())
    inputs = torch.linspace(-1, 1, 10).view(2, 5)
    expected, output = plain(inputs), model(inputs)
    assert torch.equal(output, expected)
    assert output.any()
    for each in (expected, output):
        each.square().sum().backward()
    shards = [param for param in model.parameters() if param.dtype == torch.uint8]
    assert [param.numel() for param in shards] == [{1: 48, 2: 32}[dist.get_world_size()]]  # multiples of 16
    for each in (plain, model):
        torch.optim.SGD([param for param in each.parameters() if param.requires_grad], lr=0.1).step()
    assert plain.bias.any()
    torch.testing.assert_close(model.state_dict()["bias"], plain.state_dict()["bias"])
    assert {name: value.dtype for name, value in model.state_dict().items()} == {
        "weight": torch.float8_e4m3fn,
        "bias": torch.float32,
    }
    whole = dict(zip(plain.state_dict(), model.state_dict().values(), strict=True))["weight"]
    assert torch.equal(whole.float(), plain.weight.float())


@on_ranks(2)
def test_pain_point_29_quantisation_aware_training_is_that_of_the_plain_model() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 5)).train()
    plain.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
    plain = torch.ao.quantization.prepare_qat(plain)
    model = fully_sharded()(copy.deepcopy(plain))
    inputs = torch.linspace(-1, 1, 10).view(2, 5)
    for each in (plain, model):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            each(inputs).square().sum().backward()
            optimizer.step()
    expected, found = plain.state_dict(), model.state_dict()
    assert list(found) == list(expected)
    torch.testing.assert_close(list(found.values()), list(expected.values()))
