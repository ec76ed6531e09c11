"""Modules that keep full precision inside a unit of mixed precision: `MixedPrecision.full_precision_modules`."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp import FullyShardedDataParallel, MixedPrecision
from tests.helpers.dtypes import BRAIN, DOUBLE, HALF, SINGLE
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.parity import alone


class Observed(nn.Module):
    """Remembers the dtypes of its inputs, of its parameters in computation, and of its outputs."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.register_buffer("table", torch.full((3,), 1 + 2**-12))
        self.seen: list[set[torch.dtype]] = []

    def forward(self, inputs: Tensor) -> Tensor:
        table = self.get_buffer("table")
        weights = [module.weight for module in self.layers if isinstance(module, nn.Linear)]
        output = self.layers(inputs) * table
        self.seen.append({tensor.dtype for tensor in (inputs, *weights, table, output)})
        return output


class Pair(Observed):
    """A container of layers, which know nothing of it."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))


class Model(nn.Module):
    """A pair between two layers that are not kept."""

    def __init__(self, pair: type[Observed] = Pair) -> None:
        super().__init__()
        self.entry = nn.Linear(5, 3)
        self.pair = pair()
        self.exit = nn.Linear(3, 5)
        self.seen: list[torch.dtype] = []

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.pair(self.entry(inputs))
        self.seen.append(hidden.dtype)
        return self.exit(hidden.to(self.exit.weight.dtype))


def keeping(kinds: Sequence[type[nn.Module]], dtype: torch.dtype = BRAIN, **more: Any) -> MixedPrecision:
    return MixedPrecision(param_dtype=dtype, full_precision_modules=kinds, **more)


def backward(model: nn.Module, inputs: Tensor) -> Tensor:
    output = model(inputs)
    output.float().sin().sum().backward()
    return output.detach()


every_dtype = pytest.mark.parametrize("dtype", [HALF, BRAIN])


# What is kept


@every_dtype
@pytest.mark.parametrize("flatten_parameters", [True, False])
def test_a_kept_module_computes_in_its_own_dtype_and_returns_what_came_in(
    dtype: torch.dtype, flatten_parameters: bool
) -> None:
    module = Model()
    policy = keeping([Pair], dtype, buffer_dtype=dtype)
    model = alone(module, mixed_precision=policy, flatten_parameters=flatten_parameters)
    backward(model, torch.ones(2, 5))
    assert module.pair.seen == [{SINGLE}]
    assert module.seen == [dtype]
    assert torch.equal(module.pair.get_buffer("table"), torch.full((3,), 1 + 2**-12))
    assert all(param.grad is not None and param.grad.dtype is SINGLE for param in model.params)


def test_kept_parameters_are_a_flat_parameter_of_their_own() -> None:
    model = alone(Model(), mixed_precision=keeping([Pair]))
    kept = {"pair.layers.0.weight", "pair.layers.0.bias", "pair.layers.2.weight", "pair.layers.2.bias"}
    others = {"entry.weight", "entry.bias", "exit.weight", "exit.bias"}
    names = {handle.unsharded.full.dtype: set(handle.flat_param.metadata()[0]) for handle in model._unit.handles}
    assert names == {BRAIN: others, SINGLE: kept}
    assert [handle.gradients.dtype for handle in model._unit.handles] == [BRAIN, SINGLE]


def test_subclasses_are_kept_too_and_other_classes_are_not() -> None:
    class Special(Pair):
        pass

    for kind, expected in ((Special, SINGLE), (Pair, SINGLE), (nn.Tanh, BRAIN), (nn.Embedding, BRAIN)):
        module = Model(Special)
        alone(module, mixed_precision=keeping([kind]))(torch.ones(2, 5))
        assert module.pair.layers[0].weight.dtype is expected


@pytest.mark.parametrize("kinds", [(), (nn.Embedding,)])
def test_nothing_is_kept_unless_it_is_named(kinds: tuple[type[nn.Module], ...]) -> None:
    module = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.LayerNorm(3))
    model = alone(module, mixed_precision=keeping(kinds))
    assert [handle.unsharded.full.dtype for handle in model._unit.handles] == [BRAIN]


def test_batch_norms_are_kept_by_default_and_layer_norms_are_not() -> None:
    module = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.LayerNorm(3))
    model = alone(module, mixed_precision=MixedPrecision(param_dtype=BRAIN))
    names = {handle.unsharded.full.dtype: handle.flat_param.metadata()[0] for handle in model._unit.handles}
    assert names == {BRAIN: ("0.weight", "0.bias", "2.weight", "2.bias"), SINGLE: ("1.weight", "1.bias")}


def test_a_kept_module_without_parameters_computes_in_float32() -> None:
    """A norm without weights is named for its arithmetic."""

    class Norm(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            seen.append(inputs.dtype)
            return inputs / inputs.std()

    seen: list[torch.dtype] = []
    model = alone(nn.Sequential(nn.Linear(5, 3), Norm()), mixed_precision=keeping([Norm]))
    assert model(torch.randn(2, 5)).dtype is BRAIN
    assert seen == [SINGLE]


def test_a_kept_module_keeps_float64() -> None:
    module = Model()
    module.pair.double()
    alone(module, mixed_precision=keeping([Pair]))(torch.ones(2, 5))
    assert module.pair.seen == [{DOUBLE}]
    assert module.seen == [BRAIN]


def test_an_inner_units_own_policy_decides_for_its_modules() -> None:
    module = Model()
    pair = module.pair
    module.pair = alone(pair, mixed_precision=keeping(()))  # type: ignore[assignment]
    alone(module, mixed_precision=keeping([Pair]))(torch.ones(2, 5))
    assert pair.layers[0].weight.dtype is BRAIN
    assert BRAIN in pair.seen[0]


def test_without_another_dtype_to_compute_in_buffers_are_kept_all_the_same() -> None:
    module = Model()
    alone(module, mixed_precision=MixedPrecision(buffer_dtype=BRAIN, full_precision_modules=[Pair]))
    assert module.pair.get_buffer("table").dtype is SINGLE


# The wrapped module itself


def test_the_wrapped_module_may_be_one_that_is_kept() -> None:
    pair = Pair()
    model = alone(pair, mixed_precision=keeping([Pair], buffer_dtype=BRAIN))
    assert backward(model, torch.ones(2, 3, dtype=BRAIN)).dtype is BRAIN
    assert backward(model, torch.ones(2, 3)).dtype is SINGLE
    assert pair.seen == [{SINGLE}, {SINGLE}]
    (handle,) = model._unit.handles
    assert {handle.unsharded.full.dtype, handle.gradients.dtype} == {SINGLE}


def test_the_output_dtype_is_the_policys_where_it_has_one() -> None:
    model = alone(Pair(), mixed_precision=keeping([Pair], output_dtype=HALF))
    assert model(torch.ones(2, 3)).dtype is HALF


# What goes in and comes out


class Several(nn.Module):
    """Takes and returns nests."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, inputs: dict[str, Tensor], *, mask: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.layer(inputs["x"])
        if mask is not None:
            hidden = hidden * mask
        return {"hidden": hidden, "where": hidden.argmax()}


