"""`--sessions N`: files of tests run side by side, and one report looks as if one session had run them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

# A file of tests that wait for each other, so that they pass only if another session runs the other file meanwhile.
MEETING = """
import os, pathlib, time, pytest
def test_meets_the_other():
    here = pathlib.Path("{own}.met")
    here.write_text(str(os.getpid()))
    deadline = time.monotonic() + 240
    while not pathlib.Path("{other}.met").exists():
        assert time.monotonic() < deadline
def test_second(): pass
"""


def report_of(folder: Path, files: Mapping[str, str], *options: str) -> tuple[str, int]:
    """Run these files with pytest; what it says, and its exit status."""
    command, environment = command_of(folder, files)
    done = subprocess.run(
        [*command, *options], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    return done.stdout + done.stderr, done.returncode


def command_of(folder: Path, files: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Write these files; the command that runs them with pytest, and its environment."""
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = waiting")
    command = [sys.executable, "-m", "pytest", "-p", "tests.helpers.sessions", "-p", "no:cacheprovider"]
    return command, os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""}


def test_files_that_mostly_wait_have_one_session_more(tmp_path: Path) -> None:
    # A meets b, b meets c and c meets a: three are at work at the same time.
    files = {f"test_{own}.py": MEETING.format(own=own, other=other) for own, other in ("ab", "bc", "ca")}
    files["test_c.py"] += "pytestmark = pytest.mark.waiting"
    report, status = report_of(tmp_path, files, "--sessions=2")
    assert status == 0, report
    assert "6 passed" in report


def test_a_test_that_waits_leaves_its_file(tmp_path: Path) -> None:
    # A meets b, b meets c, and c, which is in the file of a, meets a: three are at work at the same time.
    marked = MEETING.replace("def test_meets_the_other", "@pytest.mark.waiting\ndef test_waits_for_the_other")
    first = MEETING.format(own="a", other="b") + marked.format(own="c", other="a")
    files = {"test_a.py": first, "test_b.py": MEETING.format(own="b", other="c")}
    report, status = report_of(tmp_path, files, "--sessions=2")
    assert status == 0, report
    assert "5 passed" in report


# A file whose session starts a process, which the server of multiprocessing forks.
FORKING = """
import multiprocessing
def parent_of_a_fork(pipe): pipe.send(os.getppid())
def test_forks():
    context = multiprocessing.get_context("forkserver")
    pipe, far_end = context.Pipe()
    process = context.Process(target=parent_of_a_fork, args=(far_end,))
    process.start()
    pathlib.Path("{own}.server").write_text(str(pipe.recv()))
    process.join()
"""
STARTING = """
from multiprocessing import forkserver
def pytest_collection_finish(): forkserver.ensure_running()
"""


def test_files_run_side_by_side_in_processes_of_their_own_with_one_server(tmp_path: Path) -> None:
    files = {f"test_{own}.py": (MEETING + FORKING).format(own=own, other=other) for own, other in ("ab", "ba")}
    report, status = report_of(tmp_path, files | {"conftest.py": STARTING}, "--sessions=2")
    assert status == 0, report
    assert "collected 6 items" in report
    assert "6 passed" in report
    for shown in ("test_a.py ... ", "test_b.py ... ", "50%", "100%"):
        assert shown in report, report  # one line for a file, though both were at work
    first, second = ((tmp_path / f"{own}.met").read_text() for own in "ab")
    assert first != second
    assert (tmp_path / "a.server").read_text() == (tmp_path / "b.server").read_text()


LASTING = """
import pathlib, pytest, time
@pytest.mark.parametrize("number", range(1000))
def test_takes_its_time(number):
    pathlib.Path("{own}.met").touch()
    time.sleep(0.1)
"""


def test_sessions_end_when_the_one_that_was_started_is_killed(tmp_path: Path) -> None:
    command, environment = command_of(tmp_path, {f"test_{own}.py": LASTING.format(own=own) for own in "ab"})
    started = subprocess.Popen(
        [*command, "--sessions=2"], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    while not all((tmp_path / f"{own}.met").exists() for own in "ab"):
        assert started.poll() is None, started.communicate()
        time.sleep(0.05)
    started.kill()
    started.communicate(timeout=60)  # its output ends when all are gone that inherited it


FAILING = """
import pytest, warnings
@pytest.fixture(scope="session", autouse=True)
def whole():
    yield
    open("ended.{own}", "w")
@pytest.fixture(scope="module", autouse=True)
def file():
    open("made", "a").write("{own}")
class Odd(UserWarning):
    def __init__(self, one, two): super().__init__(one + two)
def test_passes(): warnings.warn(Odd("odd", "{own}"))
def test_fails(): print("printed by {own}"); assert 1 + 1 == 3
def test_skips(): pytest.skip("for {own}")
"""


def test_failures_output_skips_warnings_and_durations_are_shown_as_ever(tmp_path: Path) -> None:
    files = {f"test_{own}.py": FAILING.format(own=own) for own in "abc"}
    report, status = report_of(tmp_path, files, "--sessions=2", "-ra", "--durations=1", "-vv")
    assert status == 1, report
    assert "3 failed, 3 passed, 3 skipped, 3 warnings" in report
    assert "slowest 1 durations" in report
    for own in "abc":
        for expected in (f"printed by {own}", f"for {own}", f"odd{own}", f"FAILED test_{own}.py::test_fails"):
            assert expected in report, report
    assert "assert (1 + 1) == 3" in report
    assert "PASSED" in report
    assert sorted((tmp_path / "made").read_text()) == ["a", "b", "c"], "fixtures of files are made once"
    assert list(tmp_path.glob("ended.*")), "fixtures of sessions are torn down"


DYING = """
import os

def test_before(): pass
def test_dies(): os._exit(7)
def test_after(): pass
"""


def test_a_session_that_dies_fails_its_test_and_what_it_leaves_behind_is_told(tmp_path: Path) -> None:
    files = {"test_a.py": DYING, "test_b.py": "def test_other(): pass"}
    report, status = report_of(tmp_path, files, "--sessions=2")
    assert status == 1, report
    assert "FAILED test_a.py::test_dies - the session that ran it ended with status 7" in report
    assert "1 failed, 2 passed" in report
    assert "1 tests have not been run, since sessions died; one is test_a.py::test_after" in report


@pytest.mark.parametrize("options", [("--sessions=2", "-x"), ("--sessions=1",), ()], ids=" ".join)
def test_without_it_or_with_x_there_is_one_session(tmp_path: Path, options: tuple[str, ...]) -> None:
    report, status = report_of(tmp_path, {f"test_{own}.py": PARENT for own in "ab"}, *options)
    assert status == 0, report
    assert "2 passed" in report


PARENT = "import os\nhere = os.getpid()\ndef test_runs_where_it_was_collected(): assert os.getpid() == here"


def test_a_wrong_number_is_refused(tmp_path: Path) -> None:
    report, status = report_of(tmp_path, {"test_a.py": PARENT, "test_b.py": PARENT}, "--sessions=few")
    assert status == pytest.ExitCode.USAGE_ERROR, report
    assert "--sessions takes a number or 'auto', got 'few'" in report
