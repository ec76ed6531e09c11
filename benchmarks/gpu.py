"""Tests and benchmarks on GPUs, in parts of at most nine minutes, with one report.

    python -m benchmarks.gpu --list
    python -m benchmarks.gpu                        # every part, in order
    python -m benchmarks.gpu --resume               # the parts that are not in the report yet
    python -m benchmarks.gpu --part parity step     # these, again if they are in the report

Requires torch and pytest, and no network. The report, `runs/gpu/report.md` and `report.json`, is written after each
part. Every part runs in a process group of its own, which is killed at its limit. Exits with 1 if a chosen part has
failed or was stopped, and with 2 if nothing can be run. `docs/support.md` explains the report and how to send it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run as a file: the folder above has `benchmarks` and `fsdp`
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._gpu_machine import CUDA, SIMULATED, GpuMachine, find_machine
from benchmarks._gpu_parts import LIMIT, PARTS, Part
from benchmarks._gpu_report import STOPPED, Report, Result

_LEAST = 60.0  # seconds: a part is not started for less


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    if options.list:
        for part in PARTS:
            print(f"{part.name:12} {part.about}")
        return 0
    try:
        machine = find_machine(options.device)
        chosen = [part for part in PARTS if options.part is None or part.name in options.part]
        report = run_parts(
            chosen,
            machine,
            options.out,
            keep=options.resume or options.part is not None,
            skip_finished=options.resume,
            limit=options.limit,
            seconds=60 * options.minutes if options.minutes else None,
        )
    except (RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"\nThe report is {options.out / 'report.md'}, with report.json; docs/support.md explains how to send it.")
    results = [report.results[part.name] for part in chosen if part.name in report.results]
    return 0 if all(result.is_good for result in results) else 1


def run_parts(
    parts: Sequence[Part],
    machine: GpuMachine,
    folder: Path,
    *,
    keep: bool = False,
    skip_finished: bool = False,
    limit: float = LIMIT,
    seconds: float | None = None,
) -> Report:
    """Run parts in order, and write the report after each.

    Args:
        parts: the parts to run.
        machine: this machine.
        folder: for the report and the logs.
        keep: whether results of earlier runs stay in the report. By default a new report is started.
        skip_finished: whether parts with a result in the report are not run again.
        limit: seconds for each part.
        seconds: for all parts. A part that is stopped by this limit gets no result, so that a later run repeats it.

    Returns:
        The report, with the results that were kept.

    Raises:
        ValueError: if the folder has the report of another machine, and its results are to be kept.
    """
    folder = folder.absolute()  # parts run in the repository's folder
    folder.mkdir(parents=True, exist_ok=True)
    report = Report.read(folder, machine) if keep else Report(folder, machine)
    report.write()
    ends = None if seconds is None else time.monotonic() + seconds
    for part in parts:
        if skip_finished and part.name in report.results:
            print(f"{part.name}: in the report already", flush=True)
            continue
        left = limit if ends is None else min(limit, ends - time.monotonic())
        if left < min(limit, _LEAST):
            print(f"{part.name}: not started, {max(left, 0):.0f} s are left")
            break
        print(f"{part.name}: {part.about} ...", flush=True)
        result = part.run(machine, folder / "logs", left)
        if result.state == STOPPED and left < limit:
            print(f"{part.name}: stopped, because the time of this run has passed")
            break
        report.add(result)
        print(f"{part.name}: {_line(result)}", flush=True)
    return report


def _line(result: Result) -> str:
    counts = [f"{result.count(outcome)} {outcome}" for outcome in ("passed", "failed", "skipped") if result.outcomes]
    state = result.state if result.is_good else result.state.upper()
    return ", ".join([state, *counts, f"{result.seconds:.0f} s", *([result.reason] if result.reason else [])])


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description="Tests and benchmarks on GPUs, in parts, with one report."
    )
    add = parser.add_argument
    names = [part.name for part in PARTS]
    add("--list", action="store_true", help="print the parts, and run nothing")
    add("--part", nargs="+", choices=names, metavar="NAME", help="only these parts; other results stay in the report")
    add("--resume", action="store_true", help="skip the parts that are in the report")
    add("--device", choices=(CUDA, SIMULATED), default=CUDA, help="(%(default)s); simulated requires no GPU")
    add("--out", type=Path, default=Path("runs/gpu"), metavar="FOLDER", help="for report and logs (%(default)s)")
    add("--limit", type=float, default=LIMIT, metavar="SECONDS", help="for each part (%(default).0f)")
    add("--minutes", type=float, help="for all parts of this run; --resume continues there")
    options = parser.parse_args(arguments)
    for name in ("limit", "minutes"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            parser.error(f"--{name} must be positive")
    return options


if __name__ == "__main__":
    sys.exit(main())
