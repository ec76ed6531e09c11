"""`check_streams` checks the order of work on streams, and of messages between ranks.

With an accelerator, its streams and events are replaced by subclasses that report waits to the `StreamOrder`. Without
an accelerator, a device is simulated: CPU tensors report a device and are computed in program order, and streams and
events only report waits. A missing wait is therefore detected from the sequence of calls, instead of by chance from
wrong results.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import UntypedStorage

from fsdp.distributed import devices
from fsdp.distributed.devices import HOST, is_host
from fsdp.testing.access_log import Moment, Timeline
from fsdp.testing.noted_operators import Accelerator, NoteOperators
from fsdp.testing.simulated_tensors import Names, SimulatedTensors, reading_names
from fsdp.testing.stream_order import StreamOrder, StreamOrderError


@contextmanager
def check_streams(device: str | None = "cuda") -> Iterator[StreamOrder]:
    """Check that operators which use the same memory on multiple streams are ordered; otherwise raise an error.

    The checker records every operator with its stream and the bytes that it reads and writes, and every wait for
    streams, events and works of collectives. The reports contain:

    - two operators that use the same bytes without an order, if at least one of them writes;
    - freed memory that may be reused while another stream still uses it;
    - a read of pinned host memory before the arrival of a copy, or a write while a copy reads it;
    - a use of a collective's buffers before the collective was awaited.

    An accelerator with streams is observed. Without one, an accelerator is simulated on the CPU: tensors on `device`
    are CPU tensors that report this device, and ``torch.accelerator``, ``torch.Stream``, ``torch.Event`` and torch's
    module for the type (``torch.cuda``) use the simulation. Models, optimizers and streams that are used inside must be
    created inside. Compiled code runs eagerly inside. Not collective.

    Args:
        device: the type of the simulated accelerator if no accelerator is available. With None, only messages between
            ranks on the CPU are checked.

    Yields:
        An object whose `reports` contain the results so far.

    Raises:
        RuntimeError: inside another `check_streams`, on any thread.
        StreamOrderError: at the end, with every unordered pair of operators: their names, streams and source
            locations, and the memory, with unit and parameter for a sharded model. Other exceptions inside take
            precedence.
    """
    if not _one_at_a_time.acquire(blocking=False):
        raise RuntimeError("check_streams() inside another check_streams(): remove one of them")
    order = StreamOrder()
    try:
        found = devices.accelerator()
        if found is not None:
            places = _Observed(order, found)
        else:
            places = _HostAlone(order, HOST) if device is None else _Simulated(order, torch.device(device, 0))
        with places.replaced():
            yield order
    finally:
        order.is_active = False
        _one_at_a_time.release()
    if order.reports:
        raise StreamOrderError(order.reports)


_one_at_a_time = threading.Lock()


class _Observed:
    """An actual accelerator; torch's classes and functions for it are replaced, so that they report waits."""

    simulated = False

    def __init__(self, order: StreamOrder, device: torch.device) -> None:
        self._order, self._device = order, device
        self._real_stream = torch.accelerator.current_stream
        self._accelerator = Accelerator(device, self.simulated, self.timeline)

    def _classes(self, stream: Any, event: Any, new_event: Callable[[Any, torch.device], Any]) -> tuple[Any, Any]:
        """Return subclasses of a stream class and an event class; `new_event` creates an event."""
        places, order = self, self._order

        class Event(event):
            moment: Moment = {}  # noqa: RUF012 - never changed

            def record(self, stream: Any = None) -> None:
                super().record(*(() if stream is None else (stream,)))
                self.moment = places.timeline(stream).moment()

            def wait(self, stream: Any = None) -> None:
                super().wait(*(() if stream is None else (stream,)))
                order.wait(places.timeline(stream), self.moment)

            def synchronize(self) -> None:
                super().synchronize()
                order.wait(order.host, self.moment)

            def query(self) -> bool:
                is_over: bool = super().query()
                if is_over:
                    order.wait(order.host, self.moment)
                return is_over

        class Stream(stream):
            def wait_event(self, event: Any) -> None:
                super().wait_event(event)
                order.wait(places.timeline(self), getattr(event, "moment", {}))

            def wait_stream(self, stream: Any) -> None:
                super().wait_stream(stream)
                order.wait(places.timeline(self), places.timeline(stream).moment())

            def record_event(self, event: Any = None) -> Any:
                event = event or new_event(Event, self.device)
                event.record(self)
                return event

            def synchronize(self) -> None:
                super().synchronize()
                order.wait(order.host, places.timeline(self).moment())

            def query(self) -> bool:
                is_over: bool = super().query()
                if is_over:
                    order.wait(order.host, places.timeline(self).moment())
                return is_over

        return Stream, Event

    def timeline(self, stream: Any = None) -> Timeline:
        found = self.current_stream() if stream is None else stream
        name = f"stream {found.stream_id}" if found.stream_id else "the default stream"
        return self._order.timeline((found.device, found.stream_id), f"{name} of {found.device}")

    def current_stream(self) -> Any:
        return self._real_stream()

    def names(self) -> Names:
        Stream, Event = self._classes(torch.Stream, torch.Event, lambda kind, device: kind(device))  # noqa: N806

        def current_stream(device: Any = None) -> Any:
            found = self._real_stream(*(() if device is None else (device,)))
            kind = found.device_type
            return Stream(stream_id=found.stream_id, device_index=found.device_index, device_type=kind)

        synchronize = torch.accelerator.synchronize
        yield torch, {"Stream": Stream, "Event": Event}
        yield torch.accelerator, {"current_stream": current_stream, "synchronize": self._noting_all(synchronize)}
        module = torch.get_device_module(self._device)
        if isinstance(module.Stream, type) and module.Stream is not torch.Stream:
            own = self._classes(module.Stream, module.Event, lambda kind, device: kind())
            yield module, dict(zip(("Stream", "Event"), own, strict=True))
        yield module, {"synchronize": self._noting_all(module.synchronize)}

    def _noting_all(self, synchronize: Callable[..., None]) -> Callable[..., None]:
        def noting(*args: Any, **kwargs: Any) -> None:
            synchronize(*args, **kwargs)
            self._order.wait_for_all()

        return noting

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """Replace torch's names in the context to report calls, on this thread and on threads that it starts."""
        run = threading.Thread.run

        def run_noted(thread: threading.Thread) -> None:
            with NoteOperators(self._order, self._accelerator):
                run(thread)

        with ExitStack() as stack:
            # Before names are replaced, because this call imports torch's compiler, which caches the original objects.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.callback(_forget_streams)
            for owner, replaced in [*self.names(), *self._common_names(), (threading.Thread, {"run": run_noted})]:
                for name, value in replaced.items():
                    stack.enter_context(mock.patch.object(owner, name, value, create=True))
            _forget_streams()
            with NoteOperators(self._order, self._accelerator):
                yield

    def _common_names(self) -> Names:
        yield from reading_names(self._order, self._accelerator)
        resize = UntypedStorage.resize_

        def resize_(storage: UntypedStorage, nbytes: int) -> Any:
            resized = resize(storage, nbytes)
            held = self._order.held(storage)
            timeline = self._order.host if is_host(held.device) else self.timeline()
            with self._order.lock:
                self._order.renew(held, nbytes, self._order.access("resize_", timeline))
            return resized

        yield UntypedStorage, {"resize_": resize_}
        if dist.is_available():
            yield dist.Work, {name: self._noting_work(name) for name in _WAITS}

    def _noting_work(self, name: str) -> Callable[..., Any]:
        real, has_come = getattr(dist.Work, name), name == "is_completed"

        def noting(work: Any, *args: Any, **kwargs: Any) -> Any:
            with self._accelerator.here(is_unnoted=True):
                result = real(work, *args, **kwargs)
            if result or not has_come:
                self._order.finish(work, self.timeline(), on_host=has_come)
            return result

        return noting


