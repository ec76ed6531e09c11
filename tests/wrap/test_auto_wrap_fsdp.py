"""`fsdp.wrap` with the real wrapper: which units there are, and that what comes out trains like the plain model.

What the policies promise in detail is in test_wrap.py, which needs no ranks.
"""

from __future__ import annotations

import logging
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parameterized import parameterized
from torch import Tensor, nn

import fsdp
from examples.gpt.model import GPT, SIZES, Block, next_byte_loss
from fsdp import (
    ConfigAutoWrap,
    FlatParameter,
    FullyShardedDataParallel,
    auto_wrap,
    config_auto_wrap_policy,
    default_auto_wrap_policy,
    enable_wrap,
    get_fsdp_instances,
    lambda_wrap_policy,
    module_wrap_policy,
    wrap,
)
from fsdp.engine.names import clean_name
from tests.helpers import models
from tests.helpers.models import Net, TinyTransformer, Wrap, keep
from tests.helpers.on_ranks import on_ranks
from tests.helpers.parity import TOKENS, RanksTestCase, adamw, assert_parity, sgd_with_momentum, tiny_transformer

Policy = Any


def at_least(numel: float, **settings: Any) -> Policy:
    return partial(default_auto_wrap_policy, min_num_params=numel, **settings)


def wrapped_by(policy: Policy, model: nn.Module, **settings: Any) -> nn.Module:
    """Units by policy, and one around the whole."""
    with enable_wrap(wrapper_cls=FullyShardedDataParallel, **settings):
        model = auto_wrap(model, policy)
        return model if isinstance(model, FullyShardedDataParallel) else wrap(model)


def unit_names(model: nn.Module) -> list[str]:
    found = model.named_modules()
    return [clean_name(name) for name, module in found if isinstance(module, FullyShardedDataParallel)]


def unit_numels(model: nn.Module) -> dict[str, int]:
    """Collective. How many elements each unit took, padding left out."""
    numels = {}
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            mine = sum(param.numel() for param in module.params) - sum(module.numel_padded_per_param)
            total = torch.tensor(mine)
            dist.all_reduce(total)
            numels[clean_name(name)] = int(total)
    return numels


# By size

# Linear(10, 10) has 110 parameters, Linear(10, 30) 330, Linear(30, 10) 310.
SIZED = {"0": 110, "1.0": 330, "1.2": 310, "2": 110}


def sized() -> nn.Module:
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Linear(10, 30), nn.ReLU(), nn.Linear(30, 10))
    return nn.Sequential(nn.Linear(10, 10), wide, nn.Linear(10, 10))


class Sizes(RanksTestCase):
    @parameterized.expand(
        [
            ("every_layer", 100, {"": 0, **SIZED}, {}),
            ("large_layers", 300, {"1.0": 330, "1.2": 310}, {}),
            ("a_pair", 600, {"1": 640}, {}),
            ("a_pair_and_the_rest", 600, {"": 220, "1": 640}, {"skip_params_check_for_root": True}),
            ("whole", 800, {"": 860}, {}),
            ("nothing", 1000, {}, {}),
            ("root_anyway", 1000, {"": 860}, {"skip_params_check_for_root": True}),
        ]
    )
    def test_units_by_min_num_params(
        self, kind: str, numel: int, expected: dict[str, int], settings: dict[str, Any]
    ) -> None:
        self.ranks(2).run(_wrap_by_size, numel, expected, settings)


def _wrap_by_size(numel: int, expected: dict[str, int], settings: dict[str, Any]) -> None:
    with enable_wrap(wrapper_cls=FullyShardedDataParallel):
        model = auto_wrap(sized(), at_least(numel, **settings))
    found = unit_numels(model)
    found_with_params = {name: size for name, size in found.items() if size}
    assert found_with_params == {name: size for name, size in expected.items() if size}
    assert isinstance(model, FullyShardedDataParallel) == ("" in found)
    plain = sized()
    inputs = torch.ones(2, 10)
    assert torch.equal(model(inputs), plain(inputs))
    model(inputs).sum().backward()


@on_ranks(2)
def test_nothing_is_wrapped_outside_of_the_context() -> None:
    module = sized()
    assert auto_wrap(module, at_least(1)) is module
    assert wrap(module) is module
    assert not get_fsdp_instances(module)
    assert not ConfigAutoWrap.in_autowrap_context


# By class, by predicate, by the module's own settings

POLICIES: dict[str, tuple[Policy, list[str]]] = {
    "classes": (module_wrap_policy({models.Block}), ["", "blocks.0", "blocks.1"]),
    "subclasses": (module_wrap_policy([nn.Embedding]), ["", "positions", "tokens"]),
    "predicate": (
        lambda_wrap_policy(lambda module: isinstance(module, (models.Attention, nn.GELU))),
        ["", "blocks.0.attention.1", "blocks.1.attention.1"],
    ),
    "size": (at_least(300), ["", "blocks.0.attention.1", "blocks.0.mlp", "blocks.1.attention.1", "blocks.1.mlp"]),
}


