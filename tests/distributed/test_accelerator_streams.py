"""Streams for copies beside computation, on an accelerator: what waits for what, and whose memory is used again."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from fsdp.distributed.devices import CopyStream, copy_stream_of
from tests.helpers.accelerator import ACCELERATOR, IS_SIMULATED, device_module, later_kernels

pytestmark = pytest.mark.accelerator


BUSY = 50_000_000  # clock cycles: some ten milliseconds, in which the host runs ahead


def settled() -> CopyStream:
    """The device's copy stream, when nothing is queued."""
    device_module().synchronize()
    return copy_stream_of(torch.device(ACCELERATOR))


def test_a_device_has_one_lane() -> None:
    assert copy_stream_of(torch.device(ACCELERATOR)) is copy_stream_of(
        torch.device(ACCELERATOR, device_module().current_device())
    )
    assert copy_stream_of(torch.device(ACCELERATOR)) is not copy_stream_of(torch.device("cpu"))


def test_a_fork_runs_after_what_was_queued_before() -> None:
    lane = settled()
    value = torch.zeros(1 << 20, device=ACCELERATOR)
    device_module()._sleep(BUSY)
    value += 1
    with lane.fork():
        copied = value.to("cpu", non_blocking=False)
    assert copied.eq(1).all()


def test_what_waits_for_an_arrival_runs_after_the_fork() -> None:
    lane = settled()
    value = torch.zeros(1 << 20, device=ACCELERATOR)
    with lane.fork():
        device_module()._sleep(BUSY)
        value += 1
    lane.arrival().wait()
    assert (value + 1).eq(2).all()


def test_a_fork_runs_beside_what_is_queued_next() -> None:
    lane = settled()
    ended = [device_module().Event() for _ in range(2)]
    with lane.fork():
        device_module()._sleep(4 * BUSY)
        ended[0].record()
    torch.zeros(3, device=ACCELERATOR)
    ended[1].record()
    ended[1].synchronize()
    assert not ended[0].query()  # what was queued later ended before


def test_an_arrival_is_of_what_was_forked_until_then() -> None:
    lane = settled()
    ended = [device_module().Event() for _ in range(2)]
    with lane.fork():
        value = torch.ones(3, device=ACCELERATOR)
    first = lane.arrival()
    with lane.fork():
        device_module()._sleep(4 * BUSY)
        ended[0].record()
    first.wait()
    value += 1
    ended[1].record()
    ended[1].synchronize()
    assert not ended[0].query()
    assert value.eq(2).all()


def test_copies_to_the_host_do_not_wait_for_those_from_it() -> None:
    lane = settled()
    forked = device_module().Event()
    with lane.fork():
        device_module()._sleep(20 * BUSY)
        forked.record()
    arrived: list[bool] = []
    lane.to_host(torch.ones(3, device=ACCELERATOR), lambda _: arrived.append(forked.query()))
    lane.settle()
    assert arrived == [False]


def test_the_current_stream_is_the_caller_s_again_after_a_fork_that_raised() -> None:
    lane = settled()
    streams = [device_module().current_stream()]

    def fail() -> None:
        with lane.fork():
            streams.append(device_module().current_stream())
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fail()
    before, inside = streams
    assert inside != before
    assert device_module().current_stream() == before


def test_copies_are_used_in_order_when_the_lane_settles() -> None:
    lane = settled()
    used: list[tuple[int, Tensor]] = []
    for number in range(5):
        device_module()._sleep(BUSY // 10)
        source = torch.full((1 << 18,), number, device=ACCELERATOR)
        lane.to_host(source, partial(_note, used, number))
    assert used == []
    lane.settle()
    assert [number for number, _ in used] == [0, 1, 2, 3, 4]
    for number, copied in used:
        assert copied.is_pinned()
        assert copied.eq(number).all()


def _note(used: list[tuple[int, Tensor]], number: int, copied: Tensor) -> None:
    used.append((number, copied))


def test_a_source_s_memory_is_not_written_before_it_was_copied() -> None:
    lane = settled()
    used: list[tuple[int, Tensor]] = []
    size = 1 << (12 if IS_SIMULATED else 21)
    with later_kernels():
        for number in range(20):
            # Each takes the memory of one that was dropped, while copies (8 MiB, a third of a millisecond) are queued.
            source = torch.full((size,), number, device=ACCELERATOR)
            lane.to_host(source, partial(_note, used, number))
            del source
        lane.settle()
    assert all(copied.eq(number).all() for number, copied in used)


def test_at_most_two_sources_are_alive() -> None:
    lane = settled()
    device_module().reset_peak_memory_stats()
    before = device_module().memory_allocated()
    for number in range(8):
        source = torch.full((1 << 21,), number, dtype=torch.float32, device=ACCELERATOR)
        lane.to_host(source, lambda _: None)
        del source
    assert device_module().max_memory_allocated() - before <= 2 * (1 << 23)
    lane.settle()
    assert device_module().memory_allocated() == before


def test_settling_waits_for_forks() -> None:
    lane = settled()
    source = torch.ones(1 << 20).pin_memory()
    with lane.fork():
        device_module()._sleep(BUSY)
        copied = source.to(ACCELERATOR, non_blocking=True)
    lane.settle()
    source.zero_()  # an optimizer's step on the host, say
    assert copied.eq(1).all()
    lane.settle()
