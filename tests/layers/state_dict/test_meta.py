"""Wrapped models whose parameters have no values yet: what is refused, and what works before and after they get some.

`test_pain_point_20_...` are about starts that need more memory than what each rank will keep.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fsdp
from fsdp import EMA, FullyShardedDataParallel, MixedPrecision
from fsdp.engine.placeholder import Placeholder
from fsdp.layers.verify import describe_handle
from tests.helpers.calls import summon
from tests.helpers.copied_twins import through_pickle
from tests.helpers.equality import assert_same_state
from tests.helpers.memory import live_bytes
from tests.helpers.meta_models import (
    FLAT,
    FORMS,
    ORIGINAL,
    UNFLATTENED,
    Norms,
    Rotary,
    Zoo,
    initialise,
    mlp,
    on_meta,
    sharded,
    started,
    state_of,
    transformer,
)
from tests.helpers.models import Wrap
from tests.helpers.offload import on
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import Case, parametrize_cases, parametrize_pairs
from tests.helpers.parity import REGRESSION, TOKENS, Alone, adamw, assert_parity, sgd_with_momentum
from tests.helpers.ranks import RankPool

every_form = pytest.mark.parametrize("form", FORMS, ids=["flat", "original", "unflattened"])
INPUTS = torch.linspace(-1, 1, 20).view(4, 5)


def alone(**options: Any) -> Wrap:
    return sharded(process_group=Alone(), **options)


# Without values


def forward(model: Any) -> None:
    model(INPUTS)


def state_dict(model: Any) -> None:
    model.state_dict()


def state_dict_of_what_is_around(model: Any) -> None:
    nn.Sequential(model).state_dict()


def apply(model: Any) -> None:
    model.apply(initialise)


def reset(model: Any) -> None:
    model.reset_parameters()


def average(model: Any) -> None:
    EMA(model)


USES = [forward, state_dict, state_dict_of_what_is_around, summon, apply, reset, average]


@pytest.mark.parametrize("use", USES)
@every_form
def test_using_what_has_no_values_is_an_error_that_says_what_to_do(form: dict[str, Any], use: Any) -> None:
    model = on_meta(Norms, alone(allow_reset_parameters=True, **form))
    message = (
        r"Norms\)?: cannot [a-zA-Z ]+: 9 of its parameters and buffers have no values yet.*: norm\.weight, norm\.bias, "
        r".* and 4 more\. .*fsdp\.materialize\(model\).*param_init_fn.*load_state_dict"
    )
    with pytest.raises(RuntimeError, match=message):
        use(model)


def test_a_unit_that_has_values_computes_by_itself() -> None:
    model: Any = on_meta(Norms, alone())
    fsdp.materialize(model.entry)
    with pytest.raises(RuntimeError, match=r"7 of its .*: norm\.weight"):
        model(INPUTS)
    assert model.entry(INPUTS).shape == (4, 6)


def test_places_of_parameters_show_no_memory_that_was_never_written() -> None:
    model: Any = on_meta(Norms, alone())
    inside = model.module.module
    assert isinstance(inside.exit.weight, Placeholder)
    with pytest.raises(RuntimeError, match=r"exit\.weight has no values yet: .*fsdp\.materialize"):
        inside.exit.weight.sum()
    fsdp.materialize(model)
    assert not isinstance(inside.exit.weight, Placeholder)


@pytest.mark.parametrize("form", FORMS, ids=["flat", "original", "unflattened"])
def test_what_is_wrapped_while_the_default_device_is_meta_has_its_shards_in_memory(
    form: dict[str, Any], tmp_path: Path
) -> None:
    for offload in ({}, {"offload": "cpu"}, {"offload": "disk", "offload_folder": str(tmp_path)}):
        for machine in ("plain", "accelerated"):
            with on(machine):
                model = on_meta(mlp, alone(**form, **offload))
            assert {param.device.type for param in model.parameters()} == {"cpu"}


@on_ranks(2)
def test_dtensors_may_come_without_values() -> None:
    layer = nn.Linear(4, 2, device="meta")
    mesh = init_device_mesh("cpu", (2,))
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]))
    model = FullyShardedDataParallel(layer, process_group=Alone())
    with pytest.raises(RuntimeError, match="have no values yet"):
        model(torch.ones(1, 4))
    weight = torch.arange(8.0).view(2, 4)
    model.load_state_dict({"weight": weight, "bias": torch.zeros(2)})
    found = model.state_dict()["weight"]
    assert torch.equal(found.full_tensor() if isinstance(found, DTensor) else found, weight)


# Given values


@parametrize_cases(
    at_most=5,
    world_size=[1, 2, 3],
    make=[mlp, transformer],
    form=FORMS,
    offload=["no", "cpu", "disk"],
    make_optimizer=[sgd_with_momentum, adamw],
)
@on_ranks("world_size")
def test_it_trains_as_the_unsharded_model_that_was_started_alike(tmp_path: Path, case: Case) -> None:
    options: dict[str, Any] = dict(case.form)
    if case.offload != "no":
        options |= {"offload": case.offload} | ({"offload_folder": str(tmp_path)} if case.offload == "disk" else {})
    task = TOKENS if case.make is transformer else REGRESSION
    assert_parity(Starting(case.make), case.make_optimizer, wrap=sharded(**options), task=task)


class Starting:
    """`started` for the harness, which makes models by calling something with a wrap."""

    def __init__(self, make: Callable[[Wrap], nn.Module]) -> None:
        self._make = make

    def __call__(self, wrap: Wrap) -> nn.Module:
        return started(self._make, wrap)


@parametrize_pairs(world_size=[1, 2], form=FORMS)
@on_ranks("world_size")
def test_an_optimizer_may_be_made_before(form: dict[str, Any]) -> None:
    early, late = on_meta(mlp, sharded(**form)), on_meta(mlp, sharded(**form))
    optimizer = adamw(early.parameters())
    for model in (early, late):
        fsdp.materialize(model, param_init_fn=initialise, seed=0)
    for model, stepping in ((early, optimizer), (late, adamw(late.parameters()))):
        for step in range(2):
            model(INPUTS + step).square().mean().backward()
            stepping.step()
            stepping.zero_grad()
    assert_same_state(state_of(early), state_of(late))
    assert not torch.equal(early.state_dict()["scale"], torch.tensor(1.25))


@parametrize_pairs(
    policy=[True, MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)], world_size=[1, 2]
)
@on_ranks("world_size")
def test_mixed_precision_starts_from_values_in_full(policy: Any) -> None:
    model = started(Norms, sharded(mixed_precision=policy, compute_dtype=torch.bfloat16 if policy is True else None))
    assert_same_state(state_of(model), state_of(started(Norms)))
    assert model(INPUTS).isfinite().all()


def test_a_model_that_was_cast_before_gets_values_in_the_new_dtype() -> None:
    model: Any = on_meta(Rotary, alone()).half()
    fsdp.materialize(model, param_init_fn=initialise)
    assert {value.dtype for value in model.state_dict().values() if value.is_floating_point()} == {torch.float16}


def test_moving_a_model_leaves_what_has_no_values() -> None:
    model: Any = on_meta(Rotary, alone()).to("cpu")
    assert model.module.module.inv_freq.is_meta
    model.to_empty(device="cpu")
    with pytest.raises(RuntimeError, match=r"4 of its .*: inv_freq, steps, layer\.weight, layer\.bias"):
        model(INPUTS)


@parametrize_pairs(rank_with_values=[0, 1], form=[FLAT, ORIGINAL, UNFLATTENED])
def test_the_layout_is_that_of_ranks_with_values(ranks: RankPool, form: dict[str, Any], rank_with_values: int) -> None:
    first, second = ranks(2).run(_layout_with_values_on, form, rank_with_values)
    assert first == second


def _layout_with_values_on(form: dict[str, Any], rank: int) -> list[str]:
    model: Any = on_meta(Norms) if dist.get_rank() != rank else Norms(lambda module: module)
    if dist.get_rank() != rank:
        model.exit = nn.Linear(6, 1)  # a part of it has values here too
    wrapped: Any = sharded(**form)(model)
    return [describe_handle(handle) for handle in wrapped._unit.handles]


# Loaded


@parametrize_pairs(world_size=[1, 2], make=[Zoo, Norms, transformer], form=FORMS)
@on_ranks("world_size")
def test_a_state_dict_gives_values(make: Any, form: dict[str, Any]) -> None:
    expected = state_of(started(make))
    model = on_meta(make, sharded(**form))
    result = model.load_state_dict(expected)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert_same_state(state_of(model), expected)


@every_form
def test_what_a_state_dict_has_not_stays_without_values(form: dict[str, Any]) -> None:
    state = state_of(started(Norms))
    del state["norm.running_mean"], state["exit.weight"]
    model = on_meta(Norms, alone(**form))
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "norm.running_mean", "exit.weight"'):
        model.load_state_dict(state)
    model.load_state_dict(state, strict=False)
    with pytest.raises(RuntimeError, match=r"2 of its .* no values yet.*: exit\.weight, norm\.running_mean\."):
        model(INPUTS)
    fsdp.materialize(model)
    found = model.state_dict()
    assert_same_state({name: found[name] for name in state}, state)


def test_buffers_that_are_not_saved_are_missed_after_loading() -> None:
    model = on_meta(Rotary, alone())
    model.load_state_dict(state_of(started(Rotary)))
    with pytest.raises(RuntimeError, match=r"1 of its parameters and buffers have no values yet.*: inv_freq\."):
        model(INPUTS)
    fsdp.materialize(model, param_init_fn=initialise)
    assert torch.equal(model(INPUTS), started(Rotary)(INPUTS))


@every_form
def test_values_that_users_assign_count(form: dict[str, Any]) -> None:
    model: Any = on_meta(lambda wrap: nn.Linear(5, 1), alone(**form))
    inside = model.module.module
    inside.weight = nn.Parameter(torch.ones(1, 5))
    inside.bias = nn.Parameter(torch.zeros(1))
    assert torch.allclose(model(INPUTS), INPUTS.sum(1, keepdim=True))


def test_values_that_users_assign_to_pieces_count() -> None:
    model = on_meta(lambda wrap: nn.Linear(5, 1), alone(use_orig_params=True))
    weight, bias = model.parameters()
    weight.data, bias.data = torch.ones(1, 5), torch.zeros(1)
    assert torch.allclose(model(INPUTS), INPUTS.sum(1, keepdim=True))


def test_what_has_no_values_cannot_be_assigned() -> None:
    model: Any = alone()(nn.Linear(5, 1))
    model.module.module.weight = nn.Parameter(torch.ones(1, 5, device="meta"))
    with pytest.raises(RuntimeError, match="weight has no values now: the assigned tensor is on the meta device"):
        model(INPUTS)


# Copied


@parametrize_pairs(travel=[copy.deepcopy, through_pickle], form=FORMS)
@on_ranks(2)
def test_a_copy_has_no_values_either_and_gets_its_own(form: dict[str, Any], travel: Any) -> None:
    model = on_meta(Norms, sharded(**form))
    copied = travel(model)
    for each in (model, copied):
        with pytest.raises(RuntimeError, match="9 of its parameters and buffers have no values yet"):
            each(INPUTS)
    fsdp.materialize(copied, seed=0)
    assert torch.equal(copied(INPUTS), started(Norms)(INPUTS))
    with pytest.raises(RuntimeError, match="9 of its parameters and buffers have no values yet"):
        model(INPUTS)


# Memory

WIDTH = 200  # so that what is measured is weights


@parametrize_pairs(form=FORMS, when=["wrapping", "afterwards"])
@on_ranks(4)
def test_pain_point_20_no_rank_holds_more_than_its_shards_and_one_unit(form: dict[str, Any], when: str) -> None:
    before, found = live_bytes(), [0]

    def init(module: nn.Module) -> None:
        found.append(live_bytes() - before)
        initialise(module)

    wrap = sharded(**form, **({"param_init_fn": init} if when == "wrapping" else {}))
    layers = [wrap(nn.Linear(WIDTH, WIDTH, device="meta")) for _ in range(6)]
    model = nn.Sequential(*layers)
    if when == "afterwards":
        fsdp.materialize(model, param_init_fn=init)
    assert len(found) == 7
    unit = 4 * WIDTH * (WIDTH + 1)
    shards = 6 * 4 * math.ceil(unit / 4 / 4)
    assert max(found) <= 1.1 * (shards + unit)


@on_ranks(1)
def test_pain_point_20_values_that_are_there_cost_no_memory_while_others_are_drawn() -> None:
    model: Any = sharded()(Headed())
    state = {"layer.weight": torch.zeros(WIDTH, WIDTH), "layer.bias": torch.zeros(WIDTH)}
    model.load_state_dict(state, strict=False)
    del state
    before, found = live_bytes(), [0]

    def init(module: Any) -> None:
        found.append(live_bytes() - before)
        nn.init.zeros_(module.scale)

    fsdp.materialize(model, param_init_fn=init)
    assert len(found) == 2
    assert max(found) <= 1.1 * 4 * WIDTH * (WIDTH + 1)  # the unit, once


class Headed(nn.Module):
    """A large layer, and a small parameter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, device="meta")
        self.scale = nn.Parameter(torch.empty(1, device="meta"))


def _edges() -> list[tuple[torch.dtype, int]]:
    """The smallest and the largest number of each dtype of integers, as masks and zero points have them."""
    dtypes = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
    return [(dtype, edge) for dtype in dtypes for edge in (torch.iinfo(dtype).min, torch.iinfo(dtype).max)]


@pytest.mark.parametrize(("dtype", "value"), _edges())
def test_the_smallest_and_the_largest_integers_are_values(dtype: torch.dtype, value: int) -> None:
    def layer(wrap: Wrap) -> Any:
        module = nn.Linear(5, 2)
        module.register_buffer("table", torch.full((3,), value, dtype=dtype))
        return wrap(module)

    def draw(module: Any) -> None:
        module.reset_parameters()
        module.table.fill_(value)

    loaded, drawn = on_meta(layer, alone()), on_meta(layer, alone())
    loaded.load_state_dict(layer(alone()).state_dict())
    fsdp.materialize(drawn, param_init_fn=draw)
    for model in (loaded, drawn):
        model(INPUTS)
        assert model.state_dict()["table"].tolist() == [value] * 3
