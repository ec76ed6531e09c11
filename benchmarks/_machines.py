"""Two emulated machines: network namespaces with their own addresses, connected by a link of a given bandwidth.

A namespace has its own interfaces, addresses and ports, so a process inside reaches the other machine only through the
link. The machines share processors and files, like machines with a common file system. Requires Linux, root (or
CAP_NET_ADMIN and CAP_SYS_ADMIN) and iproute2's `ip` and `tc`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

INTERFACE = "cable"  # of either machine: they cannot see each other's names

_CLONE_NEWNET = 0x40000000
_NAMESPACES = "/run/netns"  # where `ip netns` keeps what `setns` takes

# The burst size and the maximum queue length. The burst must contain the largest packet of the kernel (64 KiB), or the
# rate is not reached; the queue has the length of a small switch's.
_BURST, _QUEUE = "128kb", "20ms"


class NotAllowedError(RuntimeError):
    """This system makes no two machines; the message says why."""


@dataclass(frozen=True)
class Machine:
    """An emulated machine.

    Args:
        name: the name of its namespace.
        address: its address for the other machine.
    """

    name: str
    address: str

    def enter(self) -> None:
        """Put this thread, and those that it starts from now on, onto the machine; and gloo on the cable."""
        descriptor = os.open(f"{_NAMESPACES}/{self.name}", os.O_RDONLY)
        try:
            if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {self.name}")
        finally:
            os.close(descriptor)
        os.environ.update(on_cable())

    def command(self, arguments: Sequence[str]) -> list[str]:
        """The command line that runs `arguments` on the machine."""
        return [_tool("ip"), "netns", "exec", self.name, *arguments]

    def limit(self, mbits: float | None) -> None:
        """Limit the sending rate to Mbit/s (10^6 bits per second, including headers); None removes the limit."""
        if mbits is not None:
            shape = ["tbf", "rate", f"{mbits}mbit", "burst", _BURST, "latency", _QUEUE]
            self._configure("tc", "qdisc", "replace", "dev", INTERFACE, "root", *shape)
        elif "tbf" in self._configure("tc", "qdisc", "show", "dev", INTERFACE):
            self._configure("tc", "qdisc", "delete", "dev", INTERFACE, "root")

    def unplug(self) -> None:
        """Disconnect the link: messages are lost without an error."""
        self._configure("ip", "link", "set", INTERFACE, "down")

    def plug(self) -> None:
        """Mend the cable; it is whole when both ends are plugged."""
        self._configure("ip", "link", "set", INTERFACE, "up")

    def kill(self) -> None:
        """Switch it off: every process on it dies at once, and is gone when this returns."""
        while pids := self._processes():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def _processes(self) -> list[int]:
        # A thread may be in a different namespace than its process; processes with only a thread here are not found.
        listed = _run("ip", "netns", "pids", self.name).split()
        return [pid for pid in map(int, listed) if pid != os.getpid()]

    def _configure(self, tool: str, *arguments: str) -> str:
        return _run(tool, "-n", self.name, *arguments)


def on_cable() -> dict[str, str]:
    """The environment in which communication takes the cable: both machines are this one, and could share memory."""
    return {"GLOO_SOCKET_IFNAME": INTERFACE, "TP_SOCKET_IFNAME": INTERFACE, "FSDP_SHARED_MEMORY": "0"}


_serial = 0


@contextlib.contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Create two connected machines, and remove them afterwards, including their processes.

    Raises:
        NotAllowedError: if the system does not permit namespaces.
    """
    global _serial
    _serial += 1
    machines = tuple(Machine(f"fsdp-{os.getpid()}-{_serial}-{end}", f"192.0.2.{1 + end}") for end in range(2))
    made: list[Machine] = []
    try:
        try:
            _make(machines, made)
        except RuntimeError as error:
            raise NotAllowedError(str(error)) from error
        yield machines[0], machines[1]
    finally:
        for machine in made:
            machine.kill()
            _run("ip", "netns", "delete", machine.name)


def _make(machines: Sequence[Machine], made: list[Machine]) -> None:
    if sys.platform != "linux":
        raise RuntimeError(f"network namespaces are Linux's, and this is {sys.platform}")
    first, second = machines
    for machine in machines:
        _run("ip", "netns", "add", machine.name)
        made.append(machine)
    ends = "name", INTERFACE, "netns", first.name, "type", "veth", "peer", "name", INTERFACE, "netns", second.name
    _run("ip", "link", "add", *ends)
    for machine in machines:
        _run("ip", "-n", machine.name, "address", "add", f"{machine.address}/24", "dev", INTERFACE)
        for interface in ("lo", INTERFACE):
            _run("ip", "-n", machine.name, "link", "set", interface, "up")
        # Here and not when it is needed, so that a system without token buckets is known at once.
        machine.limit(1000)
        machine.limit(None)


def _tool(name: str) -> str:
    # Often not on the path of who is not root by login.
    found = shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]))
    if found is None:
        raise RuntimeError(f"there is no program `{name}` here (it is part of iproute2)")
    return found


def _run(tool: str, *arguments: str) -> str:
    done = subprocess.run([_tool(tool), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip() or f"status {done.returncode}"
        raise RuntimeError(f"`{tool} {' '.join(arguments)}` failed: {reason}")
    return done.stdout


# --- what the cable really carries

_RAW = """
import socket, sys, threading, time
role, address, nbytes = sys.argv[1], sys.argv[2], int(sys.argv[3])
if role == "listen":
    server = socket.create_server((address, 0))
    print(server.getsockname()[1], flush=True)
    peer = server.accept()[0]
else:
    peer = socket.create_connection((address, int(sys.argv[4])))
chunk = bytes(1 << 16)
def push():
    for _ in range(nbytes // len(chunk)):
        peer.sendall(chunk)
pushing = threading.Thread(target=push)
pushing.start()
arrived, marks = 0, []
while arrived < nbytes // len(chunk) * len(chunk):
    arrived += len(peer.recv(1 << 20))
    marks.append((time.perf_counter(), arrived))
pushing.join()
# Without the first fifth, in which the bucket is full and TCP probes the bandwidth.
(start, before), (end, after) = next(mark for mark in marks if 5 * mark[1] >= arrived), marks[-1]
print((after - before) / (end - start))
"""


def raw_bandwidth(machines: tuple[Machine, Machine], mbits: float, seconds: float = 2.0) -> float:
    """Return the bytes per second of plain sockets in both directions on a link of `mbits`, for the slower direction.

    The result is less than the limit, which includes headers.
    """
    first, second = machines
    nbytes = str(int(mbits * 1e6 / 8 * seconds))
    arguments = [sys.executable, "-c", _RAW]
    with (
        _reading(first.command([*arguments, "listen", first.address, nbytes])) as server,
        _reading(second.command([*arguments, "connect", first.address, nbytes, _line(server)])) as client,
    ):
        return min(float(_line(server)), float(_line(client)))


@contextlib.contextmanager
def _reading(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        watchdog = threading.Timer(60, process.kill)
        watchdog.start()
        try:
            yield process
        finally:
            watchdog.cancel()
            process.kill()


def _line(process: subprocess.Popen[str]) -> str:
    line = process.stdout.readline() if process.stdout is not None else ""
    if not line:
        raise RuntimeError("the raw transfer over the cable ended without a result; its messages above say why")
    return line.strip()
