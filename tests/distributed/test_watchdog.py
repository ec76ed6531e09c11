"""A rank that waits too long makes all ranks say where they are, and a rank that ends says why."""

from __future__ import annotations

import errno
import importlib
import json
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp
from fsdp import FullyShardedDataParallel, set_watchdog
from fsdp.checkpoint import Saver, writer
from fsdp.checkpoint.cli import main
from fsdp.distributed import communicator, messages, watchdog
from fsdp.distributed.collectives import DirectExchange
from fsdp.distributed.communicator import CollectiveError
from fsdp.distributed.positions import Position, Report
from fsdp.distributed.reports import Kind, read_events
from fsdp.distributed.switches import SHARED_MEMORY
from tests.helpers import ended_rank
from tests.helpers.ended_rank import await_addresses
from tests.helpers.on_ranks import on_ranks
from tests.helpers.ranks import RankError, RankPool
from tests.helpers.standing import BOUND, Standing, watched

pytestmark = pytest.mark.waiting

LATE = 5.0  # seconds: longer than the first report takes

Late = Callable[[], None]


def printed_while(behaviour: Callable[[Late], None], *events: str, times: int = 1, late: Collection[int] = (1,)) -> str:
    """What the watchdog prints while this rank behaves so, and patience is short.

    Late ranks wait where they call what is passed to `behaviour`, until these events have happened (`Standing.until`).
    """
    with watched() as standing, redirect_stderr(StringIO()) as output:

        def wait() -> None:
            if dist.get_rank() in late:
                standing.until(*events or ["report"], times=times)

        behaviour(wait)
    return output.getvalue()


def trained_model() -> FullyShardedDataParallel:
    torch.manual_seed(0)
    model = FullyShardedDataParallel(nn.Linear(4, 4))
    train(model)
    return model


def train(model: nn.Module) -> None:
    model(torch.ones(1, 4)).sum().backward()


def test_a_wait_that_lasts_is_reported_once_with_the_place_of_who_is_late(ranks: RankPool) -> None:
    printed = "fsdp: ".join(ranks(3).run(_be_late))
    # One rank of the machine is enough.
    (report,) = (text for text in printed.split("fsdp: ") if " in wait > " in text)
    assert "has waited for all-gather of root (Linear) in forward for" in report
    assert "  ranks 0, 2: waiting for all-gather of root (Linear) in forward, at test_watchdog.py:" in report
    assert "  rank 1: in no collective, at test_watchdog.py:" in report
    assert "The others wait for rank 1." in report
    assert "Nothing has changed since the last report.\n" in printed


def test_ranks_that_nobody_waits_for_are_not_reported_as_late(ranks: RankPool) -> None:
    """The senders of messages in shared memory are those of the messages on gloo that announce them."""
    printed = "".join(ranks(3).run(_be_late_in_a_group))
    assert "  ranks 1-2: in no collective, at test_watchdog.py:" in printed
    assert "The others wait for rank 1." in printed


