"""A pytest plugin that writes each outcome to a file at once, so that a run that is killed loses no outcome.

    python -m pytest -p benchmarks._test_log --test-log FILE ...

The file has a JSON object in each line: `test`, `outcome` ("started", "passed", "failed" or "skipped") and `text`, the
traceback or the reason. A file of tests that imports a package that is not installed is skipped, with this reason.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

OWN = ("fsdp", "tests", "benchmarks", "examples")
_MOST_TEXT = 12_000  # characters of a traceback: its end, with what ranks have raised


@dataclass(frozen=True)
class Outcome:
    """An outcome of a test, or of the collection of a file."""

    test: str
    outcome: str
    text: str = ""


def read(log: Path) -> list[Outcome]:
    """Return the outcomes in a file, except for a last line that was not written completely."""
    lines = log.read_text(encoding="utf-8").split("\n")[:-1] if log.exists() else []
    return [Outcome(**json.loads(line)) for line in lines]


class TestLog:
    """Writes the outcomes of a session to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def _write(self, outcome: Outcome) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(Outcome(nodeid, "started"))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self._write(Outcome(report.nodeid, report.outcome, _text(report)))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.passed:
            return
        missing = re.search(r"ModuleNotFoundError: No module named '(\w+)", report.longreprtext)
        if missing is not None and missing[1] not in OWN:
            text = f"requires the package {missing[1]}, which is not installed"
            self._write(Outcome(report.nodeid, "skipped", text))
        else:
            self._write(Outcome(report.nodeid, report.outcome, _text(report)))


def _text(report: pytest.TestReport | pytest.CollectReport) -> str:
    if report.passed:
        return ""
    if report.skipped and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    printed = "\n".join(f"----- {title}\n{content}" for title, content in report.sections)
    return f"{report.longreprtext}\n{printed}".strip()[-_MOST_TEXT:]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--test-log", type=Path, metavar="FILE", help="write each outcome there, as JSON lines")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("test_log")
    if path is not None:
        config.pluginmanager.register(TestLog(path))
