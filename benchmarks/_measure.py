"""Measurements: bytes on the wire, memory of the process, the allocator's live bytes, spread.

All measurements treat libraries equally: they observe the process from outside and do not query any library.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import gc
import json
import os
import re
import socket
import statistics
import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

# --- spread


@dataclass(frozen=True)
class Spread:
    """A median with its quartiles."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        if len(values) < 2:
            return Spread(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return Spread(median, low, high)

    @staticmethod
    def of_ratios(values: Sequence[float], others: Sequence[float]) -> Spread:
        """Return the spread of the ratios of values from the same round."""
        return Spread.of([value / other for value, other in zip(values, others, strict=True)])

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


def ratio(values: Sequence[float], others: Sequence[float]) -> str:
    """Return the ratios with their spread, or a single ratio if each was measured once."""
    spread = Spread.of_ratios(values, others)
    return str(spread) if len(values) > 1 else f"{spread.median:.2f}"


def rotated(names: Sequence[str], num_rounds: int) -> Iterator[Sequence[str]]:
    """Yield the names once per round, with a rotating start, so that contestants do not always follow the same one."""
    for start in range(num_rounds):
        cut = start % len(names)
        yield [*names[cut:], *names[:cut]]


# --- bytes on the wire

_TCP_INFO_BYTES_SENT = 200  # offsets in Linux's struct tcp_info, which only ever grows at its end
_TCP_INFO_BYTES_RETRANSMITTED = 208
_NOT_COUNTED = ("nccl", "simulated")  # backends without TCP, or with connections and headers of their own


def bytes_sent() -> int | None:
    """Return the bytes that this process has sent over all open TCP connections, without retransmissions.

    gloo's connections are not accessible through torch, but they are file descriptors of this process, and the kernel
    counts the bytes of each. Communication without TCP (NCCL inside a machine, shared memory) is not included. The
    result is None if the kernel does not provide the count (before Linux 4.19, or on other systems), and with NCCL.
    """
    if dist.is_initialized() and any(name in dist.get_backend_config() for name in _NOT_COUNTED):
        return None
    tcp_info = getattr(socket, "TCP_INFO", None)
    if tcp_info is None or not os.path.isdir("/proc/self/fd"):
        return None
    total = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed in the meantime
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                if connection.type != socket.SOCK_STREAM:
                    continue
                info = connection.getsockopt(socket.IPPROTO_TCP, tcp_info, 512)
            if len(info) < _TCP_INFO_BYTES_RETRANSMITTED + 8:
                return None
            (sent,) = struct.unpack_from("Q", info, _TCP_INFO_BYTES_SENT)
            (again,) = struct.unpack_from("Q", info, _TCP_INFO_BYTES_RETRANSMITTED)
            total += sent - again
    return total


# --- memory of the process

# Blocks above this size get their own mapping and are returned to the system when they are freed, so resident memory
# equals live memory, for any allocating library and call. glibc's default is a threshold that grows up to 32 MiB.
# (torch's memory profiler cannot be used, because it does not see memory that gloo's threads free.)
NOTHING_KEPT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_TOP_PAD_": "0"}


def resident_bytes() -> int:
    """Resident memory of this process now."""
    return _status_bytes("VmRSS")


def peak_resident_bytes() -> int:
    """The most that was resident since `forget_peak`, which the kernel keeps to the page."""
    return _status_bytes("VmHWM")


def forget_peak() -> None:
    """Reset the peak to the current resident memory."""
    Path("/proc/self/clear_refs").write_text("5")


def settle() -> None:
    """Release memory of earlier work of this process, before a baseline is measured."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # glibc only
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _status_bytes(field: str) -> int:
    match = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    if match is None:
        raise RuntimeError(f"/proc/self/status has no {field}: the memory figures need Linux.")
    return int(match.group(1)) * 1024


class ProcessMeter:
    """Resident memory of this process above its current value."""

    def __init__(self) -> None:
        self._base = resident_bytes()
        forget_peak()

    def peaks(self) -> tuple[int, int]:
        """The most since the last call."""
        peak = peak_resident_bytes() - self._base
        forget_peak()
        return peak, peak

    def now(self) -> tuple[int, int]:
        now = resident_bytes() - self._base
        return now, now


class DeviceMeter:
    """Reserved and allocated memory of an accelerator's caching allocator, above the current values."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, torch.get_device_module(device)
        self._module.empty_cache()
        self._base = self._module.memory_reserved(device), self._module.memory_allocated(device)
        self._module.reset_peak_memory_stats(device)

    def peaks(self) -> tuple[int, int]:
        """The most since the last call."""
        reserved = self._module.max_memory_reserved(self._device)
        allocated = self._module.max_memory_allocated(self._device)
        self._module.reset_peak_memory_stats(self._device)
        return self._above((reserved, allocated))

    def now(self) -> tuple[int, int]:
        return self._above((self._module.memory_reserved(self._device), self._module.memory_allocated(self._device)))

    def _above(self, values: tuple[int, int]) -> tuple[int, int]:
        return values[0] - self._base[0], values[1] - self._base[1]


def meter_of(device: torch.device) -> ProcessMeter | DeviceMeter:
    """Return a meter of the memory that a device's tensors are in."""
    return ProcessMeter() if device.type == "cpu" else DeviceMeter(device)


# --- collectives


_BACKENDS = ("gloo:", "nccl:")
DISPATCHED = ("c10d::",)  # what reaches the fake backend, which marks nothing by itself


def operations(trace: profile, prefixes: tuple[str, ...] = _BACKENDS) -> dict[str, int]:
    """Count each backend operation (`gloo:all_reduce`, `gloo:send`, ...) in a finished profile.

    The backends record their operations whether they were called through `torch.distributed`, through a group object
    or from C++, as in DDP.
    """
    with tempfile.TemporaryDirectory() as folder:  # `trace.events()` takes seconds, it builds a tree of calls
        path = os.path.join(folder, "trace.json")
        trace.export_chrome_trace(path)
        with open(path) as file:
            names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
    counts = collections.Counter(name for name in names if name.startswith(prefixes))
    return dict(sorted(counts.items()))


def profiled() -> profile:
    """A profile of this process's host side, for `operations`."""
    return profile(activities=[ProfilerActivity.CPU])


def count_collectives(counts: Mapping[str, int], world_size: int) -> float:
    """Count the collectives; W - 1 sends with their receives are a single exchange among W ranks."""
    sends = sum(count for name, count in counts.items() if name.endswith(":send"))
    native = sum(count for name, count in counts.items() if not name.endswith((":send", ":recv", ":barrier")))
    return native + sends / max(world_size - 1, 1)


# --- the machine

_BUSY_LOAD = 0.5


def warn_if_busy() -> None:
    """Warn if other processes use the cores, which affects times and, to a lesser degree, ratios."""
    if (load := os.getloadavg()[0]) > _BUSY_LOAD:
        print(f"Something else is running here (load average {load:.1f}): expect a wide spread.", flush=True)


def synchronize(device: torch.device) -> None:
    """Wait until everything issued on the device has happened."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


# --- tables


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return aligned columns: the first to the left, all other columns to the right."""
    columns = zip(header, *rows, strict=True)
    widths = [max(map(len, column)) for column in columns]

    def line(cells: Sequence[str]) -> str:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        return "  ".join([cells[0].ljust(widths[0]), *padded[1:]]).rstrip()

    return "\n".join([line(header), line(["-" * width for width in widths]), *map(line, rows)])
