"""Trains a GPT that does not fit into memory, with and without `offload="disk"`.

    python -m benchmarks.disk_offload
    python -m benchmarks.disk_offload --size 300M --steps 4 --folder /mnt/nvme
    python -m benchmarks.disk_offload --ranks 2

Three runs from the same weights on the same batches: in memory; in memory under a limit that the system enforces, which
must fail; and with shards, gradients and optimizer state on disk under the same limit, which must end with the weights
of the first, bit for bit. `docs/benchmarks.md` says how bytes are counted. Exits with 1 if a run has an unexpected
outcome.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

if not __package__:  # run as a file: the folder above has `benchmarks` and `fsdp`
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._disk import Bandwidth, file_system, is_in_memory, measure_bandwidth
from benchmarks._disk_worker import Job
from benchmarks._limits import Limit, Limiter
from benchmarks._measure import table, warn_if_busy
from benchmarks._states import sizes_of
from examples.gpt.model import SIZES

_ROOT = Path(__file__).resolve().parent.parent
_BYTES = 4  # of a float32 parameter
_POLL_SECONDS = 0.01
_BANDWIDTH_BYTES = 512 << 20
_PHASES = ("forward", "backward", "optimizer")
_MIB = 2**20


# --- what has to be moved


@dataclass(frozen=True)
class Traffic:
    """Bytes read from and written to the disk in a step."""

    read: float
    written: float

    @property
    def total(self) -> float:
        return self.read + self.written


# The traffic of a step in units of the parameters' bytes P: for each pass, the bytes read and written.
_PASSES = {
    "forward": (1, 0),  # parameters
    "backward": (1, 1),  # parameters; gradients are made
    "optimizer": (4, 3),  # parameters, gradients and Adam's two averages; all but the gradients are changed
}


def least_traffic(parameters: float, memory: float) -> Traffic:
    """Return the minimum traffic of a step if `memory` bytes of its data can stay in memory between passes.

    A pass finds at most this part of its reads in memory, and leaves at most this part of its writes there; all other
    bytes are moved. Without memory, these are 6 P read and 4 P written.
    """
    return Traffic(
        read=sum(max(0.0, reads * parameters - memory) for reads, _ in _PASSES.values()),
        written=sum(max(0.0, changes * parameters - memory) for _, changes in _PASSES.values()),
    )


# --- one run


@dataclass
class Outcome:
    """The outcome of a run.

    Args:
        steps: by rank, its report of each step.
        digests: digests of the final weights; empty if the run did not finish.
        failure: the reason of a failure, or None.
        private: the peak of the processes' total memory that cannot be on disk, sampled every hundredth of a second.
        counted: the peak of the limit's count.
    """

    steps: list[list[dict[str, Any]]] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)
    failure: str | None = None
    private: int = 0
    counted: int | None = None

    @property
    def losses(self) -> list[list[float]]:
        return [[step["loss"] for step in rank] for rank in self.steps]

    def seconds(self, *phases: str) -> float:
        """Median over the steps but the first, which makes the optimizer's state; of the slower rank."""
        by_step = zip(*(rank[1:] for rank in self.steps), strict=True)
        return statistics.median(max(sum(rank[phase] for phase in phases) for rank in ranks) for ranks in by_step)

    def moved(self) -> Traffic | None:
        """Mean over the same steps, as the disk counted."""
        counts = [step["moved"] for step in self.steps[0][1:]]
        if not counts or None in counts:
            return None
        return Traffic(*(statistics.mean(values) for values in zip(*counts, strict=True)))


def run(job: Job, folder: Path, limiter: Limiter, nbytes: int | None = None) -> Outcome:
    """Run every rank of `job` in a process, with files in `folder`, under a limit; their places are filled in here."""
    scratch = Path(tempfile.mkdtemp(prefix="run-", dir=folder))
    with limiter.limited(nbytes, job.world_size) as limit, _processes(job, scratch, limit) as processes:
        private = _wait(processes, limit)
        outcome = Outcome(private=private, counted=limit.peak(), failure=_failure(processes, scratch, limit))
    said = [_lines(scratch / f"said-{rank}") for rank in range(job.world_size)]
    outcome.steps = [[line for line in rank if line["event"] == "step"] for rank in said]
    trained = [line for line in said[0] if line["event"] == "trained"]
    outcome.digests = trained[0]["digests"] if trained else {}
    if outcome.failure is not None:
        outcome.failure += f", {_progress(said)}"
    return outcome


@contextlib.contextmanager
def _processes(job: Job, scratch: Path, limit: Limit) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The ranks; whatever happens inside, none is left afterwards."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(job.threads), "MKL_NUM_THREADS": str(job.threads)}
    running: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(job.world_size):
            placed = replace(job, rank=rank, store=str(scratch / "store"))
            argv = [sys.executable, "-m", "benchmarks._disk_worker", placed.to_argument()]
            with open(scratch / f"said-{rank}", "wb") as said, open(scratch / f"errors-{rank}", "wb") as errors:
                running.append(
                    subprocess.Popen(
                        limit.command(argv),
                        cwd=_ROOT,
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=said,
                        stderr=errors,
                        start_new_session=True,  # Ctrl-C is ours to handle
                    )
                )
        yield running
    finally:
        for process in running:
            process.kill()
            process.wait()


