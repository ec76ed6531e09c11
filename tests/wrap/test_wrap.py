"""What `fsdp.wrap` promises: which modules become units, with which settings, and where tied parameters stay.

No process group is needed: the wrapper here is a `Unit`, which like FullyShardedDataParallel takes its
module's parameters away into one flat parameter. What is decided too late, or unties a parameter, shows.
"""

from __future__ import annotations

import functools
import logging
import re
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parameterized import parameterized
from torch import Tensor, nn

from fsdp.wrap import (
    ConfigAutoWrap,
    auto_wrap,
    config_auto_wrap_policy,
    default_auto_wrap_policy,
    enable_wrap,
    lambda_wrap_policy,
    module_wrap_policy,
    wrap,
)


class Unit(nn.Module):
    """Flattens the parameters in its module that no inner Unit has; modules compute with views of it."""

    def __init__(self, module: nn.Module, **settings: Any) -> None:
        super().__init__()
        self.module = module
        self.settings = settings
        self.slots: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for holder in _outside_of_units(module):
            for name, parameter in list(holder.named_parameters(recurse=False, remove_duplicate=False)):
                self.slots.setdefault(parameter, []).append((holder, name))
                delattr(holder, name)
        pieces = [parameter.detach().flatten() for parameter in self.slots]
        self.flat = nn.Parameter(torch.cat(pieces)) if pieces else None

    def forward(self, *args: Any) -> Any:
        if self.flat is not None:
            pieces = self.flat.split([parameter.numel() for parameter in self.slots])
            for (parameter, uses), piece in zip(self.slots.items(), pieces, strict=True):
                for holder, name in uses:
                    setattr(holder, name, piece.view(parameter.shape))
        return self.module(*args)


def _outside_of_units(module: nn.Module) -> Iterator[nn.Module]:
    if not isinstance(module, Unit):
        yield module
        for child in dict.fromkeys(module.children()):
            yield from _outside_of_units(child)