class Transformers(RanksTestCase):
    @parameterized.expand([(name, world_size) for name in POLICIES for world_size in (1, 3)])
    def test_a_transformer_trains_like_the_plain_one(self, name: str, world_size: int) -> None:
        self.ranks(world_size).run(_train_by_policy, name)

    @parameterized.expand([(name, world_size) for name in ("classes", "size", "predicate") for world_size in (2, 3)])
    def test_with_a_tied_head(self, name: str, world_size: int) -> None:
        self.ranks(world_size).run(_train_tied, name)


def _by(policy: Policy, tied: bool, wrap_it: Wrap) -> nn.Module:
    """The transformer, wrapped by policy unless `wrap_it` is that of the plain model."""
    plain = tiny_transformer(keep, tied=tied)
    return plain if wrap_it is keep else wrapped_by(policy, plain)


def _train_by_policy(name: str) -> None:
    # positions.weight is read without calling its module, so units around embeddings cannot run.
    policy, expected = POLICIES[name]
    model = wrapped_by(policy, tiny_transformer())
    assert sorted(unit_names(model)) == expected
    assert len(list(model.parameters())) == len(expected)
    if name != "subclasses":
        assert_parity(partial(_by, policy, False), adamw, task=TOKENS, wrap=FullyShardedDataParallel)


def _train_tied(name: str) -> None:
    policy, expected = POLICIES[name]
    model = wrapped_by(policy, tiny_transformer(tied=True))
    assert sorted(unit_names(model)) == expected
    inside = model.module.module  # type: ignore[union-attr]
    with model.summon_full_params():  # type: ignore[operator]
        assert inside.head.weight is inside.tokens.weight
    assert_parity(partial(_by, policy, True), sgd_with_momentum, task=TOKENS, wrap=FullyShardedDataParallel)


