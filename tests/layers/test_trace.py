"""`fsdp.trace` shows what each rank did when, and who was waited for; outside of it, nothing is recorded."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp
from fsdp import FullyShardedDataParallel, ShardingStrategy
from fsdp.distributed import communicator
from fsdp.distributed.communicator import Pending
from fsdp.engine.runtime import Runtime
from fsdp.engine.unit import Unit, units_in
from fsdp.layers import trace as tracing
from fsdp.layers.report import BACKWARD, FORWARD, STEP, WAIT, Record, Span, report_on
from fsdp.layers.steps import Steps
from tests.helpers.forms import sharded
from tests.helpers.on_ranks import on_ranks
from tests.helpers.ranks import RankPool

SLEEP = 0.05  # seconds


class Clock:
    """A clock of one rank, which stands still but for what is planted: on a busy machine any rank may be late.

    Rank 1 computes each layer for some time. The others wait for it as long, the next time that they wait for anything.
    """

    def __init__(self) -> None:
        self._now = self._owed = 0

    def time_ns(self) -> int:
        self._now += 1  # so that what follows is later
        return self._now

    def compute(self, seconds: float) -> None:
        if dist.get_rank() == 1:
            self._now += int(seconds * 1e9)
        else:
            self._owed += int(seconds * 1e9)

    @contextmanager
    def planted(self) -> Iterator[None]:
        original = communicator.finish
        self.__init__()  # type: ignore[misc]

        def finish(*args: Any) -> None:
            self._now, self._owed = self._now + self._owed, 0
            original(*args)

        with mock.patch.object(tracing, "time", self), mock.patch.object(communicator, "finish", finish):
            yield


CLOCK = Clock()


class Slow(nn.Module):
    """A layer that rank 1 computes for longer than others."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        CLOCK.compute(SLEEP)
        return self.linear(inputs)


def slow_layers(form: str = "flat") -> Any:
    torch.manual_seed(0)
    return sharded(nn.Sequential(Slow(), Slow(), Slow()), form, (Slow,))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    loss = model(torch.ones(2, 4)).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def traced(form: str, path: Path | None = None) -> fsdp.layers.trace.Trace:
    model = slow_layers(form)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer)
    with CLOCK.planted(), fsdp.trace(model, path) as trace:
        for _ in range(2):
            train(model, optimizer)
    return trace


# --- what it shows


@pytest.mark.parametrize("form", ["flat", "rows"])
def test_the_rank_that_others_wait_for_is_named(ranks: RankPool, form: str) -> None:
    first, *others = ranks(3).run(_recorded, form)
    assert all(other == first for other in others)
    records, table = first
    assert [record.rank for record in records] == [0, 1, 2]
    for record in records:
        waited = sum(span.end - span.begin for span in record.spans if span.kind == WAIT) / 1e9
        assert waited == pytest.approx(0.0 if record.rank == 1 else 2 * 3 * SLEEP, abs=1e-5)
    assert "Rank 1 waits least, for " in table


def _recorded(form: str) -> tuple[list[Record], str]:
    trace = traced(form)
    return trace.records, str(trace)


def test_every_unit_pass_wait_and_step_is_there(ranks: RankPool) -> None:
    records, table = ranks(2).run(_recorded, "flat")[0]
    for record in records:
        found = [(span.kind, span.name) for span in record.spans]
        for unit in ("0", "1", "2"):
            assert found.count((FORWARD, unit)) == 2
            assert found.count((BACKWARD, unit)) == 2
        assert found.count((FORWARD, "root (Sequential)")) == found.count((BACKWARD, "root (Sequential)")) == 2
        assert found.count((STEP, "SGD")) == 2
        assert (WAIT, "all-gather of 0 to 2 in forward") in found
        assert any(kind == WAIT and name.startswith("reduce-scatter of ") for kind, name in found)
        shards = 3 * 4 * 10  # bytes: half of 20 elements each
        assert min(nbytes for _, nbytes in record.memory) == shards
        assert max(nbytes for _, nbytes in record.memory) > 2 * shards
        assert all(begin <= end for _, _, begin, end in record.spans)
    assert [line.split()[0] for line in table.splitlines()[4:8]] == ["0", "1", "2", "all"]


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
def test_memory_is_noted_where_it_is_largest(ranks: RankPool, strategy: ShardingStrategy) -> None:
    ranks(2).run(_memory_is_noted_where_it_is_largest, strategy)


