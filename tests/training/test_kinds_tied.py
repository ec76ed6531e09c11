"""Tied parameters: one tensor under several names, in one unit or across what could be units.

`test_pain_point_03_...` are about ties that were lost when weights were sharded, saved or loaded.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp
from fsdp import FullyShardedDataParallel, auto_wrap, enable_wrap, get_fsdp_instances, module_wrap_policy
from fsdp.engine.names import clean_name
from tests.helpers.equality import assert_close_state, assert_same_state
from tests.helpers.forms import full_state
from tests.helpers.models import Net, Wrap
from tests.helpers.module_kinds import (
    FLAT,
    FORMS,
    ORIGINAL,
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
from tests.helpers.parity import Alone, adamw, fully_sharded, sgd_with_momentum
from tests.helpers.ranks import RankPool
from tests.helpers.twins import batch, once


def block() -> nn.Module:
    """Uses its one matrix twice."""
    net = Net(lambda net, x: x + net.down(torch.tanh(net.up(x))), up=nn.Linear(5, 5), down=nn.Linear(5, 5, bias=False))
    net.down.weight = net.up.weight
    return net


class Tied(nn.Module):
    """Ties inside a block, across blocks, and between the model itself and what lies deep in it: see `TIES`."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(5, 5)
        self.first = block()
        self.pair = nn.Sequential(block(), block())
        self.pair[1].up.bias = self.pair[0].up.bias
        self.exit = nn.Linear(5, 5)
        self.exit.weight = self.entry.weight
        self.scale = self.entry.weight
        self.own = nn.Linear(5, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.pair(self.first(self.entry(inputs)))
        return self.own(self.exit(hidden)) * self.scale.mean()


# By the lowest module that holds all uses.
TIES = {
    "": [{"entry.weight", "exit.weight", "scale"}],
    "first": [{"first.up.weight", "first.down.weight"}],
    "pair": [
        {"pair.0.up.weight", "pair.0.down.weight"},
        {"pair.0.up.bias", "pair.1.up.bias"},
        {"pair.1.up.weight", "pair.1.down.weight"},
    ],
}


def by_hand(model: nn.Module, wrap: Wrap) -> nn.Module:
    return wrapped_parts(model, wrap, parts=["first", "pair", "own"])


UNITS: list[Units] = [whole, auto_wrapped, by_hand]


def aliases(model: nn.Module) -> list[set[str]]:
    """The names of parameters that have several."""
    names: dict[int, set[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), set()).add(clean_name(name))
    return sorted((found for found in names.values() if len(found) > 1), key=sorted)


@parametrize_cases(
    at_most=4,
    options=FORMS,
    units=UNITS,
    world_size=[3, 2],
    make_optimizer=[sgd_with_momentum, adamw],
    reshard_after_forward=[True, False],
)
def test_pain_point_03_tied_parameters_train_as_on_one_process(ranks: RankPool, world_size: int, case: Case) -> None:
    options = {**case.options, "reshard_after_forward": case.reshard_after_forward}
    ranks(world_size).run(assert_kind_trains, Tied, case.units, case.make_optimizer, options)


# Where they live


@parametrize_pairs(options=FORMS, units=UNITS)
@on_ranks(2)
def test_pain_point_03_each_is_sharded_once(options: dict[str, Any], units: Units) -> None:
    model = units(seeded(Tied), fully_sharded(**options))
    layouts = [handle.layout for wrapper in get_fsdp_instances(model) for handle in wrapper._unit.handles]
    sharded = sum(slot.numel for layout in layouts for slot in layout.slots)
    assert sharded == sum(param.numel() for param in Tied().parameters())
    held = sum(param.numel() for param in model.parameters())  # an optimizer's, each once
    assert held <= sum(layout.shard_numel for layout in layouts)


@pytest.mark.parametrize("options", FORMS, ids=str)
@on_ranks(2)
def test_pain_point_03_the_lowest_unit_that_holds_all_uses_has_it(options: dict[str, Any]) -> None:
    units = by_hand
    model = units(seeded(Tied), fully_sharded(**options))
    model(batch(0, 0).float())
    found: dict[str, list[set[str]]] = {}
    for path, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            for places in (places for handle in module._unit.handles for places in handle.places if len(places) > 1):
                names = {f"{clean_name(path)}.{place.fqn}".lstrip(".") for place in places}
                found.setdefault(clean_name(path), []).append(names)
    assert found == TIES


# Saved and loaded


@parametrize_pairs(options=FORMS, units=UNITS)
@on_ranks(2)
def test_pain_point_03_saved_under_every_name_and_once(options: dict[str, Any], units: Units) -> None:
    pair = SideBySide(Tied, units, **options)
    pair.step(0)
    state = pair.sharded.state_dict()
    assert_close_state(state, pair.plain.state_dict())
    for names in aliases(pair.plain):
        assert len({state[name].data_ptr() for name in names}) == 1, names
    with pair.sharded.summon_full_params():
        assert aliases(pair.sharded) == aliases(pair.plain)


@parametrize_pairs(options=FORMS, units=UNITS)
@on_ranks(2)
def test_pain_point_03_loaded_under_any_name(options: dict[str, Any], units: Units) -> None:
    pair = SideBySide(Tied, units, **options)
    pair.step(0)
    for name in sorted(set().union(*aliases(pair.plain))):
        # Of the tied names this one alone: as without sharding, all of them are loaded.
        state = {name: torch.full_like(pair.plain.state_dict()[name], 0.01 * len(name))}
        results = [model.load_state_dict(state, strict=False) for model in (pair.sharded, pair.plain)]
        assert results[0] == results[1]
        pair.assert_close()
    pair.step(1)
    pair.assert_close()


@on_ranks(2)
def test_pain_point_03_a_later_name_wins_as_without_sharding() -> None:
    pair = SideBySide(Tied, by_hand)
    state = {
        name: torch.full_like(value, number) for number, (name, value) in enumerate(pair.plain.state_dict().items())
    }
    pair.on_both(lambda model: model.load_state_dict(state))
    pair.assert_close()


# Ties that cannot be kept


def two_blocks() -> nn.Module:
    """Both have the same matrix."""
    model = nn.Sequential(nn.Sequential(nn.Linear(5, 5), nn.Tanh()), nn.Sequential(nn.Tanh(), nn.Linear(5, 5)))
    model[1][1].weight = model[0][0].weight
    return model


@pytest.mark.parametrize("options", [FLAT, ORIGINAL], ids=str)  # for unflattened ones see test_append_shared_param
@on_ranks(2)
def test_pain_point_03_a_tie_that_cannot_be_kept_is_an_error_that_names_both(options: dict[str, Any]) -> None:
    wrap = fully_sharded(**options)
    model = two_blocks()
    model[0] = wrap(model[0])
    with pytest.raises(ValueError, match=r"^1\.weight is the same parameter as 0\.weight of Sequential.*auto_wrap"):
        wrap(model[1])
    with pytest.raises(ValueError, match=r"^1\.1\.weight is the same parameter as 0\.weight of Sequential.*auto_wrap"):
        wrap(model)
    assert isinstance(model[1][1].weight, nn.Parameter), "nothing may be taken from a module that is refused"
    once(auto_wrapped(two_blocks(), wrap), torch.ones(2, 5))  # as the message says


def shared_module() -> nn.Module:
    shared = nn.Linear(5, 5)
    return nn.Sequential(nn.Sequential(shared, nn.Tanh()), nn.Sequential(nn.Linear(5, 5), shared))


@parametrize_pairs(options=FORMS, world_size=[1, 2])
@on_ranks("world_size")
def test_pain_point_03_a_shared_module_cannot_be_in_two_units(options: dict[str, Any]) -> None:
    wrap = fully_sharded(**options)
    model = shared_module()
    model[0] = wrap(model[0])
    with pytest.raises(ValueError, match=r"^1 is the same Linear as 0 of Sequential.*use the wrapper in every place"):
        wrap(model[1])
    with pytest.raises(ValueError, match=r"^0\.0 = 1\.1 is the same Linear as 0 of Sequential.*auto_wrap"):
        wrap(model)
    assert isinstance(model[1][0].weight, nn.Parameter), "nothing may be taken from a module that is refused"


def shared_unit(model: nn.Module, wrap: Wrap) -> nn.Module:
    """As the message says."""
    model[0][0] = model[1][1] = wrap(model[0][0])  # type: ignore[index, operator]
    return wrapped_parts(model, wrap, parts=["0", "1"])


@parametrize_cases(
    at_most=5,
    options=FORMS,
    units=[shared_unit, auto_wrapped, whole],
    world_size=[2, 3],
    make_optimizer=[sgd_with_momentum, adamw],
)
def test_pain_point_03_a_shared_module_is_one_unit_in_every_place(ranks: RankPool, world_size: int, case: Case) -> None:
    ranks(world_size).run(assert_kind_trains, shared_module, case.units, case.make_optimizer, case.options)


def test_parameters_that_are_tied_by_their_memory_only_are_refused() -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = nn.Parameter(first.weight.data)
    with pytest.raises(
        ValueError, match=r"1\.weight is a separate parameter that shares memory with 0\.weight.*b\.weight = a"
    ):
        fully_sharded(process_group=Alone())(nn.Sequential(first, second))


def tied_by_memory() -> nn.Module:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight.data = first.weight.data
    return nn.Sequential(first, nn.ReLU(), second)


def test_parameters_that_are_tied_by_their_memory_across_units_are_refused() -> None:
    """Each unit alone would train its parameter, and the tie would be lost without an error."""
    expected = r"2\.weight is a separate parameter that shares memory with 0\.weight.*b\.weight = a"
    with pytest.raises(ValueError, match=expected):
        fsdp.shard(tied_by_memory(), units={nn.Linear}, process_group=Alone())
    wrapping = enable_wrap(wrapper_cls=FullyShardedDataParallel, process_group=Alone())
    with wrapping, pytest.raises(ValueError, match=expected):
        auto_wrap(tied_by_memory(), module_wrap_policy({nn.Linear}))
    frozen = tied_by_memory().requires_grad_(False)
    assert fsdp.shard(frozen, units={nn.Linear}, process_group=Alone())(torch.ones(1, 3)).shape == (1, 3)


@on_ranks(1)
def test_parameters_that_are_tied_by_their_memory_across_units_of_separate_calls_are_refused() -> None:
    for wrap in (fully_sharded(), fully_sharded(use_orig_params=True), fsdp.fully_shard):
        for wrapped in ((0,), (2,), (0, 2)):
            model: Any = tied_by_memory()
            for number in wrapped:
                model[number] = wrap(model[number])
            with pytest.raises(
                ValueError, match=r"[02]\.weight is a separate parameter that shares memory with [02]\.weight"
            ):
                wrap(model)


def parts(*rows_and_columns: tuple[slice, slice]) -> nn.Module:
    """Layers whose weights are parts of the same memory."""
    memory, model = torch.randn(6, 4), nn.Sequential(*(nn.Linear(4, 4) for _ in rows_and_columns))
    for layer, place in zip(model, rows_and_columns, strict=True):
        layer.weight = nn.Parameter(memory[place])
    return model


EVERY = slice(None)


@pytest.mark.parametrize("second", [(slice(3, 6), EVERY), (EVERY, slice(2, 4)), (slice(4, 6), slice(3, 4))])
@on_ranks(1)
def test_parameters_that_have_elements_in_common_are_refused(second: tuple[slice, slice]) -> None:
    for wrap in (fully_sharded(), fully_sharded(use_orig_params=True), fsdp.fully_shard):
        for inner in ((), (0, 1)):
            model: Any = parts((slice(0, 5), EVERY), second)
            for number in inner:
                model[number] = wrap(model[number])
            with pytest.raises(
                ValueError, match=r"1\.weight is a separate parameter that shares memory with 0\.weight"
            ):
                wrap(model)


@pytest.mark.parametrize("second", [(slice(3, 6), EVERY), (slice(0, 4), slice(2, 4)), (slice(2, 6, 2), EVERY)])
@on_ranks(1)
def test_parameters_may_be_separate_parts_of_the_same_memory(second: tuple[slice, slice]) -> None:
    first = {3: (slice(0, 3), EVERY), 2: (slice(1, 6, 2), EVERY), 0: (EVERY, slice(0, 2))}[second[0].start]
    for wrap in (fully_sharded(), fully_sharded(use_orig_params=True), fsdp.fully_shard):
        for inner in ((), (0, 1)):
            model: Any = parts(first, second)
            expected = {name: value.clone() for name, value in model.state_dict().items()}
            for number in inner:
                model[number] = wrap(model[number])
            assert_same_state(full_state(wrap(model)), expected)


@on_ranks(1)
def test_models_may_begin_with_the_same_memory() -> None:
    """A teacher, for example, that was loaded with assign=True."""
    for wrap in (fully_sharded(), fully_sharded(use_orig_params=True), fsdp.fully_shard):
        first, second = nn.Sequential(nn.Linear(3, 3)), nn.Sequential(nn.Linear(3, 3))
        second.load_state_dict(first.state_dict(), assign=True)
        for model in (first, second):
            model[0] = wrap(model[0])
            wrap(model)(torch.ones(1, 3)).sum().backward()


@on_ranks(1)
def test_memory_that_another_parameter_had_before_is_no_tie() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    for _ in range(20):
        fsdp.fully_shard(model[-1])
        model.append(nn.Linear(3, 3))
    fsdp.fully_shard(model)(torch.ones(1, 3)).sum().backward()
