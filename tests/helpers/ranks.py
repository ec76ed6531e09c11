"""The parent's end of the test harness: sets of worker processes that live for the whole session.

[Note: one set per world size] `torch.distributed` has one default group per process, so a test that must
see exactly n ranks as WORLD needs n processes that joined a group of n. Each world size therefore has its own
set, started when it is first asked for. A start costs a fork from a server that has torch imported already,
and the rendezvous: some 50 ms per rank. Idle sets block on a pipe.

[Note: nothing hangs anonymously] A run ends in one of five ways per rank (`Ending`). Once one rank has failed
the others get a grace of some seconds, and more while one of them still computes. Whoever has not answered by then,
or by the timeout, is asked for its Python stack by signal, which works even while the rank holds the GIL, and is
killed.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.helpers.paths import ROOT
from tests.helpers.workers import OWN, PRELOAD, Ending, Outcome, Request, Station, serve

TIMEOUT = 120.0  # seconds for one run, which takes a few at most: sessions and other programs share the cores
GRACE = 5.0  # seconds that the other ranks are given once one has failed
RUNNING = 0.2  # seconds that are added to it while one of them still computes
START_TIMEOUT = 180.0  # seconds to import torch in the server, fork, and rendezvous
IN_STEP = 2.0  # seconds for the barrier that shows that ranks which all raised are still in step
ORPHANED = 60.0  # seconds beyond its timeout after which a worker ends itself: its parent must be dead
WORKER_LOOP = f'"{serve.__code__.co_filename}", line'

Key = tuple[int, "str | None"]  # world size and backend


@dataclass(frozen=True)
class Patience:
    """How long a run may take, in seconds: all of it, and what is left of it once one rank has failed."""

    timeout: float = TIMEOUT
    grace: float = GRACE


class RankError(Exception):
    """A run failed on at least one rank; the message shows every rank.

    `outcomes` holds each rank's ending, headline and details; `outputs` what each rank printed.
    """

    def __init__(self, what: str, outcomes: list[Outcome], outputs: list[str]) -> None:
        self.outcomes = outcomes
        self.outputs = outputs
        super().__init__(_describe(what, outcomes, outputs))


class Ranks:
    """n processes with an initialised process group of n as WORLD, for as long as the caller needs them."""

    def __init__(self, pool: RankPool, key: Key, patience: Patience) -> None:
        self._pool = pool
        self._key = key
        self._patience = patience
        self.world_size = key[0]

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call `function(*args, **kwargs)` on every rank at once; the results in the order of ranks.

        `function` must be importable: defined at the top of a module, or a `functools.partial` of such a one.
        Arguments and results travel by pickle. If any rank does not return normally: `RankError`. If every
        rank calls `pytest.skip`, so does the caller.
        """
        __tracebackhide__ = True
        what = f"{_name(function)} on {self.world_size} rank{'s' * (self.world_size > 1)}"
        return self._pool.run(self._key, _pickled(function, args, kwargs), what, self._patience)

    @property
    def pids(self) -> list[int]:
        """The processes of this set, started if they are not running."""
        return self._pool.workers(self._key).pids


class RankPool:
    """All sets of one session. `pool(n)` gives the ranks; `close()` ends every process.

    The server that they are forked from imports `preload` too, so that not every rank has to.
    """

    def __init__(self, folder: Path, preload: Iterable[str] = ()) -> None:
        self._folder = folder
        self._sets: dict[Key, WorkerSet] = {}
        self._serial = itertools.count()
        self._printed: list[tuple[str, str]] = []
        self._context = _prepare_server(preload)

    def __call__(
        self, world_size: int, *, timeout: float = TIMEOUT, grace: float = GRACE, backend: str | None = "gloo"
    ) -> Ranks:
        """The ranks of a world of `world_size`.

        `timeout` bounds one run, in seconds, and `grace` what is left of it once one rank has failed.
        `backend=None` gives processes without a process group, for tests of that case and of groups of their
        own making; those are replaced after each run.
        """
        if world_size < 1:
            raise ValueError(f"a world has at least one rank, got {world_size}")
        return Ranks(self, (world_size, backend), Patience(timeout, grace))

    def workers(self, key: Key) -> WorkerSet:
        if key not in self._sets:
            folder = self._folder / f"set{next(self._serial)}"
            self._sets[key] = WorkerSet(self._context, folder, *key)
        return self._sets[key]

    def run(self, key: Key, call: bytes, what: str, patience: Patience) -> list[Any]:
        __tracebackhide__ = True
        workers = self.workers(key)
        keep = False
        try:
            outcomes = workers.round(call, patience)
            outputs = workers.outputs()
            keep = workers.usable_after(outcomes)
        finally:
            if not keep:  # also when this process was interrupted in the middle
                self._sets.pop(key).kill()
        endings = {outcome.ending for outcome in outcomes}
        if endings == {Ending.SKIPPED}:
            pytest.skip(outcomes[0].headline)
        if endings != {Ending.RETURNED}:
            raise RankError(what, outcomes, outputs)
        titles = [f"{what}, output of rank {rank}" for rank in range(key[0])]
        self._printed += [(title, text) for title, text in zip(titles, outputs, strict=True) if text]
        return [outcome.value for outcome in outcomes]

    def take_printed(self) -> list[tuple[str, str]]:
        """What ranks printed in runs that succeeded since the last call: (title, text) pairs."""
        printed, self._printed = self._printed, []
        return printed

    def close(self) -> None:
        while self._sets:
            self._sets.popitem()[1].kill()


