"""Optimizer state of unusual models, and over other ways between ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel, optim_utils, use_torch_collectives
from tests.helpers.equality import assert_same
from tests.helpers.models import Net
from tests.helpers.on_ranks import on_ranks
from tests.helpers.optimizers import FORMS, adam, from_first, garden, train
from tests.helpers.pairs import parametrize_pairs
from tests.helpers.parity import fully_sharded
from tests.helpers.state_dicts import zoo

every_form = pytest.mark.parametrize("form", FORMS[:3], ids=["flat", "unflattened", "original"])


def _there_and_back(model: Any, optimizer: torch.optim.Optimizer, make_optimizer: Any = adam) -> dict[str, Any]:
    """Collective. By every way; the state by names."""
    own = copy.deepcopy(optimizer.state_dict())
    named = optim_utils.full_optim_state_dict(model, optimizer, recipient_rank=None)
    full = from_first(model.gather_full_optim_state_dict(optimizer))
    assert named is not None
    for rank0_only, given in ((True, named), (False, named), (False, full)):
        fresh = make_optimizer(model)
        here = given if dist.get_rank() == 0 or not rank0_only else None
        optim_utils.load_full_optim_state_dict(model, fresh, here, rank0_only=rank0_only)
        assert_same(_tensors(fresh.state_dict()), _tensors(own))
    fresh = make_optimizer(model)
    fresh.load_state_dict(model.get_shard_from_optim_state_dict(full))
    assert_same(_tensors(fresh.state_dict()), _tensors(own))
    return named


def _tensors(state: dict[str, Any]) -> Any:
    """All that there is of each shard; of one without elements, and so without state, nothing."""
    return {
        number: {
            key: value if isinstance(value, Tensor) and value.dim() else float(value) for key, value in entry.items()
        }
        for number, entry in state["state"].items()
    }


@parametrize_pairs(form=FORMS[:3], world_size=[1, 2])
@on_ranks("world_size")
def test_empty_tied_and_0d_parameters_and_two_dtypes(form: dict[str, Any]) -> None:
    model = zoo(fully_sharded(**form))
    optimizer = adam(model)
    for _ in range(2):
        optimizer.zero_grad()
        model((torch.arange(4) + dist.get_rank()) % 11).square().mean().backward()
        optimizer.step()
    named = _there_and_back(model, optimizer)
    shapes = {name: param.shape for name, param in zoo().named_parameters()}
    for name, entry in named["state"].items():
        assert entry["exp_avg"].shape == shapes[name], name
    assert named["state"]["fine"]["exp_avg"].dtype is torch.float64
    assert "head.weight" not in named["state"], "it is tied, and known by its first name"
    other = {("head.weight" if name == "tokens.weight" else name): entry for name, entry in named["state"].items()}
    group = {**named["param_groups"][0]}
    group["params"] = ["head.weight" if name == "tokens.weight" else name for name in group["params"]]
    optim_utils.load_full_optim_state_dict(model, adam(model), {**named, "state": other, "param_groups": [group]})


@on_ranks(2)
def test_a_parameter_that_units_share_is_there_once() -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(5, 5), nn.Linear(5, 5)
    second.weight = first.weight
    one: Any = FullyShardedDataParallel(first, flatten_parameters=False)
    two: Any = FullyShardedDataParallel(second, flatten_parameters=False)
    two.append_shared_param(one.module.module.weight)
    model = FullyShardedDataParallel(nn.Sequential(one, two, nn.Linear(5, 1)), flatten_parameters=False)
    optimizer = adam(model)
    train(model, optimizer, range(2))
    named = _there_and_back(model, optimizer)
    assert sorted(named["state"]) == ["0.bias", "0.weight", "1.bias", "2.bias", "2.weight"]


@on_ranks(2)
def test_over_torch_collectives() -> None:
    use_torch_collectives()
    try:
        model = garden(fully_sharded())
        optimizer = adam(model)
        train(model, optimizer, range(2))
        _there_and_back(model, optimizer)
    finally:
        use_torch_collectives(False)


@on_ranks(2)
def test_a_copy_has_its_own() -> None:
    model = garden(fully_sharded())
    optimizer = adam(model)
    train(model, optimizer, range(2))
    expected = optim_utils.full_optim_state_dict(model, optimizer, recipient_rank=None)
    other, own = copy.deepcopy((model, optimizer))
    assert_same(optim_utils.full_optim_state_dict(other, own, recipient_rank=None), expected)
    train(other, own, range(2, 3))
    assert_same(optim_utils.full_optim_state_dict(model, optimizer, recipient_rank=None), expected)


@on_ranks(2)
def test_amsgrad_and_complex_parameters() -> None:
    torch.manual_seed(0)
    model = FullyShardedDataParallel(rotated())

    def amsgrad(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=1e-2, amsgrad=True)

    optimizer = amsgrad(model)
    train(model, optimizer, range(2))
    named = _there_and_back(model, optimizer, amsgrad)
    assert named["state"]["turn"]["max_exp_avg_sq"].dtype is torch.complex64


def rotated() -> nn.Module:
    return Net(
        lambda net, x: (net.entry(x) * net.turn).abs().sum(1, keepdim=True),
        entry=nn.Linear(5, 3),
        turn=nn.Parameter(torch.tensor([1 + 1j, 2 - 1j, 0.5j])),
    )


def test_a_world_of_one_without_torch_distributed() -> None:
    from tests.helpers.parity import Alone

    model: Any = garden(fully_sharded(process_group=Alone()))
    optimizer = adam(model)
    train(model, optimizer, range(2), alone=True)
    own = copy.deepcopy(optimizer.state_dict())
    full = model.gather_full_optim_state_dict(optimizer)
    fresh = adam(model)
    fresh.load_state_dict(model.get_shard_from_optim_state_dict(full))
    assert_same(fresh.state_dict(), own)
    optim_utils.load_full_optim_state_dict(
        model, fresh, optim_utils.full_optim_state_dict(model, optimizer), rank0_only=True
    )
    assert_same(fresh.state_dict(), own)
