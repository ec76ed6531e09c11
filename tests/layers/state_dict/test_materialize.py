"""`materialize` and `param_init_fn`: who is asked for values, what is kept of them, and what is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp
from fsdp import FullyShardedDataParallel
from fsdp.engine.placeholder import Placeholder
from tests.helpers.equality import assert_same_state
from tests.helpers.meta_models import FORMS, Norms, Zoo, initialise, mlp, on_meta, sharded, state_of
from tests.helpers.models import Wrap, keep
from tests.helpers.on_ranks import on_ranks
from tests.helpers.parity import Alone

every_form = pytest.mark.parametrize("form", FORMS, ids=["flat", "original", "unflattened"])
EITHER: dict[str, Wrap] = {"plain": keep, "wrapped": sharded(process_group=Alone())}
either = pytest.mark.parametrize("wrap", EITHER.values(), ids=EITHER)


def alone(**options: Any) -> Wrap:
    return sharded(process_group=Alone(), **options)


def built(make: Callable[[], nn.Module], wrap: Wrap) -> Any:
    """A model without values, with one wrap around the whole."""
    with torch.device("meta"):
        return wrap(make())


def plain_module(model: Any) -> Any:
    return model.module.module if isinstance(model, FullyShardedDataParallel) else model


# Who is asked


class Recorded:
    """An initialisation that remembers the modules it was given."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []

    def __call__(self, module: nn.Module) -> None:
        self.modules.append(module)
        initialise(module)


@either
def test_modules_are_asked_once_children_first_and_only_if_something_is_directly_in_them(wrap: Wrap) -> None:
    model = on_meta(mlp, wrap)
    inside = plain_module(model)
    trunk = plain_module(inside.trunk)
    core, gate = plain_module(trunk[2]), plain_module(inside.gate)
    init = Recorded()
    fsdp.materialize(model, param_init_fn=init)
    if wrap is keep:
        assert init.modules == [inside.entry, trunk[0], core[0], core[1], gate, inside.exit, inside]
    else:  # unit by unit, inner ones first
        assert init.modules == [core[0], core[1], trunk[0], gate, inside.entry, inside.exit, inside]


@on_ranks(2)
def test_a_cast_after_values_came_also_casts_the_gradients() -> None:
    with torch.device("meta"):
        module = nn.Linear(3, 3)
    torch.manual_seed(0)
    fsdp.materialize(module)
    model = FullyShardedDataParallel(module.bfloat16(), use_orig_params=True)
    model(torch.ones(2, 3, dtype=torch.bfloat16)).sum().backward()
    assert {param.grad.dtype for param in model.parameters() if param.grad is not None} == {torch.bfloat16}


@either
def test_the_second_time_nobody_is_asked(wrap: Wrap) -> None:
    model = on_meta(mlp, wrap)
    fsdp.materialize(model, param_init_fn=initialise)
    before, init = state_of(model), Recorded()
    fsdp.materialize(model, param_init_fn=init)
    assert init.modules == []
    assert_same_state(state_of(model), before)


@either
def test_attention_is_initialised_as_its_constructor_does(wrap: Wrap) -> None:
    def spread(model: nn.Module) -> dict[str, tuple[float, float]]:
        return {name: (value.std().item(), value.abs().max().item()) for name, value in model.state_dict().items()}

    make = lambda: nn.TransformerEncoderLayer(64, 2, 128)  # noqa: E731
    model = built(make, wrap)
    fsdp.materialize(model, seed=0)
    torch.manual_seed(0)
    expected = spread(make())
    for name, found in spread(model).items():
        assert found == pytest.approx(expected[name], rel=0.3), name


@either
def test_tied_parameters_are_initialised_once_by_their_first_module(wrap: Wrap) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
            self.second.weight = self.first.weight

    def init(module: Any) -> None:
        value = 1.0 if module is plain_module(model).first else 2.0
        nn.init.constant_(module.weight, value)
        module.bias = nn.Parameter(torch.full((3,), value))

    model = built(Tied, wrap)
    fsdp.materialize(model, param_init_fn=init)
    values = {name: value.flatten()[0].item() for name, value in model.state_dict().items()}
    assert values == {"first.weight": 1, "first.bias": 1, "second.weight": 1, "second.bias": 2}
    if wrap is keep:
        assert model.second.weight is model.first.weight


@either
def test_new_parameters_may_be_assigned_under_all_names_of_a_tie(wrap: Wrap) -> None:
    def tied() -> nn.Module:
        layers = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
        layers[1].weight = layers[0].weight
        return layers

    def init(module: Any) -> None:
        module.weight = nn.Parameter(torch.full((3, 3), 4.0))

    model = built(tied, wrap)
    fsdp.materialize(model, param_init_fn=init)
    assert all(value.eq(4).all() for value in model.state_dict().values())


# One unit at a time


@every_form
@on_ranks(2)
def test_other_units_are_not_whole_meanwhile(form: dict[str, Any]) -> None:
    layers = [nn.Linear(3, 3, device="meta") for _ in range(3)]
    model = sharded(**form)(nn.Sequential(*map(sharded(**form), layers[:2]), layers[2]))

    def init(module: nn.Module) -> None:
        shown = [not isinstance(layer.weight, Placeholder) for layer in layers]
        assert shown == [layer is module for layer in layers]
        initialise(module)

    fsdp.materialize(model, param_init_fn=init)


@on_ranks(2)
def test_no_rank_waits_for_another() -> None:
    """One has values, the others get theirs: what each does alone fits together, unlike anything collective would."""
    if dist.get_rank() == 1:
        plain = on_meta(Zoo)
        fsdp.materialize(plain, seed=0)
        model = sharded()(plain)
    else:
        model = sharded()(on_meta(Zoo))
        fsdp.materialize(model, seed=0)
    expected = on_meta(Zoo)
    fsdp.materialize(expected, seed=0)
    assert_same_state(model.state_dict(), dict(expected.state_dict()))