def start_server(preload: Iterable[str], output: Path) -> None:
    """Start the server that ranks are forked from, which sessions that are forked afterwards use as well.

    `output` is the file of what libraries print while they are imported, and of the tracker of shared resources.
    """
    _prepare_server(preload)
    with output.open("wb") as file:
        streams = {descriptor: os.dup(descriptor) for descriptor in (1, 2)}
        try:
            for descriptor in streams:
                os.dup2(file.fileno(), descriptor)
            forkserver.ensure_running()
        finally:
            for descriptor, stream in streams.items():
                os.dup2(stream, descriptor)
                os.close(stream)


def _prepare_server(preload: Iterable[str]) -> ForkServerContext:
    """Say what the server imports, unless it runs already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD + [*OWN, *preload] * _found_by_server())
    return context


class WorkerSet:
    """The processes of one world size and backend."""

    def __init__(self, context: Any, folder: Path, world_size: int, backend: str | None) -> None:
        folder.mkdir(parents=True)
        self._backend = backend
        self._stations = [Station(rank, world_size, backend, folder) for rank in range(world_size)]
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        try:
            for station in self._stations:
                pipe, far_end = context.Pipe()
                process = context.Process(target=serve, args=(far_end, station), daemon=True)
                process.start()
                far_end.close()  # so that the death of the worker reads as the end of the pipe
                self._processes.append(process)
                self._pipes.append(pipe)
            joined = self._collect(Patience(START_TIMEOUT))
            if any(outcome.ending is not Ending.RETURNED for outcome in joined):
                raise RankError(f"starting {world_size} ranks with {backend}", joined, self.outputs())
        except BaseException:
            self.kill()
            raise

    @property
    def pids(self) -> list[int]:
        return [process.pid or 0 for process in self._processes]

    def round(self, call: bytes | None, patience: Patience) -> list[Outcome]:
        """Have every rank make the call, or a barrier for None, and gather what becomes of it."""
        for station in self._stations:
            os.truncate(station.output, 0)
        message = pickle.dumps(Request(call, tuple(warnings.filters), patience.timeout + ORPHANED))
        for pipe in self._pipes:
            # A rank that died while it was idle says how when its answer is collected.
            with suppress(BrokenPipeError, ConnectionResetError):
                pipe.send_bytes(message)
        return self._collect(patience)

    def usable_after(self, outcomes: list[Outcome]) -> bool:
        """Whether the next test may have these processes: nothing pending, nobody out of step."""
        endings = {outcome.ending for outcome in outcomes}
        if self._backend is None or any(outcome.worn_out for outcome in outcomes):
            return False
        if endings == {Ending.RETURNED}:
            return _same_groups(outcomes)
        if endings <= {Ending.RAISED, Ending.SKIPPED}:
            # A test of an error that every rank raises at the same point, which is the usual kind.
            answers = self.round(None, Patience(IN_STEP))
            return all(answer.ending is Ending.RETURNED for answer in answers) and _same_groups(answers)
        return False

    def outputs(self) -> list[str]:
        texts = (s.output.read_text(errors="replace") if s.output.exists() else "" for s in self._stations)
        return [text.strip() for text in texts]

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(10)
        for pipe in self._pipes:
            pipe.close()

    def _collect(self, patience: Patience) -> list[Outcome]:
        deadline = latest = time.monotonic() + patience.timeout
        reason = f"still running after the timeout of {patience.timeout:g} s"
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < len(self._pipes):
            waiting = [rank for rank in range(len(self._pipes)) if rank not in outcomes]
            ready = wait([self._pipes[rank] for rank in waiting], max(0.0, deadline - time.monotonic()))
            if not ready and time.monotonic() < latest and any(_is_running(self.pids[rank]) for rank in waiting):
                deadline = min(latest, time.monotonic() + RUNNING)
                continue
            if not ready:
                outcomes |= self._stuck(waiting, reason)
                break
            for rank in waiting:
                if self._pipes[rank] in ready:
                    outcomes[rank] = self._receive(rank)
                    last_call = time.monotonic() + patience.grace
                    if outcomes[rank].ending is not Ending.RETURNED and last_call < deadline:
                        deadline = last_call
                        reason = f"still running {patience.grace:g} s after rank {rank} failed"
        return [outcomes[rank] for rank in range(len(self._pipes))]

    def _receive(self, rank: int) -> Outcome:
        try:
            answer = self._pipes[rank].recv_bytes()
        except (EOFError, ConnectionError):
            self._processes[rank].join(10)
            return Outcome(Ending.DIED, headline=_exit_status(self._processes[rank].exitcode))
        try:
            outcome: Outcome = pickle.loads(answer)
        except Exception as error:  # noqa: BLE001 - whatever the result's own unpickling does
            return Outcome(Ending.RAISED, headline=f"its result cannot be unpickled: {error!r}")
        return outcome

    def _stuck(self, waiting: list[int], reason: str) -> dict[int, Outcome]:
        files = {rank: self._stations[rank].stack for rank in waiting}
        for rank, file in files.items():
            os.truncate(file, 0)
            with suppress(ProcessLookupError):  # it may have ended since it was last looked at
                os.kill(self.pids[rank], signal.SIGUSR1)
        stacks = {rank: _without_harness(_settled_text(file)) for rank, file in files.items()}
        return {rank: Outcome(Ending.STUCK, headline=reason, details=stack) for rank, stack in stacks.items()}


def _is_running(pid: int) -> bool:
    """Return whether the main thread of a process runs, or would if the machine was less busy: it waits for nobody."""
    with suppress(OSError):  # no process, or no Linux
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "R"
    return False


def _settled_text(path: Path, patience: float = 2.0) -> str:
    """The text of a file that another process is writing, once it has stopped growing."""
    deadline, text = time.monotonic() + patience, ""
    while time.monotonic() < deadline:
        time.sleep(0.05)
        before, text = text, path.read_text(errors="replace")
        if text and text == before:
            return text
    return text or "(no stack: the process does not react to signals)"


def _without_harness(stack: str) -> str:
    """Drop the frames from the worker's loop outwards: they are the same in every stack."""
    lines: list[str] = []
    hidden = False
    for line in stack.splitlines():
        if not line.startswith("  File "):
            hidden = False
        elif lines and lines[-1].startswith("  File ") and WORKER_LOOP in line:
            hidden = True
        lines += [line] * (not hidden)
    return "\n".join(lines)