# Methods of a collective's work that make the current stream (for a message, the host) wait for the work.
_WAITS = ("wait", "synchronize", "block_current_stream", "get_future", "is_completed")


def _forget_streams() -> None:
    """Clear the caches of torch's streams in `fsdp.distributed.devices`, because the streams have changed."""
    for cached in (devices.has_streams, devices._side_stream, torch.get_device_module):
        cached.cache_clear()


class _HostAlone(_Observed):
    """A machine without an accelerator, where only messages are concurrent with computation."""

    def timeline(self, stream: Any = None) -> Timeline:
        return self._order.host

    def names(self) -> Names:
        return iter(())


class _Simulated(_Observed):
    """A simulated accelerator that uses host memory; its streams and events only report calls."""

    simulated = True

    def __init__(self, order: StreamOrder, device: torch.device) -> None:
        super().__init__(order, device)
        self.Stream, self.Event = self._classes(_SimulatedStream, _SimulatedEvent, lambda kind, device: kind())
        self.Stream.of_device, self.Stream.numbers = device, itertools.count()
        self._default = self.Stream()

    def current_stream(self, device: Any = None) -> Any:
        return self._accelerator.stream or self._default

    def set_stream(self, stream: Any) -> None:
        self._accelerator.stream = stream

    @contextmanager
    def entered(self, stream: Any) -> Iterator[Any]:
        """Make a stream current in the context; None has no effect."""
        with self._accelerator.here(stream=stream or self._accelerator.stream):
            yield stream

    def names(self) -> Names:
        kind = self._device.type
        real = getattr(torch, kind, None)
        module: Any = ModuleType(f"torch.{kind}")
        module.__dict__.update({} if real is None else vars(real))
        both: dict[str, Any] = {
            "current_stream": self.current_stream,
            "device_count": lambda: 1,
            "empty_cache": lambda: None,
            "is_available": lambda: True,
            "set_stream": self.set_stream,
            "synchronize": self._noting_all(lambda device=None: None),
        }
        locked = self._order.page_locked
        page_locks = SimpleNamespace(  # with the names in CUDA; both functions return 0 for success
            cudaHostRegister=lambda address, nbytes, flags: locked.update({address: nbytes}) or 0,
            cudaHostUnregister=lambda address: locked.pop(address) and 0,
        )
        module.__dict__.update(
            both,
            Stream=self.Stream,
            Event=self.Event,
            cudart=lambda: page_locks,
            current_device=lambda: 0,
            default_generators=(torch.Generator(),),
            default_stream=lambda device=None: self._default,
            device=lambda index: nullcontext(),
            get_rng_state=lambda device=None: torch.get_rng_state(),
            init=lambda: None,
            is_current_stream_capturing=lambda: False,
            is_initialized=lambda: True,
            manual_seed=lambda seed: None,
            manual_seed_all=lambda seed: None,
            set_device=lambda device: None,
            set_rng_state=lambda state, device=None: None,
            stream=self.entered,
        )
        self.Stream.entered = self.entered
        yield torch, {"Stream": self.Stream, "Event": self.Event, kind: module}
        accelerator = {"current_accelerator": lambda check_available=False: torch.device(kind)}
        indices = {f"{verb}_device_{noun}" for verb in ("current", "set") for noun in ("index", "idx")}
        yield torch.accelerator, both | accelerator | {name: lambda device=None: 0 for name in indices}
        yield from SimulatedTensors(self._order, self._accelerator).names()


class _SimulatedEvent:
    """An event that is complete as soon as it is queried."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        return 0.0

    def record(self, stream: Any = None) -> None:
        pass

    wait = synchronize = record


class _SimulatedStream:
    """A stream that runs work immediately."""

    of_device: torch.device
    entered: Callable[[Any], Any]
    numbers: Iterator[int]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device, self.stream_id = self.of_device, next(self.numbers)
        self._entered: list[Any] = []

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def wait_event(self, event: Any = None) -> None:
        pass

    wait_stream = synchronize = wait_event

    def __enter__(self) -> Any:
        context = type(self).entered(self)
        stream = context.__enter__()
        self._entered.append(context)
        return stream

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)
