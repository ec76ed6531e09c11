"""Faults are run on ranks of the test harness, and what the ranks said is judged.

A rank leaves a record in a folder of the fault: what it said and when, how its part of the job ended, and what came
afterwards. A rank that an exception ends waits a moment for the others, as long as an interpreter takes to end; if not
all of them have ended too, its process does, so that the others find out in the way that they do in a real job.
"""

from __future__ import annotations

import json
import os
import pkgutil
import re
import shutil
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch.distributed as dist

import tests.faults
from tests.faults.fault import STUCK, Fault
from tests.faults.job import Job, NotExpressible
from tests.helpers.ranks import RankError, RankPool
from tests.helpers.workers import Ending

PATIENCE = 2.0  # seconds, of the watchdog
WITHIN = 5.0  # seconds beyond it, until there must be a report
GROUP_TIMEOUT = 20.0  # seconds, of the process groups
TEARDOWN = 0.3  # seconds that an interpreter takes to end
CAUGHT = 5.0  # seconds until all ranks must have raised an error that they are said to catch

Key = tuple[str, str]  # phase and name


@cache
def table() -> dict[Key, Fault]:
    """Return all faults by their phase and name."""
    found: dict[Key, Fault] = {}
    for module in pkgutil.iter_modules(tests.faults.__path__):
        phases = getattr(import_module(f"tests.faults.{module.name}"), "FAULTS", {})
        for phase, faults in phases.items():
            for fault in faults:
                key = (phase, fault.name)
                if key in found:
                    raise ValueError(f"two faults have the name {key}")
                found[key] = fault
    return found


# --- on a rank --------------------------------------------------------------------------------------------------------


@dataclass
class Record:
    """A record says what became of a rank."""

    said: list[tuple[float, str]] = field(default_factory=list)  # on stderr, with the time
    error: str = ""  # that ended its part of the job; empty if it came to the end
    raised_at: float = 0.0
    afterwards: str = ""  # what failed in `Fault.after`
    state: str = ""  # that ranks which work together have alike, for the next fault
    expressible: bool = True


class _Listener:
    """Stands in the place of stderr, and notes what is written to it and when."""

    def __init__(self, said: list[tuple[float, str]]) -> None:
        self._said, self._stream = said, sys.stderr

    def write(self, text: str) -> int:
        self._said.append((time.monotonic(), text))
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _listening(said: list[tuple[float, str]]) -> Iterator[None]:
    sys.stderr = listener = _Listener(said)  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stderr = listener._stream


# torch 2.14 made it public, and the private one warns there.
_set_timeout = dist.set_timeout if hasattr(dist, "set_timeout") else dist.distributed_c10d._set_pg_timeout


def run_here(key: Key, folder: Path, make_job: type[Job]) -> None:
    """Collective. Do this rank's part of a fault, and leave a record of it."""
    from fsdp import set_watchdog
    from fsdp.distributed import watchdog

    fault = table()[key]
    set_watchdog(PATIENCE, raises=fault.raises)
    _set_timeout(timedelta(seconds=GROUP_TIMEOUT), dist.group.WORLD)
    job, record = make_job(fault, folder), Record()
    with _listening(record.said), job.stack:
        try:
            job.run(fault.program)
        except NotExpressible:
            record.expressible = False
            _leave(record, folder, job.rank)
            if not _all_have_ended(folder, job.world_size, TEARDOWN):
                os._exit(1)
        except BaseException as error:  # noqa: BLE001 - KeyboardInterrupt too
            record.raised_at = time.monotonic()
            record.error = f"{type(error).__name__}: {error}"
            if notes := getattr(error, "__notes__", None):
                record.error += "\n".join(["", *notes])
            _leave(record, folder, job.rank)
            if not _all_have_ended(folder, job.world_size, CAUGHT if fault.after else TEARDOWN):
                traceback.print_exception(error)
                watchdog.announce(error)
                os._exit(1)
        if fault.after and record.expressible:
            _leave(record, folder, job.rank)
            try:
                if not _all_have_ended(folder, job.world_size, CAUGHT):
                    raise AssertionError("not all ranks have come to their ends")
                job.run(fault.after)
            except Exception:  # noqa: BLE001 - whatever a broken job raises
                record.afterwards = traceback.format_exc(limit=-3)
    record.state = _state()
    _leave(record, folder, job.rank)