class Recorder:
    """A policy that answers as told and remembers how it was called."""

    def __init__(self, policy: Any = lambda **_: True) -> None:
        self.policy = policy
        self.calls: list[dict[str, Any]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> bool:
        assert not args, "policies are called with keywords only"
        self.calls.append(kwargs)
        return bool(self.policy(**kwargs))

    def counts(self, recurse: bool) -> dict[nn.Module, int]:
        return {c["module"]: c["unwrapped_params"] for c in self.calls if c["recurse"] is recurse}


def linear(numel: int = 30) -> nn.Linear:
    """A square-ish layer with exactly `numel` parameters: 5 -> numel / 6."""
    return nn.Linear(5, numel // 6)


def at_least(numel: float, **kwargs: Any) -> Any:
    return functools.partial(default_auto_wrap_policy, min_num_params=numel, **kwargs)


def auto_wrapped(module: nn.Module, policy: Any = None, **settings: Any) -> nn.Module:
    with enable_wrap(wrapper_cls=Unit, **settings):
        return auto_wrap(module, policy)


def units(module: nn.Module) -> list[str]:
    """Where the units are, by the plain names of their modules; "" is the root."""
    names = [name for name, found in module.named_modules(remove_duplicate=False) if isinstance(found, Unit)]
    return sorted(re.sub(r"(^|\.)module(?=\.|$)", "", name).removeprefix(".") for name in names)


def state_of_context() -> tuple[Any, ...]:
    return (
        ConfigAutoWrap.in_autowrap_context,
        ConfigAutoWrap.wrapper_cls,
        ConfigAutoWrap.kwargs,
        ConfigAutoWrap.auto_wrap_policy,
        ConfigAutoWrap.move_module_cuda_half,
    )


OUTSIDE = (False, None, {}, None, False)


@pytest.fixture(autouse=True)
def the_context_is_always_left() -> Iterator[None]:
    assert state_of_context() == OUTSIDE
    yield
    assert state_of_context() == OUTSIDE


# wrap


def test_wrap_inside_the_context_makes_a_unit_with_the_contexts_settings():
    layer = linear()
    with enable_wrap(wrapper_cls=Unit, flatten_parameters=False, some_keyword_of_a_subclass=3):
        wrapped = wrap(layer)
    assert isinstance(wrapped, Unit)
    assert wrapped.module is layer
    assert wrapped.settings == {"flatten_parameters": False, "some_keyword_of_a_subclass": 3}


def test_outside_of_the_context_wrap_and_auto_wrap_return_their_module_unchanged():
    layer = nn.Sequential(linear())
    assert wrap(layer, any_setting=1) is layer
    assert auto_wrap(layer, at_least(0), any_setting=1) is layer
    assert units(layer) == []


def test_settings_are_the_contexts_then_wrapper_config_then_overrides():
    layer = linear()
    layer.wrapper_config = {"b": "config", "c": "config"}
    with enable_wrap(wrapper_cls=Unit, a="context", b="context", c="context"):
        wrapped = wrap(layer, c="override")
    assert wrapped.settings == {"a": "context", "b": "config", "c": "override"}
    assert layer.wrapper_config == {"b": "config", "c": "config"}


@parameterized.expand([("none", None), ("list", ["a"]), ("flag", True)])
def test_wrapper_config_must_be_a_dict(case: str, config: Any):
    layer = linear()
    layer.wrapper_config = config
    with enable_wrap(wrapper_cls=Unit), pytest.raises(ValueError, match=r"Linear\.wrapper_config is .*dict"):
        wrap(layer)


def test_wrapper_cls_may_be_a_class_with_only_new():
    class Maker:
        def __new__(cls, module: nn.Module, **settings: Any) -> Unit:  # type: ignore[misc]
            return Unit(module, made_by=cls, **settings)

    with enable_wrap(wrapper_cls=Maker, a=1):
        model = auto_wrap(nn.Sequential(linear(), linear()), at_least(30))
    assert units(model) == ["0", "1"]
    assert model[0].settings == {"made_by": Maker, "a": 1}


@parameterized.expand([("function", lambda module, **kw: Unit(module, **kw)), ("partial", functools.partial(Unit))])
def test_wrapper_cls_may_be_any_callable(case: str, wrapper: Any):
    with enable_wrap(wrapper_cls=wrapper):
        assert units(auto_wrap(nn.Sequential(linear()), at_least(30))) == ["0"]


def test_wrap_works_in_a_constructor_that_knows_nothing_of_sharding():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = wrap(linear())
            self.head = linear()

    assert units(Net()) == []
    with enable_wrap(wrapper_cls=Unit):
        assert units(Net()) == ["body"]


# the context


def test_the_context_shows_its_state_on_the_class():
    policy = at_least(1)
    with enable_wrap(policy, wrapper_cls=Unit, a=1):
        assert state_of_context() == (True, Unit, {"a": 1}, policy, False)
    with enable_wrap(wrapper_cls=Unit):
        assert ConfigAutoWrap.auto_wrap_policy is default_auto_wrap_policy


def test_an_exception_inside_leaves_the_context():
    with pytest.raises(KeyError, match="from inside"), enable_wrap(wrapper_cls=Unit, a=1):
        raise KeyError("from inside")
    assert state_of_context() == OUTSIDE


def test_contexts_do_not_nest_and_the_outer_one_survives_the_attempt():
    with enable_wrap(wrapper_cls=Unit, a=1):
        outer = state_of_context()
        with pytest.raises(NotImplementedError, match="do not nest"), enable_wrap(wrapper_cls=Unit, a=2):
            pass
        assert state_of_context() == outer
        assert wrap(linear()).settings == {"a": 1}


@parameterized.expand([("missing", {}), ("none", {"wrapper_cls": None}), ("name", {"wrapper_cls": "Unit"})])
def test_a_wrapper_cls_is_required(case: str, settings: dict[str, Any]):
    with pytest.raises(ValueError, match="enable_wrap needs the class to wrap with"), enable_wrap(**settings):
        pass
    assert state_of_context() == OUTSIDE


def test_config_auto_wrap_is_the_same_context_and_can_be_entered_again():
    context = ConfigAutoWrap(at_least(30), wrapper_cls=Unit, a=1)
    for _ in range(2):
        with context:
            assert auto_wrap(linear()).settings == {"a": 1}
        assert state_of_context() == OUTSIDE


def test_recursive_wrap_returns_the_number_of_parameters_in_units():
    with ConfigAutoWrap(wrapper_cls=Unit):
        model = nn.Sequential(linear(60), linear(30))
        assert ConfigAutoWrap.recursive_wrap(model, at_least(60), module_is_root=True) == (model, 60)
        root, numel = ConfigAutoWrap.recursive_wrap(nn.Sequential(linear(60), linear(30)), at_least(20))
        assert (type(root), numel) == (nn.Sequential, 90)
        root, numel = ConfigAutoWrap.recursive_wrap(linear(60), at_least(20))
        assert (type(root), numel) == (Unit, 60)
    with pytest.raises(RuntimeError, match="inside enable_wrap"):
        ConfigAutoWrap.recursive_wrap(linear(), at_least(20))


MODULE = sys.modules["fsdp.wrap"]  # the attribute of `fsdp` is the function


def test_move_module_cuda_half_moves_and_casts_before_wrapping():
    with (
        enable_wrap(wrapper_cls=Unit, move_module_cuda_half=True, a=1),
        mock.patch.object(MODULE, "accelerator", return_value=torch.device("meta")),
    ):
        assert ConfigAutoWrap.move_module_cuda_half
        wrapped = wrap(linear())
    assert wrapped.flat.dtype == torch.float16
    assert wrapped.flat.is_meta
    assert wrapped.settings == {"a": 1}


def test_move_module_cuda_half_without_a_device_is_refused():
    with (
        enable_wrap(wrapper_cls=Unit, move_module_cuda_half=True),
        mock.patch.object(MODULE, "accelerator", return_value=None),
        pytest.raises(RuntimeError, match=r"Linear to an accelerator.*Omit the option"),
    ):
        wrap(linear())


# how a policy is asked


def test_a_policy_is_asked_to_go_down_and_then_to_wrap_with_what_is_left():
    inner = nn.Sequential(linear(60), linear(30))
    model = nn.Sequential(inner, linear(30))
    policy = Recorder(lambda recurse, unwrapped_params, **_: recurse or unwrapped_params >= 60)
    auto_wrapped(model, policy)
    assert all(set(c) == {"module", "recurse", "unwrapped_params", "module_is_root"} for c in policy.calls)
    assert all(c["module_is_root"] is (c["module"] is model) for c in policy.calls)
    going_down, wrapping = policy.counts(recurse=True), policy.counts(recurse=False)
    assert (going_down[model], going_down[inner]) == (120, 90)
    assert (wrapping[inner], wrapping[model]) == (30, 60)
    assert list(wrapping)[-1] is model, "children are decided before their parents"


def test_own_policies_need_only_the_three_arguments_they_use():
    def convolutions(module: nn.Module, recurse: bool, unwrapped_params: int, **kw: Any) -> bool:
        if recurse:
            return not isinstance(module, tuple(default_auto_wrap_policy.FORCE_LEAF_MODULES))
        return isinstance(module, nn.Conv1d) and unwrapped_params > 0

    assert units(auto_wrapped(nn.Sequential(nn.Conv1d(2, 2, 1), linear()), convolutions)) == ["0"]


def test_the_policy_of_the_call_wins_over_the_contexts():
    with enable_wrap(at_least(1e8), wrapper_cls=Unit):
        assert units(auto_wrap(nn.Sequential(linear()), at_least(30))) == ["0"]
        assert units(auto_wrap(nn.Sequential(linear()))) == []


def test_keywords_of_auto_wrap_go_to_every_wrapper_and_win():
    model = nn.Sequential(linear(), linear())
    model[1].wrapper_config = {"a": "config", "b": "config"}
    with enable_wrap(wrapper_cls=Unit, a="context"):
        auto_wrap(model, at_least(30), a="call")
    assert [model[0].settings, model[1].settings] == [{"a": "call"}, {"a": "call", "b": "config"}]


def test_a_policy_may_answer_with_keywords_for_a_wrapper_which_win():
    model = nn.Sequential(linear(), nn.Sequential(linear()))
    policy = lambda_wrap_policy(lambda module: isinstance(module, nn.Linear) and {"a": "policy"})
    with enable_wrap(wrapper_cls=Unit, a="context", b="context"):
        auto_wrap(model, policy, a="call")
    assert [model[0].settings, model[1][0].settings] == 2 * [{"a": "policy", "b": "context"}]


def test_a_policy_that_raises_leaves_the_module_untouched():
    def fails_at_the_root(module_is_root: bool, recurse: bool, **_: Any) -> bool:
        if module_is_root and not recurse:
            raise KeyError("policy")
        return True

    model = nn.Sequential(linear(), nn.Sequential(linear()))
    with pytest.raises(KeyError, match="policy"):
        auto_wrapped(model, fails_at_the_root)
    assert units(model) == []


def test_a_wrapper_that_raises_leaves_the_context_and_the_units_that_it_has_made():
    def only_small(module: nn.Module, **settings: Any) -> Unit:
        if isinstance(module, nn.Sequential):
            raise KeyError("wrapper")
        return Unit(module, **settings)

    model = nn.Sequential(linear(), linear())
    with pytest.raises(KeyError, match="wrapper"), enable_wrap(wrapper_cls=only_small):
        auto_wrap(model, lambda **_: True)
    assert units(model) == ["0", "1"]
    assert model(torch.ones(5)).shape == (5,)


def test_a_module_that_the_policy_does_not_enter_is_not_wrapped_and_neither_is_anything_in_it():
    model = nn.Sequential(nn.Sequential(linear()), linear())
    policy = Recorder(lambda module, recurse, **_: not (recurse and module is model[0]))
    inner = model[0]
    root = auto_wrapped(model, policy)
    assert units(root) == ["", "1"]
    assert inner not in policy.counts(recurse=False)
    assert policy.counts(recurse=False)[model] == 30, "what is in it counts for the unit around it"


def test_modules_without_any_parameter_are_never_wrapped():
    model = nn.Sequential(linear(), nn.ReLU(), nn.Sequential(nn.Dropout()))
    assert units(auto_wrapped(model, lambda **_: True)) == ["", "0"]


def test_a_module_whose_parameters_are_all_in_inner_units_can_be_a_unit():
    assert units(auto_wrapped(nn.Sequential(linear()), lambda **_: True)) == ["", "0"]


def test_something_wrapped_inside_is_refused_by_name_before_anything_changes():
    model = nn.Sequential(linear(), nn.Sequential(linear(), Unit(linear())))
    with pytest.raises(ValueError, match=r"'1\.1' in Sequential is wrapped by Unit already"):
        auto_wrapped(model, at_least(30))
    assert units(model) == ["1.1"]
    with pytest.raises(ValueError, match="the module itself is wrapped by Unit already"):
        auto_wrapped(Unit(linear()), at_least(30))
    with (
        enable_wrap(wrapper_cls=functools.partial(Unit, a=1)),
        pytest.raises(ValueError, match="wrapped by Unit already"),
    ):
        auto_wrap(model, at_least(30))


def test_what_is_wrapped_already_can_be_kept_and_the_rest_is_wrapped_around_it():
    inner = Unit(nn.Sequential(linear(), linear()))
    model = nn.Sequential(linear(), nn.Sequential(linear(), inner), nn.Sequential(inner))
    with enable_wrap(wrapper_cls=Unit):
        policy = Recorder(lambda recurse, unwrapped_params, **_: recurse or unwrapped_params > 30)
        root = auto_wrap(model, policy, keep_wrapped=True)
        assert units(root) == ["", "1.1", "2.0"], "only the root has more than 30 parameters left"
        assert policy.counts(recurse=False)[model] == 60
        assert inner not in policy.counts(recurse=True)
    again = nn.Sequential(linear(), nn.Sequential(linear(), inner), nn.Sequential(inner))
    with enable_wrap(wrapper_cls=Unit):
        assert units(auto_wrap(again, lambda **_: True, keep_wrapped=True)) == ["", "0", "1", "1.0", "1.1", "2.0"]
        with pytest.raises(ValueError, match="the module itself is wrapped by Unit already"):
            auto_wrap(inner, at_least(30), keep_wrapped=True)


def test_lazy_parameters_can_not_be_counted():
    with pytest.raises(ValueError, match=r"elements of '1\.weight'.*LazyLinear.*Run the model once"):
        auto_wrapped(nn.Sequential(linear(), nn.LazyLinear(3)), at_least(30))


def test_a_module_that_contains_itself_is_refused():
    model = nn.Sequential(nn.Sequential(linear()))
    model[0].append(model)
    with pytest.raises(ValueError, match=r"'0\.1' contains itself"):
        auto_wrapped(model, at_least(30))


# the default policy


@parameterized.expand([(29, ["0", "1"]), (30, ["0", "1"]), (30.5, [""]), (60, [""]), (61, [])])
def test_a_module_with_exactly_min_num_params_is_wrapped(numel: float, expected: list[str]):
    assert units(auto_wrapped(nn.Sequential(linear(30), linear(30)), at_least(numel))) == expected


def test_the_default_minimum_is_a_hundred_million():
    ask = functools.partial(default_auto_wrap_policy, linear(), module_is_root=False)
    for recurse in (True, False):
        assert ask(recurse=recurse, unwrapped_params=100_000_000)
        assert not ask(recurse=recurse, unwrapped_params=99_999_999)
    assert units(auto_wrapped(nn.Sequential(linear()))) == []


def test_small_layers_that_are_large_together_become_one_unit():
    model = auto_wrapped(nn.Sequential(linear(), nn.Sequential(linear(), linear())), at_least(60))
    assert units(model) == ["1"]


@parameterized.expand([("large", 60, ["", "1"]), ("smaller than the minimum", 1000, [""])])
def test_the_root_can_be_wrapped_whatever_it_has_left(case: str, numel: int, expected: list[str]):
    model = nn.Sequential(linear(), nn.Sequential(linear(), linear()))
    assert units(auto_wrapped(model, at_least(numel, skip_params_check_for_root=True))) == expected


def test_lists_and_dicts_are_looked_into_but_not_wrapped():
    assert {nn.ModuleList, nn.ModuleDict} == default_auto_wrap_policy.EXCLUDE_WRAP_MODULES
    for container in (nn.ModuleList([linear(), linear()]), nn.ModuleDict({"a": linear(), "b": linear()})):
        assert units(auto_wrapped(container, at_least(40))) == []
        assert units(auto_wrapped(container, at_least(40, skip_params_check_for_root=True))) == []
    assert units(auto_wrapped(nn.ModuleList([linear(60)]), at_least(40))) == ["0"]
    model = nn.Sequential(linear(60), nn.ReLU())
    assert units(auto_wrapped(model, at_least(40, exclude_wrap_modules={nn.Linear}))) == [""]


def test_forced_leaves_stay_whole_in_the_unit_around_them():
    assert {nn.MultiheadAttention} == default_auto_wrap_policy.FORCE_LEAF_MODULES
    model = nn.Sequential(linear(60), nn.MultiheadAttention(20, 1))
    assert units(auto_wrapped(model, at_least(40))) == ["", "0"]


def test_more_forced_leaves_can_be_named():
    leaves = default_auto_wrap_policy.FORCE_LEAF_MODULES.union({nn.Linear})
    model = nn.Sequential(linear(60), nn.ModuleList([linear(60)]))
    assert units(auto_wrapped(model, at_least(40, force_leaf_modules=leaves))) == [""]
    model = nn.Sequential(linear(60), nn.ModuleList([linear(60)]))
    with mock.patch.object(default_auto_wrap_policy, "FORCE_LEAF_MODULES", leaves):
        assert units(auto_wrapped(model, at_least(40))) == [""]


# the other policies


def test_config_auto_wrap_policy_wraps_what_has_a_wrapper_config():
    model = nn.Sequential(linear(), nn.ModuleList([linear(), linear()]))
    model[1][0].wrapper_config = {"a": 1}
    model[1][1].wrapper_config = {}
    auto_wrapped(model, config_auto_wrap_policy, a=0)
    assert units(model) == ["1.0", "1.1"]
    assert [model[1][0].settings, model[1][1].settings] == [{"a": 1}, {"a": 0}]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 1)
        self.mlp = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.attention(x, x, x)[0])


