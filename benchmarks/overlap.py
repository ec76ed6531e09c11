"""How much of the communication of a training step lies beside computation, from the profiler's traces.

    python -m benchmarks.overlap --device cuda --ranks 4
    python -m benchmarks.overlap --only ours fsdp2 --traces runs/traces

Each contestant trains alone in the same processes, and rank 0 profiles some steps. On GPUs the figures are computed
from the kernels: those of NCCL are communication, and all others are computation. Where ranks communicate by gloo, its
operations on the host are communication; the CPU computes in the main thread's operators. `docs/benchmarks.md` explains
the columns. Requires at least two ranks: a single rank has no communication.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

if not __package__:  # run as a file: the folder above has `benchmarks` and `fsdp`
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._contestants import (
    CONTESTANTS,
    DDP,
    FSDP1_FLAT,
    FSDP1_ORIG,
    FSDP2,
    FSDP2_PREFETCH,
    OURS,
    OURS_ORIG,
    OURS_ROWS,
    choose,
)
from benchmarks._figures import without_refused
from benchmarks._measure import settle, synchronize, table, warn_if_busy
from benchmarks._ranks import DEVICES, backend_of, run_ranks, this_device
from benchmarks._training import Setup, build, train_step
from examples.gpt.model import SIZES

Interval = tuple[float, float]  # start, stop; contains nothing if stop <= start

AMONG = (OURS, OURS_ORIG, OURS_ROWS, FSDP1_FLAT, FSDP1_ORIG, FSDP2, FSDP2_PREFETCH, DDP)
_WARM_UP = 4  # steps, after which the order of units is known
_GATHER = re.compile(r"nccl.*all_?gather|gloo:.*all_?gather", re.IGNORECASE)
_REDUCTION = re.compile(r"nccl.*(all|_)?reduce|gloo:.*reduce", re.IGNORECASE)


@dataclass(frozen=True)
class Overlap:
    """The communication of some steps on rank 0; times in microseconds of a step.

    Args:
        gathers, reductions, communication: time in which at least one such operation runs.
        gathers_beside, communication_beside: the part of it beside computation, 0 to 1; None without any. Messages of
            `ours` over gloo are neither gathers nor reductions by name, and count as communication only.
        computation: time in which at least one other kernel or operator runs.
        step: from the first to the last of these.
    """

    gathers: float
    gathers_beside: float | None
    reductions: float
    communication: float
    communication_beside: float | None
    computation: float
    step: float


def measured(events: Sequence[Mapping[str, Any]], steps: int) -> Overlap:
    """Return the overlap in the events of a trace in Chrome's format, of so many steps."""
    complete = [event for event in events if event.get("ph") == "X"]
    kernels = [event for event in complete if event.get("cat") == "kernel"]
    by_nccl = [event for event in kernels if event["name"].startswith("nccl")]
    communication = by_nccl or [event for event in complete if event["name"].startswith("gloo:")]
    computation = [event for event in kernels if not event["name"].startswith("nccl")] or _operators(complete)
    beside = _intervals(computation)
    every, gathers = _intervals(communication), _intervals(communication, _GATHER)
    times = [point for interval in (*every, *beside) for point in interval]
    return Overlap(
        gathers=length(gathers) / steps,
        gathers_beside=overlap(gathers, beside),
        reductions=length(_intervals(communication, _REDUCTION)) / steps,
        communication=length(every) / steps,
        communication_beside=overlap(every, beside),
        computation=length(beside) / steps,
        step=(max(times) - min(times)) / steps if times else 0.0,
    )


def length(intervals: Iterable[Interval]) -> float:
    """Return the length of the union of intervals."""
    found, end = 0.0, -math.inf
    for start, stop in sorted(intervals):
        found += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return found


def overlap(communication: Sequence[Interval], computation: Sequence[Interval]) -> float | None:
    """Return the part of the communication's time that lies beside computation, 0 to 1; None without communication."""
    whole = length(communication)
    return (whole + length(computation) - length([*communication, *computation])) / whole if whole else None


def _intervals(events: Sequence[Mapping[str, Any]], pattern: re.Pattern[str] | None = None) -> list[Interval]:
    return [
        (float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0)))
        for event in events
        if pattern is None or pattern.match(event["name"])
    ]


