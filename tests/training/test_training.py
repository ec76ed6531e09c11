"""Sharded training is unsharded training: the same losses and weights, whatever the options.

At 2 ranks, where a sum has only one order, it equals DistributedDataParallel bit for bit. At any world size it
equals one process that sees all batches put together, but for float32 noise (`tests.helpers.parity.assert_parity`).

Grids are sampled by `tests.helpers.pairs`: not every combination of all options is tried, but every value of
every option, and many pairs of values.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp import ProcessGroupName
from tests.helpers.models import Wrap, keep
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import Case, parametrize_cases, parametrize_pairs
from tests.helpers.parity import (
    REGRESSION,
    TOKENS,
    MakeModel,
    Training,
    adam,
    adamw,
    assert_bit_equal,
    assert_parity,
    distance,
    float32_noise,
    fully_sharded,
    nested_mlp,
    sgd_with_momentum,
    tiny_transformer,
    train_alone,
    train_ddp,
    train_sharded,
)

STEPS = 2

OPTIMIZERS = {"sgd": sgd_with_momentum, "adam": adam, "adamw": adamw}
MODELS: dict[str, MakeModel] = {
    "mlp": nested_mlp,
    "transformer": tiny_transformer,
    "tied": partial(tiny_transformer, tied=True),
    "recomputed around units": partial(tiny_transformer, recompute="outside"),
    "recomputed inside units": partial(tiny_transformer, recompute="inside"),
    "recomputed around units, re-entrant": partial(tiny_transformer, recompute="outside", reentrant=True),
    "recomputed inside units, re-entrant": partial(tiny_transformer, recompute="inside", reentrant=True),
}
WRAPPING: dict[str, list[Any]] = {
    "nested": [True, False],
    "reshard_after_forward": [True, False],
    "flatten_parameters": [True, False],
}


def training_of(model: str, nested: bool, optimizer: str, **how: Any) -> Training:
    return Training(
        make_model=partial(MODELS[model], nested=nested),
        make_optimizer=OPTIMIZERS[optimizer],
        steps=STEPS,
        task=REGRESSION if model == "mlp" else TOKENS,
        **how,
    )


@parametrize_cases(at_most=7, model=list(MODELS), optimizer=list(OPTIMIZERS), **WRAPPING, accumulate=[1, 3])
@on_ranks(2)
def test_equals_distributed_data_parallel_bit_for_bit_at_2_ranks(case: Case) -> None:
    training = training_of(**case.only("model", "nested", "optimizer", "accumulate"))
    wrap = fully_sharded(**case.only("reshard_after_forward", "flatten_parameters"))
    assert_bit_equal(train_sharded(training, wrap), train_ddp(training))


@parametrize_cases(
    at_most=8,
    world_size=[3, 1, 2, 4],
    model=[name for name in MODELS if name != "tied"],
    optimizer=list(OPTIMIZERS),
    **WRAPPING,
    accumulate=[1, 3],
    clip=[None, 0.2],
)
@on_ranks("world_size")
def test_equals_one_process_within_float32_noise(case: Case) -> None:
    training = training_of(**case.only("model", "nested", "optimizer", "accumulate", "clip"))
    wrap = fully_sharded(**case.only("reshard_after_forward", "flatten_parameters"))
    options = {name: getattr(training, name) for name in ("task", "accumulate", "clip")}
    assert_parity(training.make_model, training.make_optimizer, STEPS, wrap=wrap, **options)


@pytest.mark.parametrize("model", ["mlp", "transformer", "tied"])  # recomputing changes nothing in one process
@on_ranks(3)
def test_the_noise_is_far_below_what_training_changes(model: str) -> None:
    # Else equal trainings would show nothing.
    if dist.get_rank():  # the same on every rank
        return
    training = training_of(model, nested=True, optimizer="adam")
    trained = train_alone(training)
    progress = distance(train_alone(replace(training, steps=0)), trained).weight
    noise = float32_noise(training, trained)
    assert max(noise.loss, noise.weight) < 1e-3 * progress


# The scale of gradients, which Adam and clipping would hide


@parametrize_pairs(at_most=4, world_size=[1, 2, 3, 4], accumulate=[1, 3])
@on_ranks("world_size")
def test_gradients_are_the_mean_over_ranks(accumulate: int) -> None:
    torch.set_default_dtype(torch.float64)
    for predivide in (None, 1.0, 3.0) if accumulate == 1 else (None,):
        for flatten_parameters in (True, False):
            wrap = fully_sharded(gradient_predivide_factor=predivide, flatten_parameters=flatten_parameters)
            sharded, plain = nested_mlp(wrap), nested_mlp(keep)
            for turn in range(accumulate):
                with sharded.no_sync() if turn < accumulate - 1 else torch.enable_grad():
                    sharded(_inputs(dist.get_rank(), turn)).sum().backward()
                for rank in range(dist.get_world_size()):
                    plain(_inputs(rank, turn)).sum().backward()
            before = {name: value.clone() for name, value in sharded.state_dict().items()}
            torch.optim.SGD(sharded.parameters(), lr=1.0).step()
            after = sharded.state_dict()
            for name, param in plain.named_parameters():
                expected = param.grad / dist.get_world_size()
                torch.testing.assert_close(before[name] - after[name], expected, rtol=1e-10, atol=1e-12)
                assert expected.abs().max() > 1e-6, name


def _inputs(rank: int, turn: int) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * rank + turn))


# The other options


GROUPS = ["default", "by name", "none", "world", "new"]


@parametrize_cases(
    at_most=8,
    world_size=[2, 3],
    group=["default", "new"],
    reduce_group=GROUPS,
    bucket_cap_mb=[25, 0, -1, 1e-4, 3e-4],  # in bytes 1e-4 is less than the smallest unit, 3e-4 some of them
    gradient_predivide_factor=[None, 1, 2.0, 3.0],
    disable_reshard_on_root=[True, False],
    compute_device=[None, "cpu", torch.device("cpu")],
    reshard_after_forward=[True, False],
)
@on_ranks("world_size")
def test_other_options_change_no_result(case: Case) -> None:
    options = dict(case.values)
    group, reduce_group = options.pop("group"), options.pop("reduce_group")
    reduce_groups: dict[str, Any] = {
        "default": {},
        "by name": {"process_group_reduce_scatter": ProcessGroupName.default},
        "none": {"process_group_reduce_scatter": None},
        "world": {"process_group_reduce_scatter": dist.group.WORLD},
        "new": {"process_group_reduce_scatter": dist.new_group() if reduce_group == "new" else None},
    }
    if group == "new":
        options["process_group"] = dist.new_group()
    wrap = fully_sharded(**options, **reduce_groups[reduce_group])
    assert_parity(nested_mlp, sgd_with_momentum, 4, wrap=wrap, accumulate=2, clip=1.0)


@pytest.mark.parametrize("group", ["WORLD", "half"])
@on_ranks(4)
def test_ranks_outside_the_group_take_no_part(group: str) -> None:
    # Two groups train side by side; each equals DistributedDataParallel over the same ranks.
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    own = dist.group.WORLD if group == "WORLD" else halves[dist.get_rank() // 2]
    sharded = nested_mlp(fully_sharded(process_group=own))
    module = nested_mlp(keep)
    replicated = nn.parallel.DistributedDataParallel(module, process_group=own)
    optimizers = [sgd_with_momentum(model.parameters()) for model in (sharded, replicated)]
    for step in range(3):
        for model, optimizer in zip((sharded, replicated), optimizers, strict=True):
            optimizer.zero_grad()
            model(_inputs(dist.get_rank(), step)).square().mean().backward()
            optimizer.step()
    sharded_state = sharded.state_dict()
    for name, value in module.state_dict().items():
        torch.testing.assert_close(sharded_state[name], value, msg=name)


@on_ranks(3)
def test_units_may_differ_in_their_options() -> None:
    assert_parity(_mixed, sgd_with_momentum, STEPS, wrap=fully_sharded(), accumulate=2, clip=1.0)


def _mixed(wrap: Wrap) -> nn.Module:
    made: list[nn.Module] = []

    def differently(module: nn.Module) -> nn.Module:
        if wrap is keep:
            return module
        number = len(made)
        options = {"reshard_after_forward": number % 2 == 0, "flatten_parameters": number % 3 != 0}
        made.append(fully_sharded(**options, bucket_cap_mb=number)(module))
        return made[-1]

    return nested_mlp(differently)