# What is kept


class HalfLoaded:
    """Two layers of which one was given values before."""

    def __init__(self, wrap: Wrap) -> None:
        self.model = on_meta(Norms, wrap)
        loaded = {"entry.weight": torch.ones(6, 5), "norm.running_mean": torch.full((6,), 3.0)}
        if wrap is keep:
            inside: Any = self.model
            inside.entry.weight = nn.Parameter(loaded["entry.weight"].clone())
            inside.norm.running_mean = loaded["norm.running_mean"].clone()
        else:
            self.model.load_state_dict(loaded, strict=False)
        self.loaded = loaded


@either
def test_values_that_are_there_are_kept(wrap: Wrap) -> None:
    half = HalfLoaded(wrap)
    fsdp.materialize(half.model)
    state = half.model.state_dict()
    assert_same_state({name: state[name] for name in half.loaded}, half.loaded)
    assert state["norm.running_var"].eq(1).all()  # which the same call of reset_parameters has set
    assert not state["entry.bias"].isnan().any()


@either
def test_values_of_children_are_kept_from_what_is_around_them(wrap: Wrap) -> None:
    model = built(lambda: nn.MultiheadAttention(6, 2), wrap)
    inside = plain_module(model)
    inside.out_proj.bias = nn.Parameter(torch.ones(6))
    fsdp.materialize(model)
    assert model.state_dict()["out_proj.bias"].eq(1).all()


def test_frozen_parameters_stay_frozen() -> None:
    model = built(lambda: nn.Linear(3, 2).requires_grad_(False), alone())

    def init(module: Any) -> None:
        module.weight = nn.Parameter(torch.ones(2, 3))
        nn.init.zeros_(module.bias)

    fsdp.materialize(model, param_init_fn=init)
    assert model.state_dict()["weight"].eq(1).all()
    assert not any(param.requires_grad for param in model.parameters())


# How values are given


def in_place(module: Any) -> None:
    module.weight.fill_(2)
    module.bias.fill_(3)


def through_data(module: Any) -> None:
    module.weight.data.fill_(2)
    module.bias.data.fill_(3)


def by_new_data(module: Any) -> None:
    module.weight.data = torch.full((2, 3), 2.0)
    module.bias.data = torch.full((2,), 3.0)


def by_assignment(module: Any) -> None:
    module.weight = nn.Parameter(torch.full((2, 3), 2.0))
    module.bias = nn.Parameter(torch.full((2,), 3.0))


def as_for_torch(module: Any) -> None:
    module.to_empty(device="cpu", recurse=False)
    in_place(module)


def in_another_dtype(module: Any) -> None:
    module.weight = nn.Parameter(torch.full((2, 3), 2.0, dtype=torch.float64))
    module.bias = nn.Parameter(torch.full((2,), 3.0, dtype=torch.float64))


@pytest.mark.parametrize("init", [in_place, through_data, by_new_data, by_assignment, as_for_torch, in_another_dtype])
@every_form
def test_an_initialisation_may_write_or_assign(form: dict[str, Any], init: Callable[[nn.Module], None]) -> None:
    model = built(lambda: nn.Linear(3, 2), alone(**form))
    fsdp.materialize(model, param_init_fn=init)
    state = model.state_dict()
    assert state["weight"].dtype is torch.float32
    assert state["weight"].eq(2).all()
    assert state["bias"].eq(3).all()


def test_modules_around_and_ignored_ones_get_values_too() -> None:
    with torch.device("meta"):
        ignored, layer, outside = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    unit = alone(ignored_modules=[ignored])(nn.Sequential(layer, ignored))
    model = nn.Sequential(unit, outside)
    fsdp.materialize(model, seed=0)
    with torch.device("meta"):
        plain = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2))
    fsdp.materialize(plain, seed=0)
    inputs = torch.ones(1, 2)
    assert torch.equal(model(inputs), plain(inputs))


# While wrapping


def test_param_init_fn_initialises_a_unit_when_it_is_wrapped() -> None:
    init = Recorded()
    layer = nn.Linear(3, 2, device="meta")
    model = alone(param_init_fn=init)(layer)
    assert init.modules == [layer]
    assert not model.state_dict()["weight"].isnan().any()


def test_param_init_fn_is_asked_for_the_units_own_modules_only() -> None:
    init = Recorded()
    model = on_meta(Norms)
    inside: Any = model
    inside.entry = alone()(inside.entry)
    alone(param_init_fn=init)(model)
    assert init.modules == [inside.norm, inside.exit]


def test_auto_wrap_hands_param_init_fn_on() -> None:
    init = Recorded()
    model = nn.Sequential(nn.Linear(3, 3, device="meta"), nn.Linear(3, 3, device="meta"))
    policy = fsdp.module_wrap_policy({nn.Linear})
    with fsdp.enable_wrap(policy, wrapper_cls=alone(), param_init_fn=init):
        fsdp.auto_wrap(model)
    assert len(init.modules) == 2


@pytest.mark.parametrize("given", [False, "reset_parameters", 3])
def test_param_init_fn_is_a_function(given: Any) -> None:
    with pytest.raises(TypeError, match="param_init_fn must be a function of a module, got"):
        fsdp.materialize(nn.Linear(1, 1), param_init_fn=given)
    with pytest.raises(TypeError, match="param_init_fn must be a function of a module, got"):
        alone(param_init_fn=given)(nn.Linear(1, 1))