def _be_late_in_a_group() -> str:
    groups = [dist.new_group(each) for each in ([0, 1], [2])]
    model = FullyShardedDataParallel(nn.Linear(4, 4), process_group=groups[dist.get_rank() // 2])

    def come(wait: Late) -> None:
        wait()
        model(torch.ones(1, 4))

    with mock.patch.dict(os.environ, {SHARED_MEMORY: "1"}), mock.patch.object(DirectExchange, "shares_from", 1):
        return printed_while(come, late=(1, 2))


def _be_late() -> str:
    model = trained_model()
    return printed_while(lambda wait: _come(model, wait), times=2)


def _come(model: nn.Module, wait: Late) -> None:
    wait()
    train(model)


@on_ranks(2)
def test_a_rank_that_is_busy_for_a_good_reason_is_waited_for() -> None:
    model = trained_model()
    names: dict[str, Any] = {}
    exec(compile("def compile_frame(wait): wait()", "/lib/torch/_dynamo/convert_frame.py", "exec"), names)

    def behave(wait: Late) -> None:
        names["compile_frame"](wait)
        train(model)

    assert printed_while(behave, "question") == ""


def test_a_slow_save_in_the_background_is_waited_for_and_hides_nothing(ranks: RankPool, tmp_path: Path) -> None:
    report = "".join(ranks(2).run(_save_slowly_in_the_background, tmp_path))
    assert "an exchange of messages" not in report
    assert "waited for all-gather of root (Linear) in forward" in report
    assert "  rank 1: in no collective, at test_watchdog.py:" in report


def _save_slowly_in_the_background(folder: Path) -> str:
    model, write, is_reported = trained_model(), writer.write_parts, threading.Event()

    def write_slowly(*args: Any) -> Any:
        assert dist.get_rank() != 1 or is_reported.wait(BOUND)
        return write(*args)

    def behave(wait: Late) -> None:
        with mock.patch.object(writer, "write_parts", write_slowly), Saver() as saver:
            saver.save(folder / "saved", model)
            train(model)
            wait()
            is_reported.set()
            train(model)
            saver.wait()

    return printed_while(behave, "report", "question aside")


@on_ranks(2)
def test_a_slow_disk_of_one_rank_is_waited_for_while_all_save(tmp_path: Path) -> None:
    model, write = trained_model(), writer.write_parts

    def behave(wait: Late) -> None:
        def write_slowly(*args: Any) -> Any:
            wait()
            return write(*args)

        with mock.patch.object(writer, "write_parts", write_slowly):
            fsdp.save(tmp_path / "saved", model)

    assert printed_while(behave, "question") == ""


@on_ranks(2, backend=None)
def test_ranks_in_different_calls_are_reported_as_such_and_the_error_has_the_report(tmp_path: Path) -> None:
    rank = int(os.environ["RANK"])
    store = dist.FileStore(str(tmp_path / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    model = trained_model()
    paths = [lambda: train(model), model.state_dict]
    with watched() as standing, redirect_stderr(StringIO()):
        threading.Thread(target=_end_waits_when_reported, args=[standing, store]).start()
        with pytest.raises(RuntimeError) as error:
            paths[rank]()
    error = str(error.value)
    assert "did not complete: fsdp: rank " in error
    assert "  rank 0: waiting for all-gather of root (Linear) in forward, at test_watchdog.py:" in error
    assert "  rank 1: waiting for an exchange of messages in state_dict()" in error
    assert "Rank 1 is in state_dict(), which every rank must call, and rank 0 in forward 2." in error


def _end_waits_when_reported(standing: Standing, store: dist.Store) -> None:
    """Collective. End all waits as a timeout does, when each rank has looked at its own and has had the report."""
    standing.until("report", "look")
    store.set(f"{dist.get_rank()} has the report", "")
    store.wait([f"{rank} has the report" for rank in range(2)])
    messages.give_up(dist.group.WORLD)


def test_a_watchdog_that_raises_ends_all_waits_with_the_report(ranks: RankPool, tmp_path: Path) -> None:
    for rank, error in enumerate(ranks(3, backend=None).run(_give_up_waiting, tmp_path)):
        assert error.startswith(f"rank {rank}: all-gather of root (Linear) in forward did not complete: fsdp: rank ")
        assert "  rank 1: in no collective, at test_watchdog.py:" in error
        assert "The others wait for rank 1." in error


def _give_up_waiting(folder: Path) -> str:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=3, store=dist.FileStore(str(folder / "store"), 3))
    model = trained_model()
    with watched(raises=True) as standing, redirect_stderr(StringIO()):
        with pytest.raises(CollectiveError) as raised:
            _come(model, lambda: standing.until("end") if rank == 1 else None)
        with pytest.raises(CollectiveError, match="The others wait for rank 1"):  # and from now on
            train(model)
    dist.destroy_process_group()
    return str(raised.value)


@on_ranks(2, backend=None)
def test_a_rank_that_has_not_had_the_report_asks_for_it(tmp_path: Path) -> None:
    """On a busy machine, a rank that gives up may close its connections before all others have its report."""
    rank, store = int(os.environ["RANK"]), dist.FileStore(str(tmp_path / "store"), 2)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
    model = trained_model()
    await_addresses()
    if rank == 1:
        watchdog.watchdogs[dist.group.WORLD]._give_up("the report")
        store.wait(["raised"])
    else:
        with pytest.raises(CollectiveError, match="in forward did not complete: the report"):
            train(model)
        store.set("raised", "")
    dist.destroy_process_group()


@on_ranks(3, backend=None)
def test_waits_are_given_up_also_when_others_have_closed_their_connections_before(tmp_path: Path) -> None:
    rank = int(os.environ["RANK"])
    store = dist.FileStore(str(tmp_path / "store"), 3)
    dist.init_process_group("gloo", rank=rank, world_size=3, store=store)
    group = dist.group.WORLD
    assert group is not None
    dist.barrier()
    if rank == 1:  # whom rank 0 would ask first
        messages.give_up(group)
        store.set("given up", "")
    if rank == 0:
        store.wait(["given up"])
        threading.Timer(0.5, messages.give_up, [group]).start()
        with pytest.raises(RuntimeError):  # nothing comes, for half an hour
            group.recv([torch.empty(1)], 2, 1).wait()
        store.set("done", "")
    store.wait(["done"])  # rank 2 does nothing, as if it was stopped


@on_ranks(2)
def test_without_a_watchdog_there_is_no_thread_and_no_socket_until_it_is_wanted() -> None:
    model = trained_model()
    server = watchdog.watchdogs[dist.group.WORLD]._server
    set_watchdog(None)
    try:
        assert not watchdog.watchdogs
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("fsdp")]
        assert server.socket.fileno() == -1
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + dist.get_rank())  # whose steps nobody compares
        optimizer.step()
        with redirect_stderr(StringIO()) as printed:
            _come(model, lambda: time.sleep(LATE * dist.get_rank()))
        optimizer.step()
        assert printed.getvalue() == ""
        assert not watchdog.watchdogs
    finally:
        set_watchdog()
    await_addresses()


@on_ranks(2, backend=None)
def test_an_environment_variable_turns_the_watchdog_off(tmp_path: Path) -> None:
    with mock.patch.dict(os.environ, {"FSDP_WATCHDOG": "0", "FSDP_REPORTS": str(tmp_path)}):
        fresh = importlib.reload(watchdog)
    store = dist.FileStore(str(tmp_path / "store"), 2)
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=2, store=store)
    trained_model()
    fresh.watch()
    assert not fresh.watchdogs
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("fsdp")]
    fresh.set_watchdog()
    fresh.watch()
    assert len(fresh.watchdogs) == 1
    fresh.announce(ValueError("a bad batch"))
    assert any("a bad batch" in event.text for event in read_events(tmp_path))


