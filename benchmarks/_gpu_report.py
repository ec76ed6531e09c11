"""The report of `benchmarks.gpu`: the results of its parts, as JSON and as Markdown."""

from __future__ import annotations

import collections
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks._gpu_machine import GpuMachine, from_json
from benchmarks._test_log import Outcome

_FORMAT = 1
PASSED, FAILED, SKIPPED, STOPPED = "passed", "failed", "skipped", "stopped"
TO_SEND = (
    "Open an issue in the repository of this library, with the title `GPU report:` and the name of the GPU, and attach "
    "`report.md` and `report.json`. The files contain no host name, user name or environment variable, except where a "
    "traceback shows a path."
)


@dataclass(frozen=True)
class Result:
    """The result of a part.

    Args:
        part: its name.
        state: "passed", "failed", "skipped" or "stopped" (at its limit).
        seconds: the duration of the part.
        reason: the reason of a state other than "passed".
        outcomes: a test part's outcomes; the text is a traceback or the reason for skipping.
        output: the end of the printed output; the tables of a benchmark.
        figures: the JSON file of a benchmark; None if there is none.
    """

    part: str
    state: str
    seconds: float = 0.0
    reason: str = ""
    outcomes: list[Outcome] = field(default_factory=list)
    output: str = ""
    figures: Any = None

    @property
    def is_good(self) -> bool:
        return self.state in (PASSED, SKIPPED)

    def count(self, outcome: str) -> int:
        return sum(each.outcome == outcome for each in self.outcomes)


@dataclass
class Report:
    """The results on a machine, in a folder that has ``report.json``, ``report.md`` and the logs of the parts."""

    folder: Path
    machine: GpuMachine
    results: dict[str, Result] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path, machine: GpuMachine) -> Report:
        """Return the report in a folder; an empty one if there is no file.

        Raises:
            ValueError: if the report is of another machine, or of another version of this program.
        """
        path = folder / "report.json"
        if not path.exists():
            return cls(folder, machine)
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.get("format") != _FORMAT or from_json(content["machine"]) != machine:
            raise ValueError(f"{path} is a report of another machine or version. Choose another folder with --out.")
        results = {
            each["part"]: Result(**{**each, "outcomes": [Outcome(**outcome) for outcome in each["outcomes"]]})
            for each in content["results"]
        }
        return cls(folder, machine, results)

    def add(self, result: Result) -> None:
        """Add a result, and write both files."""
        self.results[result.part] = result
        self.write()

    def write(self) -> None:
        content = {
            "format": _FORMAT,
            "machine": asdict(self.machine),
            "results": [asdict(result) for result in self.results.values()],
        }
        _replace(self.folder / "report.json", json.dumps(content, indent=1))
        _replace(self.folder / "report.md", self.as_markdown())

    def as_markdown(self) -> str:
        results = list(self.results.values())
        sections = [
            "# GPU report",
            _machine_table(self.machine),
            "## Parts",
            _parts_table(results),
            *_failures(results),
            *_skips(results),
            *_outputs(results),
            "## Sending this report",
            TO_SEND,
        ]
        return "\n\n".join(sections) + "\n"


def _replace(path: Path, text: str) -> None:
    """Write a file as a whole: a crash leaves the old one or the new one."""
    part = path.with_suffix(".part")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.rename(path)


def _machine_table(machine: GpuMachine) -> str:
    gpus = machine.gpus or ("none: the simulated device, whose times mean nothing",)
    rows = [("GPU", each) for each in gpus] + [*machine.versions.items(), ("system", machine.system)]
    return _table(("machine", ""), rows)


def _parts_table(results: Sequence[Result]) -> str:
    counted = (PASSED, FAILED, SKIPPED)
    rows = [
        (
            result.part,
            result.state.upper() if not result.is_good else result.state,
            f"{result.seconds:.0f}",
            *(str(result.count(outcome)) if result.outcomes else "-" for outcome in counted),
            result.reason,
        )
        for result in results
    ]
    return _table(("part", "result", "seconds", "tests passed", "failed", "skipped", "reason"), rows)


def _failures(results: Sequence[Result]) -> list[str]:
    sections = []
    for result in results:
        failed = [each for each in result.outcomes if each.outcome == FAILED]
        sections += [f"### {result.part}: `{each.test}`\n\n{_block(each.text)}" for each in failed]
        if result.state == STOPPED or (result.state == FAILED and not failed):
            sections.append(f"### {result.part}: {result.reason}\n\n{_block(result.output)}")
    return ["## Failures", *sections] if sections else []


def _skips(results: Sequence[Result]) -> list[str]:
    counts = collections.Counter(
        (result.part, each.text) for result in results for each in result.outcomes if each.outcome == SKIPPED
    )
    rows = [(part, str(count), reason) for (part, reason), count in counts.items()]
    return ["## Skipped tests", _table(("part", "tests", "reason"), rows)] if rows else []


def _outputs(results: Sequence[Result]) -> list[str]:
    shown = [result for result in results if result.is_good and result.output and not result.outcomes]
    sections = [f"### {result.part}\n\n{_block(result.output)}" for result in shown]
    return ["## Benchmarks", *sections] if sections else []


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    cells = [[" ".join(cell.replace("|", "\\|").split()) for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _block(text: str) -> str:
    fence = "````" if "```" in text else "```"
    return f"{fence}text\n{text.strip()}\n{fence}"
