"""`fsdp.wrap` with the real wrapper: which units there are, and that what comes out trains like the plain model.

What the policies promise in detail is in test_wrap.py, which needs no ranks.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp
from fsdp import (
    FullyShardedDataParallel,
    auto_wrap,
    default_auto_wrap_policy,
    enable_wrap,
    get_fsdp_instances,
    lambda_wrap_policy,
    module_wrap_policy,
    wrap,
)
from fsdp.engine.names import clean_name
from tests.helpers import models
from tests.helpers.models import TinyTransformer, Wrap, keep
from tests.helpers.on_ranks import on_ranks
from tests.helpers.parity import TOKENS, adamw, assert_parity, sgd_with_momentum, tiny_transformer

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


# By class, by predicate, by size

POLICIES: dict[str, tuple[Policy, list[str]]] = {
    "classes": (module_wrap_policy({models.Block}), ["", "blocks.0", "blocks.1"]),
    "subclasses": (module_wrap_policy([nn.Embedding]), ["", "positions", "tokens"]),
    "predicate": (
        lambda_wrap_policy(lambda module: isinstance(module, (models.Attention, nn.GELU))),
        ["", "blocks.0.attention.1", "blocks.1.attention.1"],
    ),
    "size": (at_least(300), ["", "blocks.0.attention.1", "blocks.0.mlp", "blocks.1.attention.1", "blocks.1.mlp"]),
}


@pytest.mark.parametrize("name", POLICIES)
@on_ranks(3)
def test_a_transformer_trains_like_the_plain_one(name: str) -> None:
    # positions.weight is read without calling its module, so units around embeddings cannot run.
    policy, expected = POLICIES[name]
    model = wrapped_by(policy, tiny_transformer())
    assert sorted(unit_names(model)) == expected
    assert len(list(model.parameters())) == len(expected)
    if name != "subclasses":
        assert_parity(partial(_by, policy, False), adamw, task=TOKENS, wrap=FullyShardedDataParallel)


@pytest.mark.parametrize("name", ["classes", "size", "predicate"])
@on_ranks(2)
def test_with_a_tied_head(name: str) -> None:
    policy, expected = POLICIES[name]
    model = wrapped_by(policy, tiny_transformer(tied=True))
    assert sorted(unit_names(model)) == expected
    inside = model.module.module  # type: ignore[union-attr]
    with model.summon_full_params():  # type: ignore[operator]
        assert inside.head.weight is inside.tokens.weight
    assert_parity(partial(_by, policy, True), sgd_with_momentum, task=TOKENS, wrap=FullyShardedDataParallel)


def _by(policy: Policy, tied: bool, wrap_it: Wrap) -> nn.Module:
    """The transformer, wrapped by policy unless `wrap_it` is that of the plain model."""
    plain = tiny_transformer(keep, tied=tied)
    return plain if wrap_it is keep else wrapped_by(policy, plain)


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


@on_ranks(2)
def test_a_tie_that_the_policy_would_cut_is_kept() -> None:
    model: Any = tied(FullyShardedDataParallel)
    assert unit_names(model) == ["", "body.0", "body.2"]
    assert list(model.state_dict()) == list(Tied().state_dict())
    assert_parity(tied, sgd_with_momentum, task=TOKENS, wrap=FullyShardedDataParallel)


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
        with pytest.warns(UserWarning, match=r"^auto_wrap\(\) with a policy that selects no module .*2 ranks"):
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