def _memory_is_noted_where_it_is_largest(strategy: ShardingStrategy) -> None:
    options = {"sharding_strategy": strategy, "bucket_cap_mb": 0}
    layers = [FullyShardedDataParallel(nn.Linear(4, 4), **options) for _ in range(3)]
    model = FullyShardedDataParallel(nn.Sequential(*layers), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer)
    shard = layers[0].params[0].nbytes
    with fsdp.trace(model) as trace, torch.no_grad():
        model(torch.ones(2, 4))
    unsharded = 2 * 80 if strategy is ShardingStrategy.FULL_SHARD else 0  # of a layer and the next one
    assert max(nbytes for _, nbytes in trace.records[0].memory) == 3 * shard + unsharded
    with fsdp.trace(model) as trace:
        train(model, optimizer)
    gradients = 3 * shard if strategy is ShardingStrategy.NO_SHARD else 80  # of the layer that computes
    assert max(nbytes for _, nbytes in trace.records[0].memory) == 3 * shard + unsharded + gradients


def test_the_file_is_in_the_trace_event_format(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2).run(_written, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "C"}
    assert {event["pid"] for event in events} == {0, 1}
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {"rank 0", "rank 1"}
    complete = [event for event in events if event["ph"] == "X"]
    assert min(event["ts"] for event in events if "ts" in event) == 0  # Perfetto drops what comes before
    assert all(event["dur"] >= 0 and event["cat"] for event in complete)
    titles = {event["name"] for event in complete}
    assert {"forward of 0", "backward of root (Sequential)", "optimizer step: SGD"} <= titles, titles
    assert any(title.startswith("wait: all-gather of ") for title in titles), titles
    assert all(event["args"]["bytes"] > 0 for event in events if event["ph"] == "C")


def _written(path: Path) -> None:
    traced("flat", path)


@on_ranks(2)
def test_a_number_of_steps_is_recorded_without_a_block(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    before = vars(Unit).copy()
    model, other = slow_layers(), slow_layers()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, other)]
    trace = fsdp.trace(model, path, steps=2)
    for number in range(4):
        assert bool(trace.records) is (number >= 2)
        for one, optimizer in zip((other, model), reversed(optimizers), strict=True):
            train(one, optimizer)
    for record in trace.records:
        assert sum(span.kind == STEP for span in record.spans) == 2
        assert sum(span == ("forward", "0", *span[2:]) for span in record.spans) == 2
    assert vars(Unit) == before
    dist.barrier()
    assert json.loads(path.read_text())["traceEvents"]
    with fsdp.trace(model, steps=5) as short:  # the block ends it sooner
        train(model, optimizers[0])
    assert short.report().steps == 1
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        fsdp.trace(model, steps=0)


def test_a_report_says_which_unit_was_waited_for_and_what_it_holds(ranks: RankPool) -> None:
    first, *others = ranks(3).run(_reported)
    assert all(other == first for other in others)
    report, trace = first
    assert report == trace
    assert report.steps == 2
    assert [unit.name for unit in report.units] == ["root (Sequential)", "0", "1", "2", "all else"]
    shard = 4 * 7  # bytes: a third of 20 elements, padded
    for unit in report.units[1:-1]:
        assert (unit.shard_bytes, unit.unsharded_bytes, unit.padding) == (shard, 3 * shard, 1)
        assert unit.live_peak >= 3 * shard + unit.unsharded_bytes
        assert unit.last_rank == 1
    waited = [sum(unit.waited[rank] for unit in report.units) / 1e9 for rank in range(3)]
    assert waited == pytest.approx([2 * 3 * SLEEP, 0.0, 2 * 3 * SLEEP], abs=1e-5)
    assert report.units[1].skew > 0.4 * SLEEP * 1e9
    assert "rank 1" in str(report)


