"""Frozen parameters and parameters of several dtypes in one unit: what they cost, and that they train as unsharded.

The model is the usual one: adapters of low rank on a frozen base. `test_pain_point_04_...` are about frozen parameters,
`test_pain_point_06_...` about several dtypes in a unit.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp import fully_shard
from tests.helpers.dtypes import BRAIN, SINGLE
from tests.helpers.memory import live_bytes
from tests.helpers.models import Net, Wrap, keep
from tests.helpers.module_kinds import (
    FLAT,
    FORMS,
    ORIGINAL,
    UNFLATTENED,
    SideBySide,
    Units,
    assert_kind_trains,
    auto_wrapped,
    seeded,
    whole,
    wrapped_parts,
)
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import Case, parametrize_cases, parametrize_pairs
from tests.helpers.parity import (
    Training,
    adamw,
    assert_bit_equal,
    assert_parity,
    fully_sharded,
    sgd_with_momentum,
    train_ddp,
    train_sharded,
)
from tests.helpers.ranks import RankPool
from tests.helpers.traffic import by_dtype, counting_sent


class Adapted(nn.Module):
    """A frozen layer with a trained correction of low rank, which is computed in its own dtype."""

    def __init__(self, inputs: int, outputs: int, base_dtype: torch.dtype | None) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs, dtype=base_dtype).requires_grad_(False)
        self.down = nn.Linear(inputs, 2, bias=False)
        self.up = nn.Linear(2, outputs, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.base(inputs.to(self.base.weight.dtype)).to(inputs.dtype) + self.up(self.down(inputs))


def adapted(base_dtype: torch.dtype | None = BRAIN, outputs: int = 5) -> nn.Module:
    return nn.Sequential(Adapted(5, 7, base_dtype), nn.Tanh(), Adapted(7, outputs, base_dtype))


in_default_dtype = partial(adapted, None)


def by_layers(model: nn.Module, wrap: Wrap) -> nn.Module:
    """Base and adapters of a layer are a unit; nothing is left for the root."""
    return wrapped_parts(model, wrap, parts=["0", "2"])


UNITS: list[Units] = [whole, by_layers, auto_wrapped]


# They train


@parametrize_cases(
    at_most=4,
    options=FORMS,
    units=UNITS,
    world_size=[3, 2],
    make_optimizer=[sgd_with_momentum, adamw],
    reshard_after_forward=[True, False],
)
def test_pain_point_04_adapters_on_a_frozen_bfloat16_base(ranks: RankPool, world_size: int, case: Case) -> None:
    # Adapters in float64: what the base rounds to 16 bits is then the same here and there.
    options = {**case.options, "reshard_after_forward": case.reshard_after_forward}
    ranks(world_size).run(assert_kind_trains, adapted, case.units, case.make_optimizer, options, apart=True)


def mixed() -> nn.Module:
    """Both dtypes trained: norms in float32 between layers in bfloat16."""
    return nn.Sequential(
        nn.LayerNorm(5), cast(BRAIN), nn.Linear(5, 7, dtype=BRAIN), nn.Tanh(), cast(SINGLE), nn.Linear(7, 1)
    )


def cast(dtype: torch.dtype) -> nn.Module:
    return Net(lambda net, x: x.to(net.dtype), dtype=dtype)


def in_units(make: Callable[[], nn.Module], units: Units, wrap: Wrap) -> nn.Module:
    model = seeded(make)
    return model if wrap is keep else units(model, wrap)


@parametrize_cases(at_most=4, options=FORMS, units=UNITS, make_optimizer=[sgd_with_momentum, adamw])
@on_ranks(2)
def test_pain_point_06_float32_on_bfloat16_is_distributed_data_parallel_to_the_bit(case: Case) -> None:
    make_model = partial(in_units, partial(adapted, outputs=1), case.units)
    training = Training(make_model=make_model, make_optimizer=case.make_optimizer)
    sharded = train_sharded(training, fully_sharded(**case.options))
    assert_bit_equal(sharded, train_ddp(training))
    assert {value.dtype for name, value in sharded.weights.items() if "base" in name} == {BRAIN}
    assert {value.dtype for name, value in sharded.weights.items() if "base" not in name} == {SINGLE}


@parametrize_cases(
    at_most=4,
    world_size=[4, 2],  # a third of a gradient in bfloat16 is rounded, and that of one rank is three times as large
    options=FORMS,
    units=[whole, auto_wrapped],
    make_optimizer=[sgd_with_momentum, adamw],
)
def test_pain_point_06_both_dtypes_are_trained(ranks: RankPool, world_size: int, case: Case) -> None:
    wrap = fully_sharded(**case.options)
    ranks(world_size).run(assert_parity, partial(in_units, mixed, case.units), case.make_optimizer, wrap=wrap)


# What they cost

# Elements of `adapted()`, by parameter, of each layer.
TRAINED = [[10, 14], [14, 10]]
FROZEN = [[35, 7], [35, 5]]


def shard_numel(layers: Sequence[Sequence[int]], units: Units, options: dict[str, Any]) -> int:
    """Elements on each rank, padding included."""
    if options == UNFLATTENED:
        vectors = [numel for layer in layers for numel in layer]
    elif units is by_layers:
        vectors = [sum(layer) for layer in layers]
    else:
        vectors = [sum(map(sum, layers))]
    if options == ORIGINAL:
        vectors = [
            aligned(layer)
            for layer in (layers if units is by_layers else [[size for layer in layers for size in layer]])
        ]
    return sum(-(-numel // dist.get_world_size()) for numel in vectors)


def aligned(sizes: Sequence[int]) -> int:
    """Elements of a vector in which every parameter starts at a multiple of eight."""
    *others, last = sizes
    return sum(-(-size // 8) * 8 for size in others) + last


def train_step(model: nn.Module, inputs: Tensor) -> None:
    model(inputs).sum().backward()


@parametrize_pairs(options=FORMS, units=[whole, by_layers], world_size=[3, 2])
@on_ranks("world_size")
def test_pain_point_04_what_is_frozen_is_gathered_and_never_reduced(options: dict[str, Any], units: Units) -> None:
    # Units keep their parameters until backward: every one is gathered once.
    model = units(seeded(adapted), fully_sharded(reshard_after_forward=False, **options))
    train_step(model, torch.ones(2, 5))  # the ranks also agree in the first one
    peers = dist.get_world_size() - 1
    with counting_sent(by_dtype) as sent:
        train_step(model, torch.ones(2, 5))
    assert sent[BRAIN] == peers * shard_numel(FROZEN, units, options) * 2
    assert sent[SINGLE] == peers * shard_numel(TRAINED, units, options) * 4 * 2  # gathered and reduced


@pytest.mark.parametrize("options", FORMS, ids=str)
@on_ranks(2)
def test_pain_point_04_what_is_frozen_later_is_not_reduced_any_more(options: dict[str, Any]) -> None:
    model: Any = by_layers(seeded(adapted), fully_sharded(reshard_after_forward=False, **options))
    train_step(model, torch.ones(2, 5))
    model[2].requires_grad_(False)
    peers = dist.get_world_size() - 1
    with counting_sent(by_dtype) as sent:
        train_step(model, torch.ones(2, 5))
    gathered, reduced = (shard_numel(layers, by_layers, options) for layers in (TRAINED, TRAINED[:1]))
    assert sent[SINGLE] == peers * (gathered + reduced) * 4


@parametrize_cases(
    at_most=4, options=FORMS, units=[whole, by_layers], world_size=[3, 2], make_optimizer=[adamw, sgd_with_momentum]
)
@on_ranks("world_size")
def test_pain_point_04_gradients_and_optimizer_state_are_of_what_is_trained(case: Case) -> None:
    inputs = torch.ones(2, 5)
    before = live_bytes()
    model: Any = case.units(seeded(adapted), fully_sharded(**case.options))
    trained, frozen = (shard_numel(layers, case.units, case.options) for layers in (TRAINED, FROZEN))
    weights = 4 * trained + 2 * frozen
    assert live_bytes() - before == weights
    optimizer = case.make_optimizer(model.parameters())
    counts = sum(param.requires_grad for param in model.parameters())  # AdamW counts the steps of each
    stepped = sum(param.numel() for param in model.parameters() if param.requires_grad)
    assert stepped <= trained  # pieces are without what lies between them
    state = 4 * (2 * stepped + counts) if case.make_optimizer is adamw else 4 * stepped
    # The ranks tell each other which original parameters were used, and gloo's thread may still hold what it sent.
    flags = sum(map(len, TRAINED)) if case.options == ORIGINAL else 0

    def assert_held(nbytes: int) -> None:
        assert live_bytes() - before - nbytes in (0, flags)

    for number in range(3):
        train_step(model, inputs)
        assert_held(weights + 4 * trained + (state if number else 0))
        optimizer.step()
        assert_held(weights + 4 * trained + state)
        optimizer.zero_grad()
        assert_held(weights + state)
    with model.no_sync():
        train_step(model, inputs)
    # Whole gradients of what is trained; the root alone keeps its parameters.
    kept = dist.get_world_size() * weights if case.units is whole else 0
    assert_held(weights + state + kept + 4 * trained * dist.get_world_size())


# Frozen, thawed, frozen again


def toggle(model: nn.Module, names: Iterable[str]) -> None:
    params = dict(model.named_parameters())
    for name in names:
        params[name].requires_grad_(not params[name].requires_grad)


# Before which step which parameters are toggled: of both kinds, alone and together, in each layer.
TOGGLES = {
    1: ["0.up.weight"],
    2: ["0.base.weight", "2.base.bias"],
    4: ["0.up.weight", "0.down.weight", "2.down.weight", "2.up.weight"],
    5: ["0.base.weight", "2.up.weight"],
    6: ["0.base.weight", "0.down.weight"],
}


@parametrize_cases(
    at_most=4,
    options=[ORIGINAL, UNFLATTENED],
    units=[whole, by_layers],
    world_size=[3, 2],
    make_optimizer=[adamw, sgd_with_momentum],
    reshard_after_forward=[True, False],
)
@on_ranks("world_size")
def test_pain_point_04_each_parameter_is_frozen_and_thawed_between_steps(case: Case) -> None:
    options = {**case.options, "reshard_after_forward": case.reshard_after_forward}
    pair = SideBySide(in_default_dtype, case.units, case.make_optimizer, **options)
    for number in range(8):
        pair.on_both(partial(toggle, names=TOGGLES.get(number, ())))
        pair.backward(number)
        for model in (pair.sharded, pair.plain):
            with_gradient = {name for name, param in model.named_parameters() if param.grad is not None}
            assert with_gradient == {name for name, param in pair.plain.named_parameters() if param.requires_grad}
        pair.optimize()
    pair.assert_close()


def a_layer(model: Any, trained: bool) -> None:
    """All of it, base included."""
    model[2].requires_grad_(trained)


def the_adapters_of_a_layer(model: Any, trained: bool) -> None:
    """Which are one flat parameter."""
    layer = model[2]
    params = layer.params[1:] if hasattr(layer, "params") else [layer.down.weight, layer.up.weight]
    for param in params:
        param.requires_grad_(trained)


def the_base_of_a_layer(model: Any, trained: bool) -> None:
    layer = model[2]
    params = layer.params[:1] if hasattr(layer, "params") else layer.base.parameters()
    for param in params:
        param.requires_grad_(trained)


@parametrize_cases(
    at_most=4,
    freeze=[a_layer, the_adapters_of_a_layer, the_base_of_a_layer],
    world_size=[3, 2],
    make_optimizer=[adamw, sgd_with_momentum],
    reshard_after_forward=[True, False],
)
@on_ranks("world_size")
def test_pain_point_04_flat_parameters_are_frozen_and_thawed_between_steps(case: Case) -> None:
    options = {**FLAT, "reshard_after_forward": case.reshard_after_forward}
    pair = SideBySide(in_default_dtype, by_layers, case.make_optimizer, **options)
    for number in range(6):
        if number % 2:
            pair.on_both(partial(case.freeze, trained=number == 3))
        pair.step(number)
    pair.assert_close()


@pytest.mark.parametrize("options", FORMS, ids=str)
@on_ranks(2)
def test_pain_point_04_freezing_between_backward_and_step_keeps_the_gradient(options: dict[str, Any]) -> None:
    pair = SideBySide(in_default_dtype, by_layers, adamw, **options)
    for number in range(4):
        pair.backward(number)
        pair.on_both(partial(a_layer, trained=bool(number % 2)))
        pair.optimize()
    pair.assert_close()


@on_ranks(2)
def test_a_part_of_a_flat_parameter_cannot_be_frozen() -> None:
    inner = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3)))
    model: Any = fully_sharded()(inner)
    for part in (inner[0], inner[1], inner[1][0]):
        with pytest.raises(RuntimeError, match=r"weight cannot be frozen or thawed separately .*use_orig_params=True"):
            part.requires_grad_(False)
        assert part.requires_grad_(True) is part  # as it is
    inner.requires_grad_(False)
    assert not any(param.requires_grad for param in model.parameters())
    original: Any = fully_sharded(use_orig_params=True)(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    original.module.module[0].requires_grad_(False)
    assert [param.requires_grad for param in original.parameters()] == [False, False, True, True]


@on_ranks(1, 2)
def test_what_is_frozen_while_it_is_unsharded_is_frozen() -> None:
    for wrapper in (fully_sharded(use_orig_params=True, mixed_precision=True), fully_shard):
        model: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model = wrapper(model) or model
        layer = model.module.module[0] if hasattr(model, "module") else model[0]
        for is_trained in (False, True):
            model(torch.ones(2, 3))  # no backward, so parameters stay unsharded
            layer.weight.requires_grad_(is_trained)
            model(torch.ones(2, 3)).sum().backward()
            grads = {name.rpartition("0.")[2]: param.grad for name, param in model.named_parameters()}
            assert (grads["weight"] is not None) is is_trained
            assert grads["bias"] is not None
            model.zero_grad()


@on_ranks(2)
def test_a_part_of_a_flat_parameter_cannot_be_frozen_while_it_is_unsharded() -> None:
    layer = nn.Linear(3, 3)
    model = fully_sharded()(layer)
    model(torch.ones(2, 3))
    layer.weight.requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"weight has requires_grad=False now, .*use_orig_params=True"):
        model(torch.ones(2, 3))
    model(torch.ones(2, 3)).sum().backward()
    assert model.params[0].grad is not None


# Forwards without a backward


@contextmanager
def without_collections() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("options", FORMS, ids=str)
@on_ranks(2)
def test_the_graph_of_a_forward_without_backward_is_freed_at_once(options: dict[str, Any]) -> None:
    model: Any = by_layers(seeded(in_default_dtype), fully_sharded(**options))
    train_step(model, torch.ones(2, 5))
    hidden: list[weakref.ref[Tensor]] = []
    model[0].down.register_forward_hook(lambda module, inputs, output: hidden.append(weakref.ref(output)))
    with without_collections():
        output = model(torch.ones(2, 5))
        assert hidden[0]() is not None  # saved for backward
        del output
        assert hidden[0]() is None


class Twice(nn.Module):
    """Uses a layer twice, and computes it again for the backward of the first use."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("0", Adapted(5, 5, None))
        self.add_module("2", Adapted(5, 5, None))

    def forward(self, inputs: Tensor) -> Tensor:
        first, second = self.children()
        recomputed = checkpoint(second, first(inputs).tanh(), use_reentrant=True)
        return recomputed * second(first(inputs).tanh())  # type: ignore[no-any-return]


@pytest.mark.parametrize("options", FORMS, ids=str)
@on_ranks(2)
def test_ranks_that_collect_garbage_at_different_times_train_alike(options: dict[str, Any]) -> None:
    model = by_layers(seeded(Twice), fully_sharded(**options))
    with without_collections():
        model(torch.ones(2, 5))  # and no backward
        if dist.get_rank() == 0:
            gc.collect()
        train_step(model, torch.ones(2, 5))
    assert_kind_trains(Twice, by_layers, sgd_with_momentum, options)
