"""`StreamOrder` records accesses to memory with their streams, and reports unordered accesses.

Memory is tracked by storage. The record of a storage is an attribute of the storage and is deleted with it, which
detects when memory is freed. torch's caching allocators reuse freed memory immediately for allocations on the same
stream. Other streams may still use this memory, unless `Tensor.record_stream` was called for them.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from fsdp.distributed.devices import is_host
from fsdp.engine.call_stack import frames_from
from fsdp.engine.handle import FlatParamHandle
from fsdp.testing.access_log import Access, Memory, Moment, Span, Timeline, spans_of

_HELD = "_fsdp_stream_order"
_TORCH, _OURS = (os.path.dirname(os.path.abspath(module.__file__ or "")) for module in (torch, sys.modules["fsdp"]))
_STANDARD, _TESTING = os.path.dirname(os.__file__), os.path.dirname(os.path.abspath(__file__))


@dataclass(frozen=True)
class Report:
    """Two operators that use the same memory without an order.

    Attributes:
        first, second: the names of the operators, in the order of the calls on the host.
        first_stream, second_stream: the timelines: a stream, the host, a backend's collectives, or a message.
        first_place, second_place: the locations of the calls: file, line and function.
        memory: the bytes and their tensor, with unit and parameters for a sharded model.
    """

    first: str
    second: str
    first_stream: str
    second_stream: str
    first_place: str
    second_place: str
    memory: str
    _did: tuple[str, str]

    def __str__(self) -> str:
        return (
            f"{self.second} on {self.second_stream} {self._did[1]} {self.first} on {self.first_stream} "
            f"{self._did[0]}, and does not wait for it\n"
            f"  first:  {self.first_place}\n  second: {self.second_place}\n  memory: {self.memory}"
        )


class StreamOrderError(RuntimeError):
    """Operators on multiple streams use the same memory without an order.

    Attributes:
        reports: a report for each pair of locations, in the order of detection.
    """

    def __init__(self, reports: list[Report]) -> None:
        self.reports = reports
        listed = "\n".join(f"{number}. {report}" for number, report in enumerate(reports, 1))
        super().__init__(
            f"{len(reports)} {'pair' if len(reports) == 1 else 'pairs'} of operators without an order, so results "
            f"depend on which is faster:\n{listed}\nLet the stream of the second operator wait for that of the first "
            "(stream.wait_stream, event.wait, work.wait), or the host (synchronize), or keep the memory until both "
            "have ended."
        )


class Held:
    """The record of a storage.

    Attributes:
        device: the actual or simulated device.
        is_pinned: True if copies between this storage and an accelerator are asynchronous.
        memory: the current block of memory.
        address: the address of the block.
        within: the record of another storage that contains the block and owns the memory (such as a Python buffer).
    """

    within: Held | None = None

    def __init__(self, order: StreamOrder, device: torch.device, is_pinned: bool, memory: Memory, address: int) -> None:
        self.order, self.device, self.is_pinned, self.memory = order, device, is_pinned, memory
        self.address = address

    def surrounds(self, other: Held) -> bool:
        """Return whether this storage owns memory that contains the memory of another storage."""
        stop = self.address + self.memory.nbytes
        return (
            self is not other
            and self.within is None
            and self.address <= other.address
            and other.address + other.memory.nbytes <= stop
        )

    def __del__(self) -> None:
        if self.within is None:
            self.order.gone.append(self.memory)


class StreamOrder:
    """The clocks of all timelines, and the memory in use."""

    def __init__(self) -> None:
        self.host = Timeline("the host")
        self.lock = threading.RLock()
        self.is_active = True
        self.page_locked: dict[int, int] = {}  # the sizes of pinned blocks of host memory, by address
        self.gone: deque[Memory] = deque()  # blocks freed by any thread since the last `collect`
        self._on_host: weakref.WeakSet[Held] = weakref.WeakSet()
        self._streams: dict[Hashable, Timeline] = {}
        self._freed: dict[Timeline, list[Memory]] = {}
        self._works: weakref.WeakKeyDictionary[Any, tuple[Timeline, Any, list[Access]]] = weakref.WeakKeyDictionary()
        self._reports: dict[Hashable, Report] = {}

    @property
    def reports(self) -> list[Report]:
        """The reports so far, one for each pair of locations."""
        return list(self._reports.values())

    def timeline(self, key: Hashable, name: str) -> Timeline:
        return self._streams.setdefault(key, Timeline(name))

    def held(self, storage: UntypedStorage) -> Held:
        """Return the record of a storage; create one for older storages, or storages not allocated by torch."""
        found = getattr(storage, _HELD, None)
        if found is None or found.order is not self:
            locked = storage.data_ptr() in self.page_locked  # freed memory of the host can be reused immediately
            memory = Memory(self.host if locked else None, storage.nbytes())
            device = torch._C.StorageBase.device.__get__(storage)  # type: ignore[attr-defined] # a simulation's is another
            found = self._hold(storage, device, locked, memory)
            if is_host(found.device):
                found.within = next((each for each in self._on_host if each.surrounds(found)), None)
        return found

    def _hold(self, storage: UntypedStorage, device: torch.device, pinned: bool, memory: Memory) -> Held:
        held = Held(self, device, pinned, memory, storage.data_ptr())
        setattr(storage, _HELD, held)
        if is_host(device):
            self._on_host.add(held)
        return held

    def is_known(self, storage: UntypedStorage) -> bool:
        return getattr(getattr(storage, _HELD, None), "order", None) is self

    def allocate(self, storage: UntypedStorage, device: torch.device, pinned: bool, access: Access) -> None:
        """Record the first block of memory of a new storage."""
        held = self._hold(storage, device, pinned, Memory(None, 0))
        self.renew(held, storage.nbytes(), access)

    def renew(self, held: Held, nbytes: int, access: Access) -> None:
        """Record a new block of memory of a storage, or the release of its block if `nbytes` is 0."""
        self.collect(held.memory)
        owner = None if held.is_pinned else self.host if is_host(held.device) else access.timeline
        held.memory = Memory(owner, nbytes)
        if owner is None or owner is self.host or not nbytes:
            return
        for memory in self._freed.pop(owner, []):
            for late in memory.not_before(owner):
                what = f"{memory.nbytes} bytes on {held.device}, which were freed"
                self._report(late, access, what, "still uses", "may be given memory that")
        # Earlier work on the owner's stream may still use the memory when other timelines start to use it.
        held.memory.note(access, (0, nbytes), True)

    def collect(self, *freed: Memory) -> None:
        """Record the release of memory; host memory can be reused immediately."""
        pending = list(freed)
        while self.gone:
            pending.append(self.gone.popleft())
        for memory in pending:
            if memory.owner is self.host:
                for late in memory.not_before(self.host):
                    now = Access("free", self.host, self.host.tick(), _places())
                    self._report(late, now, f"{memory.nbytes} bytes on the host", "still uses", "gives to others what")
            elif memory.owner is not None and any(memory.not_before(memory.owner)):
                self._freed.setdefault(memory.owner, []).append(memory)

    def access(self, operator: str, timeline: Timeline) -> Access:
        """Return a new access, which follows all work awaited by the host."""
        if timeline is not self.host:
            timeline.wait(self.host.moment())
        return Access(operator, timeline, timeline.tick(), _places())

    def note(self, access: Access, tensor: Tensor, writes: bool) -> None:
        storage = tensor.untyped_storage()
        held = self.held(storage)
        if held.memory.nbytes < storage.nbytes():
            self.renew(held, storage.nbytes(), access)
        for span in spans_of(tensor):
            self.note_span(access, held, span, writes)

    def note_span(self, access: Access, held: Held, span: Span, writes: bool) -> None:
        if held.within is not None:
            offset = held.address - held.within.address
            held, span = held.within, (span[0] + offset, span[1] + offset)
        found = held.memory.note(access, span, writes)
        if found is not None:
            first, has_written = found
            what = f"bytes {span[0]} to {span[1]} of {held.memory.nbytes} on {held.device}{_owner(held, span)}"
            did = "writes what" if writes else "reads what"
            self._report(first, access, what, "has written" if has_written else "reads", did)

    def _report(self, first: Access, second: Access, memory: str, has: str, does: str) -> None:
        key = first.operator, second.operator, first.places, second.places
        places = [" in ".join(each.places) or "a thread of torch" for each in (first, second)]
        ends = first.operator, second.operator, first.happened_on, second.happened_on
        report = Report(*ends, places[0], places[1], memory, (has, does))
        self._reports.setdefault(key, report)

    def wait(self, timeline: Timeline, moment: Moment) -> None:
        with self.lock:
            self.collect()
            timeline.wait(moment)

    def wait_for_all(self) -> None:
        for timeline in list(self._streams.values()):
            self.wait(self.host, timeline.moment())

    def begin(self, work: Any, timeline: Timeline, accesses: list[Access]) -> None:
        """Record accesses that are in flight until `work` is awaited."""
        self._works[work] = timeline, timeline.moment(), accesses

    def finish(self, work: Any, waiting: Timeline, *, on_host: bool = False) -> None:
        """Record that `waiting` waits for a work, or that the host waits, for a message or if `on_host`."""
        found = None if work is None else self._works.pop(work, None)
        if found is None:  # for example, the work of multiple coalesced collectives
            for each in list(self._streams.values()):
                if each.name.startswith("collectives"):
                    self.wait(waiting, each.moment())
            return
        timeline, moment, accesses = found
        if timeline in self._streams.values():
            self.wait(self.host if on_host else waiting, moment)
            return
        with self.lock:  # the message is complete, so its accesses belong to the host
            self.collect()
            for access in accesses:
                access.timeline, access.time = self.host, self.host.tick()


def _places() -> tuple[str, ...]:
    """Return the location in user code, preceded by the location in this library if it was called from there."""
    found: list[str] = []
    for frame in frames_from(sys._getframe(2)):
        code = frame.f_code
        file = code.co_filename
        is_standard = file.startswith(_STANDARD) and "site-packages" not in file
        if not (is_standard or file.startswith((_TORCH, _TESTING, "<"))):
            is_ours = file.startswith(_OURS)
            if not is_ours or not found:
                found.append(f"{file}:{frame.f_lineno} ({code.co_name})")
            if not is_ours:
                break
    return tuple(found)


def _owner(held: Held, span: Span) -> str:
    """Return the flat parameter and the parameters in a span of a storage as text; empty if there are none."""
    for handle in [each for each in gc.get_objects() if issubclass(type(each), FlatParamHandle)]:
        for what, tensor, starts in _tensors_of(handle):
            storage = tensor.untyped_storage()
            if getattr(storage, _HELD, None) is held:
                size, first = tensor.element_size(), tensor.storage_offset()
                ranges = [(name, (first + start) * size, (first + stop) * size) for name, start, stop in starts]
                names = [name for name, start, stop in ranges if start < span[1] and stop > span[0]]
                return f": {what} of {handle.name}" + (f", {', '.join(names)}" if names else "")
    return ""


def _tensors_of(handle: FlatParamHandle) -> Iterable[tuple[str, Tensor, list[tuple[str, int, int]]]]:
    rank, vector = handle.comm.rank, handle.flat_param.vector
    intervals = [(slot.name, handle.layout.interval(number, rank)) for number, slot in enumerate(handle.layout.slots)]
    own = [(name, each.offset, each.offset + each.numel) for name, each in intervals if each is not None]
    yield "the shard", vector, own
    gradient = handle.flat_param.grad
    if type(gradient) is Tensor:  # not a placeholder for a missing gradient
        yield "the gradient of the shard", gradient, own
    whole = [(slot.name, slot.start, slot.stop) for slot in handle.layout.slots]
    yield "the unsharded parameters", handle.unsharded.full, whole
