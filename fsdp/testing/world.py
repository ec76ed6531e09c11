"""`World` runs the ranks of a sharded training as threads of a single process, with collectives in memory."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import distributed_c10d as c10d

from fsdp.distributed import communicator, watchdog
from fsdp.distributed.communicator import forget_groups, named
from fsdp.distributed.positions import Position, conclusion, lines_of, places_in
from fsdp.distributed.roll_call import RollCall
from fsdp.testing.memory_group import MemoryGroup
from fsdp.testing.network import Death, Fault, MemoryStore, Network
from fsdp.testing.process_state import ProcessState
from fsdp.testing.schedule import Schedule

_TICK = 0.5  # seconds between two checks of the ranks by the calling thread
_OUTSIDE = 5.0  # seconds after which a deadlock is reported, if all ranks wait for other threads and none runs
_PAGE = 16  # turns of each rank between two comparisons of the ranks' journals


class WorldError(RuntimeError):
    """Ranks of a world have raised exceptions.

    Attributes:
        errors: the exceptions by rank; ranks that returned, or died by a fault, are not included.
        results: the results of the ranks that returned, by rank.
    """

    def __init__(self, text: str, errors: dict[int, BaseException], results: dict[int, Any]) -> None:
        super().__init__(text)
        self.errors, self.results = errors, results


class World:
    """Ranks as threads of this process, for tests.

    In the function that the ranks run, `torch.distributed` is initialized, and collectives return the same bits as
    gloo. ``dist.new_group``, device meshes, `FullyShardedDataParallel`, ``fully_shard`` and checkpoints are supported.
    A single rank runs at a time, until it waits for another rank. Each rank uses separate process-wide state: random
    number generators, the default dtype, warning filters, and environment variables such as ``RANK``. All ranks share
    imported modules and their attributes. Tensors are on the CPU.

    Args:
        ranks: the number of ranks.
        seed: the seed for the order in which ranks run and messages arrive. The same seed results in the same order.
        late: ranks that only run if no other rank can run, so that their messages arrive as late as possible.
        faults: faults in messages, see `Fault`.
        timeout: the maximum number of seconds without a collective, after which `run` raises an error.

    Attributes:
        world_size: the number of ranks.
        order: the sequence of ranks in the last run.

    Raises:
        ValueError: if `ranks` is less than 1, or if `late` or a fault contains a rank that does not exist.
    """

    def __init__(
        self,
        ranks: int,
        *,
        seed: int = 0,
        late: Collection[int] = (),
        faults: Sequence[Fault] = (),
        timeout: float = 120.0,
    ) -> None:
        named_ranks = [*late, *(fault.rank for fault in faults)]
        if ranks < 1 or not all(0 <= rank < ranks for rank in named_ranks):
            raise ValueError(
                f"a world needs at least one rank, and `late` and `faults` must name its ranks; got {ranks} ranks, and "
                f"{named_ranks}"
            )
        self.world_size = ranks
        self._seed, self._late, self._faults, self._timeout = seed, late, faults, timeout
        self.order: list[int] = []

    def run(self, body: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call ``body(*args, **kwargs)`` on every rank, and return the results in rank order, None for dead ranks.

        Every rank starts with the caller's random state. All ranks share the argument objects.

        Raises:
            WorldError: if a rank raises an exception. Ranks that wait for this rank also raise an error.
            RuntimeError: if a world is already running in this process, or if all ranks return before a fault occurs.
        """
        if not _one_runs.acquire(blocking=False):
            by = "" if _here.rank is None else f", which is called by rank {_here.rank} of it"
            raise RuntimeError(f"a world already runs in this process: a second world cannot run{by}")
        run = _Run(self.world_size, self._seed, self._late, self._faults, self._timeout)
        try:
            return run.call(body, args, kwargs)
        finally:
            self.order = run.schedule.order
            _one_runs.release()


