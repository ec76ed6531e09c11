"""Tensors that stand in the places of parameters for one call: `torch.func.functional_call` and what is like it."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.func import functional_call, grad, vmap
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import cached

from fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs

Given = dict[str, Tensor]

KINDS = ["flat", "alone", "pieces", "rows", "nested"]


class Net(nn.Module):
    """Two layers that are tied, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.tied = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 4)
        self.tied.weight = self.first.weight

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.inner(self.tied(torch.tanh(self.first(inputs))))
        return result


class Meta(nn.Module):
    """Calls a part of itself with other parameters, in the middle of its forward."""

    def __init__(self, *, keeps_class: bool) -> None:
        super().__init__()
        self.part, self.scale = nn.Linear(4, 4), nn.Parameter(torch.tensor(2.0))
        self.make: Any = nn.Parameter if keeps_class else Tensor.detach

    def forward(self, inputs: Tensor) -> Tensor:
        fast = {"weight": self.make(torch.ones(4, 4)), "bias": self.make(torch.ones(4))}
        before = self.part(inputs)
        other: Tensor = functional_call(self.part, fast, inputs)
        result: Tensor = before + self.scale * other + self.part(inputs)
        return result


def _wrapped(model: nn.Module, kind: str) -> nn.Module:
    model = copy.deepcopy(model)
    if kind == "rows":
        return fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    if kind == "nested" and isinstance(model, Net):
        model.inner = FullyShardedDataParallel(model.inner)  # type: ignore[assignment]
    options: dict[str, dict[str, Any]] = {"alone": {"flatten_parameters": False}, "pieces": {"use_orig_params": True}}
    return FullyShardedDataParallel(model, **options.get(kind, {}))


def _inputs() -> Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(torch.distributed.get_rank()))


def _given(model: nn.Module, make: Any) -> Given:
    named: list[tuple[str, Tensor]] = list(model.named_parameters())
    return {name: make(torch.cos(param.detach() + number)) for number, (name, param) in enumerate(named)}


def _trained(model: nn.Module, shard: bool = True) -> list[Tensor]:
    """Whole values after one step on what the model itself has."""
    if isinstance(model, FSDPModule):
        model.reshard()  # else it lists unsharded parameters, as torch's does after a forward without a backward
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(_inputs()).square().sum().backward()
    if not shard:
        for param in model.parameters():
            torch.distributed.all_reduce(param.grad)
            assert param.grad is not None
            param.grad /= torch.distributed.get_world_size()
    optimizer.step()
    return _values(model)


def _values(model: nn.Module) -> list[Tensor]:
    if isinstance(model, FullyShardedDataParallel):
        with model.summon_full_params():
            return [param.detach().clone() for param in model.parameters()]
    params: list[Any] = list(model.parameters())
    return [param.detach().full_tensor() if hasattr(param, "full_tensor") else param.detach() for param in params]


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_functional_call_computes_with_what_it_is_given_and_leaves_the_parameters_alone(kind: str) -> None:
    torch.manual_seed(0)
    plain = Net()
    model, inputs = _wrapped(plain, kind), _inputs()
    before = _values(model)
    for make in (lambda value: value.requires_grad_(), nn.Parameter):
        given, ours = _given(plain, make), _given(plain, make)
        expected, found = functional_call(plain, given, inputs), functional_call(model, ours, inputs)
        torch.testing.assert_close(found, expected)
        expected.square().sum().backward()
        found.square().sum().backward()
        for name in given:
            torch.testing.assert_close(ours[name].grad, given[name].grad, msg=name)
        assert all(param.grad is None for param in model.parameters())
    # One of them only; the rest is the model's own, and is trained.
    one = {"inner.weight": torch.ones(3, 4, requires_grad=True)}
    ours = {"inner.weight": torch.ones(3, 4, requires_grad=True)}
    expected, found = functional_call(plain, one, inputs), functional_call(model, ours, inputs)
    torch.testing.assert_close(found, expected)
    expected.sum().backward()
    found.sum().backward()
    torch.testing.assert_close(ours["inner.weight"].grad, one["inner.weight"].grad)
    plain.zero_grad()
    model.zero_grad()
    with torch.no_grad():
        tied = {"first.weight": torch.eye(4)}
        torch.testing.assert_close(functional_call(model, tied, inputs), functional_call(plain, tied, inputs))
    for mine, was in zip(_values(model), before, strict=True):
        torch.testing.assert_close(mine, was)
    # What the model lists, given back to it, is no change at all.
    torch.testing.assert_close(functional_call(model, dict(model.named_parameters()), inputs), plain(inputs))
    model(inputs)  # a forward without backward before
    for mine, theirs in zip(_trained(model), _trained(plain, shard=False), strict=True):
        torch.testing.assert_close(mine, theirs)


