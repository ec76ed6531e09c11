"""Lanes: copies between a device and the host, in order on a CPU and on a stream of their own on CUDA."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from fsdp.distributed.streams import CopyStream, copy_stream_of

CPU = torch.device("cpu")


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


# On CUDA


CUDA = torch.device("cuda")
BUSY = 50_000_000  # clock cycles: some ten milliseconds, in which the host runs ahead


@pytest.fixture
def cuda_lane() -> CopyStream:
    torch.cuda.synchronize()
    return copy_stream_of(CUDA)


@pytest.mark.gpu
def test_a_device_has_one_lane() -> None:
    assert copy_stream_of(CUDA) is copy_stream_of(torch.device("cuda", torch.cuda.current_device()))
    assert copy_stream_of(CUDA) is not copy_stream_of(CPU)


@pytest.mark.gpu
def test_a_fork_runs_after_what_was_queued_before(cuda_lane: CopyStream) -> None:
    value = torch.zeros(1 << 20, device=CUDA)
    torch.cuda._sleep(BUSY)
    value += 1
    with cuda_lane.fork():
        copied = value.to("cpu", non_blocking=False)
    assert copied.eq(1).all()


@pytest.mark.gpu
def test_what_waits_for_an_arrival_runs_after_the_fork(cuda_lane: CopyStream) -> None:
    value = torch.zeros(1 << 20, device=CUDA)
    with cuda_lane.fork():
        torch.cuda._sleep(BUSY)
        value += 1
    cuda_lane.arrival().wait()
    assert (value + 1).eq(2).all()


@pytest.mark.gpu
def test_a_fork_runs_beside_what_is_queued_next(cuda_lane: CopyStream) -> None:
    ended = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    with cuda_lane.fork():
        torch.cuda._sleep(4 * BUSY)
        ended[0].record()
    torch.zeros(3, device=CUDA)
    ended[1].record()
    torch.cuda.synchronize()
    assert ended[1].elapsed_time(ended[0]) > 0  # what was queued later ended before


@pytest.mark.gpu
def test_an_arrival_is_of_what_was_forked_until_then(cuda_lane: CopyStream) -> None:
    ended = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    with cuda_lane.fork():
        value = torch.ones(3, device=CUDA)
    first = cuda_lane.arrival()
    with cuda_lane.fork():
        torch.cuda._sleep(4 * BUSY)
        ended[0].record()
    first.wait()
    value += 1
    ended[1].record()
    torch.cuda.synchronize()
    assert value.eq(2).all()
    assert ended[1].elapsed_time(ended[0]) > 0


@pytest.mark.gpu
def test_copies_to_the_host_do_not_wait_for_those_from_it(cuda_lane: CopyStream) -> None:
    forked = torch.cuda.Event()
    with cuda_lane.fork():
        torch.cuda._sleep(20 * BUSY)
        forked.record()
    arrived: list[bool] = []
    cuda_lane.to_host(torch.ones(3, device=CUDA), lambda _: arrived.append(forked.query()))
    cuda_lane.settle()
    assert arrived == [False]


@pytest.mark.gpu
def test_the_current_stream_is_the_caller_s_again_after_a_fork_that_raised(cuda_lane: CopyStream) -> None:
    streams = [torch.cuda.current_stream()]

    def fail() -> None:
        with cuda_lane.fork():
            streams.append(torch.cuda.current_stream())
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fail()
    before, inside = streams
    assert inside != before
    assert torch.cuda.current_stream() == before


@pytest.mark.gpu
def test_copies_are_used_in_order_when_the_lane_settles(cuda_lane: CopyStream) -> None:
    used: list[tuple[int, Tensor]] = []
    for number in range(5):
        torch.cuda._sleep(BUSY // 10)
        source = torch.full((1 << 18,), number, device=CUDA)
        cuda_lane.to_host(source, partial(_note, used, number))
    assert used == []
    cuda_lane.settle()
    assert [number for number, _ in used] == [0, 1, 2, 3, 4]
    for number, copied in used:
        assert copied.is_pinned()
        assert copied.eq(number).all()


def _note(used: list[tuple[int, Tensor]], number: int, copied: Tensor) -> None:
    used.append((number, copied))


@pytest.mark.gpu
def test_a_source_s_memory_is_not_written_before_it_was_copied(cuda_lane: CopyStream) -> None:
    used: list[tuple[int, Tensor]] = []
    for number in range(20):
        # Each takes the memory of one that was dropped, while copies (8 MiB, a third of a millisecond) are queued.
        source = torch.full((1 << 21,), number, device=CUDA)
        cuda_lane.to_host(source, partial(_note, used, number))
        del source
    cuda_lane.settle()
    assert all(copied.eq(number).all() for number, copied in used)


@pytest.mark.gpu
def test_at_most_two_sources_are_alive(cuda_lane: CopyStream) -> None:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for number in range(8):
        source = torch.full((1 << 21,), number, dtype=torch.float32, device=CUDA)
        cuda_lane.to_host(source, lambda _: None)
        del source
    assert torch.cuda.max_memory_allocated() - before <= 2 * (1 << 23)
    cuda_lane.settle()
    assert torch.cuda.memory_allocated() == before


@pytest.mark.gpu
def test_settling_waits_for_forks(cuda_lane: CopyStream) -> None:
    source = torch.ones(1 << 20).pin_memory()
    with cuda_lane.fork():
        torch.cuda._sleep(BUSY)
        copied = source.to(CUDA, non_blocking=True)
    cuda_lane.settle()
    source.zero_()  # an optimizer's step on the host, say
    assert copied.eq(1).all()
    cuda_lane.settle()
