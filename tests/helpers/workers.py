"""What runs inside one rank of the test harness.

A worker is forked from a server that has imported torch once, joins a process group, and then serves requests
until its parent closes the pipe. It never destroys a process group: torch 2.13 can deadlock when a gloo group
is destroyed while the GIL is held, so a worker that is not wanted any more is killed. `tests/helpers/ranks.py` is
the other end of the pipe; docs/contributing.md says how the two are used.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import logging
import os
import pickle
import random
import re
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum, auto
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests import simulated

if dist.is_gloo_available():
    from torch.distributed import ProcessGroupGloo as Gloo

# Imported by the fork server, so that each worker finds them ready: the first optimizer step imports dynamo.
PRELOAD = ["torch", "torch._dynamo", "torch.distributed.checkpoint", "torch.testing", "numpy", "pytest"]
# And these where the server would find the right copies; the package imports most of its modules when they are used.
OWN = ["tests.helpers.rewriting", "fsdp", *(f"fsdp.{name}" for name in ("distributed.watchdog", "layers.first_use"))]
OWN += [f"fsdp.layers.{name}" for name in ("offload", "optimizer_hooks", "state_dict.full")]

# Groups that tests make are never destroyed, and each keeps two threads. A worker beyond these bounds is replaced
# after its run.
MAX_THREADS = 200
MAX_RESIDENT_MIB = 3000

MOST_DELAY = 300  # microseconds: each fourth kernel of the simulated device begins so much later at most

_set_aside = 0  # modules whose objects no collection walks


class Ending(Enum):
    """How a rank came out of one request."""

    RETURNED = auto()  # `value` is what the function returned
    RAISED = auto()  # `details` is the traceback
    SKIPPED = auto()  # the function called pytest.skip; `headline` is the reason
    DIED = auto()  # the process is gone; `headline` says by which signal or exit status
    STUCK = auto()  # it had not answered in time; `details` is its live stack


@dataclass(frozen=True)
class Outcome:
    """One rank's answer to one request."""

    ending: Ending
    value: Any = None
    headline: str = ""
    details: str = ""
    worn_out: bool = False  # the worker leaked threads or memory and should be replaced
    groups: int = 0  # how many there are on a rank that returned


@dataclass(frozen=True)
class Station:
    """The place a worker takes: its rank, its group, and the folder for what it writes."""

    rank: int
    world_size: int
    backend: str | None  # None: no process group at all
    folder: Path

    @property
    def output(self) -> Path:
        return self.folder / f"rank{self.rank}.output"

    @property
    def stack(self) -> Path:
        return self.folder / f"rank{self.rank}.stack"


@dataclass(frozen=True)
class Request:
    """One thing every rank of a set must do."""

    call: bytes | None  # (function, args, kwargs), pickled; None asks for a barrier
    filters: tuple[tuple[Any, ...], ...]  # the parent's `warnings.filters`
    deadline: float  # seconds after which an orphaned worker ends itself


def serve(pipe: Connection, station: Station) -> None:
    """The life of a worker: take a place, answer requests, end with the parent."""
    stacks = _redirect(station)
    try:
        _set_up(station)
        joined = Outcome(Ending.RETURNED)
    except BaseException as error:  # noqa: BLE001 - reported by the parent
        joined = _raised(error)
    pipe.send_bytes(pickle.dumps(joined))
    while True:
        try:
            request: Request = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionError):
            # Not sys.exit: that would destroy the process group.
            os._exit(0)
        # When the parent is killed in the middle of a collective nobody is left to kill this process.
        faulthandler.dump_traceback_later(request.deadline, exit=True, file=stacks)
        answer = _answer(request)
        faulthandler.cancel_dump_traceback_later()
        pipe.send_bytes(answer)


def _redirect(station: Station) -> int:
    """Send everything this process prints to its file, and its stack to another on SIGUSR1."""
    flags = os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_APPEND
    output, stacks = os.open(station.output, flags), os.open(station.stack, flags)
    # At the descriptor, because gloo, NCCL and the interpreter's fatal errors do not go through sys.stderr.
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    _keep_handler_of(signal.SIGUSR1)
    return stacks


