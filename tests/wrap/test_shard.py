"""`fsdp.shard`: which modules become units, with which options, and how wrong units are refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

import fsdp
from fsdp import (
    FullyShardedDataParallel,
    config_auto_wrap_policy,
    default_auto_wrap_policy,
    enable_wrap,
    get_fsdp_instances,
    lambda_wrap_policy,
    module_wrap_policy,
)
from fsdp.engine.names import clean_name
from tests.helpers.models import Block, TinyTransformer, tiny_transformer
from tests.helpers.on_ranks import on_ranks
from tests.helpers.parity import TOKENS, Alone, adamw, assert_parity

FORMS: dict[str, dict[str, Any]] = {"flat": {}, "original": {"use_orig_params": True}}


class Absent(nn.Module):
    pass


class Blocks(nn.ModuleList):
    """A container without a forward of its own."""


def plain(tied: bool = False) -> TinyTransformer:
    model = tiny_transformer(tied=tied)
    assert isinstance(model, TinyTransformer)
    return model


def unit_names(model: nn.Module) -> list[str]:
    found = [clean_name(name) for name, module in model.named_modules() if isinstance(module, FullyShardedDataParallel)]
    return sorted(found)


def alone(model: nn.Module, units: Any, **options: Any) -> FullyShardedDataParallel:
    return fsdp.shard(model, units, process_group=Alone(), **options)


def first_block(model: TinyTransformer) -> Any:
    return lambda_wrap_policy(lambda module: module is model.blocks[0])


def _size_of(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


UNITS: dict[str, tuple[Callable[[TinyTransformer], Any], list[str]]] = {
    "a class": (lambda model: {Block}, ["", "blocks.0", "blocks.1"]),
    "classes": (lambda model: [Block, nn.Embedding], ["", "blocks.0", "blocks.1", "positions", "tokens"]),
    "a container's modules": (lambda model: model.blocks, ["", "blocks.0", "blocks.1"]),
    "modules": (lambda model: (each for each in [model.blocks[1]]), ["", "blocks.1"]),
    "a class and a module": (lambda model: [Block, model.tokens], ["", "blocks.0", "blocks.1", "tokens"]),
    "the model's class": (lambda model: {TinyTransformer}, [""]),
    "a policy of classes": (lambda model: module_wrap_policy({Block}), ["", "blocks.0", "blocks.1"]),
    "a policy of a predicate": (first_block, ["", "blocks.0"]),
    "a policy of FSDP1's classes": (lambda model: ModuleWrapPolicy({Block}), ["", "blocks.0", "blocks.1"]),
    "a policy of FSDP1": (
        lambda model: partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        ["", "blocks.0", "blocks.1"],
    ),
    "a policy of FSDP1, by size": (
        lambda model: partial(size_based_auto_wrap_policy, min_num_params=_size_of(model.blocks[0])),
        ["", "blocks.0", "blocks.1"],
    ),
    "a policy that picks nothing": (lambda model: default_auto_wrap_policy, [""]),
    "a policy that picks the model": (
        lambda model: partial(default_auto_wrap_policy, min_num_params=1e6, skip_params_check_for_root=True),
        [""],
    ),
}


@pytest.mark.parametrize("kind", UNITS)
def test_units_are_the_modules_that_are_named_and_the_model(kind: str) -> None:
    units, names = UNITS[kind]
    model = plain()
    sharded = alone(model, units(model))
    assert isinstance(sharded, FullyShardedDataParallel)
    assert sharded.module.module is model
    assert unit_names(sharded) == names
    assert not [param for param in sharded.parameters() if not isinstance(param, fsdp.FlatParameter)]


@on_ranks(2, 3)
@pytest.mark.parametrize("form", FORMS)
def test_it_trains_as_the_plain_model(form: str) -> None:
    sharded = partial(fsdp.shard, units={Block}, **FORMS[form])
    assert unit_names(sharded(plain())) == ["", "blocks.0", "blocks.1"]
    assert_parity(partial(tiny_transformer, nested=False), adamw, task=TOKENS, wrap=sharded)


def test_options_are_those_of_every_unit() -> None:
    sharded = alone(plain(), {Block}, use_orig_params=True, reshard_after_forward=False)
    wrappers = get_fsdp_instances(sharded)
    assert len(wrappers) == 3
    assert [wrapper.reshard_after_forward for wrapper in wrappers] == [False] * 3
    assert all("flat" not in name for name, _ in sharded.named_parameters())


def test_a_policy_and_a_module_have_options_of_their_own() -> None:
    model = plain()
    model.blocks[0].wrapper_config = {"flatten_parameters": False}
    sharded = alone(model, config_auto_wrap_policy)
    assert unit_names(sharded) == ["", "blocks.0"]
    assert len(model.blocks[0].params) > 1

    model = plain()
    keeping = lambda_wrap_policy(lambda module: module is model.blocks[1] and {"reshard_after_forward": False})
    alone(model, keeping)
    assert not model.blocks[1].reshard_after_forward


@pytest.mark.parametrize("ignores", ["ignored_modules", "ignored_parameters"])
def test_what_is_ignored_is_in_no_unit(ignores: str) -> None:
    model = plain()
    kept = list(model.blocks[1].parameters())
    given: Any = [model.blocks[1]] if ignores == "ignored_modules" else kept
    sharded = alone(model, {Block}, **{ignores: given})
    assert unit_names(sharded) == ["", "blocks.0"]
    assert {id(param) for param in kept} <= {id(param) for param in sharded.parameters()}


def test_tied_parameters_stay_tied() -> None:
    sharded = alone(plain(tied=True), {Block, nn.Embedding})
    assert unit_names(sharded) == ["", "blocks.0", "blocks.1", "positions"]


def test_wrapped_parts_keep_their_options() -> None:
    model = plain()
    model.blocks[0] = FullyShardedDataParallel(model.blocks[0], process_group=Alone(), reshard_after_forward=False)
    sharded = alone(model, {Block})
    assert unit_names(sharded) == ["", "blocks.0", "blocks.1"]
    assert [model.blocks[0].reshard_after_forward, model.blocks[1].reshard_after_forward] == [False, True]


def test_it_is_independent_of_a_wrapping_context() -> None:
    with enable_wrap(wrapper_cls=FullyShardedDataParallel, reshard_after_forward=False):
        sharded = alone(plain(), {Block})
    assert [wrapper.reshard_after_forward for wrapper in get_fsdp_instances(sharded)] == [True] * 3


REFUSED: dict[str, tuple[Any, str]] = {
    "a class that occurs nowhere": (
        {Block, Absent},
        r"shard.Absent occurs nowhere in this TinyTransformer. The classes .* Embedding \(2\), .*\.Block \(2\)",
    ),
    "a module of another model": ([nn.Linear(2, 2)], "the Linear among the units occurs nowhere in this TinyTransfo"),
    "a class without a forward": ({nn.ModuleList}, "ModuleList has no forward"),
    "no units": ([], "got no units"),
    "a class alone": (Block, r"takes a set of classes or modules as units, e.g. units=\{Block\}"),
    "a module alone": (nn.Linear(2, 2), "takes a set of classes or modules as units"),
    "a name": ("Block", "takes a set of classes or modules as units"),
    "names": ({"Block"}, "takes nn.Module classes and modules as units, found 'Block'"),
    "a policy of FSDP1 that is no function": (
        CustomPolicy(lambda _: True),
        r"lambda_wrap_policy\(f\) instead of torch's",
    ),
    "another class": ({int}, "found <class 'int'>"),
    "options for each class": ({Block: {"reshard_after_forward": False}}, "takes a set of classes or modules"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_wrong_units_are_refused_and_the_model_is_left_alone(kind: str) -> None:
    units, message = REFUSED[kind]
    model = plain()
    with pytest.raises(ValueError, match=message):
        alone(model, units)
    assert not get_fsdp_instances(model)


def test_a_container_of_its_own_class_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model.add_module("inner", Blocks([nn.Linear(2, 2)]))
    with pytest.raises(ValueError, match=r"test_shard.Blocks has no forward.*Pass the class of the modules in it"):
        alone(model, {Blocks})


def test_a_wrapped_model_is_refused() -> None:
    sharded = alone(plain(), {Block})
    with pytest.raises(ValueError, match="this model is wrapped already"):
        alone(sharded, {Block})
    with pytest.raises(TypeError, match="no_such_option"):
        alone(plain(), {Block}, no_such_option=1)


def test_a_sparse_parameter_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].extra = nn.Parameter(torch.eye(4).to_sparse())
    with pytest.raises(TypeError, match=r"extra is a torch\.sparse_coo cpu parameter"):
        fsdp.shard(model, units={nn.Linear}, process_group=Alone())