def die() -> None:
    """Exit the calling rank without a report, like a killed process; its connections to other ranks are closed.

    Raises:
        RuntimeError: outside of a `World`.
    """
    if _here.rank is None:
        raise RuntimeError("die() ends a rank of a World, but this thread is not a rank")
    raise Death


class _Here(threading.local):
    """The rank of this thread, and the record of process groups that replaces torch's record for this rank."""

    rank: int | None = None
    groups: Any = None


_here = _Here()
_one_runs = threading.Lock()


_Record = type(c10d._world)  # torch's class for the record of a process's groups


class _RankWorlds:
    """Replaces torch's record of process groups by the record of the calling thread's rank.

    Private in torch, where a comment permits overriding it (tested with torch 2.11 to 2.15).
    """

    def __init__(self, usual: Any) -> None:
        object.__setattr__(self, "_usual", usual)

    def __getattr__(self, name: str) -> Any:
        return getattr(_here.groups or self._usual, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_here.groups or self._usual, name, value)


def _no_groups() -> SimpleNamespace:
    """Return an empty record. Most entries are dictionaries; newer versions of torch have more of them."""
    tables: dict[str, Any] = {name: {} for name, entry in vars(_Record).items() if isinstance(entry, property)}
    return SimpleNamespace(**tables | {"default_pg": None, "group_count": 0, "comms": [], "pg_config_info": []})