def _leave(record: Record, folder: Path, rank: int) -> None:
    place = folder / f"record {rank}"
    place.with_suffix(".new").write_text(json.dumps(vars(record)))
    place.with_suffix(".new").rename(place)


def _all_have_ended(folder: Path, world_size: int, patience: float) -> bool:
    until = time.monotonic() + patience
    while time.monotonic() < until:
        if all((folder / f"record {rank}").exists() for rank in range(world_size)):
            return True
        time.sleep(0.01)
    return False


def _state() -> str:
    """Return what ranks must have alike to understand each other in the next fault."""
    from fsdp.distributed import communicator

    tags = [f"{key[1:]} {one._tags}" for key, one in communicator.communicators.items()]
    return f"{communicator.number_of_groups()} groups, {tags}, {threads()} threads"


def threads() -> int:
    """Return how many Python threads live that are not the watchdog's."""
    import threading

    return sum(not each.name.startswith("fsdp ") for each in threading.enumerate())


# --- in the parent ----------------------------------------------------------------------------------------------------


@dataclass
class Verdict:
    """A verdict says what was found of a fault."""

    key: Key
    fault: Fault
    world_size: int
    expressible: bool = True
    seconds: float | None = None  # from the strike to the first report; None: nobody has said anything
    named: dict[str, bool | None] = field(default_factory=dict)  # rank, unit, remedy; None: not asked for
    afterwards: str = ""  # what is not as promised
    files: bool | None = None  # None: there were none
    took: float = 0.0
    words: str = ""  # of all ranks

    @property
    def is_detected(self) -> bool:
        return self.seconds is not None

    @property
    def is_in_time(self) -> bool:
        return self.seconds is not None and self.seconds <= PATIENCE + WITHIN

    @property
    def is_good(self) -> bool:
        said_well = self.is_in_time and False not in self.named.values()
        said = not self.is_detected if self.fault.quiet else said_well
        return self.expressible and said and not self.afterwards and self.files is not False


class Runner:
    """Runs faults, and keeps the processes as long as they are in step."""

    def __init__(self, folder: Path, pool: RankPool, job: type[Job] = Job) -> None:
        self._folder, self._pool, self._job = folder, pool, job
        self._count = 0

    def run(self, key: Key, world_size: int) -> Verdict:
        """Return what was found of one fault in one world."""
        fault, begun = table()[key], time.monotonic()
        self._count += 1
        folder = self._folder / f"fault{self._count}"
        folder.mkdir()
        endings, outputs = [Ending.RETURNED] * world_size, [""] * world_size
        headlines = [""] * world_size
        grace = 3.0 if fault.ends == STUCK else GROUP_TIMEOUT + 3
        ranks = self._pool(world_size, timeout=GROUP_TIMEOUT + 20, grace=grace)
        try:
            ranks.run(run_here, key, folder, self._job)
        except RankError as error:
            endings = [outcome.ending for outcome in error.outcomes]
            headlines = [outcome.headline for outcome in error.outcomes]
            outputs = error.outputs
        records = [_read(folder, rank) for rank in range(world_size)]
        if not _in_step(records, self._job):
            self._renew(world_size)
        verdict = judge(key, fault, records, endings, headlines, _struck(folder))
        verdict.took = time.monotonic() - begun
        if verdict.afterwards:
            verdict.words += "".join(f"\n--- rank {rank} printed\n{text}" for rank, text in enumerate(outputs) if text)
        verdict.files = None if fault.damages else _files_are_intact(folder)
        shutil.rmtree(folder, ignore_errors=True)
        return verdict

    def _renew(self, world_size: int) -> None:
        found = self._pool._sets.pop((world_size, "gloo"), None)
        if found is not None:
            found.kill()