class LastBlock(Block):
    pass


def blocks() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(Block(), Block()), LastBlock())


@parameterized.expand(
    [
        ("one class and its subclasses", {Block}, (), ["1.0", "1.1", "2"]),
        ("several classes", [LastBlock, nn.Linear], (), ["0", "1.0.mlp", "1.1.mlp", "2", "2.mlp"]),
        ("all but a subclass", {Block}, {LastBlock}, ["1.0", "1.1"]),
        ("the root too", {nn.Sequential}, (), ["", "1"]),
        ("a forced leaf as a whole", {nn.MultiheadAttention}, (), ["1.0.attention", "1.1.attention", "2.attention"]),
        ("never inside a forced leaf", {nn.Linear}, (), ["0", "1.0.mlp", "1.1.mlp", "2.mlp"]),
    ]
)
def test_module_wrap_policy_wraps_by_class(case: str, classes: Any, exclude: Any, expected: list[str]):
    assert units(auto_wrapped(blocks(), module_wrap_policy(classes, exclude=exclude))) == expected


@parameterized.expand(
    [
        ("nothing", set(), (), "no classes"),
        ("a name", {"Block"}, (), "got 'Block' in classes. Pass the class itself"),
        ("an instance", [linear()], (), r"got Linear\(.*in classes"),
        ("not a module", {int}, (), "nn.Module classes, got <class 'int'>"),
        ("a class instead of a set", Block, (), "a set of classes as classes"),
        ("a name to exclude", {Block}, "LastBlock", "a set of classes as exclude"),
        ("a container", {nn.ModuleList}, (), "can not wrap ModuleList: it has no forward"),
        ("the same class twice", {Block}, {Block}, "Block in both classes and exclude"),
    ]
)
def test_module_wrap_policy_says_what_is_wrong(case: str, classes: Any, exclude: Any, message: str):
    with pytest.raises(ValueError, match=message):
        module_wrap_policy(classes, exclude=exclude)