def _wait(processes: Sequence[subprocess.Popen[bytes]], limit: Limit) -> int:
    """Wait until all processes have succeeded or any has failed; return their peak memory."""
    most = 0
    while True:
        statuses = [process.poll() for process in processes]
        if any(statuses) or all(status == 0 for status in statuses):
            return most
        most = max(most, limit.used(process.pid for process in processes))
        time.sleep(_POLL_SECONDS)


def _failure(processes: Sequence[subprocess.Popen[bytes]], scratch: Path, limit: Limit) -> str | None:
    for rank, process in enumerate(processes):
        status = process.poll()
        if status is None or status == 0:
            continue
        if status < 0:
            kills = f" ({kills} out-of-memory kill)" if (kills := limit.kills()) else ""
            return f"rank {rank} was ended by {signal.Signals(-status).name}{kills}"
        return f"rank {rank} ended with status {status}: {_last_error(scratch / f'errors-{rank}')}"
    return None


def _last_error(path: Path) -> str:
    text = re.sub(r"^\[rank\d+\]: ", "", path.read_text(errors="replace").strip(), flags=re.MULTILINE)
    lines = text.splitlines()
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]  # torch writes more below
    return "".join(errors[-1:] or lines[-1:])[:200]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def _progress(said: Sequence[Sequence[dict[str, Any]]]) -> str:
    last = min(said, key=len)
    return f"in step {sum(line['event'] == 'step' for line in last) + 1}" if last else "while the model was built"


# --- reports


def report_sizes(options: argparse.Namespace, parameters: int, limit: int, baseline: int) -> None:
    state = 4 * parameters
    print(
        f"{options.size}: {parameters // _BYTES:,} parameters; parameters {_mib(parameters)}, gradients "
        f"{_mib(parameters)}, Adam's state {_mib(2 * parameters)}, together {_mib(state)} in float32\n"
        f"limit {_mib(limit)}: {_mib(limit - baseline)} and {_mib(baseline)} that {options.ranks} process(es) need to "
        "train next to nothing",
        flush=True,
    )


def report_runs(outcomes: dict[str, Outcome]) -> None:
    rows = []
    whole = outcomes["in memory"]
    for name, outcome in outcomes.items():
        row = [name, _mib(outcome.private), "-" if outcome.counted is None else _mib(outcome.counted)]
        if outcome.failure is None:
            ratio = outcome.seconds(*_PHASES) / whole.seconds(*_PHASES)
            row += [f"{ratio:.2f}", f"{outcome.seconds(*_PHASES):.2f}"]
            row += [f"{outcome.seconds(phase):.2f}" for phase in _PHASES]
        else:
            row += ["-"] * 5
        rows.append(row)
    header = ["", "private", "counted", "step / in memory", "step s", *(f"{phase} s" for phase in _PHASES)]
    print(f"\n{table(header, rows)}")


def report_disk(
    step: float, compute: float, moved: Traffic | None, parameters: int, memory: int, disk: Bandwidth
) -> None:
    """Print the step time on disk relative to the time of the disk traffic alone, counted in three ways."""
    print(
        f"\nThe disk by itself ({disk.how}): reads {disk.read / _MIB:,.0f} MiB/s, writes {disk.write / _MIB:,.0f} MiB/s"
    )
    ways = {
        "all passes, nothing kept": least_traffic(parameters, 0),
        "at least, with this memory": least_traffic(parameters, memory),
        **({"really moved": moved} if moved is not None else {}),
    }
    rows = []
    for name, traffic in ways.items():
        seconds = disk.seconds(traffic.read, traffic.written)
        rows.append(
            [
                name,
                _mib(traffic.read),
                _mib(traffic.written),
                f"{traffic.total / parameters:.1f}",
                f"{seconds:.2f}",
                f"{step / seconds:.2f}" if seconds > step / 1000 else "-",
                f"{step / (seconds + compute):.2f}",
            ]
        )
    header = [
        "bytes of a step",
        "read",
        "written",
        "/ parameters",
        "disk s",
        "step / disk",
        "step / (disk + in memory)",
    ]
    print(table(header, rows))


def report_verdicts(memory: Outcome, limited: Outcome, disk: Outcome) -> bool:
    differing = [name for name, digest in memory.digests.items() if disk.digests.get(name) != digest]
    same = bool(memory.digests) and not differing and memory.digests.keys() == disk.digests.keys()
    found = f"differ in {len(differing)} of {len(memory.digests)} parameters: {', '.join(differing[:3])}"
    verdicts = [
        (memory.failure is None, "in memory: trained" if memory.failure is None else memory.failure),
        (
            limited.failure is not None and _is_for_want_of_memory(limited.failure),
            f"in memory under the limit: {limited.failure or 'trained: the limit limits nothing'}",
        ),
        (disk.failure is None, f"on disk under the limit: {disk.failure or 'trained'}"),
        (
            same and memory.losses == disk.losses,
            f"{len(memory.digests)} parameters and all losses equal to the bit"
            if same
            else f"the final weights {found}",
        ),
    ]
    print()
    for holds, text in verdicts:
        print(f"{'ok    ' if holds else 'FAILED'}  {text}")
    return all(holds for holds, _ in verdicts)


