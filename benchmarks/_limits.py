"""A memory limit for the processes of a measurement, enforced by the system.

A control group counts all memory of its processes, including cached files, so data that does not fit must be on disk.
If no control group can be created, private memory is limited (RLIMIT_DATA). Mapped files do not count then, and the
system may keep them cached.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_SECONDS_TO_EMPTY = 5.0


class PrivateMemory:
    """RLIMIT_DATA, an equal part for each process.

    Args:
        nbytes: of memory for all processes together; None is no limit.
        num_processes: how many there will be.
    """

    kind = "RLIMIT_DATA (private memory; cached files do not count)"

    def __init__(self, nbytes: int | None, num_processes: int) -> None:
        self._nbytes, self._num_processes = nbytes, num_processes

    def command(self, argv: Sequence[str]) -> list[str]:
        """Return the command that runs `argv` under the limit."""
        if self._nbytes is None:
            return list(argv)
        kib = self._nbytes // self._num_processes // 1024
        return ["sh", "-c", 'ulimit -d "$0" && exec "$@"', str(kib), *argv]

    def used(self, pids: Iterable[int]) -> int:
        """Return the current memory of these processes that cannot be on disk."""
        return sum(_status_bytes(pid, "VmData") for pid in pids)

    def peak(self) -> int | None:
        """Return the peak of the count so far; None if there is no count."""
        return None

    def kills(self) -> int:
        """How many processes the system has ended for want of memory."""
        return 0


@dataclass(frozen=True)
class _Version:
    """Names of a control group's files: the limit, the limit of swap, the peak, and the count of kills."""

    number: int
    limit: str
    swap: str
    peak: str
    events: str


_VERSIONS = {
    "cgroup": _Version(
        1, "memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.max_usage_in_bytes", "memory.oom_control"
    ),
    "cgroup2": _Version(2, "memory.max", "memory.swap.max", "memory.peak", "memory.events"),
}


class ControlGroup:
    """A separate memory cgroup without swap. Close it after its processes have exited."""

    def __init__(self, parent: Path, version: _Version, nbytes: int | None = None) -> None:
        self._version = version
        self.kind = f"memory cgroup v{version.number} (cached files count)"
        self._folder = parent / f"fsdp-disk-offload-{os.getpid()}"
        try:
            self._folder.mkdir()
            limit = self._folder / version.limit
            if not limit.exists():
                raise OSError(f"{parent} hands no memory controller down")
            if nbytes is not None:
                limit.write_text(str(nbytes))
                swap = self._folder / version.swap  # not there where swap is not counted
                if swap.exists():
                    swap.write_text(str(nbytes if version.number == 1 else 0))
        except BaseException:
            self.close()
            raise

    def command(self, argv: Sequence[str]) -> list[str]:
        return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self._folder / "cgroup.procs"), *argv]

    def used(self, pids: Iterable[int]) -> int:
        return sum(_status_bytes(pid, "RssAnon") for pid in pids)

    def peak(self) -> int | None:
        with contextlib.suppress(OSError):  # memory.peak is younger than cgroup v2
            return int((self._folder / self._version.peak).read_text())
        return None

    def kills(self) -> int:
        found = re.search(r"^oom_kill (\d+)", (self._folder / self._version.events).read_text(), re.MULTILINE)
        return int(found.group(1)) if found else 0

    def close(self) -> None:
        """Kill the remaining processes of the group, and remove it."""
        give_up = time.monotonic() + _SECONDS_TO_EMPTY
        while True:
            with contextlib.suppress(OSError):
                for pid in (self._folder / "cgroup.procs").read_text().split():
                    os.kill(int(pid), signal.SIGKILL)
            try:
                self._folder.rmdir()
                return
            except FileNotFoundError:
                return
            except OSError:
                if time.monotonic() > give_up:
                    raise
            time.sleep(0.01)  # a process that was killed is gone a little later


Limit = PrivateMemory | ControlGroup


class Limiter:
    """Makes limits of the best kind that works here.

    Args:
        use_groups: False does without control groups, even where they can be made.
    """

    def __init__(self, use_groups: bool = True) -> None:
        self._place = next(_places_for_groups(), None) if use_groups else None

    @contextlib.contextmanager
    def limited(self, nbytes: int | None, num_processes: int) -> Iterator[Limit]:
        """Yield a limit for the processes that run inside, or only a count of their memory."""
        if self._place is None:
            yield PrivateMemory(nbytes, num_processes)
            return
        group = ControlGroup(*self._place, nbytes)
        try:
            yield group
        finally:
            group.close()


def _places_for_groups() -> Iterator[tuple[Path, _Version]]:
    """Where a group can be made: at the top if we may, or else as near to this process's own as possible."""
    for mount, version, own in _hierarchies():
        inside = mount / own.lstrip("/")
        for parent in (mount, inside, *inside.parents):
            if parent != mount and mount not in parent.parents:
                continue
            with contextlib.suppress(OSError):
                ControlGroup(parent, version).close()
                yield parent, version


def _hierarchies() -> Iterator[tuple[Path, _Version, str]]:
    """Mounted hierarchies that can limit memory, with this process's place in them."""
    with contextlib.suppress(OSError):
        own = {}
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            own[controllers or "cgroup2"] = path
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            fields = line.split()
            fstype, _, features = fields[fields.index("-") + 1 :][:3]
            mount = Path(fields[4])
            if fstype == "cgroup2":
                yield mount, _VERSIONS[fstype], own.get("cgroup2", "/")
            elif fstype == "cgroup" and "memory" in features.split(","):
                place = next((path for names, path in own.items() if "memory" in names.split(",")), "/")
                yield mount, _VERSIONS[fstype], place


def _status_bytes(pid: int, field: str) -> int:
    with contextlib.suppress(OSError):  # it has ended
        found = re.search(rf"^{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        if found:
            return int(found.group(1)) * 1024
    return 0
