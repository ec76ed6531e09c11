"""`group_by`: few flat parameters, one for each kind, so that optimizers can treat kinds differently."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel, auto_wrap, enable_wrap, module_wrap_policy
from tests.helpers.changed_params import LAYOUTS, ChangedTwins
from tests.helpers.models import Wrap, keep, nested_mlp
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import Case, parametrize_cases, parametrize_pairs
from tests.helpers.parity import Alone, fully_sharded

Keyed = list[tuple[Hashable, nn.Parameter]]


def decay(name: str, param: nn.Parameter) -> str:
    """Matrices decay, biases and norms do not."""
    return "decay" if param.ndim >= 2 else "no decay"


def sgd_by_kind(params: Keyed) -> torch.optim.Optimizer:
    return torch.optim.SGD(_param_groups(params), lr=0.1, momentum=0.9)


def adamw_by_kind(params: Keyed) -> torch.optim.Optimizer:
    return torch.optim.AdamW(_param_groups(params), lr=1e-2)


def _param_groups(params: Keyed) -> list[dict[str, Any]]:
    kinds = {
        kind: [param for key, param in params if key == kind and param.requires_grad] for kind in ("decay", "no decay")
    }
    assert all(kinds.values())
    return [
        {"params": kinds["decay"], "weight_decay": 0.3},
        {"params": kinds["no decay"], "weight_decay": 0.0, "lr": 0.05},
    ]


class KeyedTwins(ChangedTwins):
    """Twins whose optimizers find the kind of a flat parameter in `group`, and of a plain one by asking."""

    def new_optimizers(self, make_optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
        sharded = [(param.group, param) for param in self.sharded.parameters()]  # type: ignore[attr-defined]
        plain = [(decay(name, param), param) for name, param in self.plain.named_parameters()]
        self.optimizers = [make_optimizer(sharded), make_optimizer(plain)]


# Models


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(5), nn.Linear(5, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.linear(self.norm(inputs).to(self.linear.weight.dtype)).to(inputs.dtype)


def layers(wrap: Wrap = keep) -> nn.Module:
    """One unit."""
    torch.manual_seed(0)
    return wrap(nn.Sequential(nn.Linear(5, 5), Layer(), Layer()))


def nested(wrap: Wrap) -> nn.Module:
    """A unit for each layer."""
    torch.manual_seed(0)
    return wrap(nn.Sequential(nn.Linear(5, 5), wrap(Layer()), wrap(Layer())))


def by_policy(wrap: Wrap) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), Layer(), Layer())
    if wrap is keep:
        return model
    assert isinstance(wrap, partial)
    with enable_wrap(wrapper_cls=wrap.func, **wrap.keywords):
        return wrap(auto_wrap(model, module_wrap_policy({Layer})))


def half_frozen(wrap: Wrap) -> nn.Module:
    """Frozen ones of both kinds."""
    model = layers()
    model[1].requires_grad_(False)  # type: ignore[index]
    return wrap(model)


def two_dtypes(wrap: Wrap) -> nn.Module:
    """Norms in float64 around a layer in float32."""
    model = layers()
    model[1].linear.float()  # type: ignore[index]
    return wrap(model)


MODELS = [layers, nested, by_policy, half_frozen, two_dtypes]


# Training


@parametrize_cases(
    at_most=6,
    make=MODELS,
    world_size=[3, 2, 1],
    make_optimizer=[sgd_by_kind, adamw_by_kind],
    layout=list(LAYOUTS),
    kept=[False, True],
)
@on_ranks("world_size")
def test_training_without_decay_on_biases_and_norms_equals_the_plain_model(case: Case) -> None:
    twins = KeyedTwins(case.layout, case.make, case.make_optimizer, group_by=decay, reshard_after_forward=not case.kept)
    twins.is_tight = case.make is not two_dtypes
    for _ in range(2):
        twins.step()
    twins.assert_close()


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(2)
def test_groups_survive_a_cast(layout: str) -> None:
    twins = KeyedTwins(layout, nested, sgd_by_kind, dtype=torch.float32, group_by=decay)
    for model in twins.models:
        model.double()
    twins.new_optimizers(adamw_by_kind)
    for _ in range(3):
        twins.step()
    twins.assert_close()


# Groups


def by_module(name: str, param: nn.Parameter) -> Hashable:
    return name.split(".")[0], param.ndim


@pytest.mark.parametrize(
    ("make", "group_by", "expected"),
    [
        (layers, decay, ["decay", "no decay"]),
        (nested, decay, ["decay", "no decay"] * 3),
        (layers, by_module, [("0", 2), ("0", 1), ("1", 1), ("1", 2), ("2", 1), ("2", 2)]),
        (half_frozen, decay, ["decay", "no decay", "decay frozen", "no decay frozen"]),
        (two_dtypes, decay, ["decay", "no decay", "decay narrow", "no decay narrow"]),
        (layers, None, [None]),
    ],
)
@on_ranks(1, 3)
def test_there_are_as_many_flat_parameters_as_groups(
    make: Callable[[Wrap], nn.Module], group_by: Any, expected: list[Hashable]
) -> None:
    torch.set_default_dtype(torch.float64)
    model = make(fully_sharded(group_by=group_by))
    assert sorted(map(_described, model.parameters())) == sorted(map(str, expected))


def _described(param: Any) -> str:
    frozen = "" if param.requires_grad else " frozen"
    return f"{param.group}{frozen}" + (" narrow" if param.dtype is torch.float32 else "")


@on_ranks(2)
def test_every_parameter_is_in_the_group_of_its_key() -> None:
    model = nested(fully_sharded(group_by=decay))
    shapes = {name: value.ndim for name, value in nested(keep).state_dict().items()}
    found: list[str] = []
    for unit in model._units():  # type: ignore[operator]
        prefix = "" if unit.name.startswith("root") else unit.name + "."
        for handle in unit.handles:
            names = [slot.name for slot in handle.layout.slots]
            assert {len(slot.shape) >= 2 for slot in handle.layout.slots} == {handle.flat_param.group == "decay"}
            found += [prefix + name for name in names]
    assert len(found) == len(shapes)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_key_sees_names_from_the_wrapped_module_and_the_parameters(layout: str) -> None:
    plain = layers()
    expected = dict(plain.named_parameters())
    seen: dict[str, nn.Parameter] = {}

    def key(name: str, param: nn.Parameter) -> str:
        assert seen.setdefault(name, param) is param
        return name

    model = FullyShardedDataParallel(plain, Alone(), group_by=key, **LAYOUTS[layout])
    assert list(seen) == list(expected)
    assert all(seen[name] is param for name, param in expected.items())
    assert [param.group for param in model.parameters()] == list(expected)  # type: ignore[attr-defined]


def test_a_tied_parameter_is_asked_about_once_by_its_first_name() -> None:
    plain = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5, bias=False))
    plain[1].weight = plain[0].weight
    seen = []

    def key(name: str, param: nn.Parameter) -> None:
        seen.append(name)

    FullyShardedDataParallel(plain, Alone(), group_by=key)
    assert seen == ["0.weight", "0.bias"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_key_that_fails_or_cannot_be_hashed_is_an_error_and_changes_nothing(layout: str) -> None:
    plain = layers()
    expected = dict(plain.named_parameters())

    def failing(name: str, _: nn.Parameter) -> str:
        if name == "2.linear.weight":
            raise KeyError(name)
        return name

    no_key = r"group_by\('0\.weight', \.\.\.\) returned \['0\.weight'\], which cannot be"
    keys: list[tuple[Any, type[Exception], str]] = [
        (failing, KeyError, r"2\.linear\.weight"),
        (lambda name, _: [name], TypeError, no_key),
    ]
    for key, error, message in keys:
        with pytest.raises(error, match=message):
            FullyShardedDataParallel(plain, Alone(), group_by=key, **LAYOUTS[layout])
        assert dict(plain.named_parameters()) == expected
    FullyShardedDataParallel(plain, Alone(), group_by=decay, **LAYOUTS[layout])


@parametrize_pairs(layout=list(LAYOUTS), differ=["members", "names of groups"])
@on_ranks(2)
def test_ranks_with_different_keys_are_told(layout: str, differ: str) -> None:
    def key(name: str, param: nn.Parameter) -> str:
        if dist.get_rank() == 0:
            return decay(name, param)
        return "other" if differ == "members" and name == "1.norm.bias" else f"{decay(name, param)}!"

    model = layers(fully_sharded(group_by=key, **LAYOUTS[layout]))
    with pytest.raises(RuntimeError, match="the ranks have built different models"):
        model(torch.ones(2, 5))


class Kind:
    """A key whose text is another on every rank."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __hash__(self) -> int:
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Kind) and self.name == other.name


