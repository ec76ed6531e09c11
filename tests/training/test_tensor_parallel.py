"""Tensor parallelism on one dimension of a mesh and sharded data parallelism on the other train as one process does."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fsdp import auto_wrap, enable_wrap, module_wrap_policy
from tests.helpers.models import Wrap, keep
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import Case, parametrize_cases, parametrize_pairs
from tests.helpers.parity import Training, adamw, assert_parity, sgd_with_momentum, train_sharded
from tests.helpers.precision_twins import PRECISIONS, Measured, fast_sgd_with_momentum
from tests.helpers.ranks import RankPool
from tests.helpers.tensor_parallel import (
    SENTENCES,
    Layer,
    assert_parallel_parity,
    cube,
    gpt,
    mesh_of,
    over_data,
    own_rows,
    perceptron,
)


@parametrize_cases(
    at_most=4,
    make_optimizer=[sgd_with_momentum, adamw],
    shape=[(2, 2), (1, 2), (2, 1)],
    kind=["sequence", "heads"],
    model=[
        {},
        {"vocabulary": True, "tied": True},
        {"vocabulary": True, "recompute": True},
        {"frozen": ("query", "norms.0", "narrow.bias")},
    ],
    options=[
        {},
        {"reshard_after_forward": False, "bucket_cap_mb": 0},
        {"flatten_parameters": False, "move_params_to_cpu": True},
        {"use_orig_params": True},
    ],
    training=[{"clip": 0.3}, {"accumulate": 2, "clip": 0.3}, {"accumulate": 2, "no_sync": False}],
)
@on_ranks(lambda case: prod(case.shape))
def test_every_pair_of_options_trains_as_one_process(case: Case) -> None:
    how = {"model": {"kind": case.kind, **case.model}, "options": case.options, **case.training}
    assert_parallel_parity(mesh_of(*case.shape), case.make_optimizer, **how)


@pytest.mark.parametrize(
    ("name", "options"),
    [("bfloat16_mixed", {}), ("float16_mixed", {"offload": "cpu", "use_orig_params": True}), ("bfloat16", {})],
)
def test_precisions_train_as_one_process_in_the_same(ranks: RankPool, name: str, options: dict[str, Any]) -> None:
    scales = ranks(4).run(_train_in, name, options)
    assert scales == scales[:1] * 4


def _train_in(name: str, options: dict[str, Any]) -> list[float]:
    mesh, precision = mesh_of(2, 2), PRECISIONS[name]
    plan = Training(make_model=gpt, make_optimizer=fast_sgd_with_momentum, task=SENTENCES)
    training = precision.training(plan)
    wrap = precision.wrap(process_group=mesh["dp"].get_group(), **options)
    trained = train_sharded(replace(training, make_model=partial(gpt, mesh=mesh)), wrap, own_rows(mesh))
    if dist.get_rank() == 0:  # the others have the same state dict
        Measured.of(training).compare(trained)
    return trained.scales.tolist()


# What is cut unevenly, or twice


@parametrize_pairs(at_most=3, hidden=[1, 7], options=[{}, {"use_orig_params": True}, {"flatten_parameters": False}])
@on_ranks(4)
def test_tensor_ranks_may_have_different_parts_or_none(hidden: int, options: dict[str, Any]) -> None:
    mesh = mesh_of(2, 2)
    make = partial(perceptron, mesh=mesh["tp"], hidden=hidden, placements=[[Shard(0)], [Shard(1)]])
    assert_parity(make, adamw, wrap=over_data(mesh, **options), own=own_rows(mesh), clip=0.1)


@pytest.mark.parametrize(
    "placements",
    [
        [[Shard(0), Shard(1)], [Shard(1), Replicate()]],
        [[Replicate(), Shard(0)], [Replicate(), Shard(1)]],
        [[Shard(0), Shard(0)], [Replicate(), Replicate()]],
    ],
    ids=str,
)
@on_ranks(4)
def test_a_mesh_may_have_two_tensor_dimensions(placements: list[Any]) -> None:
    mesh = cube()
    make = partial(perceptron, mesh=mesh["a", "b"], hidden=7, placements=placements)
    assert_parity(make, adamw, wrap=over_data(mesh), own=own_rows(mesh), clip=0.1)


# How modules meet their units


@on_ranks(4)
def test_units_may_take_and_return_dtensors() -> None:
    mesh = mesh_of(2, 2)
    make = partial(perceptron, mesh=mesh["tp"], hidden=7, placements=[[Shard(0)], [Shard(1)]], each=True)
    assert_parity(make, sgd_with_momentum, wrap=over_data(mesh), own=own_rows(mesh))


# A linear layer that is cut by rows returns what is still being summed over the tensor ranks.
@pytest.mark.parametrize(("kind", "units"), [(Layer, 3), (nn.Linear, 14)])
@on_ranks(4)
def test_auto_wrap_finds_units(kind: type[nn.Module], units: int) -> None:
    mesh = mesh_of(2, 2)
    assert_parity(
        partial(_auto_wrapped, mesh=mesh, kind=kind, units=units),
        sgd_with_momentum,
        wrap=over_data(mesh),
        own=own_rows(mesh),
        task=SENTENCES,
    )


def _auto_wrapped(wrap: Wrap, mesh: Any, kind: type[nn.Module], units: int) -> nn.Module:
    if wrap is keep:
        return gpt()
    assert isinstance(wrap, partial)
    model = gpt(lambda module: module, mesh=mesh)
    with enable_wrap(wrapper_cls=wrap.func, auto_wrap_policy=module_wrap_policy({kind}), **wrap.keywords):
        wrapped = wrap(auto_wrap(model))
    assert sum(type(module) is type(wrapped) for module in wrapped.modules()) == units
    return wrapped


class ReturnsItsWeight(nn.Module):
    """A module whose outputs lie in the memory of its parameter."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self) -> tuple[Tensor, ...]:
        again = self.weight.redistribute(placements=self.weight.placements)  # type: ignore[operator]
        return self.weight.to_local(), self.weight, self.weight.t().t(), again  # type: ignore[operator]