@parametrize_pairs(kind=list(KINDS), world_size=[2, 1])
@on_ranks("world_size")
def test_both_names_of_a_tied_parameter_may_be_given(kind: str) -> None:
    torch.manual_seed(0)
    plain = Net()
    model, inputs = _wrapped(plain, kind), torch.ones(2, 4)
    one, other = torch.eye(4), 2 * torch.eye(4)
    for given, tie_weights in (
        ({"first.weight": one, "tied.weight": one}, True),
        ({"first.weight": one, "tied.weight": other}, False),
        ({"tied.weight": other, "first.weight": one}, False),
    ):
        found, expected = (functional_call(each, given, inputs, tie_weights=tie_weights) for each in (model, plain))
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(model(inputs), plain(inputs))


@parametrize_pairs(kind=["flat", "pieces", "rows"], keeps_class=[True, False])
@on_ranks(2)
def test_functional_call_in_the_middle_of_a_forward(kind: str, keeps_class: bool) -> None:
    torch.manual_seed(0)
    plain = Meta(keeps_class=keeps_class)
    model, inputs = _wrapped(plain, kind), _inputs()
    torch.testing.assert_close(model(inputs), plain(inputs))
    for mine, theirs in zip(_trained(model), _trained(plain, shard=False), strict=True):
        torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(model(inputs), plain(inputs))


