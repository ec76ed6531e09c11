"""What is assigned to a wrapper, or registered with it, is found in the module that it wraps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp import FlattenParamsWrapper, FullyShardedDataParallel, StandaloneHandle
from tests.helpers.on_ranks import on_ranks
from tests.helpers.parity import alone

# What stands for the wrapped module, as a function of this module.
WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "wrapper": alone,
    "its module": alone,
    "original": partial(alone, use_orig_params=True),
    "wrapper of a wrapper": lambda module: alone(alone(module)),
    "flat parameters": FlattenParamsWrapper,
}


class Scaled(nn.Module):
    is_doubled = False

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.activation = nn.Linear(3, 3), nn.Identity()
        self.register_buffer("shift", torch.zeros(3))
        self.scale = 1.0
        self._is_used = False

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.layer(x)) * self.scale * (1 + self.is_doubled) + self.shift

    @property
    def level(self) -> float:
        return self.scale / 2

    @level.setter
    def level(self, value: float) -> None:
        self.scale = value * 2


X = torch.linspace(-1.0, 1.0, 12).view(4, 3)


def _wrapped(name: str, module: nn.Module) -> tuple[Any, Any]:
    """Return the model, and what stands for the module in it."""
    model = WRAPPERS[name](module)
    return model, model.module if name == "its module" else model


around_module = pytest.mark.parametrize("name", WRAPPERS)


@around_module
def test_what_the_module_has_is_assigned_to_it(name: str) -> None:
    _, around = _wrapped(name, Scaled())
    expected = around(X).relu() * 2 + 1
    around.scale, around.shift, around.activation = 2.0, torch.ones(3), nn.ReLU()
    assert torch.equal(around(X), expected)
    assert {"scale", "shift", "activation"}.isdisjoint(around.__dict__)


@around_module
def test_attributes_and_properties_of_the_modules_class_are_assigned_to_it(name: str) -> None:
    module = Scaled()
    _, around = _wrapped(name, module)
    expected = around(X) * 6
    around.is_doubled, around.level = True, 1.5
    assert torch.equal(around(X), expected)
    assert (module.is_doubled, module.scale, Scaled.is_doubled) == (True, 3.0, False)
    del around.is_doubled
    assert around.is_doubled is False


@around_module
def test_what_is_registered_is_the_modules_and_is_saved(name: str) -> None:
    module = Scaled()
    model, around = _wrapped(name, module)
    around.register_buffer("late", torch.ones(2))
    around.register_buffer("temporary", torch.ones(2), persistent=False)
    around.register_module("norm", nn.BatchNorm1d(3, affine=False))
    around.other = nn.Identity()
    assert {"norm", "other"} <= module._modules.keys()
    assert set(model.state_dict()) == {
        *("layer.weight", "layer.bias", "shift", "late"),
        *("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"),
    }


@around_module
def test_children_of_the_wrapper_are_registered_again_in_it(name: str) -> None:
    model, around = _wrapped(name, Scaled())
    children, expected = list(around.named_children()), around(X)
    for own, child in children:
        around.add_module(own, child)
        around.register_module(own, child)
    assert list(around.named_children()) == children
    assert set(model.state_dict()) == {"layer.weight", "layer.bias", "shift"}
    assert torch.equal(around(X), expected)


@around_module
def test_a_model_trains_after_its_batch_norms_were_looked_for(name: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    expected = plain(X)
    model, _ = _wrapped(name, plain)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    outputs = model(X)
    assert torch.equal(outputs, expected)
    outputs.sum().backward()
    assert all(param.grad is not None for param in model.parameters())


@around_module
def test_what_is_deleted_is_deleted_from_the_module(name: str) -> None:
    module = Scaled()
    _, around = _wrapped(name, module)
    del around.shift, around.scale
    assert not hasattr(module, "shift")
    assert not hasattr(module, "scale")
    with pytest.raises(AttributeError, match="nothing"):
        del around.nothing


@around_module
def test_names_of_the_wrapper_and_new_ones_stay_with_it(name: str) -> None:
    module = Scaled()
    _, around = _wrapped(name, module)
    around.training, around.comment, around._is_used = False, "new", True
    assert (around.training, around.comment, around._is_used) == (False, "new", True)
    assert (module.training, module._is_used, hasattr(module, "comment")) == (True, False, False)


@on_ranks(1, 2)
def test_a_parameter_is_assigned_to_the_module_and_a_new_one_is_an_error() -> None:
    model = FullyShardedDataParallel(nn.Linear(3, 3, bias=False))
    for holder in (model, model.module):
        value = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
        holder.weight = nn.Parameter(value)
        assert torch.equal(model(X), X @ value.T)
    model.module.register_parameter("gain", nn.Parameter(torch.ones(3)))
    with pytest.raises(RuntimeError, match="gain became a parameter after sharding"):
        model(X)


@pytest.mark.parametrize(
    "option", ["mixed_precision", "state_dict_device", "reshard_after_forward", "sharding_strategy"]
)
def test_an_option_that_is_assigned_after_wrapping_is_an_error(option: str) -> None:
    model = alone(nn.Linear(3, 3))
    before = getattr(model, option)
    with pytest.raises(AttributeError, match=f"{option} of a FullyShardedDataParallel is fixed when.* constructor"):
        setattr(model, option, before)
    assert getattr(model, option) == before


class Named(nn.Module):
    """A module that has the name of a flat parameter."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        values: dict[str, Any] = {"module": nn.Linear(3, 3), "parameter": nn.Parameter(torch.ones(3)), "attribute": 2.0}
        if kind == "buffer":
            self.register_buffer("flat_param_0", torch.ones(3))
        else:
            self.flat_param_0 = values[kind]

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        return self.flat_param_0(hidden) if isinstance(self.flat_param_0, nn.Module) else hidden * self.flat_param_0


@pytest.mark.parametrize("kind", ["module", "parameter", "buffer", "attribute"])
@pytest.mark.parametrize("wrap", [FullyShardedDataParallel, FlattenParamsWrapper])
@on_ranks(2)
def test_a_module_may_have_the_name_of_a_flat_parameter(wrap: Callable[[nn.Module], Any], kind: str) -> None:
    torch.manual_seed(0)
    plain = Named(kind)
    model = wrap(copy.deepcopy(plain))
    for each in (plain, model):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        each(X).square().sum().backward()
        optimizer.step()
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value)
    if wrap is FullyShardedDataParallel:
        shards = model.local_state_dict()
        assert {"flat_param_1"} == {name for name in shards if not name.startswith(("flat_param_0", "layer"))}
        model.load_local_state_dict(shards)
    model.load_state_dict(state)
    torch.testing.assert_close(model(X), plain(X))


class Delegating(nn.Module):
    """Has all attributes: those of the unit inside, and None for other names."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.inside = FullyShardedDataParallel(nn.Linear(3, 3))

    def __getattr__(self, name: str) -> Any:
        own = {**self.__dict__["_parameters"], **self.__dict__["_buffers"], **self.__dict__["_modules"]}
        return own[name] if name in own else getattr(own.get("inside"), name, None)

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(self.layer(x))


@pytest.mark.parametrize("is_wrapped", [True, False])
@on_ranks(2)
def test_a_module_may_have_every_attribute(is_wrapped: bool) -> None:
    module: nn.Module = Delegating()
    if is_wrapped:
        module = FullyShardedDataParallel(module)
        module(X).sum().backward()
    else:
        StandaloneHandle([*module.layer.parameters()], module)
    assert [name.rpartition(".")[2] for name, _ in module.named_parameters()] == ["flat_param_0"] * 2
