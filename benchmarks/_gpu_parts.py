"""The parts of `benchmarks.gpu`: selections of the tests, and benchmarks with their options."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._gpu_machine import GpuMachine
from benchmarks._gpu_report import FAILED, PASSED, SKIPPED, STOPPED, Result
from benchmarks._limited import Ended, run_limited
from benchmarks._test_log import Outcome, read

LIMIT = 540.0  # seconds: nine minutes
_MOST_OUTPUT = 30_000  # characters
_LARGE = 70.0  # GiB: ten models of 300M parameters with their optimizers
_NO_TESTS = 5  # pytest's exit status

Arguments = Callable[[GpuMachine], Sequence[str]]


@dataclass(frozen=True)
class Part:
    """A command that is run by itself, with a limit of time.

    Args:
        name, about: for the command line and the report.
        module: the module for `python -m`.
        arguments: of the command, for a machine.
        most_gpus: the part is for machines with at most this number; None if there is no limit.
        packages: required packages.
        has_figures: whether the command writes its figures to the file after ``--json``.
    """

    name: str
    about: str
    module: str
    arguments: Arguments
    most_gpus: int | None = None
    packages: tuple[str, ...] = ()
    has_figures: bool = False

    def obstacle(self, machine: GpuMachine) -> str | None:
        """Return the reason why the part cannot run on a machine; None if it can."""
        count = max(len(machine.gpus), 1)
        if self.most_gpus is not None and count > self.most_gpus:
            return f"is for machines with at most {self.most_gpus} GPU; the other parts use all {count} GPUs"
        missing = [package for package in self.packages if not machine.has(package)]
        return f"requires {', '.join(missing)}, which is not installed" if missing else None

    def run(self, machine: GpuMachine, folder: Path, limit: float = LIMIT) -> Result:
        """Run the part with its logs in a folder, for at most `limit` seconds."""
        reason = self.obstacle(machine)
        if reason is not None:
            return Result(self.name, SKIPPED, reason=reason)
        folder.mkdir(parents=True, exist_ok=True)
        log, record = folder / f"{self.name}.log", folder / f"{self.name}.json"
        record.unlink(missing_ok=True)
        command = [sys.executable, "-m", self.module, *self.arguments(machine)]
        if self.module == "pytest":
            command += ["--test-log", str(record)]
        elif self.has_figures:
            command += ["--json", str(record)]
        ended = run_limited(command, limit, log, machine.environment)
        output = _end_of(log)
        if self.module == "pytest":
            return _result_of_tests(self.name, ended, read(record), output)
        state = STOPPED if ended.status is None else FAILED if ended.status else PASSED
        return Result(self.name, state, ended.seconds, _reason(ended), output=output, figures=_figures(record))


def _figures(record: Path) -> Any:
    """Return the figures in a file; None if there is none, or if it was not written to its end."""
    try:
        return json.loads(record.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def _reason(ended: Ended) -> str:
    if ended.status is None:
        return f"stopped after {ended.seconds:.0f} s"
    return f"ended with the status {ended.status}" if ended.status else ""


def _result_of_tests(name: str, ended: Ended, outcomes: Sequence[Outcome], output: str) -> Result:
    done = {each.test: each for each in outcomes if each.outcome != "started"}
    started = [each.test for each in outcomes if each.outcome == "started"]
    running = [test for test in started if test not in done]
    found = [*done.values(), *(Outcome(test, FAILED, f"was running: the part {_reason(ended)}") for test in running)]
    failed = [each for each in found if each.outcome == FAILED]
    if ended.status is None:
        return Result(name, STOPPED, ended.seconds, _reason(ended), found, output)
    if failed:
        return Result(name, FAILED, ended.seconds, f"{len(failed)} failed", found, output)
    if ended.status not in (0, 1) or not found:  # 1 without a failed test: a file whose package is missing
        what = "no test was selected" if ended.status == _NO_TESTS else f"pytest {_reason(ended)}"
        return Result(name, FAILED, ended.seconds, what, found, output)
    if all(each.outcome == SKIPPED for each in found):
        return Result(name, SKIPPED, ended.seconds, "; ".join(sorted({each.text for each in found})), found)
    return Result(name, PASSED, ended.seconds, outcomes=found)


def _end_of(log: Path) -> str:
    text = log.read_text(encoding="utf-8", errors="replace")
    return text if len(text) <= _MOST_OUTPUT else f"...\n{text[-_MOST_OUTPUT:]}"


# --- tests

PYTEST = (
    *("-p", "no:cacheprovider", "-p", "benchmarks._test_log", "--continue-on-collection-errors", "-q", "-rN"),
    # Raised by torch itself when it is imported beside an old package.
    *("-W", "ignore:The pynvml package is deprecated:FutureWarning"),
)


def _tests(
    name: str,
    about: str,
    *selected: str,
    without: Sequence[str] = (),
    options: Sequence[str] = (),
) -> Part:
    """Return a part that runs tests, except for those in `without`; both are files or pytest's node ids."""
    omitted = [option for each in without for option in ("--deselect", each)]
    arguments = [*PYTEST, "-m", "accelerator or gpu", *options, *omitted, *selected]
    return Part(name, about, "pytest", lambda machine: arguments, packages=("pytest",))