def _reported() -> tuple[Any, Any]:
    model = slow_layers()
    with pytest.raises(RuntimeError, match=r"no trace was recorded"):
        model.report()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer)
    with CLOCK.planted():
        trace = fsdp.trace(model, steps=2)
        for _ in range(2):
            train(model, optimizer)
    return model.report(), trace.report()


@on_ranks(1)
def test_a_trace_that_has_ended_keeps_no_model_alive() -> None:
    model = slow_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fsdp.trace(model) as trace:
        train(model, optimizer)
    gone = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert gone() is None
    assert trace.records


# --- what it leaves alone


@pytest.mark.parametrize(("file", "error"), [("trace.json", "run a step"), ("missing/trace.json", "missing")])
@on_ranks(2)
def test_a_file_that_cannot_be_written_is_an_error_on_every_rank(tmp_path: Path, file: str, error: str) -> None:
    model = FullyShardedDataParallel(nn.Linear(2, 2))
    trace = fsdp.trace(model, tmp_path / file)
    trace.begin()
    if error == "missing":
        model(torch.ones(1, 2)).sum().backward()
    with pytest.raises((RuntimeError, OSError), match=error):
        trace.end()


@on_ranks(2)
def test_nothing_is_recorded_outside_and_nothing_changes_inside() -> None:
    before = {owner: dict(vars(owner)) for owner in (Runtime, Unit, Pending, Steps)}
    model, plain = slow_layers(), slow_layers()
    optimizer, other = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain))
    with fsdp.trace(model) as trace:
        losses = [train(model, optimizer) for _ in range(2)]
        wanted = [train(plain, other) for _ in range(2)]
    assert losses == wanted
    assert sum(span.kind == FORWARD for span in trace.records[0].spans) == 2 * 4  # of the traced model only
    given_up, waits = fsdp.trace(model), communicator.wait_observers
    with pytest.raises(ZeroDivisionError, match="a bad batch"):
        _fail_in(given_up, lambda: train(model, optimizer))
    assert not given_up.records
    assert communicator.wait_observers == waits
    assert not any(unit.observers.forward for unit in units_in(model._unit))
    assert {owner: dict(vars(owner)) for owner in before} == before


def _fail_in(trace: fsdp.layers.trace.Trace, step: Callable[[], Any]) -> None:
    with trace:
        step()
        raise ZeroDivisionError("a bad batch")


@on_ranks(1)
def test_misuse_is_told() -> None:
    with pytest.raises(TypeError, match=r"fsdp.trace\(\) needs the outermost FullyShardedDataParallel.*got a Linear"):
        fsdp.trace(nn.Linear(1, 1))
    model = slow_layers()
    model(torch.ones(1, 4))
    with pytest.raises(RuntimeError, match=r"fsdp\.trace\(\) is for the outermost sharded module"):
        fsdp.trace(model[0])
    trace = fsdp.trace(model)
    assert str(trace) == "a trace that is not recorded yet"
    with pytest.raises(RuntimeError, match="nothing is recorded yet: run a step inside"):
        trace.save("nowhere.json")
    with trace:
        model(torch.ones(1, 4))
    with pytest.raises(RuntimeError, match="has already begun: create another one"), trace:
        pass


def test_a_wait_is_of_the_unit_whose_whole_name_its_text_has() -> None:
    names = ["root (Model)", "root", "a, b", "a"]
    units: Any = [SimpleNamespace(name=name, handles=[]) for name in names]
    texts = [f"all-gather of {name} in forward" for name in names] + ["sum of other things"]
    spans = [Span(WAIT, text, 0, 10**place) for place, text in enumerate(texts)]
    report = report_on(units, [Record(0, spans, [(0, 1)])])
    assert [unit.waited[0] for unit in report.units] == [1, 10, 100, 1000, 10000]
