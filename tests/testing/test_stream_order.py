"""What the checker of stream order reports of users' code, on a machine without an accelerator."""

from __future__ import annotations

import runpy
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _device

import fsdp
from fsdp.testing import Report, StreamOrderError, check_streams
from fsdp.testing.pytest_plugin import stream_order as stream_order
from fsdp.testing.stream_order import StreamOrder
from tests.helpers.on_ranks import on_ranks
from tests.helpers.parity import Alone
from tests.helpers.paths import ROOT

DEVICE = "cuda"


def reports(body: Callable[[], None]) -> list[Report]:
    try:
        with check_streams():
            body()
    except StreamOrderError as error:
        return error.reports
    return []


def pairs(body: Callable[[], None]) -> list[tuple[str, str]]:
    return [(report.first, report.second) for report in reports(body)]


def ones(size: int = 8, **options: object) -> Tensor:
    return torch.ones(size, device=DEVICE, **options)  # type: ignore[call-overload, no-any-return]


def after(stream: torch.Stream) -> torch.Stream:
    """Return a new stream, which waits for one."""
    made = torch.Stream(DEVICE)
    made.wait_stream(stream)
    return made


def current() -> torch.Stream:
    return torch.accelerator.current_stream()


# Streams


def test_what_is_in_order_is_not_reported() -> None:
    def body() -> None:
        value, side = ones(), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            copied = value.mul(2)
        torch.cuda.current_stream().wait_stream(side)
        copied.add_(value)
        assert copied.tolist() == [3] * 8

    assert reports(body) == []


def test_a_write_that_a_read_does_not_wait_for() -> None:
    def body() -> None:
        value = ones()
        with torch.Stream(DEVICE):
            value.sum()

    assert pairs(body) == [("ones", "sum")]


def test_a_read_that_a_write_does_not_wait_for() -> None:
    def body() -> None:
        value = ones()
        with after(current()):
            value.sum()
        value.zero_()

    assert pairs(body) == [("sum", "zero_")]


def test_two_reads_need_no_order_and_other_bytes_do_not_either() -> None:
    def body() -> None:
        value, other = ones(), ones()
        first, second = after(current()), after(current())
        with first:
            value.sum()
            other[:4].zero_()
        with second:
            value.sum()
            other[4:].zero_()

    assert reports(body) == []


def test_a_view_at_another_address_than_what_was_written() -> None:
    def body() -> None:
        buffer = ones()
        with after(current()):
            buffer.fill_(2)
        buffer[4:].sum()

    (report,) = reports(body)
    assert (report.first, report.second) == ("fill_", "sum")
    assert "bytes 16 to 32 of 32" in report.memory


def test_views_with_strides() -> None:
    def body() -> None:
        square = ones(16).view(4, 4)
        with after(current()):
            square[:, 0].zero_()
        square[:, 1].sum()
        square.as_strided((2,), (4,), 4).sum()

    assert pairs(body) == [("zero_", "sum")]


def test_events() -> None:
    def body(event: bool = True) -> None:
        value = ones()
        done = torch.Event(DEVICE)
        side = after(current())
        with side:
            value.zero_()
            if event:
                done.record()
            else:
                done.record(current())
                value.zero_()  # after the event
        current().wait_event(done)
        value.sum()

    assert reports(body) == []
    assert pairs(lambda: body(False)) == [("zero_", "sum")]


def test_an_event_waits_for_what_its_stream_has_waited_for() -> None:
    def body() -> None:
        value = ones()
        first = after(current())
        with first:
            value.zero_()
        second = after(first)
        current().wait_event(second.record_event())
        value.sum()

    assert reports(body) == []


@pytest.mark.parametrize("wait", ["item", "stream", "event", "query", "device"])
def test_the_host_waits(wait: str) -> None:
    def body() -> None:
        value, host = ones(), torch.zeros(8, pin_memory=True)
        side = after(current())
        with side:
            host.copy_(value, non_blocking=True)
            done = side.record_event()
            if wait == "item":
                value.sum().item()
        if wait == "stream":
            side.synchronize()
        elif wait == "event":
            done.synchronize()
        elif wait == "query":
            assert done.query()
        elif wait == "device":
            torch.accelerator.synchronize()
        assert host.sum() == 8

    assert reports(body) == []


# Memory