def test_lambda_wrap_policy_wraps_by_predicate():
    model = nn.Sequential(linear(30), linear(60), linear(30))
    predicate = mock.Mock(side_effect=lambda module: getattr(module, "out_features", 0) == 10)
    assert units(auto_wrapped(model, lambda_wrap_policy(predicate))) == ["1"]
    assert all(isinstance(call.args[0], nn.Module) for call in predicate.call_args_list)
    with pytest.raises(ValueError, match=r"takes a function of a module, got \{'Block'\}"):
        lambda_wrap_policy({"Block"})  # type: ignore[arg-type]


def test_containers_are_not_units_unless_they_can_be_called():
    class Stack(nn.ModuleList):
        def forward(self, x: Tensor) -> Tensor:
            return functools.reduce(lambda out, layer: layer(out), self, x)

    everything = lambda_wrap_policy(lambda module: True)
    containers = [nn.ModuleList([linear()]), nn.ModuleDict({"0": linear()}), Stack([linear()])]
    assert [units(auto_wrapped(c, everything)) for c in containers] == [["0"], ["0"], ["", "0"]]
    parameters = nn.Sequential(nn.ParameterList([nn.Parameter(torch.ones(3))]))
    assert units(auto_wrapped(parameters, everything)) == [""]


def test_policies_can_be_reused_and_called_from_own_ones():
    by_class = module_wrap_policy({Block})

    def large_blocks(module: nn.Module, recurse: bool, unwrapped_params: int, **kw: Any) -> bool:
        wanted = by_class(module=module, recurse=recurse, unwrapped_params=unwrapped_params, **kw)
        return wanted and (recurse or not isinstance(module, LastBlock))

    for _ in range(2):
        assert units(auto_wrapped(blocks(), large_blocks)) == ["1.0", "1.1"]
        assert units(auto_wrapped(blocks(), functools.partial(by_class))) == ["1.0", "1.1", "2"]


