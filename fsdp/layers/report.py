"""`Report` contains the results of a trace for each unit: memory, waits of ranks, and delays between ranks.

The report is computed from the records when a trace ends, so untraced steps have no cost.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from fsdp.engine.unit import Unit
from fsdp.layers.summary import aligned, milliseconds, size_text

FORWARD, BACKWARD, WAIT, STEP = "forward", "backward", "wait", "optimizer step"
OTHERS = "all else"


class Span(NamedTuple):
    """An interval of time and the activity of a rank in it.

    Attributes:
        kind: "forward", "backward", "wait" (for a collective) or "optimizer step".
        name: the name of the unit, the collective, or the optimizer.
        begin, end: in nanoseconds since 1970, on the clock of the rank's machine.
    """

    kind: str
    name: str
    begin: int
    end: int


class Record(NamedTuple):
    """The record of a rank; times are in nanoseconds since 1970, on the clock of the rank's machine.

    Attributes:
        rank: the global rank.
        spans: intervals in the order of their ends; they are nested or disjoint.
        memory: times, with the bytes of shards, unsharded parameters and gradients.
    """

    rank: int
    spans: list[Span]
    memory: list[tuple[int, int]]


@dataclass(frozen=True)
class UnitReport:
    """A unit of a `Report`, with the activity of all ranks in the traced steps.

    Attributes:
        name: the name of its module in the model. The last entry "all else" is not a unit: it contains collectives
            outside units, such as comparisons between ranks.
        shard_bytes, unsharded_bytes: the bytes of its parameters on each rank, and all-gathered.
        padding: the number of padding elements on all ranks together.
        waited: nanoseconds of each rank's waits for its all-gathers and reductions. Collectives of several units
            count for the first of these units.
        live_peak: the peak bytes of shards, unsharded parameters and gradients of all units on a rank while the unit
            ran.
        skew: the average delay in nanoseconds between the first and the last rank at the end of its forward or
            backward.
        last_rank: the rank that ended these last, on average; None for a unit that did not run.
    """

    name: str
    shard_bytes: int
    unsharded_bytes: int
    padding: int
    waited: Mapping[int, int]
    live_peak: int
    skew: int
    last_rank: int | None


@dataclass(frozen=True)
class Report:
    """The results of a trace for each unit; see `Trace.report`. ``str(report)`` is a table.

    Attributes:
        steps: the number of recorded forwards of the outermost unit.
        units: the outermost unit first, and all other waits last.
    """

    steps: int
    units: tuple[UnitReport, ...]

    def __str__(self) -> str:
        ranks = sorted(self.units[0].waited)
        rows = [("", "shard", "unsharded", "padding", "waited on average", "most", "live peak", "ranks apart", "last")]
        for unit in self.units:
            most = max(ranks, key=lambda rank: unit.waited[rank])
            rows.append(
                (
                    unit.name,
                    size_text(unit.shard_bytes),
                    size_text(unit.unsharded_bytes),
                    str(unit.padding),
                    milliseconds(sum(unit.waited.values()) // len(ranks)),
                    f"{milliseconds(unit.waited[most])} (rank {most})",
                    size_text(unit.live_peak),
                    milliseconds(unit.skew),
                    "" if unit.last_rank is None else f"rank {unit.last_rank}",
                )
            )
        waited = {rank: sum(unit.waited[rank] for unit in self.units) for rank in ranks}
        least, *others = sorted(ranks, key=waited.__getitem__)
        lines = [f"{self.steps} steps on {len(ranks)} ranks", "", *aligned(rows)]
        if others:
            average = milliseconds(sum(map(waited.__getitem__, others)) // len(others))
            least_time = milliseconds(waited[least])
            lines += ["", f"Rank {least} waits least, for {least_time}, other ranks for {average} on average."]
        return "\n".join(lines)


def report_on(units: Sequence[Unit], records: Sequence[Record]) -> Report:
    """Return a report on units, the outermost first, from the records of all ranks."""
    names = {unit.name for unit in units}
    waited = {name: dict.fromkeys((record.rank for record in records), 0) for name in (*names, OTHERS)}
    passes: dict[str, list[list[Span]]] = {name: [[] for _ in records] for name in names}  # of each rank
    for number, record in enumerate(records):
        for span in record.spans:
            if span.kind == WAIT:
                waited[_waited_for(span.name, names)][record.rank] += span.end - span.begin
            elif span.kind != STEP and span.name in passes:
                passes[span.name][number].append(span)
    reports = [_report(unit, records, passes[unit.name], waited[unit.name]) for unit in units]
    reports.append(UnitReport(OTHERS, 0, 0, 0, waited[OTHERS], 0, 0, None))
    steps = sum(span.kind == FORWARD for span in passes[units[0].name][0])
    return Report(steps, tuple(reports))


def _waited_for(what: str, names: Collection[str]) -> str:
    """Return the name of the unit in a text such as "all-gather of layers.3 in forward"."""
    words = what.partition(" of ")[2].split(" ")
    # The longest match, because a name may consist of multiple words, and "root" may be a module in "root (Model)".
    starts = (" ".join(words[:count]) for count in range(len(words), 0, -1))
    return next((start for start in starts if start in names), OTHERS)


def _report(
    unit: Unit, records: Sequence[Record], passes: Sequence[Sequence[Span]], waited: Mapping[int, int]
) -> UnitReport:
    handles = unit.handles
    skews, behind = [], {record.rank: 0 for record in records}
    for same in zip(*passes, strict=False):
        first = min(span.end for span in same)
        skews.append(max(span.end for span in same) - first)
        for record, span in zip(records, same, strict=True):
            behind[record.rank] += span.end - first
    return UnitReport(
        name=unit.name,
        shard_bytes=sum(handle.flat_param.nbytes for handle in handles),
        unsharded_bytes=sum(handle.layout.unsharded_numel * handle.dtype.itemsize for handle in handles),
        padding=sum(handle.layout.padded_numel - handle.layout.numel for handle in handles),
        waited=waited,
        live_peak=max(
            (_most_in(span, one.memory) for one, each in zip(records, passes, strict=True) for span in each), default=0
        ),
        skew=sum(skews) // max(len(skews), 1),
        last_rank=max(behind, key=lambda rank: behind[rank]) if skews else None,
    )


def _most_in(span: Span, memory: Sequence[tuple[int, int]]) -> int:
    first, beyond = (bisect_right(memory, time, key=itemgetter(0)) for time in (span.begin, span.end))
    return max((nbytes for _, nbytes in memory[max(first - 1, 0) : beyond]), default=0)


_last: weakref.WeakKeyDictionary[Unit, Report] = weakref.WeakKeyDictionary()


def keep(root: Unit, report: Report) -> None:
    """Store a report as the last report of a model."""
    _last[root] = report


def last_report(root: Unit) -> Report:
    """Return the last report on a model; RuntimeError if there is none."""
    if root not in _last:
        raise RuntimeError(
            f"{root.name}: no trace was recorded. Run a step inside `with fsdp.trace(model):`, with the outermost "
            "module, before report()."
        )
    return _last[root]
