"""`Trace` records the times of all ranks' activity: the forwards and backwards of units, and waits in collectives.

An observer records the times of the events of all units (`engine.observers`). All times are host times: on a CPU, the
times of the computation; on an accelerator, the times at which the computation was queued. `torch.profiler` records
device times, under the same names.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp.distributed import communicator
from fsdp.distributed.communicator import during, is_aside, own_rank
from fsdp.distributed.consensus import done_by_all, from_everyone
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.observers import attached
from fsdp.engine.runtime import Runtime, runtime_of_root
from fsdp.engine.unit import Unit
from fsdp.layers.report import BACKWARD, FORWARD, STEP, WAIT, Record, Report, Span, keep, report_on
from fsdp.layers.verify import require_sharded

_NOT_YET = "nothing is recorded yet: run a step inside of `with fsdp.trace(model) as trace:`"


class Trace:
    """A recording of some steps of a sharded model on all ranks, created by `fsdp.trace`.

    ``str(trace)`` is the table of the `report`.

    Attributes:
        records: the records of all ranks, in their order; the same on every rank, and empty until recording has ended.
    """

    def __init__(self, runtime: Runtime, path: str | os.PathLike[str] | None, steps: int | None) -> None:
        self.records: list[Record] = []
        self._runtime: Runtime | None = runtime  # until recording has ended: a trace must not keep a model alive
        self._path, self._steps = path, steps
        self._counted: torch.optim.Optimizer | None = None  # the optimizer whose steps are counted
        self._report: Report | None = None
        self._recorder: _Recorder | None = None
        self._undo = ExitStack()

    def __enter__(self) -> Trace:
        if self._steps is None:
            self.begin()
        return self  # with `steps`, recording has already begun

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if kind is None:
            self.end()
        else:
            self._stop()  # without a collective, because other ranks may not have failed

    def begin(self) -> None:
        """Collective. Record from now on."""
        if self._runtime is None or self._recorder is not None:
            raise RuntimeError("this trace has already begun: create another one with fsdp.trace()")
        with during("fsdp.trace()"):
            from_everyone(self._runtime.root.everyone, None)  # so that all ranks begin together
        self._recorder = _Recorder(self._runtime, self._end_step)
        self._undo.enter_context(attached(self._recorder, self._runtime.units))
        communicator.wait_observers += (self._recorder.wait,)
        self._undo.callback(_forget_waits, self._recorder.wait)

    def end(self) -> None:
        """Collective. End recording, if it has not already ended, and exchange the records of all ranks.

        Raises:
            RuntimeError, OSError: on every rank, if the first rank cannot write the file, or has no events to write.
        """
        runtime, recorder = self._runtime, self._recorder
        if runtime is None or recorder is None:
            return
        self._stop()
        with during("fsdp.trace()"):
            heard = from_everyone(runtime.root.everyone, Record(own_rank(), recorder.spans, recorder.memory))
        self.records = sorted(heard, key=lambda one: one.rank)
        self._report = report_on(runtime.units, self.records)
        keep(runtime.root, self._report)
        if self._path is not None:
            is_first = own_rank() == self.records[0].rank
            save = partial(self.save, self._path) if is_first else lambda: None
            done_by_all([runtime.root.everyone], f"write the trace {self._path}", save)

    def _stop(self) -> None:
        self._undo.close()
        self._runtime = self._recorder = self._counted = None

    def _end_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._steps is None:
            return
        if self._counted is None:
            self._counted = optimizer
        if optimizer is self._counted:
            self._steps -= 1
            if not self._steps:
                self.end()

    def report(self) -> Report:
        """Return for each unit the waits of ranks, its bytes and padding, and the delay between ranks.

        Raises:
            RuntimeError: before recording has ended.
        """
        if self._report is None:
            raise RuntimeError(_NOT_YET)
        return self._report

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace for Perfetto (ui.perfetto.dev) or ``chrome://tracing``. Not collective.

        Args:
            path: the path of the file, which has the JSON format of Chrome's trace events.

        Raises:
            RuntimeError: before recording has ended.
        """
        starts = [span.begin for record in self.records for span in record.spans]
        if not starts:
            raise RuntimeError(_NOT_YET)
        start = min(*starts, *(when for record in self.records for when, _ in record.memory))
        events: list[dict[str, Any]] = []
        for rank, spans, memory in self.records:
            whose = {"pid": rank, "tid": 0}
            events.append({**whose, "ph": "M", "name": "process_name", "args": {"name": f"rank {rank}"}})
            for kind, name, begin, end in spans:
                times = {"ts": (begin - start) / 1e3, "dur": (end - begin) / 1e3}
                title = f"{kind}: {name}" if kind in (WAIT, STEP) else f"{kind} of {name}"
                events.append({**whose, **times, "ph": "X", "cat": kind, "name": title})
            for when, nbytes in memory:
                counted = {"ts": (when - start) / 1e3, "args": {"bytes": nbytes}}
                events.append({**whose, **counted, "ph": "C", "name": "live bytes"})
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))

    def __str__(self) -> str:
        return "a trace that is not recorded yet" if self._report is None else str(self._report)