# modules that occur more than once


class Twice(nn.Module):
    """One layer in two places: first in a, last in b."""

    def __init__(self) -> None:
        super().__init__()
        layer = linear()
        self.a, self.b = nn.Sequential(layer, linear()), nn.Sequential(linear(), layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x)


def test_a_module_in_several_places_is_wrapped_once_and_every_place_gets_the_wrapper():
    model = Twice()
    policy = Recorder(module_wrap_policy({nn.Linear}))
    auto_wrapped(model, policy)
    assert units(model) == ["a.0", "a.1", "b.0", "b.1"]
    assert model.a[0] is model.b[1]
    assert len(policy.counts(recurse=False)) == 6 == sum(not call["recurse"] for call in policy.calls)


def test_two_names_in_one_module_are_two_places():
    layer = linear()
    model = auto_wrapped(nn.Sequential(layer, nn.ReLU(), layer), module_wrap_policy({nn.Linear}))
    assert model[0] is model[2]
    assert isinstance(model[0], Unit)


def test_a_shared_module_is_counted_once():
    model = Twice()
    policy = Recorder(lambda recurse, **_: recurse)
    auto_wrapped(model, policy)
    assert policy.counts(recurse=True)[model] == policy.counts(recurse=False)[model] == 90
    assert policy.counts(recurse=True)[model.a] == 60


