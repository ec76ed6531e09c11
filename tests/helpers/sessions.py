"""`--sessions N`: the files of tests are shared out among N sessions, which run side by side.

Ranks that work in step leave cores idle while they wait for each other, and those of another session use them.

The sessions are forked when the tests are collected. Each takes the next file from a pipe, which is filled beforehand,
when it is about to finish a file, and sends the results of its tests. Files with few tests come first, since each of
the few may take long; a file with many tests has short ones, so that all sessions end at about the same time. Tests
that mostly wait are not part of their file there: an additional session runs them. The session that was started shows
each file when it is complete, as if it had run it; so there is a single report, and options that concern it keep their
meaning.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

MOST = 4  # sessions that "auto" starts: each has up to ten ranks, which take some GB of memory
NUMBER = 4  # bytes of a file's number in the hat

Told = tuple[str, dict[str, Any]]  # a hook of pytest, and what it is called with


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sessions",
        default="1",
        metavar="N",
        help="share the files of tests out among N sessions, side by side, and one more for tests that are marked as "
        f"waiting; 'auto': one for each core, up to {MOST}. With -x, --maxfail or --pdb there is only one.",
    )


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    option = session.config.option
    if session.testsfailed or option.collectonly or option.usepdb or option.maxfail:
        return None  # as pytest does it
    files = _shared_out(session.items)
    number = min(_wanted(option.sessions), len(files))
    if number < 2:
        return None
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # one folder for all
    waiting = [place for place, items in enumerate(files) if _waits(items[0])]
    hat, hat_of_waiting = _filled_hat(set(range(len(files))).difference(waiting)), _filled_hat(waiting)
    players: list[Player] = []
    try:
        for each in [hat_of_waiting] * bool(waiting) + [hat] * number:
            players.append(Player(session, files, each, players))
        _show(session, players)
    finally:
        for player in players:
            player.end()
        os.close(hat)
        os.close(hat_of_waiting)
    return True


def _shared_out(items: Iterable[pytest.Item]) -> list[list[pytest.Item]]:
    """Return the tests of each file, those that wait apart from the others, and the files with fewest tests first."""
    files: dict[tuple[Path, bool], list[pytest.Item]] = {}
    for item in items:
        files.setdefault((item.path, _waits(item)), []).append(item)
    return sorted(files.values(), key=len)


def _waits(item: pytest.Item) -> bool:
    return item.get_closest_marker("waiting") is not None


def _wanted(sessions: str) -> int:
    if sessions == "auto":
        # Elsewhere a process that has libraries loaded may not fork.
        return min(len(os.sched_getaffinity(0)), MOST) if hasattr(os, "sched_getaffinity") else 1
    if not sessions.isdecimal():
        raise pytest.UsageError(f"--sessions takes a number or 'auto', got {sessions!r}")
    return int(sessions)


def _filled_hat(files: Iterable[int]) -> int:
    """A descriptor from which every read takes the number of another one of these files, the first ones first."""
    hat, inside = os.pipe()
    os.write(inside, b"".join(number.to_bytes(NUMBER, "little") for number in sorted(files)))
    os.close(inside)
    return hat


# In the session that was started


class Player:
    """One of the sessions, as seen by the one that was started."""

    def __init__(
        self, session: pytest.Session, files: list[list[pytest.Item]], hat: int, earlier: Iterable[Player]
    ) -> None:
        self.pipe, far_end = multiprocessing.Pipe(duplex=False)
        self.told: list[Told] = []  # of the file that it is at
        self.at = ""  # the test that it is at
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads; there are none that matter
            self.pid = os.fork()
        if not self.pid:
            for each in (*earlier, self):
                each.pipe.close()  # so that telling it fails when the session that was started has died
            _play(session, files, hat, far_end)  # does not return
        far_end.close()  # so that its death reads as the end of the pipe

    def end(self) -> None:
        """Wait for a session that has closed its pipe, and end any other."""
        with suppress(ProcessLookupError):
            if not self.pipe.closed:
                os.kill(self.pid, signal.SIGTERM)
                os.waitpid(self.pid, 0)
        self.pipe.close()

    def died(self) -> str:
        """Reap it; how it ended, or nothing if that is as it should be."""
        _, status = os.waitpid(self.pid, 0)
        self.pipe.close()
        code = os.waitstatus_to_exitcode(status)
        return "" if code == 0 else f"the session that ran it ended with status {code}"


def _show(session: pytest.Session, players: list[Player]) -> None:
    """Have the hooks called for all tests, one file after the other."""
    hook, left = session.config.hook, {item.nodeid for item in session.items}
    open_pipes = {player.pipe: player for player in players}
    while open_pipes:
        for pipe in wait(list(open_pipes)):
            player = open_pipes[pipe]  # type: ignore[index]
            try:
                name, what = pickle.loads(player.pipe.recv_bytes())
            except EOFError:
                del open_pipes[player.pipe]
                left -= _replay(session, player.told)
                if reason := player.died():
                    hook.pytest_runtest_logreport(report=_lost(player.at, reason))
                    left.discard(player.at)
                continue
            if name == "pytest_runtest_logstart":
                if _file(what["nodeid"]) != _file(player.at):
                    left -= _replay(session, player.told)
                player.at = what["nodeid"]
            player.told.append((name, what))
    if left:
        session.shouldfail = f"{len(left)} tests have not been run, since sessions died; one is {min(left)}"


def _replay(session: pytest.Session, told: list[Told]) -> set[str]:
    """Call the hooks that another session was told of; returns the tests that are done. Empties `told`."""
    done = set()
    for name, what in told:
        if name == "pytest_runtest_logreport":
            what["report"] = session.config.hook.pytest_report_from_serializable(
                config=session.config, data=what["report"]
            )
        if name == "pytest_runtest_logfinish":
            done.add(what["nodeid"])
        hook = getattr(session.config.hook, name)
        if name == "pytest_warning_recorded":
            hook.call_historic(kwargs=what)  # pytest keeps these for plugins that come later
        else:
            hook(**what)
    told.clear()
    if session.shouldstop:  # as a plugin may ask
        raise session.Interrupted(session.shouldstop)
    return done


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def _lost(nodeid: str, reason: str) -> pytest.TestReport:
    location = (_file(nodeid), None, nodeid.partition("::")[2])
    return pytest.TestReport(nodeid, location, {}, "failed", reason, "call")


# In a session that was forked


def _play(session: pytest.Session, files: list[list[pytest.Item]], hat: int, pipe: Connection) -> None:
    """Run files of tests until none is left, and end the process."""
    status = 1
    try:
        _capture_apart(session.config)
        _share_server()
        plugins = session.config.pluginmanager
        plugins.unregister(plugins.getplugin("terminalreporter"))
        plugins.register(Teller(session.config, pipe))
        items = _dealt(files, hat)
        item = next(items, None)
        while item is not None:
            following = next(items, None)  # pytest tears down what that one does not need
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            item = following
        pipe.close()
        status = 0
    finally:
        os._exit(status)  # what happens at the end of a session is for the one that was started


def _dealt(files: list[list[pytest.Item]], hat: int) -> Iterator[pytest.Item]:
    while number := os.read(hat, NUMBER):
        yield from files[int.from_bytes(number, "little")]


def _capture_apart(config: pytest.Config) -> None:
    """Into files of its own: the ones that are open are those of every session."""
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is not None:
        capture.stop_global_capturing()
        capture.start_global_capturing()
        capture.suspend_global_capture()


def _share_server() -> None:
    """Use the server of multiprocessing that the session that was started has started, and leave its end to that one.

    A session would wait for the process of the server to see whether it runs, which only its parent may.
    """
    if forkserver._forkserver._forkserver_pid is not None:  # type: ignore[attr-defined]
        forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]


class Teller:
    """A plugin that sends what the terminal would show."""

    def __init__(self, config: pytest.Config, pipe: Connection) -> None:
        self._config, self._pipe = config, pipe

    def _tell(self, name: str, **what: Any) -> None:
        self._pipe.send_bytes(pickle.dumps((name, what)))

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self._tell("pytest_runtest_logstart", nodeid=nodeid, location=location)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._tell("pytest_runtest_logreport", report=data)

    def pytest_runtest_logfinish(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self._tell("pytest_runtest_logfinish", nodeid=nodeid, location=location)

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any
    ) -> None:
        told = _plain(warning_message)
        self._tell("pytest_warning_recorded", warning_message=told, when=when, nodeid=nodeid, location=location)


def _plain(warning: warnings.WarningMessage) -> warnings.WarningMessage:
    """The same without the object it is about, and as text where its class cannot travel."""
    make: Callable[..., warnings.WarningMessage] = warnings.WarningMessage
    plain = make(warning.message, warning.category, warning.filename, warning.lineno, line=warning.line)
    try:
        pickle.loads(pickle.dumps(plain))
    except Exception:  # noqa: BLE001 - whatever a class of warnings does
        return make(str(warning.message), UserWarning, warning.filename, warning.lineno, line=warning.line)
    return plain