class Tied(nn.Module):
    """Embedding and head of one weight, each as large as a unit should be."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TinyTransformer.VOCABULARY, 9)
        self.body = nn.Sequential(nn.Linear(9, 31), nn.Tanh(), nn.Linear(31, 9))
        self.head = nn.Linear(9, TinyTransformer.VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.embedding(tokens)))


def tied(wrap_it: Wrap) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        plain = Tied()
    return plain if wrap_it is keep else wrapped_by(at_least(200), plain)


@on_ranks(1, 2)
def test_a_tie_that_the_policy_would_cut_is_kept() -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("fsdp.wrap")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        model: Any = tied(FullyShardedDataParallel)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert len(lines) == 1
    assert "tied parameter embedding.weight = head.weight stays in" in lines[0]
    assert "not wrapped because of it: 'embedding' (Embedding), 'head' (Linear)" in lines[0]
    assert unit_names(model) == ["", "body.0", "body.2"]
    assert list(model.state_dict()) == list(Tied().state_dict())
    assert_parity(tied, sgd_with_momentum, task=TOKENS, wrap=FullyShardedDataParallel)


class BlockWithConfig(nn.Linear):
    """Brings its own settings."""

    wrapper_config = {"flatten_parameters": False, "reshard_after_forward": False}  # noqa: RUF012 (a client's class)


@on_ranks(2)
def test_settings_of_context_module_and_call() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 7), BlockWithConfig(7, 3))

    with enable_wrap(config_auto_wrap_policy, wrapper_cls=FullyShardedDataParallel, verbose=True, bucket_cap_mb=1):
        model: Any = wrap(auto_wrap(make()), bucket_cap_mb=2)
    assert unit_names(model) == ["", "1"]
    inner = model[1]
    assert (inner.verbose, inner.bucket_cap_mb) == (True, 1)
    assert (inner.flatten_parameters, inner.reshard_after_forward) == (False, False)
    assert (model.verbose, model.bucket_cap_mb) == (True, 2)
    assert (model.flatten_parameters, model.reshard_after_forward) == (True, True)
    assert torch.equal(model(torch.ones(2, 5)), make()(torch.ones(2, 5)))


# Wrappers of clients


class Marked(FullyShardedDataParallel):
    """Takes a keyword that the library does not know."""

    def __init__(self, *args: Any, use_sharded_state: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.use_sharded_state = use_sharded_state


@on_ranks(2)
def test_a_subclass_gets_its_extra_keyword() -> None:
    with enable_wrap(wrapper_cls=Marked, use_sharded_state=True, flatten_parameters=False):
        model: Any = wrap(auto_wrap(sized(), at_least(300)), use_sharded_state=False)
    units = get_fsdp_instances(model)
    assert {type(unit) for unit in units} == {Marked}
    assert [unit.use_sharded_state for unit in units] == [False, True, True]
    assert not any(unit.flatten_parameters for unit in units)
    model(torch.ones(2, 10)).sum().backward()
    with (
        enable_wrap(wrapper_cls=FullyShardedDataParallel, use_sharded_state=True),
        pytest.raises(TypeError, match="use_sharded_state"),
    ):
        wrap(nn.Linear(2, 2))


@on_ranks(2)
def test_what_is_wrapped_already_is_refused_by_name() -> None:
    model = wrapped_by(at_least(300), sized())
    names = unit_names(model)
    for again in (model, nn.Sequential(model)):
        with enable_wrap(wrapper_cls=FullyShardedDataParallel), pytest.raises(ValueError, match="is wrapped by"):
            auto_wrap(again, at_least(1))
    assert unit_names(model) == names
    model(torch.ones(2, 10)).sum().backward()


@on_ranks(2)
def test_layer_by_layer_in_a_constructor() -> None:
    torch.manual_seed(0)
    plain = stack()
    assert not get_fsdp_instances(plain)
    torch.manual_seed(0)
    with enable_wrap(wrapper_cls=FullyShardedDataParallel):
        model = wrap(stack())
    assert unit_names(model) == ["", "layers.0", "layers.1", "layers.2"]
    assert all(isinstance(param, FlatParameter) for param in model.parameters())
    assert torch.equal(model(torch.ones(2, 10)), plain(torch.ones(2, 10)))


def stack() -> nn.Module:
    """Shards each layer as soon as it exists, where sharding is switched on."""
    return Net(lambda net, x: net.layers(x), layers=nn.Sequential(*(wrap(nn.Linear(10, 10)) for _ in range(3))))


# The project's own GPT


@on_ranks(2)
def test_the_gpt_of_the_training_job() -> None:
    config = SIZES["tiny"]
    torch.manual_seed(0)
    plain = GPT(config)
    torch.manual_seed(0)
    model: Any = wrapped_by(module_wrap_policy({Block}), GPT(config))
    assert unit_names(model) == ["", *(f"blocks.{number}" for number in range(config.num_layers))]
    total = sum(param.numel() for param in plain.parameters())
    assert sum(unit_numels(model).values()) == total
    windows = torch.randint(config.vocab, (2, config.context + 1))
    assert torch.equal(next_byte_loss(model, windows), next_byte_loss(plain, windows))
    sharded_state = model.state_dict()
    for name, value in plain.state_dict().items():
        assert torch.equal(sharded_state[name], value)
    # The largest parameter tensor that a rank holds between steps is its shard of the largest unit.
    assert max(param.numel() for param in model.parameters()) <= -(-max(unit_numels(model).values()) // 2)


@on_ranks(2)
def test_models_of_the_tests_have_the_units_that_they_promise() -> None:
    by_hand = tiny_transformer(FullyShardedDataParallel)
    by_policy = wrapped_by(module_wrap_policy({models.Block}), tiny_transformer())
    assert unit_names(by_hand) == unit_names(by_policy)
    assert len(get_fsdp_instances(by_hand)) == TinyTransformer.LAYERS + 1
    tokens = torch.zeros(1, TinyTransformer.CONTEXT, dtype=torch.int64)
    assert torch.equal(by_hand(tokens), by_policy(tokens))


# Ranks that would train apart


@on_ranks(2)
def test_what_leaves_ranks_to_train_apart_is_noticed() -> None:
    for wrap_outside, name in ((fsdp.auto_wrap, "auto_wrap"), (fsdp.wrap, "wrap")):
        module = nn.Linear(2, 2)
        with pytest.warns(UserWarning, match=rf"^{name}\(\) outside of enable_wrap.*each of the 2 ranks"):
            assert wrap_outside(module) is module
    with fsdp.enable_wrap(wrapper_cls=fsdp.FullyShardedDataParallel):
        with pytest.warns(UserWarning, match=r"^auto_wrap\(\) with a policy that picks nothing .*2 ranks"):
            fsdp.auto_wrap(nn.Linear(2, 2), fsdp.module_wrap_policy({nn.Conv1d}))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fsdp.auto_wrap(nn.Linear(2, 2), fsdp.module_wrap_policy({nn.Linear}))
            fsdp.auto_wrap(nn.Linear(2, 2), fsdp.module_wrap_policy({nn.Conv1d}), keep_wrapped=True)
            fsdp.auto_wrap(nn.Tanh(), fsdp.module_wrap_policy({nn.Conv1d}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fsdp.auto_wrap_bn(nn.Linear(2, 2))
    # The outermost module was forgotten: what no unit took is stepped beside shards.
    for ignored, is_noticed in ((False, True), (True, False)):
        model = nn.Sequential(fsdp.FullyShardedDataParallel(nn.Linear(2, 2)), nn.Linear(2, 2), nn.Linear(2, 2))
        if ignored:
            model = fsdp.FullyShardedDataParallel(model, ignored_modules=[model[1]])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 2)).sum().backward()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            optimizer.step()
        assert [str(one.message) for one in seen if "4 that are not" in str(one.message)] == [
            str(one.message) for one in seen if is_noticed
        ]
        assert len(seen) == is_noticed