@pytest.mark.parametrize("kind", ["flat", "pieces"])
@on_ranks(2)
def test_functorch_differentiates_through_what_is_given(kind: str) -> None:
    torch.manual_seed(0)
    plain = Net()
    model, inputs = _wrapped(plain, kind), _inputs()
    given = _given(plain, Tensor.clone)

    def loss(module: nn.Module, params: Given) -> Tensor:
        result: Tensor = functional_call(module, params, inputs)
        return result.square().sum()

    found, expected = (grad(lambda params, module=module: loss(module, params))(given) for module in (model, plain))
    for name in given:
        torch.testing.assert_close(found[name], expected[name])
    stacked = {name: torch.stack([value, value + 1]) for name, value in given.items()}
    found, expected = (vmap(lambda p, module=module: loss(module, p))(stacked) for module in (model, plain))
    torch.testing.assert_close(found, expected)
    for mine, theirs in zip(_trained(model), _trained(plain, shard=False), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_gradients_of_gradients_are_those_of_what_is_given(kind: str) -> None:
    torch.manual_seed(0)
    plain = Net()
    model = _wrapped(plain, kind)

    def penalty(module: nn.Module, params: Given) -> Tensor:
        inputs = _inputs().requires_grad_()
        output = functional_call(module, params, inputs).sin().sum()
        (gradient,) = torch.autograd.grad(output, inputs, create_graph=True)
        return (gradient.norm() - 1).square()

    given, ours = _given(plain, Tensor.requires_grad_), _given(plain, Tensor.requires_grad_)
    expected, found = penalty(plain, given), penalty(model, ours)
    torch.testing.assert_close(found, expected)
    expected.backward()
    found.backward()
    for name in given:
        torch.testing.assert_close(ours[name].grad, given[name].grad, msg=name)
    for mine, theirs in zip(_trained(model), _trained(plain, shard=False), strict=True):
        torch.testing.assert_close(mine, theirs)


@parametrize_pairs(world_size=[1, 2], kind=["flat", "pieces"])
@on_ranks("world_size")
def test_modules_with_ways_of_their_own(kind: str) -> None:
    torch.manual_seed(0)
    # A list of weights beside the attributes, buffers, and weights that are computed.
    makes: Any = (lambda: nn.LSTM(4, 3), lambda: nn.BatchNorm1d(4), lambda: weight_norm(nn.Linear(4, 3)))
    for make in makes:
        plain = make()
        model, inputs = _wrapped(plain, kind), _inputs()
        given = {name: value + 0.5 for name, value in plain.state_dict().items() if value.is_floating_point()}
        for _ in range(2):
            ours, theirs = dict(given), dict(given)
            expected, found = functional_call(plain, theirs, inputs), functional_call(model, ours, inputs)
            torch.testing.assert_close(found, expected)
            torch.testing.assert_close(ours, theirs)  # running statistics are written to what was given
            torch.testing.assert_close(model(inputs), plain(inputs))
        sums = []
        for each in (model, plain):
            with cached():  # torch tells modules apart by what they were copied from
                sums.append(_sum(each(inputs)) + _sum(each(2 * inputs)))
                sums[-1].backward()
        torch.testing.assert_close(*sums)
        torch.testing.assert_close(model.state_dict(), dict(plain.state_dict()))


def _sum(output: Any) -> Tensor:
    result: Tensor = (output[0] if isinstance(output, tuple) else output).square().sum()
    return result


@on_ranks(2)
def test_what_is_assigned_through_a_wrapper_arrives_in_the_module() -> None:
    for use_orig_params in (False, True):
        model: Any = FullyShardedDataParallel(nn.BatchNorm1d(4), use_orig_params=use_orig_params)
        for each in (model, pickle.loads(pickle.dumps(copy.deepcopy(nn.Sequential(model))))[0]):
            each.weight = nn.Parameter(torch.full((4,), 3.0))
            each.running_mean = torch.full((4,), 5.0)
            each.process_group = torch.distributed.group.WORLD
            each.eval()(torch.ones(2, 4))
            assert each.state_dict()["weight"].eq(3.0).all()
            assert each.state_dict()["running_mean"].eq(5.0).all()
            assert each.module.module.running_mean.eq(5.0).all()


@on_ranks(2)
def test_what_is_lent_is_not_saved() -> None:
    model = FullyShardedDataParallel(nn.Linear(4, 3), use_orig_params=True)
    listed = model.module.module._parameters["weight"]
    model.module.module._parameters["weight"] = nn.Parameter(torch.ones(3, 4))
    with pytest.raises(RuntimeError, match=r"'weight' of a Linear was replaced by other tensors"):
        model.state_dict()
    model.module.module._parameters["weight"] = listed
    assert not model.state_dict()["weight"].eq(1.0).all()


@pytest.mark.parametrize("kind", ["flat", "pieces", "rows"])
@on_ranks(2)
def test_functional_call_refuses_parts_of_parameters(kind: str) -> None:
    torch.manual_seed(0)
    model = _wrapped(Net(), kind)
    before = _values(model)
    parts = {name: param.detach().clone() for name, param in model.named_parameters()}
    with pytest.raises(RuntimeError, match="summon_full_params"):
        functional_call(model, parts, _inputs())
    model(_inputs())
    for mine, was in zip(_values(model), before, strict=True):
        torch.testing.assert_close(mine, was)


@pytest.mark.parametrize("kind", ["flat", "pieces", "rows"])
@on_ranks(2)
def test_torch_export_is_refused_with_the_model_to_export_instead(kind: str) -> None:
    model = _wrapped(Net(), kind)
    with pytest.raises(RuntimeError, match=r"For torch.export, load the model's checkpoint into the unsharded model"):
        torch.export.export(model, (_inputs(),))
    assert model(_inputs()).isfinite().all()