def _in_step(records: Sequence[Record | None], job: type[Job]) -> bool:
    """Return whether the processes serve for another fault: nobody waits for a message that never comes."""
    states = {record and record.state for record in records}
    is_harmed = any(record is None or (record.error and job.transport_error in record.error) for record in records)
    return len(states) == 1 and not is_harmed


def _read(folder: Path, rank: int) -> Record | None:
    place = folder / f"record {rank}"
    return Record(**json.loads(place.read_text())) if place.exists() else None


def _struck(folder: Path) -> float | None:
    return max((float(place.read_text()) for place in folder.glob("struck *")), default=None)


def _files_are_intact(folder: Path) -> bool | None:
    from fsdp.checkpoint import newest, verify

    places = [place for place in (folder / "saved", newest(folder / "run")) if place is not None and place.exists()]
    if not places:
        return None
    try:
        for place in places:
            verify(place)
    except Exception:  # noqa: BLE001 - whatever it finds
        return False
    return True


def judge(
    key: Key,
    fault: Fault,
    records: Sequence[Record | None],
    endings: Sequence[Ending],
    headlines: Sequence[str],
    struck: float | None,
) -> Verdict:
    """Return what the records of all ranks amount to."""
    verdict = Verdict(key, fault, len(records))
    if any(record is not None and not record.expressible for record in records) or struck is None:
        verdict.expressible = False
        return verdict
    patterns = {"rank": fault.rank, "unit": fault.unit, "remedy": fault.remedy}
    told = [_told(record, list(patterns.values())) for record in records]
    hearers = [rank for rank in range(len(records)) if _must_say(fault, rank)]
    times = [when for rank in hearers for when, _ in told[rank]]
    if times:
        verdict.seconds = max(0.0, min(times) - struck)
    texts = ["\n".join(text for _, text in each) for each in told]
    for what, pattern in patterns.items():
        among = any if fault.by == "one" else all
        verdict.named[what] = among(re.search(pattern, texts[rank]) for rank in hearers) if pattern else None
    verdict.words = "".join(f"\n--- rank {rank} said\n{text[-1500:] or '(nothing)'}" for rank, text in enumerate(texts))
    verdict.afterwards = "; ".join(_broken(fault, records, endings, headlines))
    return verdict


def _must_say(fault: Fault, rank: int) -> bool:
    is_victim = fault.victim in (None, rank)
    if fault.ends:
        return not is_victim
    return {"all": True, "victim": is_victim}.get(fault.by, not is_victim)


def _told(record: Record | None, patterns: Sequence[str]) -> list[tuple[float, str]]:
    """Return the reports of a rank: errors, and what it has printed that somebody waits for."""
    if record is None:
        return []
    texts = [(when, text) for when, text in record.said if any(each and re.search(each, text) for each in patterns)]
    return texts + ([(record.raised_at, record.error)] if record.error else [])


def _broken(
    fault: Fault, records: Sequence[Record | None], endings: Sequence[Ending], headlines: Sequence[str]
) -> Iterator[str]:
    for rank, (record, ending, headline) in enumerate(zip(records, endings, headlines, strict=True)):
        is_expected = fault.ends and fault.ends in (headline or "") and fault.victim in (None, rank)
        if is_expected:
            continue
        if record is None:
            yield f"rank {rank} {ending.name.lower()}, {headline}"
        elif ending is Ending.DIED and "status 1" not in headline:
            yield f"rank {rank} {headline}"
        elif fault.quiet and record.error:
            yield f"rank {rank} raised {record.error}"
        elif record.afterwards:
            yield f"rank {rank} afterwards: {record.afterwards}"