def _exit_status(code: int | None) -> str:
    if code is None:
        return "closed its pipe but did not exit"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exited with status {code} without answering"


def _same_groups(outcomes: list[Outcome]) -> bool:
    """Whether no rank has made more groups than another: the next that some of them make would never be complete."""
    return len({outcome.groups for outcome in outcomes}) == 1


def _found_by_server() -> bool:
    """Whether the server, which looks in the folder it is started in, imports this copy of the package and no other."""
    return Path.cwd() == ROOT and not getattr(sys.flags, "safe_path", False)


def _name(function: Callable[..., Any]) -> str:
    while isinstance(function, partial):
        function = function.func
    return f"{function.__module__}.{getattr(function, '__qualname__', function)}"


def _pickled(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    try:
        return pickle.dumps((function, args, kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        _refuse(function, error)


def _refuse(function: Callable[..., Any], error: Exception) -> NoReturn:
    raise TypeError(
        f"{_name(function)} or one of its arguments cannot be sent to other processes: {error}. "
        "A rank body must be a function at the top of a module (not a lambda, closure or method of a local "
        "class), and its arguments plain values."
    ) from error


def _describe(what: str, outcomes: list[Outcome], outputs: list[str]) -> str:
    failed = [rank for rank, outcome in enumerate(outcomes) if outcome.ending is not Ending.RETURNED]
    parts = [f"{what}: {len(failed)} of {len(outcomes)} did not return"]
    groups: dict[tuple[str, str, str], list[int]] = {}
    for rank, (outcome, output) in enumerate(zip(outcomes, outputs, strict=True)):
        headline = outcome.headline or "returned normally"
        groups.setdefault((headline, outcome.details.strip(), output), []).append(rank)
    # The cause before its consequences: who was killed or raised, then who waited for them in vain.
    order = [Ending.DIED, Ending.RAISED, Ending.SKIPPED, Ending.STUCK, Ending.RETURNED]
    causes_first = sorted(groups.items(), key=lambda group: order.index(outcomes[group[1][0]].ending))
    for (headline, details, output), ranks in causes_first:
        name = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        parts.append(f"===== {name}: {headline} =====")
        parts += [details] * bool(details)
        parts += [f"----- output of {name} -----\n{output}"] * bool(output)
    return "\n".join(parts)
