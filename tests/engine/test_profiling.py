"""What others see of a step: the ranges of a profiler, with the units' names, and the debug log of phases."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from fsdp.engine.unit import unit_of
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs

INPUTS = torch.linspace(-1, 1, 24).view(3, 8)


class Failing(nn.Linear):
    """Raises if it is told to."""

    fails = False

    def forward(self, inputs: Tensor) -> Tensor:
        if self.fails:
            raise ValueError("as told")
        return super().forward(inputs)


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(Failing(8, 8), nn.Tanh()), nn.Linear(8, 8))


def flat(**options: Any) -> nn.Module:
    options = {"bucket_cap_mb": 0, **options}
    model = blocks()
    for number, block in enumerate(model):
        model[number] = FullyShardedDataParallel(block, **options)
    return FullyShardedDataParallel(nn.Sequential(*model, nn.Linear(8, 2)), **options)


def orig() -> nn.Module:
    return flat(use_orig_params=True)


def rows() -> nn.Module:
    model = nn.Sequential(*blocks(), nn.Linear(8, 2))
    for block in model[:2]:
        fully_shard(block)
    return fully_shard(model)


FORMS = [flat, orig, rows]


def step(model: nn.Module) -> None:
    model(INPUTS).sum().backward()


@contextmanager
def profiled() -> Iterator[list[Any]]:
    """The events of what happens inside, when it has ended."""
    found: list[Any] = []
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        yield found
    found += profiler.events()


def _time(event: Any) -> tuple[float, float]:
    return event.time_range.start, event.time_range.end


@parametrize_pairs(world_size=[2, 3], form=FORMS)
@on_ranks("world_size")
def test_a_profiler_shows_each_pass_of_each_unit(form: Callable[[], nn.Module]) -> None:
    model = form()
    step(model)
    with profiled() as events:
        step(model)
    shown = {event.name: _time(event) for event in events if event.name.startswith("FSDP::")}
    names = ["0", "1", f"root ({'Sequential' if form is not rows else 'FSDPSequential'})"]
    for unit in names:
        for what in ("forward", "all_gather_wait", "backward", "reshard"):
            assert f"FSDP::{what} ({unit})" in shown, sorted(shown)
        if form is not rows:  # whose small units are gathered together
            assert f"FSDP::all_gather ({unit})" in shown, sorted(shown)
    computing = [_time(event) for event in events if event.name == "aten::tanh"]
    begin, end = shown["FSDP::forward (0)"]
    assert all(begin <= start < stop <= end for start, stop in computing)
    assert shown["FSDP::backward (1)"] < shown["FSDP::backward (0)"]
    if form is not rows:  # whose small gradients are reduced together
        for unit in names:
            assert shown[f"FSDP::reduce_scatter ({unit})"] < shown[f"FSDP::reduce_scatter_wait ({unit})"]
    assert {event.count for event in events if event.name == "FSDP::forward (0)"} == {1}
    step(model)
    assert all(unit_of(module)._range is None for module in model.modules() if unit_of(module) is not None)


@on_ranks(2)
def test_a_message_with_several_flat_parameters_of_one_unit_has_its_name() -> None:
    model = FullyShardedDataParallel(nn.Linear(8, 2), flatten_parameters=False)
    for _ in range(2):
        step(model)
    with profiled() as events:
        step(model)
    gathers = [event.name for event in events if event.name.startswith("FSDP::all_gather (")]
    assert gathers == ["FSDP::all_gather (root (Linear))"]


@on_ranks(2)
def test_a_profiler_shows_sums_over_replicas() -> None:
    model = flat(sharding_strategy=ShardingStrategy.NO_SHARD)
    step(model)
    with profiled() as events:
        step(model)
    assert "FSDP::all_reduce (1)" in {event.name for event in events}


@on_ranks(2)
def test_a_range_ends_with_a_forward_that_raises() -> None:
    model = flat()
    step(model)
    failing = next(module for module in model.modules() if isinstance(module, Failing))
    failing.fails = True
    with profiled() as events:
        with pytest.raises(ValueError, match="as told"):
            model(INPUTS)
        torch.ones(3).erf()
    failing.fails = False
    ended = [_time(event)[1] for event in events if event.name.startswith("FSDP::forward")]
    (after,) = (_time(event)[0] for event in events if event.name == "aten::erf")
    assert len(ended) == 2
    assert max(ended) <= after
    step(model)


class Kept(logging.Handler):
    """Keeps the messages."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextmanager
def logged(level: int) -> Iterator[list[str]]:
    """What loggers of the library say at this level and above."""
    logger, handler = logging.getLogger("fsdp"), Kept()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield handler.messages
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


FORWARD = "IDLE -> FORWARD, UNSHARDING -> UNSHARDED, FORWARD -> IDLE, UNSHARDED -> SHARDED"
BACKWARD = "SHARDED -> UNSHARDING, IDLE -> BACKWARD_PRE, UNSHARDING -> UNSHARDED, BACKWARD_PRE -> BACKWARD_POST"
REDUCTION = "UNSHARDED -> SHARDED, reduction started, reduction finished, BACKWARD_POST -> IDLE"


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_the_debug_log_tells_the_phases_of_units(form: Callable[[], nn.Module]) -> None:
    model = form()
    step(model)
    with logged(logging.INFO) as messages:
        step(model)
    assert messages == []
    with logged(logging.DEBUG) as messages:
        step(model)
    begin = f"rank {dist.get_rank()}, 0: "
    of_first = [message.removeprefix(begin) for message in messages if message.startswith(begin)]
    assert of_first == f"SHARDED -> UNSHARDING, {FORWARD}, {BACKWARD}, {REDUCTION}".split(", ")
