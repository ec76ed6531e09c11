"""Every placement trains as one process does: ZeRO-1, ZeRO-2 and hybrid sharding of the optimizer state."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp import DataParallelMeshDims, Placed, Placement, Placements, ShardingStrategy, reduce_gradients
from fsdp.distributed.dtensor import full_tensor
from tests.helpers.equality import assert_close
from tests.helpers.forms import FORMS, WRAPPERS, Beside, batch, inside
from tests.helpers.hybrid import group_option, mesh_of
from tests.helpers.models import nested_mlp, scaled_layers
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import Case, parametrize_cases, parametrize_pairs
from tests.helpers.parity import assert_parity, fully_sharded, sgd_with_momentum
from tests.helpers.ranks import RankPool

ZERO_1, ZERO_2 = ShardingStrategy.SHARD_OPTIM, ShardingStrategy.SHARD_OPTIM_GRADS
HFSDP = ShardingStrategy.HYBRID_SHARD_OPTIM

SHARDED = Placed(Placement.SHARDED, Placement.REPLICATED)
UNREDUCED = Placed(Placement.PARTIAL, Placement.PARTIAL)
UNSHARDED = Placed(Placement.REPLICATED, Placement.REPLICATED)

# Values without a name: gradients accumulate though parameters are sharded, or nothing is.
OTHERS = {
    "parameters on the host until backward": Placements.from_strategy(reshard_after_forward="host"),
    "sharded parameters, deferred gradients": Placements(parameters=SHARDED, gradients=UNREDUCED, optimizer=SHARDED),
    "replicas, deferred gradients": Placements(parameters=UNSHARDED, gradients=UNREDUCED, optimizer=UNSHARDED),
}

ON_BOTH = Placed(Placement.SHARDED, Placement.SHARDED)
HYBRID = {
    "HYBRID_SHARD_OPTIM": Placements.from_strategy(HFSDP),
    "summed over replicas at the step": Placements(
        parameters=SHARDED, gradients=Placed(Placement.SHARDED, Placement.PARTIAL), optimizer=ON_BOTH
    ),
    "ZeRO-1 over both axes": Placements(parameters=UNSHARDED, gradients=UNREDUCED, optimizer=ON_BOTH),
    "sharded along both axes": Placements(parameters=ON_BOTH, gradients=ON_BOTH, optimizer=ON_BOTH),
    "ZeRO-1 along the shard axis": Placements(parameters=UNSHARDED, gradients=UNREDUCED, optimizer=SHARDED),
}


@parametrize_cases(
    at_most=8,
    strategy=[ZERO_1, ZERO_2],
    world_size=[2, 3, 4, 1],
    form=[*WRAPPERS],
    accumulate=[1, 3],
    no_sync=[False, True],
    clip=[None, 0.1],
    bucket_cap_mb=[25, 0],
)
def test_kept_parameters_train_as_one_process_does(ranks: RankPool, world_size: int, case: Case) -> None:
    options = {"sharding_strategy": case.strategy, "bucket_cap_mb": case.bucket_cap_mb, **WRAPPERS[case.form]}
    ranks(world_size).run(_train, options, case.accumulate, case.no_sync, case.clip)


def _train(options: dict[str, Any], accumulate: int, no_sync: bool, clip: float | None) -> None:
    training = {"accumulate": accumulate, "no_sync": no_sync, "clip": clip}
    assert_parity(nested_mlp, sgd_with_momentum, wrap=fully_sharded(**options), **training)


@parametrize_cases(
    at_most=7,
    shape=[(2, 2), (1, 3), (3, 1), (2, 1)],
    how=["mesh", "pair"],
    form=[*WRAPPERS],
    accumulate=[1, 3],
    no_sync=[False, True],
    clip=[None, 0.1],
    bucket_cap_mb=[25, 0],
)
@on_ranks(lambda case: prod(case.shape))
def test_optimizer_state_over_replicas_trains_as_one_process_does(case: Case) -> None:
    group = group_option(case.how, *case.shape)
    options = {"sharding_strategy": HFSDP, "bucket_cap_mb": case.bucket_cap_mb, **WRAPPERS[case.form]}
    _train({"process_group": group, **options}, case.accumulate, case.no_sync, case.clip)


@parametrize_pairs(form=[*WRAPPERS], accumulate=[1, 2])
def test_parameters_kept_among_neighbours_train_as_one_process_does(
    ranks: RankPool, form: str, accumulate: int
) -> None:
    ranks(4).run(_train, {"reshard_after_forward": 2, **WRAPPERS[form]}, accumulate, False, 0.1)


def learn(model: Any, inputs: Tensor, step: int) -> Tensor:
    loss = model(inputs).square().mean()
    loss.backward()
    return loss.detach()


ZEROS = {strategy.name: {"placements": Placements.from_strategy(strategy)} for strategy in (ZERO_1, ZERO_2)}
VALUES: dict[str, dict[str, Any]] = {**ZEROS, **{name: {"placements": value} for name, value in OTHERS.items()}}


@parametrize_pairs(at_most=8, value=[*VALUES], form=FORMS, world_size=[2, 3], turns=[1, 2])
def test_every_value_trains_in_every_form(ranks: RankPool, value: str, form: str, world_size: int, turns: int) -> None:
    options = dict(VALUES[value])
    if form == "rows" and options["placements"].optimizer == UNSHARDED:
        options["dp_mesh_dims"] = DataParallelMeshDims(replicate="all")
    ranks(world_size).run(_train_beside, form, turns, options)


@parametrize_pairs(at_most=6, value=[*HYBRID], form=["flat", "orig"], shape=[(2, 2), (3, 1)], turns=[1, 2])
def test_every_hybrid_value_trains(ranks: RankPool, value: str, form: str, shape: tuple[int, int], turns: int) -> None:
    ranks(shape[0] * shape[1]).run(_train_beside, form, turns, {"placements": HYBRID[value]}, shape)


def _beside(form: str, options: dict[str, Any], shape: tuple[int, int] | None = None) -> Beside:
    both = Beside(scaled_layers, form, (nn.Linear,))
    if shape is not None:
        options = {**options, "process_group": mesh_of(*shape)}
    if "dp_mesh_dims" in options:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("all",))
        options = {**options, "mesh": mesh}
    both.start(**options)
    return both


def _train_beside(form: str, turns: int, options: dict[str, Any], shape: tuple[int, int] | None = None) -> None:
    both = _beside(form, options, shape)
    for step in range(2):
        for turn in range(1, turns):
            both.backward(learn, 10 * step + turn)
        both.step(learn, 10 * step)
    both.assert_equal()


# What happens between a backward and the next pass, while parameters are kept


def infer(both: Beside) -> None:
    with torch.no_grad():
        inputs = batch(0, 0)
        assert_close(both.model(inputs), both.plain(inputs))


def save(both: Beside) -> None:
    both.assert_equal()


def load(both: Beside) -> None:
    """Load values that differ in a single row, which is in the shard of a single rank."""
    state = {name: value.clone() for name, value in both.plain.state_dict().items()}
    state["first.weight"][0] += 1.0
    both.plain.load_state_dict(state)
    both.model.load_state_dict(state)


def summon(both: Beside) -> None:
    if both.form != "rows":
        with torch.no_grad(), both.model.summon_full_params():
            inside(both.model).second.bias[0] += 1.0
        with torch.no_grad():
            both.plain.second.bias[0] += 1.0


def clip(both: Beside) -> None:
    norms = [nn.utils.clip_grad_norm_(each.parameters(), 0.1) for each in (both.model, both.plain)]
    assert_close(full_tensor(norms[0]), norms[1])


def clip_values(both: Beside) -> None:
    reduce_gradients(both.model)  # torch's function is not replaced: it sees this rank's gradients
    for each in (both.model, both.plain):
        nn.utils.clip_grad_value_(each.parameters(), 0.01)


def drop(both: Beside) -> None:
    for optimizer in both.optimizers:
        optimizer.zero_grad()


def read(both: Beside) -> None:
    reduce_gradients(both.model)
    assert any(param.grad is not None and param.grad.isfinite().all() for param in both.model.parameters())


BETWEEN = [infer, save, load, summon, clip, clip_values, drop, read]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("value", [*ZEROS])
def test_what_is_done_between_a_backward_and_a_step(ranks: RankPool, value: str, form: str) -> None:
    ranks(2).run(_do_between, form, VALUES[value])


@pytest.mark.parametrize(
    ("value", "form"), [("HYBRID_SHARD_OPTIM", "flat"), ("summed over replicas at the step", "orig")]
)
def test_the_same_with_optimizer_state_over_replicas(ranks: RankPool, value: str, form: str) -> None:
    ranks(4).run(_do_between, form, {"placements": HYBRID[value]}, (2, 2))


def _do_between(form: str, options: dict[str, Any], shape: tuple[int, int] | None = None) -> None:
    both = _beside(form, options, shape)
    for number, act in enumerate(BETWEEN):
        both.backward(learn, 10 * number)
        act(both)
        both.step(learn, 10 * number + 1)  # after another backward
        both.backward(learn, 10 * number + 2)
        act(both)
        both.optimize()
        try:
            both.assert_equal()
        except AssertionError as error:
            raise AssertionError(f"{act.__name__}: {error}") from None


class Routed(nn.Module):
    """A layer that only batches use whose first element is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.routed = nn.Linear(5, 7), nn.Linear(7, 2), nn.Linear(7, 7)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        if inputs[0, 0] > 0:
            hidden = hidden + self.routed(hidden)
        return self.second(hidden)


SUMMED_AT_THE_STEP = Placements(
    parameters=SHARDED, gradients=Placed(Placement.SHARDED, Placement.PARTIAL), optimizer=SHARDED
)
DEFERRED = [OTHERS["sharded parameters, deferred gradients"], SUMMED_AT_THE_STEP]


@parametrize_pairs(value=DEFERRED, form=FORMS)
@on_ranks(4)
def test_layers_of_some_ranks_where_the_reduction_is_deferred(value: Placements, form: str) -> None:
    both = Beside(Routed, form)
    mesh = {"mesh" if form == "rows" else "process_group": mesh_of(2, 2)}
    both.start(placements=value, **mesh)
    for step in range(4):
        both.backward(learn, 2 * step)
        if step % 2:
            clip(both)
        both.step(learn, 2 * step + 1)
    both.assert_equal()