_MOVES = ("aten::copy_", "aten::to", "aten::_to_copy", "aten::empty", "aten::set_")  # also inside of communication


def _operators(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the operators that compute on a CPU."""
    found = [event for event in events if event.get("cat") == "cpu_op" and event["name"].startswith("aten::")]
    return [event for event in found if not event["name"].startswith(_MOVES)]


# --- on a rank


def _measure(setup: Setup, names: Sequence[str], steps: int, folder: str) -> dict[str, Overlap]:
    return {name: _trained(setup, name, steps, Path(folder)) for name in names}


def _trained(setup: Setup, name: str, steps: int, folder: Path) -> Overlap:
    device = this_device()
    settle()  # the last contestant's memory, of which cycles are kept
    module = build(CONTESTANTS[name], setup, device)
    optimizer, windows = setup.adamw(module), setup.windows(0, device)
    train: Callable[[], Any] = lambda: train_step(module, optimizer, windows)  # noqa: E731
    for _ in range(_WARM_UP):
        train()
    synchronize(device)
    dist.barrier()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities) as trace:
        for _ in range(steps):
            train()
        synchronize(device)
    dist.barrier()
    path = folder / f"{name}-rank{dist.get_rank()}.json"
    trace.export_chrome_trace(str(path))
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    if device.type == "cuda" and not any(event.get("cat") == "kernel" for event in events):
        raise RuntimeError(
            f"the profiler has recorded no kernel of {name} on {device}: the driver may permit this to root only "
            "(NVreg_RestrictProfilingToAdminUsers). Run as root, or leave this part out."
        )
    return measured(events, steps)


# --- the program


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    setup = Setup(size=options.size, batch=options.batch, context=options.context, foreach=True, device=options.device)
    names = choose(options.only, among=AMONG, always=())
    print(
        f"{setup.num_parameters:,} parameters, {options.ranks} ranks, batch {setup.batch} x {setup.context}, "
        f"{setup.device} ({backend_of(setup.device)}), {options.steps} steps, torch {torch.__version__}",
        flush=True,
    )
    warn_if_busy()
    if setup.device != "cpu":
        names = without_refused(setup, names, options.ranks)
    with tempfile.TemporaryDirectory() as folder:
        kept = options.traces or Path(folder)
        kept.mkdir(parents=True, exist_ok=True)
        found = run_ranks(_measure, options.ranks, setup, names, options.steps, str(kept), device=setup.device)[0]
    report(found)
    if options.json is not None:
        options.json.write_text(json.dumps({name: asdict(each) for name, each in found.items()}, indent=1))
    return 0


def report(found: Mapping[str, Overlap]) -> None:
    rows = [
        [
            name,
            _part(each.gathers_beside),
            _part(each.communication_beside),
            *(
                f"{value / 1000:.2f}"
                for value in (each.gathers, each.reductions, each.communication, each.computation, each.step)
            ),
        ]
        for name, each in found.items()
    ]
    header = ["", "gathers beside", "all beside", "gathers ms", "reductions ms", "all ms", "compute ms", "step ms"]
    print("\nThe part of the communication's time on rank 0 that lies beside computation, and times of a step.")
    print(table(header, rows), flush=True)


def _part(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overlap", description="Communication beside computation: ours and the peers."
    )
    add = parser.add_argument
    add("--size", choices=list(SIZES), default="17M")
    add("--ranks", type=int, default=2)
    add("--batch", type=int, default=Setup.batch, help="sequences per rank (%(default)s)")
    add("--context", type=int, default=Setup.context, help="length of one (%(default)s)")
    add("--steps", type=int, default=3, help="that are profiled (%(default)s)")
    add("--device", choices=[each for each in DEVICES if each != "sim"], default="cpu")
    add("--only", nargs="+", choices=list(AMONG), metavar="NAME", help=f"of {', '.join(AMONG)}")
    add("--traces", type=Path, metavar="FOLDER", help="keep the traces there, for Perfetto")
    add("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse_args(arguments)
    if options.ranks < 2:
        parser.error("--ranks must be at least 2: a single rank does not communicate")
    for name in ("batch", "context", "steps"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    return options


if __name__ == "__main__":
    sys.exit(main())
