"""Optimizer state of unusual models, and over other ways between ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp
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


class Counted(nn.Module):
    """A frozen integer parameter, of which Adagrad keeps state from the beginning on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.counts = nn.Parameter(torch.arange(1, 8), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.linear(inputs) * self.counts.sum()
        return out


def _counted(seed: int = 0) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Counted()
    return model, _adagrad(model)


def _adagrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=2)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()


@every_form
@on_ranks(2)
def test_state_of_parameters_that_are_sharded_as_bytes_is_left_out(form: dict[str, Any]) -> None:
    """Of full states, whether they are gathered or given; no step uses it."""
    plain, expected = _counted()
    _step(plain, expected)
    whole = {name: expected.state[param] for name, param in plain.named_parameters()}
    model: Any = FullyShardedDataParallel(_counted()[0], **form)
    optimizer = _adagrad(model)
    _step(model, optimizer)
    full = optim_utils.full_optim_state_dict(model, optimizer, recipient_rank=None)
    assert full is not None
    assert_same(full["state"], {name: state for name, state in whole.items() if name != "counts"})
    numbers = from_first(model.gather_full_optim_state_dict(optimizer))
    loads: dict[str, Callable[[Any], None]] = {
        "ours": lambda fresh: optim_utils.load_full_optim_state_dict(model, fresh, full),
        "of a plain model": lambda fresh: optim_utils.load_full_optim_state_dict(model, fresh, full | {"state": whole}),
        "by numbers": lambda fresh: fresh.load_state_dict(model.get_shard_from_optim_state_dict(numbers)),
    }
    for name, load in loads.items():
        fresh = _adagrad(model)
        load(fresh)
        again = optim_utils.full_optim_state_dict(model, fresh, recipient_rank=None)
        assert_same(again, full, name)
    _step(plain, expected)
    _step(model, fresh)
    assert_same(model.state_dict(), plain.state_dict())


@every_form
@on_ranks(2)
def test_an_optimizer_with_state_of_integers_is_handed_over(form: dict[str, Any]) -> None:
    plain, expected = _counted()
    module, optimizer = _counted()
    _step(module, optimizer)
    model = FullyShardedDataParallel(module, **form)
    model.reshard_optimizer(optimizer)
    _step(model, optimizer)
    for _ in range(2):
        _step(plain, expected)
    assert_same(model.state_dict(), plain.state_dict())


@on_ranks(2)
def test_checkpoints_leave_state_of_bytes_out(tmp_path: Path) -> None:
    makes = [FullyShardedDataParallel, partial(FullyShardedDataParallel, use_orig_params=True), fsdp.fully_shard]
    for number, (make, other) in enumerate(zip(makes, [*makes[1:], makes[0]], strict=True)):
        model = make(_counted()[0])
        optimizer = _adagrad(model)
        _step(model, optimizer)
        fsdp.save(tmp_path / f"{number}", model, optimizer)
        found = other(_counted(seed=1)[0])
        loaded = _adagrad(found)
        fsdp.load(tmp_path / f"{number}", found, loaded)
        for each in (model, optimizer), (found, loaded):
            _step(*each)
        assert fsdp.fingerprint(found, loaded) == fsdp.fingerprint(model, optimizer)