@pytest.mark.parametrize(("local", "address"), [("2", "127.0.0.1"), ("1", "192.0.2.7")])
def test_the_socket_is_on_the_loopback_device_or_the_interface_of_the_group(
    local: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Probe(socket.socket):
        def connect(self, to: Any) -> None:
            assert to[0] == "head"

        def getsockname(self) -> Any:
            return ("192.0.2.7", 1)

    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    monkeypatch.delenv("MASTER_ADDR", raising=False)  # as with init_method="tcp://head:29500"
    monkeypatch.setattr(watchdog.socket, "socket", Probe)
    store = dist.PrefixStore("default", dist.HashStore())
    monkeypatch.setattr(dist.HashStore, "host", "head", raising=False)
    assert watchdog._own_ip(2, store) == address


@pytest.fixture
def gone() -> Iterator[watchdog.Address]:
    """The address of a process that has ended."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        yield watchdog.Address(socket.gethostname(), 1, "127.0.0.1", unused.getsockname()[1], "")


def test_a_rank_behind_the_loopback_device_of_another_machine_is_not_said_to_be_gone(gone: watchdog.Address) -> None:
    answers = watchdog._tell({1: gone, 2: gone._replace(host="another")}, {})
    assert answers[1] == watchdog._GONE
    assert "cannot be reached (process 1 on another)" in answers[2]


def test_an_answer_that_is_there_counts_however_late_it_is_read(
    gone: watchdog.Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "_ANSWER", 0.0)
    assert watchdog._tell({1: gone}, {}) == {1: watchdog._GONE}


@pytest.mark.parametrize("lack", [(socket, "socket"), (selectors, "DefaultSelector")], ids=["socket", "selector"])
def test_a_process_that_can_open_no_more_files_has_no_answers(lack: tuple[Any, str], gone: watchdog.Address) -> None:
    with mock.patch.object(*lack, side_effect=OSError(errno.EMFILE, "too many open files")):
        answers = watchdog._tell({1: gone}, {})
    assert "cannot be reached" in answers[1]


def test_ranks_are_asked_as_long_as_files_can_be_opened(gone: watchdog.Address) -> None:
    sockets = [socket.socket(), OSError(errno.EMFILE, "too many open files")]
    with mock.patch.object(socket, "socket", side_effect=sockets):
        answers = watchdog._tell({1: gone, 2: gone}, {})
    assert answers[1] == watchdog._GONE
    assert "cannot be reached" in answers[2]


@pytest.mark.parametrize("patience", [0, -1.0])
def test_patience_is_positive(patience: float) -> None:
    with pytest.raises(ValueError, match="patience is a positive number of seconds, or None for never"):
        set_watchdog(patience)


class Work:
    """A collective that takes so long, by a clock that a test sets."""

    def __init__(self, clock: list[float], seconds: float) -> None:
        self._clock, self._seconds = clock, seconds

    def wait(self) -> None:
        self._clock[0] += self._seconds


@pytest.mark.parametrize(
    ("waited", "between", "expected"),
    [(0.25, 0.0, 0.25), (0.0, 4.0, 2.0), (3.0, 4.0, 3.5), (0.0, 3600.0, 5.0), (60.0, 3600.0, 60.0)],
)
def test_patience_grows_with_waits_and_with_what_lies_between_them(
    monkeypatch: pytest.MonkeyPatch, waited: float, between: float, expected: float
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    communicator.measure_anew()
    try:
        communicator.finish([Work(clock, 0.0)], "a")
        clock[0] += between
        communicator.finish([Work(clock, waited)], "b")
        assert communicator.longest == {False: expected, True: 0.0}
        for _ in range(7000):
            communicator.finish([], "c")
        assert communicator.longest[False] < 0.06
    finally:
        communicator.measure_anew()


def test_time_in_which_the_process_did_not_run_is_not_waited() -> None:
    """A machine under load reports nothing that is not the case."""
    looks = watchdog._Looks(is_aside=False)
    looks.pass_time(1.0)
    looks.pass_time(1.4)
    looks.pass_time(21.0)
    assert looks.lost == pytest.approx(20.4)


@pytest.mark.parametrize(
    ("first", "place", "is_late"),
    [
        *((first, place, False) for first in (0, 1) for place in ("_printers", "_tell_all")),
        (1, "_tell_all", True),
    ],
)
def test_ranks_whose_turns_come_together_report_once(
    first: int, place: str, is_late: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before one asks, or before it tells what it has found, the other reports, which may arrive too late."""
    monkeypatch.setattr(watchdog, "_patience", None)  # the threads look at nothing
    store = dist.HashStore()
    both = [watchdog.Watchdog(rank, 2, store) for rank in range(2)]
    one, other = both[first], both[1 - first]
    wait = communicator.Wait("all-gather of a", "", time.monotonic() - 100.0)
    monkeypatch.setitem(communicator.waits, threading.main_thread().ident, wait)
    inner, tell_all = getattr(one, place), other._tell_all

    def look(which: Any) -> None:
        which._look(which._looks[0], wait, time.monotonic(), 0.2)

    def tell(message: Any) -> Any:
        return {} if is_late and "report" in message else tell_all(message)

    def meet(*args: Any) -> Any:
        monkeypatch.setattr(one, place, inner)
        with mock.patch.object(other, "_tell_all", tell):
            look(other)
        return inner(*args)

    try:
        for each in both:
            each._find_unknown()
        monkeypatch.setattr(one, place, meet)
        look(one)
    finally:
        for each in both:
            each.stop()
    assert capsys.readouterr().err.count("has waited for all-gather of a for 100 s") == 1


def gather_failed(rank_1: str, rank: int = 0) -> str:
    """A pattern of what another rank says."""
    return (
        rf"CollectiveError: rank {rank}: all-gather of root \(Linear\) in forward did not complete: rank 1 {rank_1}\n"
    )


def test_a_rank_that_was_killed_is_in_the_error_of_the_others(ranks: RankPool) -> None:
    with pytest.raises(RankError) as failed:
        ranks(2, grace=60).run(_be_killed)
    where = r"is gone: its process has ended( by SIGKILL)? \(process \d+ on .*\)\. Look at what this rank has printed.*"
    assert re.search(gather_failed(where), failed.value.outcomes[0].details)


def _be_killed() -> None:
    model = trained_model()
    await_addresses()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    train(model)


def test_a_rank_whose_program_has_ended_is_not_said_to_be_killed(ranks: RankPool) -> None:
    with pytest.raises(RankError) as failed:
        ranks(2, grace=60).run(_end_early)
    details = failed.value.outcomes[0].details
    assert re.search(gather_failed(r"is gone: its process has ended.*ended without this call, which every .*"), details)
    assert ("with status 0" in details) is not ("was killed, as the kernel does" in details)


def _end_early() -> None:
    model = trained_model()
    await_addresses()
    if dist.get_rank() == 1:
        os._exit(0)
    train(model)


@pytest.mark.skipif(not Path("/proc").exists(), reason="only Linux tells")
@pytest.mark.parametrize(
    ("code", "expected"),
    [("import sys; sys.exit(3)", " with status 3"), ("import os; os.kill(os.getpid(), 9)", " by SIGKILL")],
)
def test_how_a_process_has_ended_is_seen_until_its_parent_asks(code: str, expected: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", code])
    until = time.monotonic() + 60
    while not (found := watchdog._exit_of(process.pid)) and time.monotonic() < until:
        time.sleep(0.01)
    assert found == expected
    process.wait()
    assert watchdog._exit_of(process.pid) == ""
    assert watchdog._exit_of(os.getpid()) == ""


@pytest.mark.parametrize("world_size", [2, 3])
def test_why_a_rank_has_ended_is_in_the_error_of_the_others_and_in_the_folder_of_reports(
    ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str], world_size: int
) -> None:
    with pytest.raises(RankError) as failed:
        ranks(world_size, backend=None, grace=60).run(ended_rank.main, tmp_path)
    assert {each.headline for each in failed.value.outcomes} == {"exited with status 1 without answering"}
    why = r"was ended by ValueError: a bad batch \(ended_rank\.py:\d+ in load_batch\)"
    for rank in {*range(world_size)} - {1}:
        assert re.search(gather_failed(why, rank), failed.value.outputs[rank] + "\n")
    # At once, before it asks why: a launcher that ends all ranks leaves no time for more.
    assert any(event.kind is Kind.CLOSED and "rank 1" in event.text for event in read_events(tmp_path / "reports"))
    assert main(["diagnose", str(tmp_path / "reports")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("The first cause, on rank 1 (")
    assert lines[1].startswith("  ended by ValueError: a bad batch (ended_rank.py:")
    followed = "because of another rank, by: all-gather of root (Linear) in forward did not complete"
    assert any(followed in line for line in lines)


@on_ranks(2)
def test_nobody_is_answered_without_the_secret() -> None:
    trained_model()
    (one,) = watchdog.watchdogs.values()
    for secret, is_answered in ((one._server.secret, True), ("0" * 32, False)):
        with socket.create_connection(("127.0.0.1", one._server.server_address[1]), 10) as connection:
            connection.sendall(json.dumps({"secret": secret}).encode() + b"\n")
            assert bool(connection.makefile().readline()) is is_answered


@on_ranks(2)
def test_ranks_that_are_threads_have_no_watchdog() -> None:
    """The groups of torch's own tests have no store."""
    watchdog.stop()
    with mock.patch.object(dist.ProcessGroup, "get_group_store", return_value=None):
        trained_model()
        assert not watchdog.watchdogs


# What a report says


def waiting(what: str, **known: Any) -> Position:
    return Position(
        **{
            "waits_for": what,
            "awaits": [],
            "call": "",
            "seconds": 20.0,
            "stack": [],
            "occupation": None,
            "passes": [],
            "groups": [],
        }
        | known
    )


def elsewhere(**known: Any) -> Position:
    return waiting("", **known | {"waits_for": None})


def test_ranks_that_say_the_same_share_a_line() -> None:
    answers: dict[int, Position | str] = {rank: waiting("all-gather of a") for rank in (0, 1, 2, 5)}
    answers |= {3: elsewhere(stack=["train.py:3 in step", "data.py:7 in load"]), 4: "is gone"}
    assert str(Report(5, answers)).splitlines() == [
        "fsdp: rank 5 has waited for all-gather of a for 20 s.",
        "  ranks 0-2, 5: waiting for all-gather of a",
        "  rank 3: in no collective, at train.py:3 in step > data.py:7 in load",
        "  rank 4: is gone",
        "The others wait for ranks 3-4.",
    ]


def test_a_report_is_due_unless_the_wait_is_over_or_all_that_are_late_are_busy() -> None:
    waits, busy, late = waiting("all-gather of a"), elsewhere(occupation="compiling"), elsewhere()
    assert Report(0, {0: waits, 1: late}).is_due
    assert Report(0, {0: waits, 1: busy, 2: late}).is_due
    assert Report(0, {0: waits, 1: busy, 2: "is gone"}).is_due
    assert Report(0, {0: waits, 1: waiting("all-gather of b")}).is_due
    assert Report(0, {0: waits, 1: waiting("all-gather of a")}).is_due
    assert Report(0, {0: waits, 1: waiting("all-gather of b", seconds=0.1)}).is_due
    assert not Report(0, {0: waits, 1: waiting("all-gather of a", seconds=0.1)}).is_due, "it has just come"
    assert not Report(0, {0: waits, 1: busy}).is_due
    assert not Report(0, {0: late, 1: waits}).is_due


def test_only_ranks_that_somebody_waits_for_are_late() -> None:
    answers: dict[int, Position | str] = {0: waiting("all-gather of a", awaits=[1]), 1: elsewhere(), 2: elsewhere()}
    assert str(Report(0, answers)).endswith("The others wait for rank 1.")
    answers[1] = waiting("all-reduce of b", awaits=[3])  # which is late itself, because of rank 3
    assert str(Report(0, {**answers, 3: elsewhere()})).endswith("The others wait for rank 3.")
    assert not Report(0, {**answers, 3: elsewhere(occupation="compiling")}).is_due
    answers[1] = waiting("a collective of torch")  # whose ranks are unknown
    assert str(Report(0, answers)).endswith("The others wait for rank 2.")


def test_ranks_that_all_wait_for_the_same_point_to_the_network() -> None:
    report = str(Report(0, {rank: waiting("all-gather of a", call="state_dict()") for rank in range(4)}))
    assert "  ranks 0-3: waiting for all-gather of a in state_dict()\n" in report
    assert report.endswith("All ranks wait for the same collective: the network is slow, or has lost a message.")