def test_memory_that_is_freed_while_another_stream_uses_it() -> None:
    def use(record: bool = False, wait: bool = False) -> None:
        value, side = ones(), after(current())
        with side:
            value.sum()
        if record:
            value.record_stream(side)
        del value
        if wait:
            current().wait_stream(side)
        torch.zeros(8, device=DEVICE)

    (report,) = reports(use)
    assert (report.first, report.second) == ("sum", "zeros")
    assert "may be given memory that" in str(report)
    assert reports(lambda: use(record=True)) == []
    assert reports(lambda: use(wait=True)) == []


def test_memory_that_is_used_on_another_stream_before_it_may_be() -> None:
    """Its stream may still compute with what lay there before."""

    def body() -> None:
        value = torch.empty(8, device=DEVICE)
        with torch.Stream(DEVICE):
            value.fill_(1)

    assert pairs(body) == [("empty", "fill_")]


def test_storages_that_are_freed_and_allocated_again() -> None:
    def body(wait: bool = False) -> None:
        buffer, side = ones(), after(current())
        with side:
            buffer.sum()
        if wait:
            current().wait_stream(side)
        buffer.untyped_storage().resize_(0)
        buffer.untyped_storage().resize_(32)
        buffer.zero_()

    assert pairs(body) == [("sum", "resize_")]
    assert reports(lambda: body(wait=True)) == []


# The host


@pytest.mark.parametrize("read", ["item", "numpy", "tolist", "sum"])
def test_pinned_memory_that_is_read_before_the_copy_has_come(read: str) -> None:
    def body() -> None:
        host = torch.zeros(1, pin_memory=True).copy_(ones(1), non_blocking=True)
        getattr(host, read)()

    (report,) = reports(body)
    assert report.first == "copy_"
    assert report.second_stream == "the host"
    assert "reads what copy_ on the default stream of cuda:0 has written" in str(report)


def test_pinned_memory_that_is_written_while_a_copy_reads_it() -> None:
    def body() -> None:
        host = torch.ones(8).pin_memory()
        assert host.is_pinned()
        copied = host.to(DEVICE, non_blocking=True)
        host.zero_()
        copied.sum()

    assert pairs(body) == [("_to_copy", "zero_")]


def test_memory_that_is_not_pinned_is_copied_before_the_host_goes_on() -> None:
    def body() -> None:
        host = torch.ones(8)
        host.to(DEVICE, non_blocking=True)
        host.zero_()
        host.copy_(ones(), non_blocking=True)
        host.zero_()
        ones().cpu().zero_()

    assert reports(body) == []


def test_new_memory_of_a_copy_that_the_host_does_not_wait_for_is_pinned() -> None:
    def body() -> None:
        ones().to("cpu", non_blocking=True).sum()

    assert pairs(body) == [("_to_copy", "sum")]


def test_other_threads() -> None:
    def body() -> None:
        host = torch.zeros(8, pin_memory=True)
        host.copy_(ones(), non_blocking=True)
        reader = threading.Thread(target=host.sum)
        reader.start()
        reader.join()

    assert pairs(body) == [("copy_", "sum")]


def test_memory_that_several_storages_look_at() -> None:
    def body() -> None:
        host = torch.zeros(8, pin_memory=True)
        again = torch.frombuffer(host.numpy().data[4:], dtype=torch.float32)
        host.copy_(ones(), non_blocking=True)
        again.sum()

    (report,) = reports(body)
    assert (report.first, report.second) == ("copy_", "sum")
    assert "bytes 16 to 32 of 32" in report.memory


# Collectives


@pytest.mark.parametrize("wait", [True, False])
@on_ranks(2)
def test_what_a_collective_gives_before_it_was_awaited(wait: bool) -> None:
    def body() -> None:
        value = ones()
        work = dist.all_reduce(value, async_op=True)
        if wait:
            work.wait()
        assert value.sum().item() == 16
        work.wait()
        dist.all_reduce(value)
        value.sum()

    assert pairs(body) == ([] if wait else [("allreduce_", "sum")])


@on_ranks(2)
def test_what_is_sent_on_the_host_is_written_again() -> None:
    def body() -> None:
        value = torch.ones(4)
        work = dist.isend(value, 1) if dist.get_rank() == 0 else dist.irecv(value, 0)
        value.zero_()
        assert work is not None
        work.wait()

    assert pairs(body) == [("recv_" if dist.get_rank() else "send", "zero_")]


# Reports


def test_training_is_in_order_and_its_backward_and_optimizer_are_seen() -> None:
    def body(wait: bool = True) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)).to(DEVICE)
        optimizer, side = torch.optim.AdamW(model.parameters()), torch.Stream(DEVICE)
        for _ in range(2):
            model(torch.ones(2, 4).to(DEVICE)).sum().backward()
            optimizer.step()
            side.wait_stream(current())
            with side:
                kept = model[0].weight.detach().clone()
            if wait:
                current().wait_stream(side)
            optimizer.zero_grad()
        assert kept.device == torch.device(DEVICE, 0)
        assert kept.is_cuda

    assert reports(body) == []
    assert {first for first, _ in pairs(lambda: body(False))} == {"clone"}