_TRAINING = "tests/engine/test_accelerator.py"
_ROWS = "tests/fully_shard/test_accelerator.py"
_PRECISION = "tests/engine/test_accelerator_precision.py"
_USES = "tests/training/test_accelerator_uses.py"
_BATCH_NORM = "tests/wrap/test_batch_norm.py"
_COMPILED = f"{_USES}::test_compiled_units_train"
_GRAPHS = "tests/training/test_cuda_graphs.py"
_OVER_NCCL = "test_training_over_nccl_equals_the_unsharded_model"
_NCCL = (f"{_TRAINING}::{_OVER_NCCL}", f"{_ROWS}::{_OVER_NCCL}", f"{_PRECISION}::{_OVER_NCCL}_in_the_same_precision")
_HYBRID = tuple(
    f"{_USES}::{test}"
    for test in (
        "test_replicas_and_whole_parameters_among_neighbours",
        "test_tensor_parallel_modules_are_sharded_besides",
    )
)
_SAVES = tuple(
    f"{_USES}::{test}"
    for test in ("test_trains_saves_and_goes_on", "test_the_state_dict_of_rows_goes_through_torchs_checkpoints")
)
_THROUGH_HOST = f"{_USES}::test_ranks_that_share_an_accelerator_train_through_the_host"


# --- benchmarks


def _benchmark(
    name: str,
    about: str,
    module: str,
    arguments: Arguments,
    *,
    most_gpus: int | None = None,
    has_figures: bool = True,
) -> Part:
    return Part(name, about, f"benchmarks.{module}", arguments, most_gpus=most_gpus, has_figures=has_figures)


def _ranks(machine: GpuMachine) -> list[str]:
    return ["--ranks", str(max(len(machine.gpus), 1) if not machine.is_simulated else 2)]


def _device(machine: GpuMachine) -> list[str]:
    return ["--device", "sim" if machine.is_simulated else "cuda"]


def _model(machine: GpuMachine) -> list[str]:
    """Return a model of which ten contestants fit on a GPU; for the simulated device a tiny one."""
    if machine.is_simulated:
        return ["--size", "tiny", "--context", "16"]
    return ["--size", "300M" if machine.gib > _LARGE else "85M", "--batch", "8", "--context", "512"]


def _steps(*more: str) -> Arguments:
    """Return the arguments of training steps; with the simulated device, whose times mean nothing, of a single one."""

    def arguments(machine: GpuMachine) -> list[str]:
        small = [*_model(machine), "--rounds", "1", "--steps", "1", "--foreach"]
        real = [*_model(machine), "--rounds", "8"]
        return [*_ranks(machine), *_device(machine), *(small if machine.is_simulated else real), *more]

    return arguments


def _states(gigabytes: float, simulated: Sequence[str]) -> Arguments:
    def arguments(machine: GpuMachine) -> list[str]:
        size = 0.01 if machine.is_simulated else gigabytes
        rounds = 1 if machine.is_simulated else 3
        # FSDP1 calls functions that the simulated device does not have.
        only = ["--only", *simulated] if machine.is_simulated else []
        return [*_ranks(machine), *_device(machine), "--gigabytes", str(size), "--rounds", str(rounds), *only]

    return arguments


def _overhead(machine: GpuMachine) -> list[str]:
    # torch's fake process group does not serve a custom device. For each of its ranks, an all-gather queues a kernel.
    return (
        ["--device", "cpu", "--units", "5", "--rounds", "1"]
        if machine.is_simulated
        else ["--device", "cuda", "--ranks", "2"]
    )


def _overlap(machine: GpuMachine) -> list[str]:
    # Kernels of the simulated device are not in a profile, so gloo's messages are measured on the CPU instead.
    where = ["--device", "cpu", "--steps", "1"] if machine.is_simulated else ["--device", "cuda"]
    size = ["--size", "46M"] if len(machine.gpus) == 1 else []  # two ranks share it, and communicate by sockets
    return [*_model(machine), *where, *size, "--ranks", str(max(len(machine.gpus), 2))]


