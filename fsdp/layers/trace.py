"""`Trace` records what each rank did when: the forwards and backwards of units, and where ranks waited for whom.

While it records, an observer notes the times of the events of all units (`engine.observers`). All times are host
times: on a CPU the times of the work itself, on an accelerator the times at which it was queued (`torch.profiler` has
the device's times, under the same names).
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp.distributed import communicator
from fsdp.distributed.communicator import Communicator, during, is_aside, own_rank
from fsdp.distributed.consensus import from_everyone
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.observers import attached
from fsdp.engine.runtime import Runtime, runtime_of_root
from fsdp.engine.unit import Unit
from fsdp.layers.report import BACKWARD, FORWARD, STEP, WAIT, Record, Report, Span, keep, report_on
from fsdp.layers.summary import aligned, milliseconds
from fsdp.layers.verify import require_sharded

_COLORS = {FORWARD: "#4c78a8", BACKWARD: "#54a24b", WAIT: "#e45756", STEP: "#b279a2"}
_ROUNDS = 8  # of messages by which the ranks compare their clocks
_WIDTH, _ROW, _LEFT, _TOP = 1200, 44, 70, 50  # of the picture, in pixels
_DARK = "<style>@media (prefers-color-scheme: dark) { svg { color: #cfd0d0 } .ground { fill: #131416 } }</style>"
_ROWS = 30  # of the table
_NOT_YET = "nothing is recorded yet: run a step inside of `with fsdp.trace(model) as trace:`"


class Trace:
    """A recording of some steps of a sharded model on all ranks, made by `fsdp.trace`.

    ``str(trace)`` is a table of where the time went.

    Attributes:
        records: what each rank has noted, by ranks; the same on every rank, and empty until recording has ended.
    """

    def __init__(self, runtime: Runtime, path: str | os.PathLike[str] | None, steps: int | None) -> None:
        self.records: list[Record] = []
        self._runtime: Runtime | None = runtime  # until it has ended: a trace keeps no model alive
        self._path, self._steps = path, steps
        self._counted: torch.optim.Optimizer | None = None  # the one whose steps are
        self._report: Report | None = None
        self._spans: list[Span] = []
        self._memory: list[tuple[int, int]] = []
        self._open: dict[tuple[str, object], tuple[str, int]] = {}  # by kind and whose it is: name and begin
        self._undo = ExitStack()

    # --- recording ----------------------------------------------------------------------------------------------

    def __enter__(self) -> Trace:
        if self._steps is None:
            self.begin()
        return self  # else it has begun

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if kind is None:
            self.end()
        else:
            self._stop()  # others may not come to this point

    def begin(self) -> None:
        """Collective. Record from now on."""
        if self._runtime is None or self._memory:
            raise RuntimeError("this trace has been recorded: make another one by fsdp.trace()")
        self._clock = _Clock(self._runtime.root.everyone)
        try:
            self._follow(self._runtime)
        except BaseException:
            self._undo.close()
            raise

    def _follow(self, runtime: Runtime) -> None:
        self._undo.enter_context(attached(_Follower(self, runtime.root), runtime.units))
        communicator.wait_observers += (self._begin_wait,)
        self._undo.callback(self._forget_waits)
        self._note_memory()

    def _begin_wait(self, what: str) -> Callable[[], None]:
        return partial(self._end_wait, what, time.monotonic_ns())

    def _end_wait(self, what: str, begun: int) -> None:
        if not is_aside(threading.get_ident()):  # as those of a save in the background are
            self._spans.append(Span(WAIT, what, begun, time.monotonic_ns()))

    def _forget_waits(self) -> None:
        communicator.wait_observers = tuple(one for one in communicator.wait_observers if one != self._begin_wait)

    def end(self) -> None:
        """Collective. End recording, if it has not ended by itself, and let every rank know what all have noted."""
        runtime = self._runtime
        if runtime is None:
            return
        self._stop()
        with during("fsdp.trace()"):
            heard = from_everyone(runtime.root.everyone, Record(own_rank(), self._spans, self._memory))
            offsets = self._clock.offsets()
        del self._clock
        self.records = sorted(map(_on_common_clock, heard, offsets), key=lambda one: one.rank)
        self._report = report_on(runtime.units, self.records)
        keep(runtime.root, self._report)
        if self._path is not None and own_rank() == self.records[0].rank:
            self.save(self._path)

    def _stop(self) -> None:
        self._undo.close()
        self._runtime = self._counted = None
        self._open.clear()

    def _end_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._end(STEP, optimizer)
        if self._steps is None or any(kind == STEP for kind, _ in self._open):  # one steps by means of others
            return
        if self._counted is None:
            self._counted = optimizer
        if optimizer is self._counted:
            self._steps -= 1
            if not self._steps:
                self.end()

    def _begin(self, kind: str, of: object, name: str) -> None:
        self._open.setdefault((kind, of), (name, time.monotonic_ns()))

    def _end(self, kind: str, of: object) -> None:
        begun = self._open.pop((kind, of), None)
        if begun is not None:
            self._spans.append(Span(kind, *begun, time.monotonic_ns()))

    def _begin_backward(self, root: Unit, unit: Unit) -> None:
        self._begin(BACKWARD, root, root.name)
        if (BACKWARD, unit) not in self._open:
            self._end_backwards(but=root)  # of the unit before, which still waits for gradients of its weights
            self._begin(BACKWARD, unit, unit.name)

    def _end_if_complete(self, root: Unit, unit: Unit) -> None:
        if unit is not root and not unit.backward.missing:
            self._end(BACKWARD, unit)

    def _end_backwards(self, but: Unit | None = None) -> None:
        for kind, of in reversed(list(self._open)):
            if kind == BACKWARD and of is not but:
                self._end(kind, of)

    def _note_memory(self) -> None:
        nbytes = 0
        for handle in () if self._runtime is None else self._runtime.handles:
            gradients, shard = handle.gradients, handle.flat_param
            nbytes += shard.nbytes + (0 if shard.grad is None else shard.grad.nbytes)
            if not handle.unsharded.is_shard:
                nbytes += handle.unsharded.full.untyped_storage().nbytes()
            if not gradients.is_empty:
                nbytes += gradients.layout.padded_numel * gradients.dtype.itemsize
        self._memory.append((time.monotonic_ns(), nbytes))

    # --- what it shows ------------------------------------------------------------------------------------------

    def report(self) -> Report:
        """Return for each unit how long ranks waited for it, its bytes and padding, and how far ranks were apart.

        Raises:
            RuntimeError: before recording has ended.
        """
        if self._report is None:
            raise RuntimeError(_NOT_YET)
        return self._report

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace for Perfetto (ui.perfetto.dev) or ``chrome://tracing``. In one process.

        Args:
            path: of the file, in the JSON of Chrome's Trace Event Format.

        Raises:
            RuntimeError: before the block has ended.
        """
        start = self._start
        events: list[dict[str, Any]] = []
        for rank, spans, memory in self.records:
            whose = {"pid": rank, "tid": 0}
            events.append({**whose, "ph": "M", "name": "process_name", "args": {"name": f"rank {rank}"}})
            for kind, name, begin, end in spans:
                times = {"ts": (begin - start) / 1e3, "dur": (end - begin) / 1e3}
                events.append({**whose, **times, "ph": "X", "cat": kind, "name": _title(kind, name)})
            for when, nbytes in memory:
                counted = {"ts": (when - start) / 1e3, "args": {"bytes": nbytes}}
                events.append({**whose, **counted, "ph": "C", "name": "live bytes"})
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))

    def save_picture(self, path: str | os.PathLike[str]) -> None:
        """Draw a line for each rank, with what it did from left to right; waiting is red. In one process.

        Args:
            path: of the file, in SVG, which browsers show; they show names and times of what is pointed at.

        Raises:
            RuntimeError: before the block has ended.
        """
        start = self._start
        stop = max(span.end for record in self.records for span in record.spans)
        scale = (_WIDTH - _LEFT - 10) / max(stop - start, 1)
        height = _TOP + _ROW * len(self.records) + 30
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" '
            'font-size="13" color="black" fill="currentColor">',
            _DARK,
            f'<rect class="ground" width="{_WIDTH}" height="{height}" fill="white"/>',
        ]
        for number, (kind, color) in enumerate(_COLORS.items()):
            lines.append(f'<rect x="{_LEFT + 150 * number}" y="12" width="14" height="14" fill="{color}"/>')
            lines.append(f'<text x="{_LEFT + 150 * number + 20}" y="24">{kind}</text>')
        for row, record in enumerate(self.records):
            top = _TOP + _ROW * row
            lines.append(f'<text x="4" y="{top + _ROW / 2}">rank {record.rank}</text>')
            # The outer ones first, so that what lies within is drawn over them, a little lower.
            for span, depth in _nested(record.spans):
                inset, opacity = min(depth, 3) * 4, 1 if depth or span.kind in (WAIT, STEP) else 0.4
                x, width = _LEFT + (span.begin - start) * scale, max((span.end - span.begin) * scale, 0.3)
                lines.append(
                    f'<rect x="{x:.2f}" y="{top + inset}" width="{width:.2f}" height="{_ROW - 8 - inset}" '
                    f'fill="{_COLORS[span.kind]}" fill-opacity="{opacity}">'
                    f"<title>{escape(_title(span.kind, span.name))}, {milliseconds(span.end - span.begin)}</title>"
                    "</rect>"
                )
        for part in range(6):
            x, when = _LEFT + (_WIDTH - _LEFT - 10) * part / 5, (stop - start) * part // 5
            anchor = ("start", "middle", "end")[(part > 0) + (part == 5)]
            lines.append(f'<text x="{x:.0f}" y="{height - 8}" text-anchor="{anchor}">{milliseconds(when)}</text>')
        Path(path).write_text("\n".join([*lines, "</svg>\n"]), encoding="utf-8")

    def __str__(self) -> str:
        if not self.records:
            return "a trace that is not recorded yet"
        rows = [("", *_COLORS, "most live bytes")]
        waited: dict[int, int] = {}
        for record in self.records:
            times: dict[str, int] = defaultdict(int)
            for span, own in _own_times(record.spans):
                times[span.kind] += own
            waited[record.rank] = times[WAIT]
            most = max(nbytes for _, nbytes in record.memory)
            rows.append((f"rank {record.rank}", *(milliseconds(times[kind]) for kind in _COLORS), f"{most:,}"))
        lines = aligned(rows)
        least = min(waited, key=lambda rank: waited[rank])
        others = [nanoseconds for rank, nanoseconds in waited.items() if rank != least]
        if others:
            lines.append(
                f"Rank {least} waits least, for {milliseconds(waited[least])}; each of the others "
                f"for {milliseconds(sum(others) // len(others))} on average."
            )
        return "\n".join([*lines, "", *aligned(self._by_name())])

    def _by_name(self) -> list[tuple[str, ...]]:
        """Return the rows of a table of what took longest, without what lies within it."""
        found: dict[str, dict[int, int]] = defaultdict(lambda: dict.fromkeys((one.rank for one in self.records), 0))
        for record in self.records:
            for span, own in _own_times(record.spans):
                found[_title(span.kind, span.name)][record.rank] += own
        longest = sorted(found.items(), key=lambda one: -sum(one[1].values()))
        rows: list[tuple[str, ...]] = [("", "on average", "least", "most")]
        for name, times in longest[:_ROWS]:
            least, most = (choose(times, key=lambda rank: times[rank]) for choose in (min, max))
            mean = milliseconds(sum(times.values()) // len(times))
            rows.append((name, mean, *(f"{milliseconds(times[rank])} (rank {rank})" for rank in (least, most))))
        if len(longest) > _ROWS:
            rows.append((f"and {len(longest) - _ROWS} more", "", "", ""))
        return rows

    @property
    def _start(self) -> int:
        starts = [span.begin for record in self.records for span in record.spans]
        if not starts:
            raise RuntimeError(_NOT_YET)
        return min(*starts, *(when for record in self.records for when, _ in record.memory))


def trace(model: nn.Module, path: str | os.PathLike[str] | None = None, *, steps: int | None = None) -> Trace:
    """Collective. Record what all ranks do in some steps, to see where the time goes and who waits for whom. ::

        with fsdp.trace(model, "trace.json") as trace:
            for batch in itertools.islice(batches, 3):
                train(batch)
        if rank == 0:
            print(trace)
            trace.save_picture("trace.svg")

    Or the next three steps of a training loop, from this call on, without a block::

        trace = fsdp.trace(model, "trace.json", steps=3)

    Times are those of the host, with the clocks of all ranks compared at the beginning: exact to the time that a
    message takes.

    Args:
        model: the outermost wrapper, or module under `fully_shard`.
        path: where the first rank writes the trace for Perfetto (ui.perfetto.dev) when recording has ended, which is
            collective, too.
        steps: record from this call on, and end by itself after so many steps of the optimizer (of several for this
            model, of the one that steps first), or when the block ends, or by ``trace.end()``. None: the block.

    Raises:
        RuntimeError: if another module around this one is sharded and runs it.
        TypeError: if `model` is not sharded.
        ValueError: for less than one step.
    """
    if steps is not None and steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    runtime = runtime_of_root(require_sharded(model, "fsdp.trace()"), "fsdp.trace()", "module")
    made = Trace(runtime, path, steps)
    if steps is not None:
        made.begin()
    return made


class _Follower:
    """The observer by which a trace follows the units of a model."""

    def __init__(self, trace: Trace, root: Unit) -> None:
        self._trace, self._root = trace, root

    def forward(self, unit: Unit, inputs: Any) -> None:
        self._trace._begin(FORWARD, unit, unit.name)

    def forward_end(self, unit: Unit, output: Any, failed: bool) -> None:
        self._trace._end(FORWARD, unit)

    def backward(self, unit: Unit) -> None:
        self._trace._begin_backward(self._root, unit)

    def gradients_complete(self, unit: Unit, handle: FlatParamHandle) -> None:
        self._trace._end_if_complete(self._root, unit)

    def backward_end(self) -> None:
        self._trace._end_backwards()

    def unshard(self, unit: Unit) -> None:
        self._trace._note_memory()

    def reshard(self, unit: Unit) -> None:
        self._trace._note_memory()

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        self._trace._begin(STEP, optimizer, type(optimizer).__name__)

    def step_end(self, optimizer: torch.optim.Optimizer) -> None:
        self._trace._end_step(optimizer)


class _Clock:
    """Compares the clocks of all ranks.

    A rank ends a round after all ranks have begun it. So of two ranks, each begins a round before the other rank ends
    it, whatever their clocks show; this bounds the difference of the two clocks from both sides.
    """

    def __init__(self, everyone: tuple[Communicator, Communicator]) -> None:
        self._everyone = everyone
        self._rounds = []
        with during("fsdp.trace()"):
            for _ in range(_ROUNDS):
                begin = time.monotonic_ns()
                from_everyone(self._everyone, None)
                self._rounds.append((begin, time.monotonic_ns()))

    def offsets(self) -> list[int]:
        """Collective. Return for each rank how far its clock is ahead of the first one's, in nanoseconds."""
        first, *others = from_everyone(self._everyone, self._rounds)
        return [0, *(_offset(first, other) for other in others)]


def _offset(first: Sequence[tuple[int, int]], other: Sequence[tuple[int, int]]) -> int:
    """Return how far the other clock is ahead, from the begins and ends of the same rounds on both."""
    pairs = list(zip(first, other, strict=True))
    least = max(begin - end for (_, end), (begin, _) in pairs)
    most = min(end - begin for (begin, _), (_, end) in pairs)
    return 0 if least <= 0 <= most else (least + most) // 2  # one machine has one clock


def _on_common_clock(record: Record, ahead: int) -> Record:
    spans = [span._replace(begin=span.begin - ahead, end=span.end - ahead) for span in record.spans]
    return Record(record.rank, spans, [(when - ahead, nbytes) for when, nbytes in record.memory])


def _nested(spans: Sequence[Span]) -> list[tuple[Span, int]]:
    """Return spans by their begins, outer before inner, with the number of those that each lies within."""
    found: list[tuple[Span, int]] = []
    around: list[Span] = []
    for span in sorted(spans, key=lambda one: (one.begin, -one.end)):
        while around and around[-1].end <= span.begin:
            around.pop()
        found.append((span, len(around)))
        around.append(span)
    return found


def _own_times(spans: Sequence[Span]) -> list[tuple[Span, int]]:
    """Return each span with its nanoseconds, without those of what lies within it."""
    nested = _nested(spans)
    own = [span.end - span.begin for span, _ in nested]
    around: list[int] = []
    for number, (span, depth) in enumerate(nested):
        del around[depth:]
        if around:
            own[around[-1]] -= span.end - span.begin
        around.append(number)
    return [(span, time) for (span, _), time in zip(nested, own, strict=True)]


def _title(kind: str, name: str) -> str:
    return f"{kind}: {name}" if kind in (WAIT, STEP) else f"{kind} of {name}"
