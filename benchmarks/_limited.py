"""A command with a limit of time, in a process group that is killed as a whole."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_LAST_WORDS = 3.0  # seconds in which processes print their stacks
_TO_DIE = 30.0  # seconds: a process inside a driver's call may not end at once


@dataclass(frozen=True)
class Ended:
    """The end of a command: its exit status, or None if it was stopped at its limit."""

    status: int | None
    seconds: float


def run_limited(command: Sequence[str], limit: float, log: Path, environment: Mapping[str, str]) -> Ended:
    """Run a command in the repository, and kill its whole process group when it ends or reaches its limit.

    At the limit every process first gets SIGABRT, on which Python's fault handler prints the stacks of all threads.
    Processes that have left the group (torchrun's ranks) are found as descendants, and killed as well.

    Args:
        command: program and arguments.
        limit: seconds.
        log: receives everything that the processes print.
        environment: variables in addition to those of this process.
    """
    environment = {**os.environ, "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1", **environment}
    began = time.monotonic()
    with log.open("wb") as file, _no_core_files():
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )
    status: int | None = None
    others: list[int] = []
    try:
        status = process.wait(limit)
    except subprocess.TimeoutExpired:
        others = _descendants(process.pid)
        _signal(process.pid, others, signal.SIGABRT)
        time.sleep(_LAST_WORDS)
    except BaseException:  # an interrupt
        others = _descendants(process.pid)
        raise
    finally:
        seconds = time.monotonic() - began
        _signal(process.pid, others, signal.SIGKILL)  # ranks too that have outlived their parent
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_TO_DIE)
    return Ended(status, seconds)


def _signal(group: int, others: Sequence[int], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
    for process in others:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, number)


def _descendants(process: int) -> list[int]:
    """Return the processes below a process, in other groups too; none where the system has no /proc."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            fields = path.read_text().rpartition(")")[2].split()  # after the name, which may contain anything
            children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found = list(children.get(process, ()))
    for each in found:
        found += children.get(each, ())
    return found


@contextlib.contextmanager
def _no_core_files() -> Iterator[None]:
    """Let processes that start here leave no core file: a rank's would have gigabytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))
