"""A watchdog that looks only while all ranks stand still, for tests that must not depend on the machine's speed.

A test of what is reported when ranks wait for each other has an impatient watchdog. On a busy machine, a rank that is
on its way to the place where it stops takes longer than that, and the report would be of this. `Standing` therefore
holds the watchdog back until all ranks have come to where they stop. A rank that is late for the test waits in
`Standing.until` for what it is late for, such as a report, and for no number of seconds.

A thread on each rank takes samples of what the main thread executes, and publishes how many of them were alike. All
ranks stand still if each has published several such samples since this rank has last moved. The samples are counted on
each rank, so a process that gets little of the processor delays the result and does not change it.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch.distributed as dist

from fsdp import set_watchdog
from fsdp.distributed import communicator, messages, watchdog

BOUND = 100.0  # seconds until what is waited for must have happened
INTERVAL = 0.04  # seconds between two samples
ENOUGH = 4  # samples that are alike
MAIN = Path("/proc/self/stat")  # of the main thread
_NUMBERS = count()  # of the objects of this process: the keys in the store are of one of them


class Standing:
    """The knowledge of a rank about whether all ranks stand still, and what the watchdog has done since."""

    def __init__(self, rank: int, world_size: int, store: Any) -> None:
        self._rank, self._others = rank, [each for each in range(world_size) if each != rank]
        self._store = dist.PrefixStore(f"standing {next(_NUMBERS)}", store)
        self._main = threading.main_thread().ident
        self._are_still, self._is_over = threading.Event(), threading.Event()
        self._events: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._asked = dict.fromkeys((False, True), time.monotonic())  # when this rank was last asked
        self._thread = threading.Thread(target=self._sample, name="fsdp samples", daemon=True)

    def until(self, *events: str, times: int = 1) -> None:
        """Block until each of these has happened so often on this rank.

        The watchdogs of all ranks look no more when no rank is left that waits here.

        Args:
            events: "report", which this rank has made or was sent; "end" of this rank's waits because of it; "look" of
                this rank at its own wait; "question" of another rank where this one is. "question aside" and so on are
                those about waits of threads beside the main one.
        """
        self._store.add("asked", 1)
        with self._changed:
            is_done = self._changed.wait_for(lambda: all(self._events[each] >= times for each in events), BOUND)
        assert is_done, f"within {BOUND:g} s there was only {dict(self._events)}"
        self._store.add("done", 1)

    def note(self, event: str, is_aside: bool = False) -> None:
        with self._changed:
            self._events.update([event, f"{event} aside"] if is_aside else [event])
            self._changed.notify_all()

    @property
    def may_look(self) -> bool:
        if not self._are_still.is_set():
            return False
        done = self._store.add("done", 0)
        return done == 0 or done < self._store.add("asked", 0)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _sample(self) -> None:
        before: Any = None
        moves = alike = 0
        first: dict[int, tuple[int, int]] = {}  # what each other rank had published, since this one stands still
        while not self._is_over.wait(INTERVAL):
            self._hear_questions()
            place = self._place()
            alike = alike + 1 if place == before else 0
            if not alike:
                before, moves, first = place, moves + 1, {}
            with suppress(RuntimeError):  # the store ends with its process
                self._store.set(str(self._rank), f"{moves} {alike}")
                found = {each: self._published(each) for each in self._others}
                for rank, published in found.items():
                    if rank not in first or first[rank][0] != published[0]:
                        first[rank] = published
                are_still = alike >= ENOUGH and all(found[each][1] - first[each][1] >= ENOUGH for each in found)
                (self._are_still.set if are_still else self._are_still.clear)()

    def _hear_questions(self) -> None:
        for looks in (each for one in list(watchdog.watchdogs.values()) for each in one._looks):
            if looks.questioned_at > self._asked[looks.is_aside]:
                self._asked[looks.is_aside] = looks.questioned_at
                self.note("question", looks.is_aside)

    def _place(self) -> Any:
        """Return what the main thread executes, and the waits of all threads; something new while it runs, or could."""
        if MAIN.exists() and MAIN.read_text().rpartition(")")[2].split()[0] == "R":  # which Linux tells
            return object()
        frame: FrameType | None = sys._current_frames().get(self._main or 0)
        frames = []
        while frame is not None:
            frames.append((id(frame), frame.f_lasti))
            frame = frame.f_back
        return frames, dict(communicator.waits)

    def _published(self, rank: int) -> tuple[int, int]:
        if not self._store.check([str(rank)]):
            return -1, 0
        moves, alike = self._store.get(str(rank)).split()
        return int(moves), int(alike)


@contextmanager
def standing_on(group: Any) -> Iterator[Standing]:
    """Collective. Take samples of the ranks of a group."""
    standing = Standing(group.rank(), group.size(), group.get_group_store().clone())
    standing.start()
    try:
        yield standing
    finally:
        standing.stop()


@contextmanager
def given_up(group: Any) -> Iterator[None]:
    """Collective. End the waits on a group on gloo, as its timeout does, when all ranks stand still."""
    is_left = threading.Event()

    def give_up_when_still() -> None:
        while not is_left.wait(INTERVAL):
            if standing.may_look:
                messages.give_up(group)
                return

    with standing_on(group) as standing:
        thread = threading.Thread(target=give_up_when_still, daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_left.set()
            thread.join()


@contextmanager
def watched(patience: float = 0.2, *, raises: bool = False) -> Iterator[Standing]:
    """Collective. Set a watchdog on the default process group that looks only while all ranks stand still."""
    look, show, give_up = (getattr(watchdog.Watchdog, each) for each in ("_look", "_show", "_give_up"))

    def look_if_still(self: Any, looks: Any, *args: Any) -> None:
        if standing.may_look:
            look(self, looks, *args)
            standing.note("look", looks.is_aside)

    def show_and_note(self: Any, report: str, is_aside: bool, *args: Any) -> Any:
        message = show(self, report, is_aside, *args)
        standing.note("report", is_aside)
        return message

    def give_up_and_note(*args: Any) -> None:
        give_up(*args)
        standing.note("end")

    with (
        standing_on(dist.group.WORLD) as standing,
        mock.patch.object(watchdog.Watchdog, "_look", look_if_still),
        mock.patch.object(watchdog.Watchdog, "_show", show_and_note),
        mock.patch.object(watchdog.Watchdog, "_give_up", give_up_and_note),
    ):
        set_watchdog(patience, raises=raises)
        try:
            yield standing
        finally:
            set_watchdog()
