"""The ranks' reports in a folder, one file of JSON lines for each rank, and a page that summarizes the files."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path

from fsdp.distributed.communicator import named

_ENDING = ".fsdp-report.jsonl"
_OWN = re.compile(r"^rank \d+: |(?<=^fsdp: )rank \d+ |(?m: for \d+ s\.$)")  # parts that differ between equal events
_MOST_BYTES = 1 << 20  # the maximum number of bytes to read from a file


class Kind(str, Enum):
    """A kind of event; earlier members are causes of later members."""

    DIFFERENCE = "the ranks differ"
    END = "ended by"
    RECOVERY = "recovers"
    WAIT = "waited too long"
    CLOSED = "saw that"  # the only event of a rank that the launcher ends immediately
    STOPPED = "was stopped by"
    FOLLOWED = "ended, because of another rank, by"


# `STOPPED` and `FOLLOWED` have the same priority, so their times determine the order.
_ORDER = {kind: number for number, kind in enumerate(Kind)} | {Kind.FOLLOWED: list(Kind).index(Kind.STOPPED)}


@dataclass
class Event:
    """An event on a rank, with its text and origin."""

    kind: Kind
    text: str
    rank: int
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    at: float = field(default_factory=time.time)  # seconds since 1970, by the clock of the rank's machine

    def write(self, folder: str | Path) -> None:
        """Append the event to the rank's file; errors of the file system are ignored."""
        with suppress(OSError):
            Path(folder).mkdir(parents=True, exist_ok=True)
            with open(Path(folder) / f"rank{self.rank:05}{_ENDING}", "a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(self)) + "\n")


def read_events(folder: str | Path) -> list[Event]:
    """Return the events in a folder, the oldest first; invalid lines are skipped."""
    found = []
    for path in sorted(Path(folder).glob(f"*{_ENDING}")):
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file.read(_MOST_BYTES).splitlines():
                with suppress(ValueError, TypeError, KeyError, AttributeError):
                    event = Event(**json.loads(line))
                    event.kind = Kind(event.kind)
                    event.text, event.rank, event.at = str(event.text), int(event.rank), float(event.at)
                    found.append(event)
    return sorted(found, key=lambda event: event.at)


def page(folder: str | Path) -> Iterator[str]:
    """Yield the lines of a page with the first cause, followed by the events that ranks have reported.

    Raises:
        ValueError: if the folder contains no reports.
    """
    events = read_events(folder)
    if not events:
        raise ValueError(f"{folder}: the folder contains no reports of ranks (set_watchdog(reports=...), FSDP_REPORTS)")
    others = {event.rank for event in events if event.kind is not Kind.CLOSED}
    events = [event for event in events if event.kind is not Kind.CLOSED or event.rank not in others]
    first = min(events, key=lambda event: (_ORDER[event.kind], event.at))
    yield f"The first cause, on rank {first.rank} ({first.host}, process {first.pid}):"
    yield from _lines(first)
    yield ""
    alike: dict[tuple[Kind, str], list[Event]] = {}
    for event in events:
        alike.setdefault((event.kind, _OWN.sub("", event.text)), []).append(event)
    for same in alike.values():
        ranks = {event.rank for event in same}
        times = f" ({len(same)} times, until {clock(same[-1].at)[-8:]})" if len(same) > len(ranks) else ""
        about = " the first cause, see above" if first in same else ""
        yield f"{clock(same[0].at)} {named(ranks)}:{about}{times}"
        yield from () if about else _lines(same[0])


def clock(at: float) -> str:
    """Format a time, given in seconds since 1970."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def _lines(event: Event) -> Iterator[str]:
    first, *rest = re.sub(r"^rank \d+: ", "", event.text).splitlines() or [""]
    yield f"  {event.kind.value}{'' if event.kind in (Kind.END, Kind.CLOSED) else ':'} {first}"
    yield from (f"    {line.strip()}" for line in rest)
