"""More units, or parameters in a unit, cost in proportion: calls grow in a straight line. Objects are small."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp
from fsdp import FullyShardedDataParallel, fully_shard
from fsdp.layers.report import BACKWARD, FORWARD, WAIT, Record, Span, report_on
from tests.helpers.forms import FORMS, sharded
from tests.helpers.on_ranks import on_ranks
from tests.helpers.parity import Alone
from tests.helpers.paths import ROOT

PACKAGE = f"{ROOT / 'fsdp'}/"
SIZES = (8, 16, 24)  # units


def calls_of(function: Callable[[], Any]) -> int:
    """The calls of the package's functions, and the calls of others that these make."""
    count = 0

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        count += event in ("call", "c_call") and frame.f_code.co_filename.startswith(PACKAGE)

    gc.collect()
    gc.disable()
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def bend_of(counts: list[int]) -> int:
    """How far counts are from a straight line. A single call of every layer for every other layer makes 128."""
    _, few, more, most = counts  # the first loads modules
    return most - 2 * more + few


def uses(form: str, number: int, folder: Path, *, are_units: bool) -> dict[str, Callable[[], Any]]:
    """Collective. What users do with a model of so many layers, in order; each is a unit, or all are one."""
    model: Any = nn.Sequential(*(nn.Linear(2, 2) for _ in range(number)))
    found: dict[str, Any] = {}

    def wrap() -> None:
        for place in range(number) if are_units else ():
            model[place] = sharded(model[place])
        found["model"] = sharded(model)
        found["optimizer"] = torch.optim.Adam(found["model"].parameters())

    def sharded(module: nn.Module) -> nn.Module:
        if form == "rows":
            return fully_shard(module)
        return FullyShardedDataParallel(module, Alone(), use_orig_params=form == "orig")

    def train() -> None:
        found["model"](torch.ones(1, 2)).sum().backward()

    def summon() -> None:
        with found["model"].summon_full_params() if form != "rows" else nullcontext():
            pass

    def load() -> None:
        found["model"].load_state_dict(found["model"].state_dict())

    def traced() -> None:
        with fsdp.trace(found["model"]):
            train()

    def park() -> None:
        with fsdp.parked(found["model"], found["optimizer"]):
            pass

    wrapper: dict[str, Callable[[], Any]] = {
        "pickle": lambda: pickle.dumps(found["model"]),
        "local state": lambda: found["model"].load_local_state_dict(found["model"].local_state_dict()),
        "sharded state": lambda: found["model"].load_sharded_state_dict(found["model"].sharded_state_dict()),
        "optimizer state": lambda: found["model"].gather_full_optim_state_dict(found["optimizer"]),
    }
    return {
        "wrap": wrap,
        "first use": train,
        "step": train,
        "optimizer": lambda: found["optimizer"].step(),
        "state dict": lambda: found["model"].state_dict(),
        "load": load,
        "summon": summon,
        **(wrapper if form != "rows" else {}),
        "pickle states": lambda: pickle.dumps([found["model"].state_dict(), found["optimizer"].state_dict()]),
        "copy": lambda: copy.deepcopy(found["model"]),
        "trace": traced,
        "park": park,
        "save": lambda: fsdp.save(folder / f"{number}", found["model"], found["optimizer"]),
        "load files": lambda: fsdp.load(folder / f"{number}", found["model"], found["optimizer"]),
        "cast": lambda: found["model"].to(torch.float64),
    }


@on_ranks(1)
def test_calls_grow_in_proportion_to_the_units_on_disk(tmp_path: Path) -> None:
    counts = []
    for number in (2, *SIZES):
        options = {"offload": "disk", "offload_folder": tmp_path / f"{number}"}
        layers = [FullyShardedDataParallel(nn.Linear(2, 2), Alone(), **options) for _ in range(number)]
        model = FullyShardedDataParallel(nn.Sequential(*layers), Alone(), **options)
        counts.append(calls_of(lambda model=model: [model(torch.ones(1, 2)).sum().backward() for _ in range(3)]))
    assert abs(bend_of(counts)) <= 60, counts


def test_calls_grow_in_proportion_to_the_tensors_that_make_room_for_others() -> None:
    def stage_in_turn(stager: fsdp.StateDictStager, *trees: list[Tensor]) -> None:
        for tree in (*trees, *trees):
            stager.stage(tree)

    counts = []
    for number in (2, *SIZES):
        trees = [[torch.ones(2) for _ in range(number)] for _ in range(2)]
        stager = fsdp.StateDictStager(max_bytes=number * trees[0][0].nbytes)
        counts.append(calls_of(partial(stage_in_turn, stager, *trees)))
    assert abs(bend_of(counts)) <= 60, counts


@on_ranks(2)
def test_calls_grow_in_proportion_to_the_units_with_groups_of_their_own() -> None:
    own, counts = dist.new_group([dist.get_rank()], use_local_synchronization=True), []
    for number in (2, *SIZES):
        experts = [FullyShardedDataParallel(nn.Linear(2, 2), process_group=own) for _ in range(number)]
        model = FullyShardedDataParallel(nn.Sequential(nn.Linear(2, 2), *experts), sync_module_states=True)
        model(torch.ones(1, 2)).sum().backward()
        counts.append(calls_of(model.sharded_state_dict))
    assert abs(bend_of(counts)) <= 60, counts


