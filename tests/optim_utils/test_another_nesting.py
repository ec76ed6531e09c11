"""Full optimizer states are loaded by names where the numbers of parameters are others: another nesting of wrappers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp import FullyShardedDataParallel, OwnedOptimizer, fully_shard, optim_utils
from fsdp.compat import fairscale
from tests.helpers.equality import assert_same
from tests.helpers.on_ranks import on_ranks
from tests.helpers.optimizers import adam, from_first
from tests.helpers.pairs import parametrize_pairs

EQUAL, UNEQUAL = (4, 4, 4, 4), (4, 6, 3, 5)
OPTIONS: list[dict[str, Any]] = [{}, {"use_orig_params": True}, {"flatten_parameters": False}]
SAME_MODULES = r"goes by numbers without names.*wrap the same modules as when it was saved"
Load = Callable[[Any, torch.optim.Optimizer, Any], None]


def nested(wrapped: int, sizes: tuple[int, ...], options: dict[str, Any]) -> FullyShardedDataParallel:
    """Three layers, one of them a unit of its own."""
    torch.manual_seed(0)
    layers = [nn.Linear(*pair) for pair in pairwise(sizes)]
    layers[wrapped] = FullyShardedDataParallel(layers[wrapped], **options)  # type: ignore[call-overload]
    return FullyShardedDataParallel(nn.Sequential(*layers), **options)


def trained(wrapped: int, sizes: tuple[int, ...], options: dict[str, Any]) -> tuple[Any, torch.optim.Optimizer]:
    model = nested(wrapped, sizes, options)
    optimizer = adam(model)
    model(torch.arange(4.0 * sizes[0]).reshape(4, -1)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def _by_shard(model: Any, optimizer: Any, full: Any) -> None:
    optimizer.load_state_dict(model.get_shard_from_optim_state_dict(full))


def _by_shard_full(model: Any, optimizer: Any, full: Any) -> None:
    optimizer.load_state_dict(optim_utils.shard_full_optim_state_dict(model, full, optimizer))


def _from_everyone(model: Any, optimizer: Any, full: Any) -> None:
    optim_utils.load_full_optim_state_dict(model, optimizer, full)


def _from_first(model: Any, optimizer: Any, full: Any) -> None:
    optim_utils.load_full_optim_state_dict(model, optimizer, full if dist.get_rank() == 0 else None, rank0_only=True)


def _by_rekeying(model: Any, optimizer: Any, full: Any) -> None:
    for to in ("numbers", "names", "numbers"):
        full = optim_utils.rekey_optim_state_dict(full, model, to)
    _by_shard(model, optimizer, full)


DOORS: list[Load] = [_by_shard, _by_shard_full, _from_everyone, _from_first]
every_door = pytest.mark.parametrize("load", [*DOORS, _by_rekeying])


@parametrize_pairs(at_most=12, load=[*DOORS, _by_rekeying], sizes=[EQUAL, UNEQUAL], options=OPTIONS, world_size=[2, 3])
@on_ranks("world_size")
def test_each_parameter_gets_its_own_state(load: Load, sizes: tuple[int, ...], options: dict[str, Any]) -> None:
    model, optimizer = trained(1, sizes, options)
    full = from_first(model.gather_full_optim_state_dict(optimizer))
    expected = optim_utils.full_optim_state_dict(model, optimizer, recipient_rank=None)
    assert expected is not None
    other = nested(2, sizes, options)
    second = adam(other)
    load(other, second, full)
    found = optim_utils.full_optim_state_dict(other, second, recipient_rank=None)
    assert found is not None
    assert found["state"].keys() == expected["state"].keys()
    for name, state in expected["state"].items():
        for key, value in state.items():
            assert torch.equal(found["state"][name][key], value), (name, key)


@every_door
@on_ranks(2, 3)
def test_a_state_without_names_goes_by_numbers(load: Load) -> None:
    """As those are that FairScale and version 0.1.0 have written."""
    model, optimizer = trained(1, UNEQUAL, {})
    full = from_first(model.gather_full_optim_state_dict(optimizer))
    del full["param_names"]
    same = nested(1, UNEQUAL, {})
    second = adam(same)
    load(same, second, from_first(full))
    assert_same(
        from_first(same.gather_full_optim_state_dict(second))["state"],
        from_first(model.gather_full_optim_state_dict(optimizer))["state"],
    )


@pytest.mark.parametrize("load", DOORS)
@on_ranks(2)
def test_numbers_of_other_shapes_are_refused_with_the_remedy(load: Load) -> None:
    model, optimizer = trained(1, UNEQUAL, {})
    full = from_first(model.gather_full_optim_state_dict(optimizer))
    del full["param_names"]
    other = nested(2, UNEQUAL, {})
    second = adam(other)
    with pytest.raises((ValueError, RuntimeError), match=SAME_MODULES) as caught:
        load(other, second, full)
    assert "OwnedOptimizer" not in str(caught.value)
    assert not second.state
    # The remedy that it names.
    named = optim_utils.rekey_optim_state_dict(full, nested(1, UNEQUAL, {}), "names")
    optim_utils.load_full_optim_state_dict(other, second, named)


@on_ranks(2)
def test_a_state_by_names_of_other_shapes_is_told_to_be_of_another_model() -> None:
    model, optimizer = trained(1, UNEQUAL, {})
    full = from_first(model.gather_full_optim_state_dict(optimizer))
    other = nested(1, (4, 6, 5, 5), {})
    with pytest.raises(ValueError, match=r"state 'exp_avg' of 2.weight has shape .*Load the state of a model with par"):
        other.get_shard_from_optim_state_dict(full)


@on_ranks(2)
def test_names_are_plain_whatever_the_units_are() -> None:
    plain = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(3, 2))
    names = sorted(name for name, _ in plain.named_parameters())
    wrapped = FullyShardedDataParallel(FullyShardedDataParallel(copy.deepcopy(plain)))
    fully_shard([plain[0], plain[1]])
    fully_shard(plain)
    owned = OwnedOptimizer(
        plain, [{"params": names[:4], "optimizer": torch.optim.Adam}, {"optimizer": torch.optim.SGD}]
    )
    assert sorted(owned.plan.owner_of) == names
    for model, optimizer in ((wrapped, adam(wrapped)), (plain, owned)):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        full = optim_utils.full_optim_state_dict(model, optimizer, recipient_rank=None)
        assert full is not None
        assert sorted(name for group in full["param_groups"] for name in group["params"]) == names


@on_ranks(2)
def test_fairscale_s_helper_drops_the_names() -> None:
    model, optimizer = trained(1, EQUAL, {})
    full = from_first(model.gather_full_optim_state_dict(optimizer))
    assert fairscale.flatten_optim_state_dict(full).keys() == {"state", "param_groups"}