def test_a_report_names_unit_and_parameter_and_the_user_s_line() -> None:
    def body() -> None:
        model = fsdp.FullyShardedDataParallel(nn.Linear(4, 4).to(DEVICE), Alone(), use_orig_params=False)
        with torch.Stream(DEVICE):
            model.flat_param.data[2:].zero_()

    found = reports(body)
    text = str(found[0])
    assert "the shard of" in text
    assert "weight, bias" in text
    assert found[0].first_place.startswith(f"{ROOT / 'fsdp'}/")
    assert found[0].first_place.endswith("(body)")
    assert found[0].second_place == f"{__file__}:{body.__code__.co_firstlineno + 3} (body)"


SCRIPT = """
import torch
from torch import nn
from fsdp.testing import check_streams

def main():
    model = nn.Linear(64, 64).to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    side, snapshot = torch.cuda.Stream(), torch.empty(64, 64, pin_memory=True)
    for step in range(3):
        model(torch.randn(8, 64, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            snapshot.copy_(model.weight.detach(), non_blocking=True)
        side.synchronize()
        print(step, snapshot.norm().item())

with check_streams():
    main()
"""


@pytest.mark.parametrize(
    ("wait", "late", "what"),
    [
        ("side.wait_stream(torch.cuda.current_stream())", "snapshot.copy_", "copy_ on stream 1 of cuda:0 reads what"),
        ("side.synchronize()", "print", "on the host reads what copy_ on stream 1 of cuda:0 has written"),
    ],
)
def test_a_wait_that_is_taken_out_of_a_script_is_found_at_its_line(
    tmp_path: Path, wait: str, late: str, what: str
) -> None:
    file = tmp_path / "train.py"
    file.write_text(SCRIPT, encoding="utf-8")
    runpy.run_path(str(file))
    file.write_text(SCRIPT.replace(wait, "pass"), encoding="utf-8")
    with pytest.raises(StreamOrderError, match=what) as raised:
        runpy.run_path(str(file))
    line = 1 + next(number for number, text in enumerate(SCRIPT.split("\n")) if late in text)
    assert f"{file}:{line} (main)" in str(raised.value)


def test_the_fixture_checks_a_test(stream_order: StreamOrder) -> None:
    value = ones()
    with torch.Stream(DEVICE):
        value.sum()
    assert [(report.first, report.second) for report in stream_order.reports] == [("ones", "sum")]
    stream_order._reports.clear()  # or this would fail


def test_what_is_compiled_runs_as_it_is_written() -> None:
    write = torch.compile(lambda value: value.add_(1), backend="eager")

    def body() -> None:
        value = ones()
        with torch.Stream(DEVICE):
            write(value)

    assert pairs(body) == [("ones", "add_")]


@on_ranks(1, backend=None)  # a new process
def test_what_is_compiled_for_the_first_time_after_a_check_is_compiled() -> None:
    fill = torch.compile(lambda value: torch.zeros(3) + value, backend="eager", fullgraph=True)
    with check_streams():
        fill(torch.ones(3))
    assert fill(torch.ones(3)).tolist() == [1, 1, 1]


def test_devices_are_entered_after_the_check_as_before_it() -> None:
    _device._device_constructors.cache_clear()  # private; as in a process where nobody has entered one
    with check_streams(), torch.device("meta"):
        assert nn.Linear(2, 2).weight.is_meta
    with torch.device("meta"):
        assert nn.Linear(2, 2).weight.is_meta


def test_one_at_a_time() -> None:
    with check_streams():
        with pytest.raises(RuntimeError, match=r"inside another check_streams\(\)"):
            check_streams().__enter__()
        assert torch.cuda.is_available()
    assert not torch.cuda.is_available()


def test_another_error_comes_first_and_names_are_put_back() -> None:
    before = torch.Stream, torch.cuda, Tensor.to, Tensor.device, dist.Work.wait, threading.Thread.run

    def fail() -> None:
        with check_streams(), torch.Stream(DEVICE):
            assert torch.Stream is not before[0]
            ones()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert (torch.Stream, torch.cuda, Tensor.to, Tensor.device, dist.Work.wait, threading.Thread.run) == before
    assert not torch.accelerator.is_available()
    assert not torch.ones(1).is_cuda
