"""`benchmarks.gpu`: parts that fail, hang, are skipped and resumed; a report of each; parts that select what exists."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from benchmarks import _limited, gpu
from benchmarks._gpu_machine import CUDA, SIMULATED, GpuMachine
from benchmarks._gpu_parts import PARTS, PYTEST, Part

VERSIONS = dict.fromkeys(("driver", "torch", "numpy", "pytest", "triton", "tqdm"), "1.0")
HERE = GpuMachine(SIMULATED, (), 0.0, VERSIONS, "a system")
ONE_GPU = GpuMachine(CUDA, ("a GPU",), 80.0, VERSIONS, "a system")
EIGHT_GPUS = GpuMachine(CUDA, ("a small GPU",) * 8, 24.0, VERSIONS, "a system")

PLANTED = """
import pytest

def test_passes(): pass

def test_fails(): assert 6 * 9 == 42, "planted"

@pytest.mark.skip(reason="not today")
def test_is_skipped(): pass
"""
CRASHES = """
import os

def test_passes(): pass

def test_crashes(): os.kill(os.getpid(), 9)
"""
GOOD = "def test_passes(): pass"
MISSING = "import package_that_is_absent"
HANGS = """
import subprocess, time
other = subprocess.Popen(["sleep", "60"], start_new_session=True)
open({!r}, "w").write(str(other.pid))
time.sleep(60)
"""


def toy(name: str, module: str, *arguments: str, **more: Any) -> Part:
    return Part(name, f"toy {name}", module, lambda machine: arguments, **more)


def toy_tests(folder: Path, name: str, **files: str) -> Part:
    (folder / name).mkdir()
    for file, text in files.items():
        (folder / name / f"test_{file}.py").write_text(text)
    return toy(name, "pytest", *PYTEST, "-c", os.devnull, "--rootdir", str(folder), str(folder / name))


def run(parts: Sequence[Part], folder: Path, *arguments: str, machine: GpuMachine = HERE) -> int:
    with (
        mock.patch.object(gpu, "PARTS", tuple(parts)),
        mock.patch.object(gpu, "find_machine", return_value=machine),
        mock.patch.object(_limited, "_LAST_WORDS", 0.5),
    ):
        return gpu.main(["--out", str(folder), *arguments])


def is_running(process: int) -> bool:
    stat = Path(f"/proc/{process}/stat")  # of a killed process too, until its parent has looked at it
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "ZX"


def results(folder: Path) -> dict[str, dict[str, Any]]:
    return {each["part"]: each for each in json.loads((folder / "report.json").read_text())["results"]}


@pytest.mark.waiting
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are found in /proc")
def test_a_report_has_what_passed_failed_crashed_hung_and_was_skipped(tmp_path: Path) -> None:
    folder, other = tmp_path / "report", tmp_path / "other"
    parts = [
        toy_tests(tmp_path, "planted", planted=PLANTED, missing=MISSING),
        toy_tests(tmp_path, "good", good=GOOD, missing=MISSING),
        toy_tests(tmp_path, "crashes", crashes=CRASHES),
        toy("figures", "timeit", "-n", "1", "print('a table of figures')"),
        toy("absent", "timeit", packages=("triton",)),
        toy("hangs", "timeit", "-n", "1", HANGS.format(str(other))),
    ]
    *others, _ = (part.name for part in parts)
    machine = GpuMachine(SIMULATED, (), 0.0, VERSIONS | {"triton": "not installed"}, "a system")
    assert run(parts, folder, "--part", *others, machine=machine) == 1
    assert run(parts, folder, "--part", "hangs", "--limit", "5", machine=machine) == 1
    found = results(folder)
    assert {name: result["state"] for name, result in found.items()} == {
        "planted": "failed",
        "good": "passed",
        "crashes": "failed",
        "figures": "passed",
        "absent": "skipped",
        "hangs": "stopped",
    }
    text = (folder / "report.md").read_text()
    for expected in (
        "| planted | FAILED | ",
        "assert (6 * 9) == 42",
        "| planted | 1 | not today |",
        "| planted | 1 | requires the package package_that_is_absent, which is not installed |",
        "test_crashes.py::test_crashes`\n\n```text\nwas running: the part ended with the status -9",
        "### hangs: stopped after ",
        "a table of figures",
        "| absent | skipped | 0 | - | - | - | requires triton, which is not installed |",
        "Open an issue",
    ):
        assert expected in text, expected
    assert "File" in found["hangs"]["output"]  # the stack
    assert not is_running(int(other.read_text()))  # in a session of its own, and killed all the same


def test_parts_are_resumed_repeated_and_left_for_a_later_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    marks = tmp_path / "marks"
    note = f"open({str(marks)!r}, 'a').write('x')"
    parts = [toy(name, "timeit", "-n", "1", "-r", "1", note) for name in ("first", "second")]
    broken = toy("third", "timeit", "-n", "1", "-r", "1", "raise ValueError")
    assert run([*parts, broken], tmp_path, "--part", "first") == 0
    assert run([*parts, broken], tmp_path, "--resume") == 1
    assert marks.read_text() == "xx"  # the first part is not run again
    assert results(tmp_path)["third"]["reason"] == "ended with the status 1"
    assert run([*parts, broken], tmp_path, "--resume") == 1  # a part of the report has failed
    assert run(parts, tmp_path, "--part", "second") == 0
    assert marks.read_text() == "xxx"
    assert list(results(tmp_path)) == ["first", "second", "third"]
    assert run([toy("slow", "timeit", "import time; time.sleep(60)")], tmp_path, "--minutes", "0.02") == 0
    assert list(results(tmp_path)) == []  # a new report, in which a part without enough time has no result
    assert "slow: not started" in capfd.readouterr().out


def test_a_report_of_another_machine_is_not_continued(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run([], tmp_path) == 0
    assert run([], tmp_path, "--resume", machine=ONE_GPU) == 2
    assert "Choose another folder with --out" in capfd.readouterr().err


def test_one_part_is_for_a_single_gpu() -> None:
    by_name = {part.name: part for part in PARTS}
    assert all(part.obstacle(ONE_GPU) is None for part in PARTS)
    assert "at most 1 GPU" in str(by_name["shared-step"].obstacle(EIGHT_GPUS))
    assert all(by_name[name].obstacle(EIGHT_GPUS) is None for name in by_name.keys() - {"shared-step"})
    assert all(part.obstacle(HERE) is None for part in PARTS)


def test_selected_tests_exist() -> None:
    for part in PARTS:
        if part.module == "pytest":
            selected = [each for each in part.arguments(HERE) if each.startswith("tests/")]
            assert selected, part.name
            for each in selected:
                path, _, name = each.partition("::")
                module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
                assert not name or hasattr(module, name), each


class ParsedError(Exception):
    """The command line of a benchmark was accepted."""


@pytest.mark.parametrize("machine", [HERE, ONE_GPU, EIGHT_GPUS], ids=["simulated", "one", "eight"])
def test_benchmarks_accept_their_arguments(machine: GpuMachine) -> None:
    parse = argparse.ArgumentParser.parse_args

    def accept(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
        parse(parser, arguments)
        raise ParsedError

    for part in PARTS:
        if part.module.startswith("benchmarks."):
            module = importlib.import_module(part.module)
            figures = ["--json", "figures"] if part.has_figures else []
            with mock.patch.object(argparse.ArgumentParser, "parse_args", accept), pytest.raises(ParsedError):
                module.main([*part.arguments(machine), *figures])


def test_the_parts_are_listed_without_a_machine(capfd: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--list"]) == 0
    listed = [line.split()[0] for line in capfd.readouterr().out.splitlines()]
    assert listed == [part.name for part in PARTS]
    assert sys.modules["benchmarks.gpu"].LIMIT <= 540