@on_ranks(2)
def test_keys_may_be_objects_of_any_class() -> None:
    model = layers(fully_sharded(group_by=lambda name, param: Kind(decay(name, param))))
    assert {param.group.name for param in model.parameters()} == {"decay", "no decay"}  # type: ignore[attr-defined]
    model(torch.ones(2, 5)).sum().backward()


# Groups by rules that shards cannot follow


@on_ranks(2)
def test_groups_by_dimensions_or_names_that_shards_do_not_have_are_noticed() -> None:
    def by_dimensions(name: str, param: nn.Parameter) -> bool:
        return param.ndim >= 2

    def by_name(name: str, param: nn.Parameter) -> bool:
        return not name.endswith(("bias", "scale"))

    def by_whole_shape(name: str, param: Any) -> bool:
        return len(param.unsharded_shape) >= 2

    def by_group(name: str, param: Any) -> bool:
        return bool(param.group == "decay")

    def by_layer(name: str, param: nn.Parameter) -> bool:
        return "trunk" in name

    flat, original, single = {}, {"use_orig_params": True}, {"flatten_parameters": False}
    # What remains when an embedding is left alone: one matrix that is not sharded.
    beside: dict[str, Any] = {"ignored": True}
    table: list[tuple[dict[str, Any], Callable[[str, Any], bool], bool]] = [
        (flat, by_dimensions, True),
        (flat, by_name, True),
        (original, by_dimensions, True),
        (single, by_dimensions, True),
        (flat | beside, by_dimensions, True),
        (original, by_name, False),
        (original, by_whole_shape, False),
        (single, by_name, False),
        ({"group_by": decay}, by_group, False),
        (flat, by_layer, True),
        ({"nested": True}, by_layer, False),
        (flat, lambda name, param: True, False),
    ]
    for options, rule, is_noticed in table:
        _step_in_groups(options, rule, is_noticed)


def _step_in_groups(given: dict[str, Any], rule: Callable[[str, Any], bool], is_noticed: bool) -> None:
    options = dict(given)
    module = nested_mlp(keep)
    if options.pop("ignored", False):
        options["ignored_parameters"] = [module.entry.weight]
    if options.pop("nested", False):
        module.trunk = FullyShardedDataParallel(module.trunk)
    model = FullyShardedDataParallel(module, **options)
    named = list(model.named_parameters())
    decayed = [param for name, param in named if rule(name, param)]
    spared = [param for name, param in named if not rule(name, param)]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": spared, "weight_decay": 0.0}]
    # A single group says nothing of how it was made.
    optimizer = torch.optim.AdamW(groups if rule.__name__ != "<lambda>" else groups[:1])
    for _ in range(2):
        model(torch.ones(2, 5)).sum().backward()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            optimizer.step()
        said = [str(one.message) for one in seen if "do not distinguish them" in str(one.message)]
        assert len(said) == is_noticed, (given, rule, said)
        is_noticed = False  # once