def _memory(machine: GpuMachine) -> list[str]:
    return [*_steps()(machine), "--rounds", "1", "--steps", "1"]


def _shared_gpu(machine: GpuMachine) -> list[str]:
    only = ["--only", "ours", "ours-rows", "fsdp2", "--no-memory"]
    return [*_steps(*only)(machine), "--ranks", "2", *([] if machine.is_simulated else ["--size", "46M"])]


def _example(machine: GpuMachine) -> list[str]:
    # On all GPUs; without any, on the CPU.
    return ["--size", "tiny", "--steps", "300"] if machine.is_simulated else []


PARTS: tuple[Part, ...] = (
    _tests("parity", "training equals the unsharded model", _TRAINING, _ROWS, without=_NCCL),
    _tests(
        "streams",
        "the order of streams, also under the checker",
        "tests/testing/test_stream_order_observed.py",
        "tests/distributed/test_accelerator_streams.py",
        "tests/distributed/test_accelerator_exchange.py",
        "tests/distributed/test_accelerator_watchdog.py",
    ),
    _tests("offload", "shards on the host and on disk", "tests/layers/test_accelerator_offload.py"),
    _tests("hybrid", "replicas of shards, and tensor parallelism", *_HYBRID),
    _tests(
        "background",
        "checkpoints that are written during training, stagers and parking",
        *_SAVES,
        "tests/state_dict_utils/test_accelerator_stager.py",
        "tests/state_dict_utils/test_host.py",
        "tests/checkpoint/test_accelerator_parking.py",
    ),
    _tests("compile", "torch.compile of units, and steps in CUDA graphs", _COMPILED, _GRAPHS),
    _tests(
        "nccl-parity",
        "training over NCCL equals the unsharded model",
        *_NCCL,
        _BATCH_NORM,
    ),
    _tests(
        "shared",
        "ranks that share a GPU, over gloo",
        _USES,
        "tests/distributed/test_accelerator_dtensor.py",
        "tests/weights/test_accelerator.py",
        without=(*_HYBRID, *_SAVES, _COMPILED),
        options=("--accelerator-backend", "gloo"),
    ),
    _tests(
        "nccl",
        "the other tests over NCCL; ranks share GPUs if there are fewer",
        *(_TRAINING, _ROWS, _USES, "tests/layers/test_accelerator_offload.py", "tests/weights/test_accelerator.py"),
        without=(*_NCCL, _THROUGH_HOST, _COMPILED),
        options=("--accelerator-backend", "nccl"),
    ),
    Part(
        "train",
        "the example with all GPUs, and its checks in a plain model",
        "examples.gpt.launch",
        _example,
        packages=("tqdm",),
    ),
    _tests("random", "random models and calls, over NCCL", "tests/test_fuzz.py", options=("--fuzz-cases", "60")),
    _tests("precision", "mixed precision, offload and accumulation together", _PRECISION, without=_NCCL),
    _tests(
        "features",
        "optimizers by owners, resharded state, resident units, plans, recomputation",
        "tests/layers/test_accelerator_compression.py",
        "tests/layers/test_accelerator_resident.py",
        "tests/layers/test_accelerator_same_bits.py",
        "tests/optim_utils/test_accelerator_outer.py",
        "tests/optim_utils/test_accelerator_owned.py",
        "tests/optim_utils/test_accelerator_reshard_optimizer.py",
        "tests/wrap/test_checkpoint_wrapper_memory.py",
        "tests/wrap/test_plan.py",
        "tests/benchmarks/test_accelerator_steps.py",
    ),
    _tests("lightning", "Lightning's strategy", "tests/integrations/test_gpu_lightning.py"),
    _benchmark("step", "training steps: time against FSDP1 and FSDP2", "step", _steps("--no-memory")),
    _benchmark("bfloat16", "the same in bfloat16", "step", _steps("--precision", "bfloat16", "--no-memory")),
    _benchmark("memory", "training steps: device memory", "step", _memory),
    _benchmark("overlap", "how much of the all-gathers' time lies beside computation", "overlap", _overlap),
    _benchmark("overhead", "host time of a unit", "overhead", _overhead),
    _benchmark(
        "checkpoint",
        "checkpoints in files",
        "checkpoint",
        _states(0.4, ("ours", "dcp", "disk")),
        has_figures=False,
    ),
    _benchmark("state", "full states on the first rank", "state", _states(1.0, ("ours", "fsdp2")), has_figures=False),
    _benchmark("lora", "adapters on a frozen base", "lora", _steps("--memory-runs", "1")),
    _benchmark("shared-step", "steps of two ranks that share a GPU", "step", _shared_gpu, most_gpus=1),
)
