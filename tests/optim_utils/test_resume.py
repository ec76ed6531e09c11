"""Training goes on from a full optimizer state, at any world size and in any form, as if it had not stopped."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp import optim_utils
from tests.helpers.equality import assert_close, assert_same
from tests.helpers.on_ranks import on_ranks
from tests.helpers.optimizers import (
    FORMS,
    MakeOptimizer,
    adadelta,
    adam,
    assert_within_noise,
    from_first,
    garden,
    grouped_adamw,
    momentum,
    nadam,
    stateless,
    train,
)
from tests.helpers.pairs import Case, parametrize_cases
from tests.helpers.parity import fully_sharded
from tests.helpers.ranks import RankPool

OPTIMIZERS: list[MakeOptimizer] = [adam, grouped_adamw, momentum, adadelta, nadam, stateless]
HALF = 2


@parametrize_cases(at_most=6, saved_at=[2, 1, 3, 4], loaded_at=[3, 1, 2, 4], form=FORMS, make_optimizer=OPTIMIZERS)
def test_half_of_the_steps_at_another_world_size(ranks: RankPool, tmp_path: Path, case: Case) -> None:
    ranks(case.saved_at).run(_train_and_save, tmp_path / "saved", case.form, case.make_optimizer)
    ranks(case.loaded_at).run(_load_and_train, tmp_path / "saved", case.form, case.make_optimizer)


def _train_and_save(path: Path, form: dict[str, Any], make_optimizer: MakeOptimizer) -> None:
    model: Any = garden(fully_sharded(**form))
    optimizer = make_optimizer(model)
    train(model, optimizer, range(HALF))
    weights, full = model.state_dict(), model.gather_full_optim_state_dict(optimizer)
    assert (full is not None) == (dist.get_rank() == 0)
    own = optimizer.state_dict()
    assert_same(model.get_shard_from_optim_state_dict(from_first(full)), own)
    assert_same(optimizer.state_dict(), own)
    if full is not None:
        torch.save((weights, full), path)


def _load_and_train(path: Path, form: dict[str, Any], make_optimizer: MakeOptimizer) -> None:
    weights, full = torch.load(path, weights_only=True)
    model: Any = garden(fully_sharded(**form), seed=1)
    optimizer = make_optimizer(model)
    model.load_state_dict(weights)
    optimizer.load_state_dict(model.get_shard_from_optim_state_dict(full))
    saved = torch.load(path, weights_only=True)[1]
    gathered = from_first(model.gather_full_optim_state_dict(optimizer))
    _forget_number_of_ranks(saved), _forget_number_of_ranks(gathered)
    assert_same(gathered, saved)
    train(model, optimizer, range(HALF, 2 * HALF))
    twin = garden()
    make_own = partial(_optimizer_like, form=form, make_optimizer=make_optimizer)
    own = make_own(twin)
    train(twin, own, range(2 * HALF), alone=True)
    # In one flat parameter with others, what is used nowhere has a gradient of zeros: it may be decayed, and has state.
    states = [_without(dict(each.state_dict()), "idle") for each in (model, twin)]
    assert_within_noise(states[0], states[1], garden, make_own, range(2 * HALF))
    named = optim_utils.full_optim_state_dict(model, optimizer, recipient_rank=None)
    assert named is not None
    plain = optim_utils.rekey_optim_state_dict(own.state_dict(), twin, "names", own)
    for name, state in plain["state"].items():
        elements = {key: value for key, value in state.items() if value is not None and value.dim()}
        assert_close({key: named["state"][name][key] for key in elements}, elements, rtol=1e-3, atol=1e-4)
    assert named["state"].keys() - plain["state"].keys() <= {"idle"}


def _optimizer_like(twin: Any, form: dict[str, Any], make_optimizer: MakeOptimizer) -> torch.optim.Optimizer:
    """That of the plain model; with the same parameters in each group."""
    if make_optimizer is not grouped_adamw or form:
        return make_optimizer(twin)
    return torch.optim.AdamW(twin.parameters(), lr=1e-2, weight_decay=0.1)  # flat parameters have no names of biases


def _without(state: Any, name: str) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key != name}


def _forget_number_of_ranks(full: dict[str, Any]) -> None:
    """0-d tensors are there once for each rank. When they are loaded, torch casts them as the parameter is."""
    for state in full["state"].values():
        for key, value in state.items():
            if isinstance(value, list):
                state[key] = value[0].item()


@pytest.mark.parametrize("make_optimizer", [adam, nadam])
@on_ranks(2)
def test_an_unsharded_model_goes_on_from_it_and_back(make_optimizer: MakeOptimizer) -> None:
    model, twin = garden(fully_sharded(use_orig_params=True)), garden()
    optimizer, own = make_optimizer(model), make_optimizer(twin)
    train(model, optimizer, range(2))
    named = optim_utils.full_optim_state_dict(model, optimizer, recipient_rank=None)
    assert named is not None
    own.load_state_dict(optim_utils.rekey_optim_state_dict(named, twin, "numbers", own))
    twin.load_state_dict(model.state_dict())
    train(model, optimizer, range(2, 4))
    train(twin, own, range(2, 4), alone=True)
    assert_close(dict(model.state_dict()), dict(twin.state_dict()), rtol=1e-3, atol=1e-5)
    back = optim_utils.rekey_optim_state_dict(own.state_dict(), twin, "names", own)
    assert "idle" not in back["state"], "it was never used"
    optim_utils.load_full_optim_state_dict(model, optimizer, back)
    again = optim_utils.full_optim_state_dict(model, optimizer, recipient_rank=None)
    assert again is not None
    assert_same(again["state"], back["state"])