def _keep_handler_of(number: signal.Signals) -> None:
    """Let nobody replace it. Lightning, when it is done, puts back all that Python knows of, which this one is not."""
    replace = signal.signal

    def guarded(signalnum: int, handler: Any) -> Any:
        return signal.getsignal(signalnum) if signalnum == number else replace(signalnum, handler)

    signal.signal = guarded


def _set_up(station: Station) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which kills its workers
    _let_each_other_finish()
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    importlib.import_module("tests.helpers.rewriting")  # unless the server has imported it
    rank, size = str(station.rank), str(station.world_size)
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ["FSDP_SHARED_MEMORY"] = "0"  # bytes are counted in sockets, and a group keeps the way that it has found
    loopback = {"lo", "lo0"} & {name for _, name in socket.if_nameindex()}
    if loopback:
        # By default gloo looks for the interface of this machine's name, which a sandbox may not have.
        os.environ["GLOO_SOCKET_IFNAME"] = loopback.pop()
    _share_one_event_loop()
    _seed_only_what_is_there()
    gc.set_threshold(50_000)  # each run ends with a collection; those in between took a twentieth of the time
    _join(station)
    _set_aside_modules()


def _let_each_other_finish() -> None:
    """Have threads that wake up wait for a free core, instead of taking one from a thread that is at work.

    Gloo's event loop spins while another thread of its process holds the lock of a connection. It often woke up just
    to take the core from that thread, and spun until the scheduler's next tick: a third of what the suite computed.
    """
    if hasattr(os, "SCHED_BATCH"):  # Linux; all threads of the process inherit it, for none has been started yet
        with suppress(OSError):  # a sandbox may know a single policy; tests then take longer
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _share_one_event_loop() -> None:
    """Have all groups of gloo share a device, which is an event loop: a thread that looks around every 10 ms.

    Otherwise each group brings one of its own, and those of idle groups took a fifth of what the machine computed.
    The thread gives way to the others of its process, since it spins while one of them holds the lock of a connection.
    """
    if not dist.is_gloo_available():
        return
    initialize = Gloo.__init__

    @cache
    def device_on(interface: str | None) -> object:
        others = _threads()
        device = Gloo.create_device(interface=interface) if interface else Gloo.create_default_device()
        for thread in _threads() - others:
            os.setpriority(os.PRIO_PROCESS, thread, 5)
        return device

    def with_the_device(group: Gloo, store: dist.Store, rank: int, size: int, timeout: Any, **more: Any) -> None:
        options = timeout
        if isinstance(timeout, timedelta):
            options, more = Gloo._Options(), {}
            device = device_on(os.environ.get("GLOO_SOCKET_IFNAME"))  # a rank may be put on another machine
            options._devices, options._threads, options._timeout = [device], 2, timeout
        initialize(group, store, rank, size, options, **more)

    Gloo.__init__ = with_the_device  # the class itself, since groups come out of C++ as its instances


def _threads() -> set[int]:
    """Return the threads of this process. Only Linux tells."""
    tasks = Path("/proc/self/task")
    return {int(task.name) for task in tasks.iterdir()} if tasks.exists() else set()


def _seed_only_what_is_there() -> None:
    """Keep `torch.manual_seed` from noting seeds, each with a stack, for devices that may come: half a millisecond."""
    for devices in (torch.cuda, torch.xpu, torch.mtia):
        if not devices.is_available():
            devices.manual_seed_all = lambda seed: None