def _is_for_want_of_memory(failure: str) -> bool:
    return re.search("SIGKILL|SIGABRT|memory|alloc", failure, re.IGNORECASE) is not None


def _mib(nbytes: float) -> str:
    return f"{nbytes / _MIB:,.0f} MiB"


# --- the program


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    for ending in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C does: everything that was made is removed
        signal.signal(ending, lambda number, frame: sys.exit(128 + number))
    options.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="disk-offload-", dir=options.folder)).resolve()
    try:
        return compare(options, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def compare(options: argparse.Namespace, folder: Path) -> int:
    limiter = Limiter(use_groups=not options.no_cgroup)
    with limiter.limited(None, options.ranks) as limit:
        print(f"limit by {limit.kind}; folder on {file_system(folder)}; torch {torch.__version__}")
    warn_if_busy()
    threads = max(1, len(os.sched_getaffinity(0)) // options.ranks)
    job = Job(
        size=options.size,
        batch=options.batch // options.ranks,
        context=options.context,
        steps=options.steps,
        threads=threads,
        folder=None,
        store="",
        rank=0,
        world_size=options.ranks,
    )
    idle = run(replace(job, size="tiny", context=SIZES["tiny"].context), folder, limiter)
    if idle.failure is not None:
        print(f"the smallest model does not train: {idle.failure}", file=sys.stderr)
        return 1
    parameters, _ = sizes_of(SIZES[options.size])
    memory = options.limit << 20 if options.limit else 4 * parameters // 3
    nbytes = memory + idle.private
    report_sizes(options, parameters, nbytes, idle.private)

    before = measure_bandwidth(folder, _BANDWIDTH_BYTES)
    outcomes = {
        "in memory": run(job, folder, limiter),
        "in memory, limited": run(job, folder, limiter, nbytes),
        "on disk, limited": run(replace(job, folder=str(folder)), folder, limiter, nbytes),
    }
    after = measure_bandwidth(folder, _BANDWIDTH_BYTES)
    disk = Bandwidth(max(before.read, after.read), max(before.write, after.write), before.how)
    in_memory, _, offloaded = outcomes.values()
    if in_memory.failure is None:
        report_runs(outcomes)
        if offloaded.failure is None:
            step, compute = offloaded.seconds(*_PHASES), in_memory.seconds(*_PHASES)
            report_disk(step, compute, offloaded.moved(), parameters, memory, disk)
    succeeded = report_verdicts(*outcomes.values())
    if options.json is not None:
        options.json.write_text(json.dumps(_as_json(options, nbytes, idle, outcomes, disk), indent=1))
    return 0 if succeeded else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.disk_offload",
        description="Training on disk under a memory limit, against training in memory.",
    )
    add = parser.add_argument
    add("--size", choices=list(SIZES), default="85M", help="(%(default)s)")
    add("--ranks", type=int, default=1, help="which share the limit and the cores (%(default)s)")
    add("--batch", type=int, default=2, help="sequences, shared among the ranks (%(default)s)")
    add("--context", type=int, default=64, help="length of one (%(default)s)")
    add("--steps", type=int, default=5, help="of which the first is not timed (%(default)s)")
    add("--limit", type=int, metavar="MIB", help="beside what an idle process needs; default: a third of the state")
    add(
        "--folder", type=Path, default=Path("runs"), help="below which files are made, on the disk to use (%(default)s)"
    )
    add("--no-cgroup", action="store_true", help="limit private memory, even where a control group can be made")
    add("--json", type=Path, metavar="FILE", help="write every step's figures there")
    options = parser.parse_args(arguments)
    for name, least in (("ranks", 1), ("batch", 1), ("context", 1), ("steps", 2)):
        if getattr(options, name) < least:
            parser.error(f"--{name} must be at least {least}")
    if options.batch % options.ranks:
        parser.error(f"--batch {options.batch} cannot be shared among {options.ranks} ranks")
    if options.context > SIZES[options.size].context:
        parser.error(f"--context must be at most {SIZES[options.size].context} for --size {options.size}")
    if is_in_memory(options.folder):
        parser.error(f"--folder {options.folder} is on {file_system(options.folder)}, which is memory: name a disk")
    return options


def _as_json(
    options: argparse.Namespace, limit: int, idle: Outcome, outcomes: dict[str, Outcome], disk: Bandwidth
) -> dict[str, object]:
    return {
        "options": {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()},
        "torch": torch.__version__,
        "limit": limit,
        "bandwidth": asdict(disk),
        "runs": {name: asdict(outcome) for name, outcome in {"idle": idle, **outcomes}.items()},
    }


if __name__ == "__main__":
    sys.exit(main())