def test_a_unit_does_not_take_the_parameters_of_a_module_that_it_shares_with_others():
    root = auto_wrapped(Twice(), module_wrap_policy({nn.Sequential, Twice}))
    assert units(root) == [""]


def test_modules_around_a_shared_unit_can_be_units():
    root = auto_wrapped(Twice(), module_wrap_policy({nn.Linear, nn.Sequential}))
    assert units(root) == ["a", "a.0", "a.1", "b", "b.0", "b.1"]


def test_what_occurs_inside_of_a_forced_leaf_is_not_wrapped_elsewhere():
    attention = nn.MultiheadAttention(4, 1)
    model = nn.Sequential(attention.out_proj, attention, nn.Linear(4, 4))
    assert units(auto_wrapped(model, module_wrap_policy({nn.Linear}))) == ["2"]


# tied parameters


class Encoder(nn.Module):
    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding = embedding
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layers(self.embedding(tokens))


class Tied(nn.Module):
    """An embedding two levels down and a head at the top, with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder(nn.Embedding(10, 4))
        self.mix = nn.Linear(4, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.encoder.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.mix(self.encoder(tokens)))


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, logger="fsdp.wrap"):
        yield caplog


def test_a_tied_parameter_stays_in_the_lowest_unit_that_contains_its_uses(log):
    classes = {Tied, Encoder, nn.Linear, nn.Embedding, nn.Sequential}
    root = auto_wrapped(nn.Sequential(Tied()), module_wrap_policy(classes))
    # Neither the embedding nor the head, nor the encoder that contains one of them; the untied layers are.
    assert units(root) == ["", "0", "0.encoder.layers", "0.encoder.layers.0", "0.encoder.layers.1", "0.mix"]
    assert [parameter.shape for parameter in root.module[0].slots] == [(10, 4)]
    assert log.messages == [
        "tied parameter 0.encoder.embedding.weight = 0.head.weight stays in unit '0' (Tied); not wrapped "
        "because of it: '0.encoder.embedding' (Embedding), '0.encoder' (Encoder), '0.head' (Linear)"
    ]
    assert {(record.name, record.levelname) for record in log.records} == {("fsdp.wrap", "INFO")}


def test_without_a_unit_around_all_uses_the_tied_parameter_stays_unwrapped(log):
    model = Tied()
    weight = model.head.weight
    auto_wrapped(model, module_wrap_policy({Encoder, nn.Linear}))
    assert units(model) == ["encoder.layers.0", "encoder.layers.1", "mix"]
    assert model.head.weight is model.encoder.embedding.weight is weight
    assert log.messages == [
        "tied parameter encoder.embedding.weight = head.weight stays in '' (the root, Tied), "
        "outside of all units in it; not wrapped because of it: 'encoder' (Encoder), 'head' (Linear)"
    ]


def test_what_can_not_be_wrapped_counts_for_the_unit_around_it():
    wanted = (nn.Linear, nn.Embedding, Encoder)
    policy = Recorder(lambda module, recurse, **_: recurse or isinstance(module, wanted))
    model = Tied()
    encoder = model.encoder
    auto_wrapped(model, policy)
    counts = policy.counts(recurse=False)
    assert counts[encoder] == 40, "the embedding; both of its layers are units"
    assert counts[model] == 40, "the one tied weight, once; the rest is in units"


def test_ties_inside_one_unit_keep_nothing_from_being_wrapped(log):
    model = auto_wrapped(nn.Sequential(Tied(), linear()), module_wrap_policy({Tied}))
    assert units(model) == ["0"]
    assert log.messages == ["tied parameter 0.encoder.embedding.weight = 0.head.weight stays in unit '0' (Tied)"]


def test_untied_models_log_nothing(log):
    auto_wrapped(blocks(), module_wrap_policy({Block}))
    auto_wrapped(Twice(), module_wrap_policy({nn.Linear, nn.Sequential}))
    assert log.messages == []


def test_a_parameter_of_a_module_with_several_parents_is_logged_when_it_rises(log):
    auto_wrapped(Twice(), module_wrap_policy({nn.Sequential, Twice}))
    assert log.messages == [
        f"tied parameter a.0.{name} = b.1.{name} stays in unit '' (the root, Twice); "
        "not wrapped because of it: 'a' (Sequential), 'b' (Sequential)"
        for name in ("weight", "bias")
    ]


def test_a_tie_across_three_levels_rises_only_as_far_as_it_must(log):
    inner = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4))
    inner[0].weight = inner[1][0].weight = inner[2].weight
    model = auto_wrapped(nn.Sequential(inner, nn.Linear(4, 4)), lambda **_: True)
    assert units(model) == ["", "0", "1"]
    assert "0.0.weight = 0.1.0.weight = 0.2.weight stays in unit '0' (Sequential)" in log.text


def test_one_parameter_under_two_names_of_one_module_is_no_obstacle(log):
    layer = linear()
    layer.alias = layer.weight
    assert units(auto_wrapped(nn.Sequential(layer), module_wrap_policy({nn.Linear}))) == ["0"]
    assert log.messages == []


@st.composite
def tangled_models(draw: st.DrawFn) -> tuple[list[nn.Module], set[nn.Module]]:
    """Modules (root first, parents before children), some shared, with shared parameters; the wanted ones."""
    modules = [Node() for _ in range(draw(st.integers(1, 8)))]
    for index in range(1, len(modules)):
        for parent in draw(st.sets(st.integers(0, index - 1), min_size=1, max_size=3)):
            modules[parent].add_module(f"child{index}", modules[index])
    for index in range(draw(st.integers(0, 5))):
        parameter = nn.Parameter(torch.full([index + 1], float(index)))
        for holder in draw(st.sets(st.sampled_from(modules), min_size=1, max_size=3)):
            holder.register_parameter(f"p{index}", parameter)
    return modules, draw(st.sets(st.sampled_from(modules)))


class Node(nn.Module):
    def forward(self) -> None: ...


def reachable(module: nn.Module, without: nn.Module | None = None) -> set[nn.Parameter]:
    if module is without:
        return set()
    return set(module.parameters(recurse=False)).union(*(reachable(c, without) for c in module.children()))


@settings(max_examples=150)
@given(tangled_models())
def test_a_unit_takes_exactly_what_can_not_be_reached_without_it(model: tuple[list[nn.Module], set[nn.Module]]):
    modules, wanted = model
    root = modules[0]
    taken: dict[nn.Module, set[nn.Parameter]] = {}
    for module in reversed(modules):
        left = reachable(module).difference(*taken.values())
        if module in wanted and reachable(module) and not left & reachable(root, without=module):
            taken[module] = left
    wrapped = auto_wrapped(root, lambda_wrap_policy(wanted.__contains__))
    assert {u.module: set(u.slots) for u in wrapped.modules() if isinstance(u, Unit)} == taken


POLICIES = [
    ("by class", module_wrap_policy({nn.Linear, nn.Embedding, Encoder, nn.Sequential, Tied, Twice})),
    ("by predicate", lambda_wrap_policy(lambda module: True)),
    ("by size, small", at_least(1)),
    ("by size, middling", at_least(35)),
    ("by size, root only", at_least(1e8, skip_params_check_for_root=True)),
    ("the outer modules", module_wrap_policy({Encoder, nn.Sequential, Tied, Twice})),
]


@parameterized.expand(POLICIES)
def test_a_wrapped_model_trains_like_the_plain_one(case: str, policy: Any):
    for make, data in ((Tied, torch.arange(6) % 10), (Twice, torch.linspace(-1, 1, 15).view(3, 5))):
        torch.manual_seed(0)
        plain = make()
        torch.manual_seed(0)
        wrapped = auto_wrapped(make(), policy)
        assert sum(p.numel() for p in wrapped.parameters()) == sum(p.numel() for p in plain.parameters())
        torch.testing.assert_close(losses(wrapped, data), losses(plain, data))


def losses(model: nn.Module, data: Tensor) -> Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for _ in range(4):
        loss = model(data).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.detach())
    return torch.stack(seen)


def test_an_unwrapped_use_outside_would_show_in_training():
    """What the rule is there for: wrapping both holders of a tied weight unties it."""
    torch.manual_seed(0)
    plain = Tied()
    torch.manual_seed(0)
    untied = Tied()
    with enable_wrap(wrapper_cls=Unit):
        untied.encoder = wrap(untied.encoder)
        untied.head = wrap(untied.head)
    assert sum(p.numel() for p in untied.parameters()) > sum(p.numel() for p in plain.parameters())
    data = torch.arange(6) % 10
    assert not torch.allclose(losses(untied, data), losses(plain, data))