class Caller(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.several = Several()
        self.entry = nn.Linear(3, 3)

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        hidden = self.entry(inputs)
        assert hidden.dtype is BRAIN
        return self.several({"x": hidden}, mask=hidden)


def test_nests_are_cast_on_the_way_in_and_back() -> None:
    model = alone(Caller(), mixed_precision=keeping([Several]))
    output = model(torch.ones(2, 3))
    assert {name: value.dtype for name, value in output.items()} == {"hidden": BRAIN, "where": torch.int64}


def test_what_came_in_with_several_dtypes_goes_out_as_computed() -> None:
    """There is no dtype to cast back to."""
    module = Several()
    model = alone(module, mixed_precision=keeping([Several]))
    assert model({"x": torch.ones(2, 3, dtype=BRAIN)}, mask=torch.ones(3))["hidden"].dtype is SINGLE
    assert model({"x": torch.ones(2, 3, dtype=BRAIN)}, mask=torch.ones(3, dtype=BRAIN))["hidden"].dtype is BRAIN


def test_a_call_that_failed_leaves_the_next_one_right() -> None:
    module = Model()
    model = alone(module, mixed_precision=keeping([Pair]))
    module.pair.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        model(torch.ones(2, 5))
    module.pair.layers[1]._forward_pre_hooks.clear()
    model(torch.ones(2, 5))
    assert module.pair.seen == [{SINGLE}]
    assert module.seen == [BRAIN]


# The same numbers


def by_hand(plain: Model, inputs: Tensor, dtype: torch.dtype) -> Tensor:
    """What `plain` computes with low copies of what is not kept; gradients are added to its own parameters."""
    entry, leave = copy.deepcopy(plain.entry).to(dtype), copy.deepcopy(plain.exit).to(dtype)
    output = leave(plain.pair(entry(inputs.to(dtype)).float()).to(dtype))
    output.float().sin().sum().backward()
    for low, own in ((entry, plain.entry), (leave, plain.exit)):
        for source, target in zip(low.parameters(), own.parameters(), strict=True):
            assert source.grad is not None
            target.grad = source.grad.float()
    return output


class Recomputing(Model):
    """Checkpoints the kept module, whose recomputation torch stops as early as it can."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = checkpoint(self.pair, self.entry(inputs), use_reentrant=False)
        self.seen.append(hidden.dtype)
        return self.exit(hidden.to(self.exit.weight.dtype))


@parametrize_pairs(dtype=[HALF, BRAIN], world_size=[1, 2], kind=[Model, Recomputing])
@on_ranks("world_size")
def test_kept_modules_train_as_with_casts_by_hand(dtype: torch.dtype, kind: type[Model]) -> None:
    torch.manual_seed(0)
    plain = kind()
    module = copy.deepcopy(plain)
    model = FullyShardedDataParallel(module, mixed_precision=keeping([Pair], dtype))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (plain, model)]
    for number in range(3):
        # The same on all ranks: the mean of their gradients is each one's, but for the last bit in float32.
        inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(number))
        torch.testing.assert_close(
            backward(model, inputs), by_hand(plain, inputs, dtype).detach(), rtol=1e-2, atol=1e-3
        )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert set(module.seen) == {dtype}
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-6)


# Under autocast


class SeeingNorm(nn.BatchNorm1d):
    """Remembers the dtypes of its inputs."""

    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.seen: list[torch.dtype] = []

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen.append(inputs.dtype)
        return super().forward(inputs)


@pytest.mark.parametrize(
    "options",
    [{"mixed_precision": MixedPrecision(param_dtype=SINGLE)}, {"mixed_precision": True, "compute_dtype": SINGLE}],
    ids=["policy", "flags"],
)
def test_a_unit_in_float32_leaves_inputs_to_autocast(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 3), SeeingNorm(3), nn.Linear(3, 5))
    sharded = copy.deepcopy(plain)
    model = alone(sharded, **options)
    with torch.autocast("cpu", BRAIN):
        found, expected = backward(model, torch.ones(4, 5)), backward(plain, torch.ones(4, 5))
    assert sharded[1].seen == plain[1].seen == [BRAIN]
    assert torch.equal(found, expected)
    assert len(model._unit.handles) == 1
