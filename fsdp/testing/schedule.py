"""The order in which the ranks of a world run: a single rank at a time, and a seed determines the next rank.

A rank holds the baton while it runs, and passes the baton on when it waits for a message. The same seed therefore
results in the same order. A deadlock is detected immediately: no rank is ready, and all ranks wait.

Threads started by a rank run concurrently, for example threads for background saving. They require the baton
only for communication. A rank that waits for such a thread releases the baton.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

_IN_TURN = 2  # bits: in one of four cases, the next rank is random; otherwise, it has been ready for the longest time


class Task:
    """A thread of a rank that runs only while it holds the baton."""

    __slots__ = ("lock", "rank")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.lock = threading.Lock()
        self.lock.acquire()


class Schedule:
    """The baton, and the threads that wait for it.

    Args:
        ranks: the number of ranks.
        seed: the seed of the order.
        late: ranks that run only if no other rank can run.
        passed: a function, called with the previous and the next rank if they differ; -1 means no rank.
        stuck: a function, called in a deadlock of all threads, which must make some threads ready.

    Attributes:
        order: the sequence of ranks that held the baton.
        passes: how often the baton was passed on.
        waits: a description of the wait of each thread.
    """

    def __init__(
        self,
        ranks: int,
        seed: int,
        late: Collection[int],
        passed: Callable[[int, int], None],
        stuck: Callable[[], None],
    ) -> None:
        self._random = random.Random(seed)
        # After the arrival of a message, a wait still passes the baton on with this probability (in bits), about
        # once per collective.
        self._keeps_on = max(3, ranks.bit_length())
        self._late, self._passed, self._stuck = frozenset(late), passed, stuck
        self._mutex = threading.RLock()
        self._tasks: dict[int, Task] = {}  # by thread
        self._ready: list[Task] = []
        self._blocked: list[Task] = []
        self._expected = ranks  # ranks that have not started yet; no rank runs before all have started
        self._holder: Task | None = None
        self._last = -1
        self._released = 0  # the number of main threads that wait for another thread
        self._beside = 0  # the number of concurrent threads, which may request the baton
        self.waits: dict[int, str] = {}
        self.passes = 0
        self.order: list[int] = []

    def draw(self, bits: int = 1) -> bool:
        """Return True with probability 1/2, 1/4, 1/8, ... for 1, 2, 3, ... bits."""
        return not self._random.getrandbits(bits)

    @property
    def waits_for_nobody(self) -> bool:
        """Return whether no thread holds the baton, and no concurrent thread could request it."""
        return self._holder is None and not self._beside

    def begin(self, rank: int) -> None:
        """Make this thread the main thread of a rank, and wait for its turn."""
        task = self._tasks[threading.get_ident()] = Task(rank)
        with self._mutex:
            self._ready.append(task)
            self._expected -= 1
            if not self._expected:
                self._ready.sort(key=lambda each: each.rank)
                self._pass_on()
        task.lock.acquire()

    def end(self) -> None:
        """End this thread's part in the schedule, and pass the baton on."""
        with self._mutex:
            del self._tasks[threading.get_ident()]
            self._pass_on()

    def stop(self) -> None:
        """Stop calling `passed` after the run, while abandoned ranks may still be running."""
        with self._mutex:
            self._passed = lambda last, now: None

    @property
    def own_task(self) -> Task | None:
        """The task of this thread; None if it is not a rank's main thread and does not communicate."""
        return self._tasks.get(threading.get_ident())

    @contextmanager
    def turn(self, rank: int) -> Iterator[None]:
        """Hold the baton in the context; `rank` is the rank of this thread, which may already hold the baton."""
        ident = threading.get_ident()
        if ident in self._tasks:
            yield
            return
        task = self._tasks[ident] = Task(rank)
        with self._mutex:
            self._beside -= 1
        self._take(task)
        try:
            yield
        finally:
            with self._mutex:
                del self._tasks[ident]
                self._beside += 1
                self._pass_on()

    @contextmanager
    def without(self) -> Iterator[None]:
        """Release the baton in the context, if this thread holds it, to wait for a concurrent thread."""
        task = self.own_task
        if task is None or task is not self._holder:
            yield
            return
        with self._mutex:
            self._released += 1
            self._pass_on()
        try:
            yield
        finally:
            with self._mutex:
                self._released -= 1
            self._take(task)

    def beside(self, run: Callable[[], None]) -> Callable[[], None]:
        """Return the function with which a new concurrent thread of a rank must call `run`."""
        with self._mutex:
            self._beside += 1

        def counted() -> None:
            try:
                run()
            finally:
                with self._mutex:
                    self._beside -= 1
                    if self._holder is None:
                        self._pass_on()

        return counted

    def _take(self, task: Task) -> None:
        with self._mutex:
            self._ready.append(task)
            if self._holder is None:
                self._pass_on()
        task.lock.acquire()

    def pause(self) -> None:
        """Pass the baton on in random cases, and block until this thread's next turn."""
        task = self._tasks[threading.get_ident()]
        if self._ready and (task.rank in self._late or self.draw(self._keeps_on)):
            with self._mutex:
                self._ready.append(task)
                self._pass_on()
            task.lock.acquire()

    def block(self, waiters: list[Task], what: str) -> None:
        """Add this thread to `waiters`, and pass the baton on until they are woken; `what` describes the wait."""
        task = self._tasks[ident := threading.get_ident()]
        self.waits[ident] = what
        with self._mutex:
            waiters.append(task)
            self._blocked.append(task)
            self._pass_on()
        task.lock.acquire()
        del self.waits[ident]
        if task in waiters:  # after `wake_all`, which does not clear `waiters`
            waiters.remove(task)

    def wake(self, waiters: list[Task]) -> None:
        """Make blocked threads ready."""
        if waiters:
            with self._mutex:
                for task in waiters:
                    if task in self._blocked:
                        self._blocked.remove(task)
                        self._ready.append(task)
                waiters.clear()

    def wake_all(self) -> None:
        """Make every blocked thread ready, so that it checks the condition of its wait again."""
        with self._mutex:
            blocked, self._blocked = self._blocked, []
            self._ready += blocked
            if self._holder is None and self._ready:
                self._pass_on()

    def _pass_on(self) -> None:
        self._holder = None
        self.passes += 1
        if not self._ready and self._blocked and not self._released and not self._beside:
            self._stuck()  # wakes all threads, which passes the baton on
            return
        if not self._ready:
            return
        chosen = [at for at, task in enumerate(self._ready) if task.rank not in self._late] if self._late else ()
        # If the choice were always random, most ranks would only find that one of many messages has arrived.
        number = self._random.randrange(len(chosen or self._ready)) if self.draw(_IN_TURN) else 0
        task = self._ready.pop(chosen[number] if chosen else number)
        if task.rank != self._last:
            self._passed(self._last, task.rank)
            self._last = task.rank
            self.order.append(task.rank)
        self._holder = task
        task.lock.release()