class _Run:
    """A run of all ranks. This object replaces the ranks' watchdogs, and requires no sockets."""

    def __init__(self, ranks: int, seed: int, late: Collection[int], faults: Sequence[Fault], timeout: float) -> None:
        self._ranks, self._timeout = ranks, timeout
        self.schedule = Schedule(ranks, seed, late, self._passed, self._stuck)
        self._network = Network(ranks, self.schedule, faults)
        self._caller = ProcessState()
        size = str(ranks)
        self._states = [
            ProcessState({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size})
            for rank in range(ranks)
        ]
        kept = [state.journals for state in self._states]
        self._roll_calls = [RollCall(rank, ranks, self._tell, journals) for rank, journals in enumerate(kept)]
        self._threads: list[threading.Thread] = []
        self._groups: list[Any] = []  # all created groups
        self._running = set(range(ranks))
        self._errors: dict[int, BaseException] = {}
        self._results: dict[int, Any] = {}

    def call(self, body: Callable[..., Any], args: Any, kwargs: Any) -> list[Any]:
        self._threads = [
            threading.Thread(target=self._rank, args=(rank, body, args, kwargs), name=f"rank {rank}", daemon=True)
            for rank in range(self._ranks)
        ]
        try:
            # `DTensor`s use this mode. The first one of a process must not be on a thread that ends, because later
            # modes crash the interpreter (seen in torch 2.11, built for CUDA, and not in 2.13). Private in torch.
            with FakeTensorMode():
                pass
            with self._installed():
                for thread in self._threads:
                    thread.start()
                self._await()
        finally:
            self.schedule.stop()
            self._running.clear()  # otherwise, abandoned ranks would destroy groups later
            self._caller.show()
            forget_groups(self._groups)
        if not self._errors and len(self._results) == self._ranks:
            self._compare_journals()
        if self._errors:
            self._raise()
        for fault in self._network.faults_to_come:
            raise RuntimeError(
                f"{fault} did not occur: rank {fault.rank} sent {self._network.sent[fault.rank]} messages"
            )
        return [self._results.get(rank) for rank in range(self._ranks)]

    def _rank(self, rank: int, body: Callable[..., Any], args: Any, kwargs: Any) -> None:
        _here.rank, _here.groups = rank, _no_groups()
        communicator.main_threads.add(own := threading.get_ident())
        self.schedule.begin(rank)
        try:
            dist.init_process_group("gloo", store=MemoryStore(self._network, rank), rank=rank, world_size=self._ranks)
            watchdog.watchdogs[dist.group.WORLD] = self
            self._results[rank] = body(*args, **kwargs)
        except Death:
            self._network.close(rank)
        except BaseException as error:  # noqa: BLE001 (the caller raises it)
            self._errors[rank] = error
            self._network.close(rank)
        finally:
            try:
                if rank in self._running and dist.is_initialized():
                    dist.destroy_process_group()
            except Exception as error:  # noqa: BLE001 (as above; the other ranks must continue)
                self._errors.setdefault(rank, error)
            self._running.discard(rank)
            communicator.main_threads.discard(own)
            self.schedule.end()

    @contextmanager
    def _installed(self) -> Iterator[None]:
        """Make torch create this world's groups in the context, and assign ranks to started threads."""
        network, schedule, groups = self._network, self.schedule, self._groups
        start, join, wait = threading.Thread.start, threading.Thread.join, threading.Condition.wait

        class ProcessGroupGloo(MemoryGroup):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(network, *args, **kwargs)
                groups.append(self)

        def start_as_rank(thread: threading.Thread) -> None:
            if _here.rank is not None:
                thread.run = schedule.beside(partial(_as_rank, vars(_here).copy(), thread.run))  # type: ignore[method-assign]
            start(thread)

        def join_freely(thread: threading.Thread, timeout: float | None = None) -> None:
            with schedule.without():
                join(thread, timeout)

        def wait_freely(condition: Any, timeout: float | None = None) -> bool:
            if schedule.own_task is None:
                return wait(condition, timeout)
            with schedule.without():
                came = wait(condition, timeout)
                held = condition._release_save()  # the thread with the baton may require the condition
            condition._acquire_restore(held)
            return came

        isolate = torch._C._distributed_c10d._set_thread_isolation_mode  # type: ignore[attr-defined]
        with ExitStack() as stack:
            # Private in torch, tested with torch 2.13: the record of groups, the class of gloo's groups, and
            # thread-local names of groups.
            stack.callback(self._put_back, c10d._world)
            c10d._world = _RankWorlds(c10d._world)  # type: ignore[assignment]
            stack.enter_context(patch.object(c10d, "ProcessGroupGloo", ProcessGroupGloo))
            isolate(True)
            stack.callback(isolate, False)
            stack.enter_context(patch.object(sys, "excepthook", sys.excepthook))  # restored, because torch replaces it
            stack.enter_context(patch.object(threading.Thread, "start", start_as_rank))
            stack.enter_context(patch.object(threading.Thread, "join", join_freely))
            stack.enter_context(patch.object(threading.Condition, "wait", wait_freely))
            yield

    def _put_back(self, usual: Any) -> None:
        """Restore torch's record of groups, unless an abandoned rank still runs and would use the caller's groups."""
        if not any(thread.is_alive() for thread in self._threads):
            c10d._world = usual

    def _await(self) -> None:
        seen, since = -1, time.monotonic()
        try:
            while alive := [thread for thread in self._threads if thread.is_alive()]:
                alive[0].join(_TICK)
                if self.schedule.passes != seen:
                    seen, since = self.schedule.passes, time.monotonic()
                waited = time.monotonic() - since
                if self.schedule.waits_for_nobody and waited > _OUTSIDE:
                    self._stuck()
                elif waited > self._timeout:
                    self._network.failure = f"a rank has run for {self._timeout:g} s without reaching a collective"
                    for rank in list(self._running):
                        self._errors[rank] = TimeoutError(f"{self._network.failure}\n{self._position(rank)}")
                    return
        except BaseException:  # for example KeyboardInterrupt
            self._network.failure = "the run was interrupted"
            self.schedule.wake_all()
            for thread in self._threads:
                thread.join(_TICK)
            raise

    def _passed(self, last: int, now: int) -> None:
        if last >= 0:
            self._states[last].keep()
        self._states[now].show()
        if self.schedule.passes % (_PAGE * self._ranks) == 0:
            self._call_roll()

    def _call_roll(self) -> None:
        if watchdog.is_watching():
            for roll_call in self._roll_calls:
                roll_call.tick()

    def _tell(self, ranks: Sequence[int], message: Any) -> dict[int, Any]:
        return {rank: self._roll_calls[rank].answer(message) for rank in ranks}

    def _compare_journals(self) -> None:
        for state in self._states:
            for journal in state.journals:
                journal.page += 1
        for _ in range(1 + self._ranks // 64 + 1):
            self._call_roll()
        for rank, roll_call in enumerate(self._roll_calls):
            if roll_call.difference:
                self._errors[rank] = RuntimeError(roll_call.difference)

    def _stuck(self) -> None:
        """Make all ranks raise an error about the deadlock."""
        answers: dict[int, Position | str] = {
            rank: self._position(rank) if rank in self._running else self._end(rank) for rank in range(self._ranks)
        }
        lines = [*lines_of(answers), conclusion(min(self._running), answers)]
        self._network.failure = "\n".join(["the ranks wait for each other, and no message is in flight:", *lines])
        self.schedule.wake_all()

    def _position(self, rank: int) -> Position:
        thread = self._threads[rank].ident or 0
        wait = communicator.waits.get(thread)
        return Position(
            waits_for=wait.what if wait else self.schedule.waits.get(thread),
            awaits=communicator.awaited_by(thread),
            call=wait.call if wait else "",
            seconds=0.0,
            stack=places_in(sys._current_frames().get(thread)),
            occupation=None,
            passes=self._states[rank].passes,
            groups=[],
        )

    def _end(self, rank: int) -> str:
        if rank in self._results:
            return "has returned"
        error = self._errors.get(rank)
        return "is gone: it has died" if error is None else f"was ended by {type(error).__name__}: {error}"

    def explain(self, closed_by: int | None) -> str:
        """Return which ranks have ended, and why; only the ranks that caused the failure, if known."""
        if self._network.failure:
            return ""  # the error already contains the reason
        gone = sorted(self._network.gone)
        causes = [rank for rank in gone if not isinstance(self._errors.get(rank), communicator.OtherRankError)]
        return "; ".join(f"rank {rank} {self._end(rank)}" for rank in causes or gone)

    def meet(self, ranks: Sequence[int], why: str, state: Any) -> dict[int, Any]:
        raise RuntimeError("fsdp.recover() reconnects processes, which a World does not have: use real processes")

    def announce_end(self, error: BaseException, trace: Any) -> None:
        """Not required, because other ranks detect the exit."""

    def stop(self) -> None:
        """Not required, because there is no watchdog thread."""

    def _raise(self) -> None:
        errors = sorted(self._errors.items(), key=lambda each: isinstance(each[1], communicator.OtherRankError))
        first = errors[0][1]
        if len(errors) == self._ranks and not any(isinstance(error, Exception) for _, error in errors):
            raise first  # for example the exception of pytest.skip
        by_text: dict[str, list[int]] = {}
        for rank, error in errors:
            trace = error.__traceback__.tb_next if error.__traceback__ else None  # skips the frame in this file
            text = "".join(traceback.format_exception(type(error), error, trace)).strip()
            by_text.setdefault(text, []).append(rank)
        cause = "".join(traceback.format_exception_only(type(first), first)).strip().splitlines()[0]
        parts = [f"{len(errors)} of {self._ranks} ranks did not return: rank {errors[0][0]} has raised {cause}"]
        parts += [f"===== {named(ranks)} =====\n{text}" for text, ranks in by_text.items()]
        if others := {self._end(rank): rank for rank in range(self._ranks) if rank not in self._errors}:
            parts.append("; ".join(f"rank {rank} {text}" for text, rank in others.items()))
        raise WorldError("\n".join(parts), dict(self._errors), dict(self._results)) from first


def _as_rank(own: dict[str, Any], function: Callable[[], None]) -> None:
    vars(_here).update(own)
    function()