def _join(station: Station) -> None:
    if station.backend is None:
        return
    device = None
    if simulated.NAME in station.backend:
        simulated.install().set_delay(MOST_DELAY)
    if "cuda" in station.backend or station.backend == "nccl":
        device = torch.device("cuda", station.rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        if station.world_size > torch.cuda.device_count():
            from benchmarks._ranks import share_gpus  # only on a GPU

            share_gpus(station.rank)
    dist.init_process_group(
        station.backend,
        store=dist.FileStore(str(station.folder / "store"), station.world_size),
        rank=station.rank,
        world_size=station.world_size,
        device_id=device if "nccl" in station.backend else None,
    )


def _answer(request: Request) -> bytes:
    """Carry out one request; whatever happens is an outcome, already pickled."""
    try:
        if request.call is None:
            dist.barrier()
            outcome = Outcome(Ending.RETURNED, groups=_groups())
        else:
            with _fresh_state(request.filters):
                function, args, kwargs = pickle.loads(request.call)
                outcome = Outcome(Ending.RETURNED, function(*args, **kwargs), worn_out=_worn_out(), groups=_groups())
        return pickle.dumps(outcome)
    except pytest.skip.Exception as skipped:
        return pickle.dumps(Outcome(Ending.SKIPPED, headline=str(skipped)))
    except BaseException as error:  # noqa: BLE001 - SystemExit and pytest.fail too: it is an answer
        return pickle.dumps(_raised(error))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


@contextmanager
def _fresh_state(filters: tuple[tuple[Any, ...], ...]) -> Iterator[None]:
    """Every run starts as if in a new process, under the parent's warning filters."""
    _set_aside_modules()
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    environment, loggers = dict(os.environ), _loggers()
    with warnings.catch_warnings():
        _apply_filters(filters)
        try:
            yield
        finally:
            _restore(environment)
            for logger, level, handlers in loggers:
                if logger.level != level:
                    logger.setLevel(level)
                logger.handlers[:] = handlers
            # Inside the run and not after it, so that a hang in here is reported against the right test.
            gc.collect()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()


def _set_aside_modules() -> None:
    """Keep collections from walking what is imported, which lives as long as the process.

    A run that compiles imports so much that it would cost each later one a tenth of a second.
    """
    global _set_aside
    if len(sys.modules) != _set_aside:
        if _set_aside:
            gc.collect()  # what the last run left behind must not live as long too
        _set_aside = len(sys.modules)
        gc.freeze()


def _loggers() -> list[tuple[logging.Logger, int, list[logging.Handler]]]:
    """Return every logger, with its level and handlers. Those that a run creates by imports are left as they are."""
    # A name that has only children is not a logger yet.
    known = [logging.root, *map(logging.getLogger, list(logging.root.manager.loggerDict))]
    return [(logger, logger.level, [*logger.handlers]) for logger in known]


def _restore(environment: Mapping[str, str]) -> None:
    if os.environ != environment:  # setting all of them takes longer than to compare
        os.environ.clear()
        os.environ.update(environment)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)


def _apply_filters(filters: tuple[tuple[Any, ...], ...]) -> None:
    """Rebuild the parent's filters through the public functions, which also forget what was already shown."""
    warnings.resetwarnings()
    for action, message, category, module, line in reversed(filters):
        warnings.filterwarnings(action, _pattern(message), category, _pattern(module), line)


def _pattern(compiled: re.Pattern[str] | str | None) -> str:
    return compiled if isinstance(compiled, str) else compiled.pattern if compiled else ""


def _groups() -> int:
    # Private, and what torch names a group by that only its members make: they must count alike, or wait forever.
    return len(dist.distributed_c10d._world.pg_names)


def _worn_out() -> bool:
    """Whether groups or memory have piled up. Only Linux tells; elsewhere a worker is kept."""
    status = Path("/proc/self/status")
    if not status.exists():
        return False
    fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
    resident = int(fields["VmRSS"].split()[0]) // 1024
    return int(fields["Threads"]) > MAX_THREADS or resident > MAX_RESIDENT_MIB


def _raised(error: BaseException) -> Outcome:
    first = error.__traceback__.tb_next if error.__traceback__ else None  # without the frame of this file
    lines = traceback.format_exception(type(error), error, first)
    headline = traceback.format_exception_only(type(error), error)[-1].strip()
    return Outcome(Ending.RAISED, headline=headline.splitlines()[0], details="".join(lines))
