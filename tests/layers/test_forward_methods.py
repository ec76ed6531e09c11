"""`register_fsdp_forward_method`: methods besides forward that compute with a unit's parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import fsdp
from fsdp import MixedPrecisionPolicy, TrainingState, fully_shard, register_fsdp_forward_method
from tests.helpers.dtensor_twins import units
from tests.helpers.equality import assert_close_state
from tests.helpers.forms import FORMS, full_state, sharded
from tests.helpers.models import Net, Wrap, keep
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.parity import Alone, fully_sharded
from tests.helpers.twins import Twins

KINDS: dict[str, dict[str, Any]] = {
    "flat": {},
    "kept": {"reshard_after_forward": False},
    "orig": {"use_orig_params": True},
    "unflattened": {"flatten_parameters": False},
}


class Coder(nn.Module):
    """Encodes and decodes by methods; its forward is both."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(6, 3), nn.Linear(3, 6)

    def encode(self, inputs: Tensor) -> Tensor:
        return torch.tanh(self.down(inputs))

    def decode(self, code: Tensor) -> Tensor:
        return code @ self.up.weight.T + self.up.bias

    def nothing(self, inputs: Tensor) -> None:
        inputs.add_(self.down.bias.sum())

    def forward(self, inputs: Tensor) -> Tensor:
        return self.decode(self.encode(inputs))


def model(wrap: Wrap) -> nn.Module:
    """Calls its coder by the methods only."""
    torch.manual_seed(0)
    made = wrap(
        Net(lambda net, x: net.head(net.coder.decode(net.coder.encode(x))), coder=wrap(Coder()), head=nn.Linear(6, 2))
    )
    if wrap is not keep:
        for method in ("encode", "decode"):
            register_fsdp_forward_method(made.get_submodule("_fsdp_wrapped_module._fpw_module.coder"), method)
    return made


@parametrize_pairs(kind=list(KINDS), world_size=[1, 2])
@on_ranks("world_size")
def test_pain_point_13_training_through_methods_equals_the_plain_model(kind: str) -> None:
    options = KINDS[kind]
    twins = Twins.of(model, **options)
    for number in range(2):
        twins.take(number, _step)
    twins.assert_close()


def _step(module: nn.Module, inputs: Tensor) -> None:
    module(torch.cat([inputs, inputs], dim=1)[:, :6]).square().mean().backward()


@on_ranks(2)
def test_without_it_the_error_names_the_weight() -> None:
    coder: Any = fully_sharded()(Coder())
    with pytest.raises(RuntimeError, match=r"down\.weight is sharded.*Call the sharded module"):
        coder.encode(torch.ones(1, 6))
    register_fsdp_forward_method(coder, "encode")
    assert coder.encode(torch.ones(1, 6)).shape == (1, 3)


@on_ranks(2)
def test_without_it_the_error_under_fully_shard_names_weight_and_remedy() -> None:
    coder: Any = fully_shard(Coder())
    coder(torch.ones(1, 6)).sum().backward()
    with pytest.raises(RuntimeError, match=r"^down\.weight is sharded: encode\(\) of .*method\(module, 'encode'\)"):
        coder.encode(torch.ones(1, 6))
    with pytest.raises(RuntimeError, match=r"^down\.weight or .* or up\.weight or up\.bias is sharded: decode\(\) of"):
        coder.decode(torch.ones(1, 3))
    register_fsdp_forward_method(coder, "encode")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):  # other errors are left alone
        coder.encode(torch.ones(1, 5))
    code = coder.encode(torch.ones(1, 6))
    register_fsdp_forward_method(coder, "decode")
    assert coder.decode(code).shape == (1, 6)


@pytest.mark.parametrize("output_dtype", [None, torch.float64])
@on_ranks(2)
def test_a_method_of_a_unit_that_has_not_run_computes_with_lent_tensors(output_dtype: torch.dtype | None) -> None:
    net = Net(lambda net, x: net.coder.encode(x), coder=Coder())
    lent = {name: torch.full_like(param, 0.1) for name, param in net.named_parameters()}
    expected = functional_call(net, lent, torch.ones(1, 6))
    fully_shard(net.coder, mp_policy=MixedPrecisionPolicy(output_dtype=output_dtype))
    register_fsdp_forward_method(net.coder, "encode")
    assert torch.equal(functional_call(net, lent, torch.ones(1, 6)), expected.to(output_dtype or torch.float32))


class Generating:
    """The base class of a library, which does not define the forward."""

    def generate(self: Any, inputs: Tensor) -> Any:
        return self.down(inputs)


class Generator(Generating, Coder):
    """A user's module, with a method of the library."""


@on_ranks(2)
def test_without_it_the_generate_of_a_base_class_is_explained_too() -> None:
    with pytest.raises(RuntimeError, match=r"^down\.weight is sharded: generate\(\) of .*method\(module, 'generate'\)"):
        fully_shard(Generator()).generate(torch.ones(1, 6))


class Encoder(Coder):
    """Inherits its forward, and adds a method."""

    def narrow(self, inputs: Tensor) -> Any:
        return self.down(inputs)