def trace(model: nn.Module, path: str | os.PathLike[str] | None = None, *, steps: int | None = None) -> Trace:
    """Collective. Record the activity of all ranks during some steps, to analyze run times and waits between ranks. ::

        with fsdp.trace(model, "trace.json") as trace:
            for batch in itertools.islice(batches, 3):
                train(batch)
        if rank == 0:
            print(trace)

    For example, the next three steps of a training loop can be recorded without a block::

        trace = fsdp.trace(model, "trace.json", steps=3)

    Times are host times. To compare ranks on multiple machines, synchronize the clocks of the machines (NTP, PTP).

    Args:
        model: the outermost wrapper, or module under `fully_shard`.
        path: optional, the path where the first rank writes the trace for Perfetto (ui.perfetto.dev) when recording
            ends, which is also collective.
        steps: optional, the number of steps to record from this call on. Only steps of the first optimizer to step are
            counted. Recording also ends with the block, or in ``trace.end()``. By default, the block is recorded.

    Raises:
        RuntimeError: if an enclosing sharded module runs this module.
        TypeError: if `model` is not sharded.
        ValueError: if `steps` is less than 1.
    """
    if steps is not None and steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    runtime = runtime_of_root(require_sharded(model, "fsdp.trace()"), "fsdp.trace()")
    made = Trace(runtime, path, steps)
    if steps is not None:
        made.begin()
    return made


# The bytes of all units are counted again after this number of events for each unit of the model.
_EVENTS_PER_UNIT = 0.25


def _bytes_of(unit: Unit) -> int:
    """Return the bytes of a unit's shards, unsharded parameters and gradients."""
    nbytes = 0
    for handle in unit.handles:
        gradients, shard = handle.gradients, handle.flat_param
        nbytes += shard.nbytes + (0 if shard.grad is None else shard.grad.nbytes)
        if not handle.unsharded.is_shard:
            nbytes += handle.unsharded.full.untyped_storage().nbytes()
        if not gradients.is_empty:
            nbytes += gradients.layout.padded_numel * gradients.dtype.itemsize
    return nbytes


class _Recorder:
    """The observer of this rank's activity; `stepped` is called after each optimizer step."""

    def __init__(self, runtime: Runtime, stepped: Callable[[torch.optim.Optimizer], None]) -> None:
        self.spans: list[Span] = []
        self.memory: list[tuple[int, int]] = []
        self._runtime, self._stepped = runtime, stepped
        self._open: dict[tuple[str, object], tuple[str, int]] = {}  # by kind and unit or optimizer: name and begin
        self._bytes: dict[Unit, int] = {}  # at the last count
        self._total = 0  # the sum of these bytes
        self._events = 0  # since the last count of all units
        self._note_memory()

    def _begin(self, kind: str, of: object, name: str) -> None:
        self._open.setdefault((kind, of), (name, time.time_ns()))

    def _end(self, kind: str, of: object) -> None:
        begun = self._open.pop((kind, of), None)
        if begun is not None:
            self.spans.append(Span(kind, *begun, time.time_ns()))

    def wait(self, what: str) -> Callable[[], None]:
        begun = time.time_ns()

        def end() -> None:
            if not is_aside(threading.get_ident()):  # without waits of a background save
                self.spans.append(Span(WAIT, what, begun, time.time_ns()))

        return end

    def forward(self, unit: Unit, inputs: Any) -> None:
        self._begin(FORWARD, unit, unit.name)

    def forward_end(self, unit: Unit, output: Any, failed: bool) -> None:
        self._end(FORWARD, unit)

    def backward(self, unit: Unit) -> None:
        root = self._runtime.root
        self._begin(BACKWARD, root, root.name)
        if (BACKWARD, unit) not in self._open:
            self._end_backwards(but=root)  # of the previous unit, which still waits for gradients of its weights
            self._begin(BACKWARD, unit, unit.name)

    def gradients_complete(self, unit: Unit, handle: FlatParamHandle) -> None:
        if unit is not self._runtime.root and not unit.backward.missing:
            self._end(BACKWARD, unit)

    def backward_end(self) -> None:
        self._end_backwards()
        self._note_memory()

    def _end_backwards(self, but: Unit | None = None) -> None:
        for kind, of in reversed(list(self._open)):
            if kind == BACKWARD and of is not but:
                self._end(kind, of)

    def unshard(self, unit: Unit) -> None:
        self._note_memory(unit)

    reshard = unshard

    def _note_memory(self, of: Unit | None = None) -> None:
        """Record the bytes of all units. Only the given unit is counted; without a unit, or periodically, all units."""
        units = self._runtime.units
        self._events += 1
        if of is None or self._events >= _EVENTS_PER_UNIT * len(units):
            self._bytes, self._events = {unit: _bytes_of(unit) for unit in units}, 0
            self._total = sum(self._bytes.values())
        else:
            before, self._bytes[of] = self._bytes[of], _bytes_of(of)
            self._total += self._bytes[of] - before
        self.memory.append((time.time_ns(), self._total))

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        self._begin(STEP, optimizer, type(optimizer).__name__)

    def step_end(self, optimizer: torch.optim.Optimizer) -> None:
        self._end(STEP, optimizer)
        if not any(kind == STEP for kind, _ in self._open):  # not for steps inside a step of another optimizer
            self._stepped(optimizer)


def _forget_waits(observer: Callable[[str], Callable[[], None]]) -> None:
    communicator.wait_observers = tuple(one for one in communicator.wait_observers if one != observer)