@on_ranks(1)
def test_calls_of_a_step_grow_in_proportion_to_the_units_that_are_kept_until_it() -> None:
    counts = []
    for number in (2, *SIZES):
        options: dict[str, Any] = {"sharding_strategy": fsdp.ShardingStrategy.SHARD_OPTIM_GRADS}
        layers = [FullyShardedDataParallel(nn.Linear(2, 2), Alone(), **options) for _ in range(number)]
        model = FullyShardedDataParallel(nn.Sequential(*layers), Alone(), **options)
        optimizer = torch.optim.SGD(model.parameters())
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        counts.append(calls_of(optimizer.step))
    assert abs(bend_of(counts)) <= 60, counts


def test_calls_of_a_report_grow_in_proportion_to_the_units() -> None:
    counts = []
    for number in (2, *SIZES):
        units: Any = [SimpleNamespace(name=f"layers.{place}", handles=[]) for place in range(number)]
        texts = [(kind, f"{what}{unit.name}") for unit in units for kind, what in SPANS]
        spans = [Span(kind, text, time, time + 1) for time, (kind, text) in enumerate(texts)]
        counts.append(calls_of(lambda spans=spans, units=units: report_on(units, [Record(0, spans, [(0, 1)])])))
    assert abs(bend_of(counts)) <= 60, counts


SPANS = ((WAIT, "all-gather of "), (FORWARD, ""), (WAIT, "reduce-scatter of "), (BACKWARD, ""))


@pytest.mark.parametrize("is_after", [False, True])
@on_ranks(1)
def test_calls_of_the_first_use_grow_in_proportion_to_the_ties_between_units(is_after: bool) -> None:
    counts = []
    for number in (2, *SIZES):
        model: Any = nn.Sequential(*(nn.Linear(2, 2) for _ in range(number)))
        for first, second in zip(model[::2], model[1::2], strict=True) if not is_after else ():
            second.weight = first.weight
        for layer in (*model, model):
            fully_shard(layer)
        for first, second in zip(model[::2], model[1::2], strict=True) if is_after else ():
            second.weight = first.weight
        counts.append(calls_of(lambda model=model: model(torch.ones(1, 2)).sum().backward()))
    assert abs(bend_of(counts)) <= 60, counts


class Layers(nn.ModuleList):
    """Each layer is a module that other ranks may not run."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = fsdp.cond(layer, True, x)
        return x


@on_ranks(1)
def test_calls_grow_in_proportion_to_the_modules_that_not_every_rank_runs() -> None:
    counts = []
    for number in (2, *SIZES):
        layers = Layers(FullyShardedDataParallel(nn.Linear(2, 2), Alone()) for _ in range(number))
        model = FullyShardedDataParallel(layers, Alone())
        counts.append(calls_of(lambda model=model: model(torch.ones(1, 2)).sum().backward()))
    assert abs(bend_of(counts)) <= 60, counts


class Ignored(nn.Linear):
    """Counts how often it is looked through."""

    count = 0

    def modules(self) -> Iterator[nn.Module]:
        Ignored.count += 1
        return super().modules()


@on_ranks(1)
def test_the_first_use_looks_through_an_ignored_module_once_and_not_for_each_unit() -> None:
    ignored = Ignored(2, 2)
    blocks = [nn.Linear(2, 2) for _ in range(8)]
    model = fsdp.shard(nn.Sequential(ignored, *blocks), blocks, process_group=Alone(), ignored_modules=[ignored])
    before = Ignored.count
    model(torch.ones(1, 2)).sum().backward()
    assert Ignored.count - before == 1


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("are_units", [True, False], ids=["units", "parameters of a unit"])
@on_ranks(1)
def test_calls_grow_in_proportion_to_the_layers(form: str, are_units: bool, tmp_path: Path) -> None:
    counts: dict[str, list[int]] = {}
    for number in (2, *SIZES):  # the first loads modules
        for name, use in uses(form, number, tmp_path, are_units=are_units).items():
            counts.setdefault(name, []).append(calls_of(use))
    assert {name: bend for name, each in counts.items() if abs(bend := bend_of(each)) > 60} == {}


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_no_part_of_a_unit_has_more_attributes_than_python_stores_compactly(form: str) -> None:
    """CPython shares the keys of up to 30 attributes. An instance with more has a dictionary of its own, of 1.6 kB."""
    others = {id(each): each for each in gc.get_objects() if _is_part(type(each))}  # of models of other tests
    model = sharded(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), form, (nn.Linear,))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = [each for each in gc.get_objects() if _is_part(type(each)) and id(each) not in others]
    parts = [each for each in found if hasattr(each, "__dict__")]
    assert {"Unit", "FlatParamHandle", "GradientBuffer"} <= {type(each).__name__ for each in parts}
    assert {type(each).__name__: sorted(vars(each)) for each in parts if len(vars(each)) > 29} == {}


def _is_part(kind: type) -> bool:
    module = kind.__module__
    return isinstance(module, str) and module.startswith("fsdp.engine.") and not issubclass(kind, torch.Tensor)


@on_ranks(2)
def test_equal_row_parameters_share_a_specification_that_ends_with_them() -> None:
    # Of a size that no model of another test has, which may live yet.
    model: Any = fully_shard(nn.Sequential(*(fully_shard(nn.Linear(37, 37)) for _ in range(3))))
    spec = model[0].weight._spec
    assert spec is model[2].weight._spec
    assert spec is not model[0].bias._spec
    model(torch.ones(1, 37)).sum().backward()
    assert spec is model[1].weight.grad._spec
    ended = weakref.ref(spec)
    del model, spec
    gc.collect()
    assert ended() is None
