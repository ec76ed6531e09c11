"""The harness itself: what it returns, what it says when something goes wrong, and that it then goes on."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from parameterized import parameterized

from tests.helpers.parity import RanksTestCase
from tests.helpers.paths import ROOT
from tests.helpers.ranks import RankError, RankPool
from tests.helpers.workers import Ending

pytestmark = pytest.mark.waiting

PRELOAD = ["mailbox"]  # which nothing else imports

# Results


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_rank_of_an_exact_world_returns_its_result(ranks: RankPool, world_size: int) -> None:
    results = ranks(world_size).run(_sum_of_ranks, 10, offset=1)
    assert results == [(rank, world_size, 10 + sum(range(world_size)) + 1) for rank in range(world_size)]


def _sum_of_ranks(start: int, *, offset: int) -> tuple[int, int, int]:
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), start + int(total) + offset


def test_processes_are_reused_and_each_world_size_has_its_own(ranks: RankPool) -> None:
    first, second = ranks(2).run(os.getpid), ranks(2).run(os.getpid)
    assert first == second == ranks(2).pids
    assert len({*ranks(2).pids, *ranks(3).pids, os.getpid()}) == 6


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_rank_finds_what_its_file_preloads(ranks: RankPool, world_size: int) -> None:
    # The server looks in the folder that it is started in, and elsewhere would find another copy of the package.
    assert ranks(world_size).run(_has_preloaded) == [Path.cwd() == ROOT] * world_size


def test_the_server_of_ranks_has_imported_the_tests(ranks: RankPool) -> None:
    is_there = f"{__name__!r} in __import__('sys').modules"
    assert ranks(1, backend=None).run(eval, is_there) == [Path.cwd() == ROOT]


def _has_preloaded() -> bool:
    return PRELOAD[0] in sys.modules


def test_every_run_starts_from_the_same_state(ranks: RankPool) -> None:
    first = ranks(2).run(_disturb)
    assert first == ranks(2).run(_disturb)
    assert first[0] == first[1]


def _disturb() -> tuple[Any, ...]:
    found = (
        (torch.rand(1).item(), random.random(), np.random.rand()),
        (torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads()),
        os.environ.get("LEFT_BEHIND"),
        (logging.root.hasHandlers(), logging.getLogger("fsdp.engine").level, logging.root.level),
    )
    logging.basicConfig(level=logging.ERROR)
    logging.getLogger("fsdp.engine").setLevel(logging.WARNING)  # as a page shows it
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    os.environ["LEFT_BEHIND"] = "yes"
    return found


def test_ranks_have_one_thread_and_the_variables_of_a_launcher(ranks: RankPool) -> None:
    variables = ["RANK", "LOCAL_RANK", "WORLD_SIZE"]
    assert ranks(2).run(_threads_and_variables, variables) == [(1, "0", "0", "2"), (1, "1", "1", "2")]


def _threads_and_variables(variables: list[str]) -> tuple[Any, ...]:
    return torch.get_num_threads(), *(os.environ[name] for name in variables)


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has the policy")
def test_no_thread_of_a_rank_takes_the_core_from_one_at_work(ranks: RankPool) -> None:
    assert ranks(2).run(_policies) == [{os.SCHED_BATCH}] * 2


def _policies() -> set[int]:
    dist.barrier()
    return {os.sched_getscheduler(int(thread)) for thread in os.listdir("/proc/self/task")}


def test_collections_do_not_walk_what_earlier_runs_have_imported(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "imported_late.py").write_text("objects = [[] for _ in range(100_000)]")
    ranks(2).run(_import_late, str(tmp_path))
    assert max(ranks(2).run(_walked)) < 50_000


def _import_late(folder: str) -> None:
    sys.path.insert(0, folder)
    try:
        importlib.import_module("imported_late")
    finally:
        sys.path.remove(folder)


def _walked() -> int:
    return len(gc.get_objects())


def test_without_a_backend_there_is_no_process_group(ranks: RankPool) -> None:
    bare = ranks(2, backend=None)
    before = bare.pids
    assert bare.run(dist.is_initialized) == [False, False]
    assert not set(before) & set(bare.pids), "groups that a body made must not reach the next one"


class TestGrids(RanksTestCase):
    @parameterized.expand([(1, "a"), (2, "b")])
    def test_parameterized_cases_get_ranks(self, world_size: int, word: str) -> None:
        assert self.ranks(world_size).run(_echo, word) == [word] * world_size


def _echo(word: str) -> str:
    print("said", word)
    return word


# Errors


def test_an_error_shows_every_ranks_traceback_and_the_values_of_an_assert(ranks: RankPool) -> None:
    before = ranks(3).pids
    with pytest.raises(RankError) as failure:
        ranks(3).run(_wrong_everywhere)
    message = str(failure.value)
    assert "_wrong_everywhere on 3 ranks: 3 of 3 did not return" in message
    for rank in range(3):
        assert f"===== rank {rank}: AssertionError: odd one out" in message
        assert f"assert {rank * 10} == 5" in message
    assert message.count("in _compare") == 3
    assert "helpers/workers.py" not in message, "the harness's own frames only distract"
    assert ranks(3).pids == before, "all ranks raised at the same point, so they are kept"


def _wrong_everywhere() -> None:
    _compare(dist.get_rank() * 10)


def _compare(value: int) -> None:
    assert value == 5, "odd one out"


def test_equal_errors_are_shown_once_for_all_their_ranks(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="ranks 0, 1, 2: ValueError: the same") as failure:
        ranks(3).run(_same_error)
    assert str(failure.value).count("Traceback") == 1


def _same_error() -> None:
    raise ValueError("the same")


def test_an_error_on_one_rank_replaces_the_processes(ranks: RankPool) -> None:
    before = ranks(2).pids
    with pytest.raises(RankError, match="1 of 2 did not return") as failure:
        ranks(2).run(_only_rank_1_raises)
    assert "rank 0: returned normally" in str(failure.value)
    assert _all_gone(before)
    assert ranks(2).run(os.getpid) == ranks(2).pids


def _only_rank_1_raises() -> None:
    if dist.get_rank() == 1:
        raise ValueError("only here")


def test_ranks_that_wait_for_a_failed_one_show_where(ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RankError) as failure:
        ranks(3, grace=1).run(_rank_1_raises_before_a_barrier, tmp_path)
    message = str(failure.value)
    assert "rank 1: ValueError: before the barrier" in message
    # One report for both, unless one of them was on its way into the barrier, or its process slow to answer.
    waiting = re.findall(r"ranks? ([\d, ]+): still running 1 s after rank 1 failed", message)
    assert sorted(rank for ranks in waiting for rank in ranks.split(", ")) == ["0", "2"]
    assert "in barrier" in message
    assert "in _rank_1_raises_before_a_barrier" in message
    assert message.index("before the barrier") < message.index("still running"), "the cause comes first"


def _rank_1_raises_before_a_barrier(folder: Path) -> None:
    if dist.get_rank() == 1:
        while len(list(folder.iterdir())) < 2:
            time.sleep(0.05)
        time.sleep(0.5)  # by then they are in it
        raise ValueError("before the barrier")
    (folder / str(dist.get_rank())).touch()
    dist.barrier()


@pytest.mark.skipif(not Path("/proc").exists(), reason="only Linux tells")
def test_a_rank_that_still_computes_is_not_taken_for_one_that_waits(ranks: RankPool) -> None:
    with pytest.raises(RankError) as failure:
        ranks(2, grace=0.1).run(_compute_or_raise)
    assert [outcome.ending for outcome in failure.value.outcomes] == [Ending.RETURNED, Ending.RAISED]


def _compute_or_raise() -> None:
    if dist.get_rank() == 1:
        raise ValueError("at once")
    until = time.process_time() + 1
    while time.process_time() < until:
        pass


def test_ranks_that_all_raise_out_of_step_are_replaced(ranks: RankPool) -> None:
    before = ranks(2).pids
    with pytest.raises(RankError, match="ValueError"):
        ranks(2).run(_raise_with_a_collective_pending_on_rank_0)
    assert _all_gone(before)
    assert ranks(2).run(_sum_of_ranks, 0, offset=0) == [(0, 2, 1), (1, 2, 1)]


def _raise_with_a_collective_pending_on_rank_0() -> None:
    if dist.get_rank() == 0:
        dist.barrier(async_op=True)
    raise ValueError("on all ranks")


def test_a_result_that_cannot_travel_is_an_error_of_its_rank(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"cannot pickle '_thread\.lock'"):
        ranks(2).run(threading.Lock)


def test_a_body_that_cannot_travel_is_refused(ranks: RankPool) -> None:
    with pytest.raises(TypeError, match="must be a function at the top of a module"):
        ranks(2).run(lambda: None)


def test_a_world_has_a_rank(ranks: RankPool) -> None:
    with pytest.raises(ValueError, match="at least one rank, got 0"):
        ranks(0)


# Hangs and crashes


def test_a_hang_ends_at_its_timeout_with_every_ranks_stack(ranks: RankPool) -> None:
    before, began = ranks(3).pids, time.monotonic()
    with pytest.raises(RankError) as failure:
        ranks(3, timeout=4).run(_rank_1_never_comes)
    assert time.monotonic() - began < 300  # of the thousand seconds that rank 1 sleeps
    message = str(failure.value)
    assert "rank 1: still running after the timeout of 4 s" in message
    assert "ranks 0, 2: still running after the timeout of 4 s" in message
    assert "in _oversleep" in message
    assert "in barrier" in message
    assert message.count("in _rank_1_never_comes") == 2  # once for rank 1, once for the two that wait
    assert "waiting for rank 1" in message  # what they printed
    assert [outcome.ending for outcome in failure.value.outcomes] == [Ending.STUCK] * 3
    assert _all_gone(before)
    assert ranks(3).run(_sum_of_ranks, 0, offset=0) == [(rank, 3, 3) for rank in range(3)]


def _rank_1_never_comes() -> None:
    if dist.get_rank() == 1:
        _oversleep()
    print("waiting for rank 1")
    dist.barrier()


def _oversleep() -> None:
    time.sleep(1000)


@pytest.mark.parametrize(
    ("how", "verdict"), [("signal", "killed by SIGSEGV"), ("exit", "exited with status 7 without answering")]
)
def test_a_crash_is_reported_with_rank_and_exit(ranks: RankPool, how: str, verdict: str) -> None:
    with pytest.raises(RankError) as failure:
        ranks(2, grace=2).run(_rank_0_dies, how)
    message = str(failure.value)
    assert f"rank 0: {verdict}" in message
    assert ("Fatal Python error: Segmentation fault" in message) == (how == "signal")
    assert "in _rank_0_dies" in message
    assert ranks(2).run(_sum_of_ranks, 0, offset=0) == [(0, 2, 1), (1, 2, 1)]


def _rank_0_dies(how: str) -> None:
    if dist.get_rank() == 0 and how == "exit":
        os._exit(7)
    if dist.get_rank() == 0:
        # At this thread: the kernel may hand a signal to the process to any of its threads, while this one goes on.
        signal.raise_signal(signal.SIGSEGV)
    time.sleep(1000)


def test_leaked_process_groups_wear_a_worker_out(ranks: RankPool) -> None:
    before = ranks(2).pids
    ranks(2).run(_leak_groups, 100)
    assert _all_gone(before)


def test_ranks_that_made_different_numbers_of_groups_are_replaced(ranks: RankPool) -> None:
    before = ranks(2).pids
    ranks(2).run(_make_a_group_on_rank_0)
    assert _all_gone(before)


def _make_a_group_on_rank_0() -> None:
    if dist.get_rank() == 0:
        dist.new_group([0], use_local_synchronization=True)


def _leak_groups(count: int) -> None:
    for group in [dist.new_group() for _ in range(count)]:
        dist.barrier(group)


def _all_gone(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


# Warnings and output


@pytest.mark.parametrize("category", [DeprecationWarning, FutureWarning])
def test_deprecations_are_errors_on_ranks_and_here(ranks: RankPool, category: type[Warning]) -> None:
    with pytest.raises(category, match="old"):
        warnings.warn("old", category, stacklevel=1)
    with pytest.raises(RankError, match=f"{category.__name__}: old"):
        ranks(1).run(warnings.warn, "old", category)


@pytest.mark.filterwarnings("ignore:old.*:DeprecationWarning", "error:mine:UserWarning")
def test_ranks_obey_the_filters_of_the_test(ranks: RankPool) -> None:
    ranks(1).run(warnings.warn, "old way", DeprecationWarning)
    with pytest.raises(RankError, match="UserWarning: mine"):
        ranks(1).run(warnings.warn, "mine", UserWarning)


def test_output_is_kept_per_rank_and_run(ranks: RankPool) -> None:
    ranks.take_printed()
    ranks(2).run(_print_rank)
    expected = [f"out {rank}\nerr {rank}\ndescriptor {rank}" for rank in range(2)]
    assert [text for _, text in ranks.take_printed()] == expected
    ranks(2).run(os.getpid)
    assert ranks.take_printed() == []


def _print_rank() -> None:
    rank = dist.get_rank()
    print("out", rank)
    print("err", rank, file=sys.stderr)
    os.write(2, f"descriptor {rank}".encode())


INNER = """
import pytest

def test_that_fails_here_and_not_on_a_rank(ranks):
    ranks(2).run(print, "shown on failure")
    assert False

def test_that_passes(ranks):
    ranks(2).run(print, "not shown")

@pytest.mark.gpu
def test_of_a_gpu():
    pass
"""


def test_a_report_shows_the_ranks_output_of_failed_tests_only(tmp_path: Path) -> None:
    inner = tmp_path / "test_inner.py"
    inner.write_text(INNER)
    options = ["-p", "tests.conftest", "-rs", "--rootdir", str(tmp_path)]
    command = [sys.executable, "-m", "pytest", *options, str(inner)]
    report = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300).stdout
    assert "output of rank 1" in report, report
    assert "shown on failure" in report, report
    assert "not shown" not in report, report
    if not torch.cuda.is_available():
        assert "needs a CUDA device" in report, report


def test_the_stack_of_a_hang_is_shown_after_somebody_has_put_handlers_back(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="in _oversleep"):
        ranks(1, timeout=5).run(_put_handlers_back_and_hang)


def _put_handlers_back_and_hang() -> None:
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, signal.getsignal(number))
    _oversleep()