class Around(nn.Module):
    """Calls a unit between parameters of its own."""

    def __init__(self, unit: nn.Module, other: nn.Module) -> None:
        super().__init__()
        self.unit, self.other = unit, other

    def forward(self) -> Any:
        with torch.no_grad():
            return self.unit()


@on_ranks(4)
def test_outputs_outlive_the_parameter_that_they_are_parts_of() -> None:
    mesh, whole = mesh_of(2, 2), torch.arange(12.0).view(6, 2)
    unit = over_data(mesh)(ReturnsItsWeight(distribute_tensor(whole, mesh["tp"], [Shard(0)])))
    model = over_data(mesh)(Around(unit, nn.Linear(2, 2)))  # a root would keep its parameters
    local, *returned = model()
    assert unit._unit.handles[0].unsharded.full.untyped_storage().nbytes() == 0  # type: ignore[union-attr, operator, index]
    assert torch.equal(local, whole.chunk(2)[mesh["tp"].get_local_rank()])
    for tensor in returned:
        assert torch.equal(tensor.full_tensor(), whole)


def test_tensor_ranks_stay_equal_to_the_bit(ranks: RankPool) -> None:
    states = ranks(4).run(_train_and_keep)
    for state in states[1:]:
        assert all(torch.equal(value, states[0][name]) for name, value in state.items())


def _train_and_keep() -> dict[str, Tensor]:
    mesh = mesh_of(2, 2)
    training = Training(
        make_model=partial(gpt, mesh=mesh, kind="sequence"), make_optimizer=adamw, task=SENTENCES, clip=0.3
    )
    return train_sharded(training, over_data(mesh), own_rows(mesh)).weights