@on_ranks(2)
def test_without_it_a_method_of_a_class_that_inherits_its_forward_is_explained_too() -> None:
    with pytest.raises(RuntimeError, match=r"^down\.weight is sharded: narrow\(\) of .*method\(module, 'narrow'\)"):
        fully_shard(Encoder()).narrow(torch.ones(1, 6))


class Reversed(torch.autograd.Function):
    """Computes a layer in backward again, by another method of its own."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, layer: Any) -> Tensor:
        ctx.layer = layer
        with torch.no_grad():
            outputs: Tensor = layer(inputs)
        ctx.save_for_backward(inputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (inputs,) = ctx.saved_tensors
        return ctx.layer.backward_pass(inputs, grad), None


class Reversible(Coder):
    def backward_pass(self, inputs: Tensor, grad: Tensor) -> Tensor | None:
        with torch.enable_grad():
            inputs = inputs.detach().requires_grad_()
            Coder.forward(self, inputs).backward(grad)
        return inputs.grad


def reformer() -> nn.Module:
    return Net(lambda net, x: Reversed.apply(net.first(x), net.coder), first=nn.Linear(6, 6), coder=Reversible())


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_a_method_that_backward_calls_trains_once_it_is_registered(form: str) -> None:
    torch.manual_seed(0)
    plain = reformer()
    model: Any = copy.deepcopy(plain)
    layer, inputs = model.coder, torch.randn(2, 6)
    model = sharded(model, form, (Reversible,))
    with pytest.raises(RuntimeError, match=r"down\.weight.* is sharded.*register_fsdp_forward_method\("):
        model(inputs).square().sum().backward()
    fsdp.recover(model)
    for param in model.parameters():
        param.grad = None
    register_fsdp_forward_method(layer, "backward_pass")
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for _ in range(2):
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            each(inputs).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_close_state(full_state(model), plain.state_dict(), rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_the_modules_own_forward_calls_it_as_an_ordinary_method() -> None:
    torch.manual_seed(0)
    plain = Coder()
    coder: Any = fully_sharded()(copy.deepcopy(plain))
    register_fsdp_forward_method(coder, "encode")
    register_fsdp_forward_method(coder, "decode")
    inputs = torch.ones(2, 6)
    assert torch.equal(coder(inputs), plain(inputs))
    coder(inputs).sum().backward()
    assert coder.training_state is TrainingState.IDLE


@on_ranks(2)
@torch.no_grad()
def test_memory_is_given_back_whatever_the_method_does() -> None:
    coder: Any = fully_sharded()(Coder())
    register_fsdp_forward_method(coder, "encode")
    register_fsdp_forward_method(coder, "nothing")
    (handle,) = coder._unit.handles
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        coder.encode(torch.ones(1, 5))
    assert handle.unsharded.full.untyped_storage().nbytes() == 0
    assert coder.nothing(torch.ones(1, 6)) is None
    assert handle.unsharded.full.untyped_storage().nbytes() == 0
    assert coder.training_state is TrainingState.IDLE


def test_what_cannot_be_registered() -> None:
    coder = fully_sharded(process_group=Alone())(Coder())
    unsharded = nn.Linear(2, 2)
    register_fsdp_forward_method(unsharded, "forward")  # does nothing, so that programs may be run without sharding
    assert "forward" not in vars(unsharded)
    with pytest.raises(ValueError, match="Coder has no method 'sample'"):
        register_fsdp_forward_method(coder, "sample")


@on_ranks(2)
def test_a_method_whose_parameters_cannot_be_unsharded_leaves_nothing_behind() -> None:
    sharded_coder: Any = fully_shard(Coder())
    register_fsdp_forward_method(sharded_coder, "encode")
    sharded_coder.encode(torch.ones(1, 6)).sum().backward()
    weight = sharded_coder.down.weight
    sharded_coder.down.weight = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(RuntimeError, match=r"down\.weight: expected shape \(3, 6\)"):
        sharded_coder.encode(torch.ones(1, 6))
    assert [unit.state for unit in units(sharded_coder)] == [TrainingState.IDLE]
    sharded_coder.down.weight = weight
    sharded_coder.encode(torch.ones(1, 6)).sum().backward()


@on_ranks(2)
def test_after_an_interrupted_forward_a_method_computes_with_the_present_weights() -> None:
    class Interrupted(Coder):
        is_interrupted = False

        def forward(self, inputs: Tensor) -> Tensor:
            if self.is_interrupted:
                raise KeyboardInterrupt
            return super().forward(inputs)

    torch.manual_seed(0)
    coder: Any = fully_shard(Interrupted())
    register_fsdp_forward_method(coder, "encode")
    inputs = torch.ones(1, 6)
    coder(inputs).sum().backward()
    coder.is_interrupted = True
    weight, bias = (full_state(coder)[f"down.{name}"].clone() for name in ("weight", "bias"))
    listed = list(coder.parameters())
    with pytest.raises(KeyboardInterrupt):
        coder(inputs)
    with torch.no_grad():
        for param in listed:
            param.mul_(2)
        found = coder.encode(inputs)
    torch.testing.assert_close(found, torch.tanh(nn.functional.linear(inputs, 2 * weight, 2 * bias)))
    with pytest.raises(KeyboardInterrupt):
        coder(inputs)
    coder.reshard()
