"""Devices: which one is used, and copies to and from the host, in order on a CPU and beside computation elsewhere."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch import Tensor

from fsdp.distributed.devices import (
    CopyStream,
    accelerator,
    arrival_on,
    copy_stream_of,
    current_device,
    default_generators,
    generator_state,
    has_streams,
    host_bytes,
    new_copy_stream,
    run_after,
    set_generator_state,
)

CPU = torch.device("cpu")


def test_the_memory_of_a_tensor_keeps_it_alive() -> None:
    tensor = torch.tensor([1, 2, 3], dtype=torch.uint8)
    alive, part = weakref.ref(tensor), host_bytes(tensor)[1:]
    del tensor
    assert list(part.cast("B")) == [2, 3]
    assert alive() is not None
    del part
    assert alive() is None


# On a CPU, and where streams are not known


@pytest.fixture
def lane() -> CopyStream:
    return copy_stream_of(CPU)


def test_all_devices_without_streams_have_one_lane() -> None:
    assert copy_stream_of(CPU) is copy_stream_of(torch.device("cpu", 0)) is copy_stream_of(torch.device("meta"))


def test_a_fork_is_nothing_and_hides_nothing(lane: CopyStream) -> None:
    value = torch.zeros(3)
    with lane.fork() as entered:
        value += 1
    assert entered is None
    lane.arrival().wait()
    assert value.tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="inside"), lane.fork():
        raise ValueError("inside")


def test_forks_may_lie_in_each_other(lane: CopyStream) -> None:
    with lane.fork(), lane.fork():
        lane.arrival().wait()
    lane.settle()


def test_what_is_on_the_host_is_used_at_once_and_as_it_is(lane: CopyStream) -> None:
    sources, used = [torch.ones(3), torch.zeros(2)], list[Tensor]()
    for number, source in enumerate(sources):
        lane.to_host(source, used.append)
        assert len(used) == number + 1
        assert used[-1] is source
    lane.settle()
    lane.settle()
    assert len(used) == 2


# On an accelerator that is not CUDA, and does no more than to note what it is asked for


class Noted:
    """Stands for torch's module of an accelerator: what is queued on its streams is noted, in the order of the host."""

    def __init__(self) -> None:
        self.queued: list[str] = []
        self.streams = 0
        self.current = self.Stream(torch.device("xpu", 1))
        self.default_generators = [torch.Generator(), torch.Generator()]

    def Stream(self, device: torch.device) -> NotedStream:  # noqa: N802 (torch's name)
        self.streams += 1
        return NotedStream(self, device, f"stream {self.streams}")

    def Event(self) -> NotedEvent:  # noqa: N802 (torch's name)
        return NotedEvent(self)

    def current_device(self) -> int:
        return 1

    def current_stream(self, device: torch.device) -> NotedStream:
        assert device.type == "xpu"
        return self.current

    @contextmanager
    def stream(self, stream: NotedStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def is_initialized(self) -> bool:
        return True

    def get_rng_state(self, device: torch.device) -> Tensor:
        assert device.index is not None
        return self.default_generators[device.index].get_state()

    def set_rng_state(self, state: Tensor, device: torch.device) -> None:
        assert device.index is not None
        self.default_generators[device.index].set_state(state)


class NotedStream:
    def __init__(self, module: Noted, device: torch.device, name: str) -> None:
        self.module, self.device, self.name = module, device, name

    def wait_stream(self, other: NotedStream) -> None:
        self.module.queued.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: NotedEvent) -> None:
        self.module.queued.append(f"{self.name} waits for {event.of}")

    def synchronize(self) -> None:
        self.module.queued.append(f"the host waits for {self.name}")


class NotedEvent:
    of = "nothing"

    def __init__(self, module: Noted) -> None:
        self.module = module

    def record(self, stream: NotedStream) -> None:
        self.of = f"the event on {stream.name}"

    def synchronize(self) -> None:
        self.module.queued.append(f"the host waits for {self.of}")


XPU = torch.device("xpu", 1)


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Noted]:
    module = Noted()
    torch.get_device_module.cache_clear()
    monkeypatch.setattr(torch, "xpu", module)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("xpu"))
    yield module
    torch.get_device_module.cache_clear()


@pytest.mark.usefixtures("noted")
def test_every_accelerator_with_streams_is_one() -> None:
    assert has_streams("xpu")
    assert accelerator() == current_device("xpu") == XPU
    assert not has_streams("cpu")
    assert not has_streams("meta")
    assert current_device("cpu") == CPU


def test_an_accelerator_without_streams_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("mps"))
    assert accelerator() is None
    assert copy_stream_of(torch.device("mps")) is copy_stream_of(CPU)


def test_a_fork_waits_for_the_compute_stream_which_waits_for_its_arrival(noted: Noted) -> None:
    lane = new_copy_stream(XPU)
    with lane.fork():
        noted.queued.append(f"a copy on {noted.current.name}")
    lane.arrival().wait()
    arrival_on(XPU).synchronize()
    lane.settle()
    assert noted.queued == [
        "stream 2 waits for stream 1",
        "a copy on stream 2",
        "stream 1 waits for the event on stream 2",
        "the host waits for the event on stream 1",
        "the host waits for stream 2",
    ]


def test_random_numbers_are_of_the_current_accelerator(noted: Noted) -> None:
    drawn = default_generators(torch.device("xpu"))
    assert drawn == [torch.default_generator, noted.default_generators[1]]
    state = generator_state()
    assert state is not None
    before = torch.rand(3, generator=noted.default_generators[1])
    set_generator_state("cuda", state[1])  # of another type
    assert not torch.rand(3, generator=noted.default_generators[1]).equal(before)
    set_generator_state(*state)
    assert torch.rand(3, generator=noted.default_generators[1]).equal(before)


# Another device than the current one


def test_an_event_is_awaited_on_the_device_of_the_unit() -> None:
    device, event = torch.device("cuda", 1), object()
    with mock.patch.object(torch, "get_device_module") as module:
        run_after(event, device)
    module.return_value.current_stream.assert_called_once_with(device)
    module.return_value.current_stream.return_value.wait_event.assert_called_once_with(event)
