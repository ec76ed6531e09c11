"""The machine of a GPU report: its GPUs, driver and versions, found in a separate process.

python -m benchmarks._gpu_machine cuda
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

CUDA, SIMULATED = "cuda", "simulated"
_PACKAGES = ("numpy", "pytest", "triton", "tqdm", "hypothesis", "parameterized", "safetensors", "lightning")
_MOST_SECONDS = 300
_UNKNOWN = "unknown"


@dataclass(frozen=True)
class GpuMachine:
    """The facts that a report begins with.

    Args:
        device: "cuda" or "simulated".
        gpus: the name and memory of each GPU; empty for the simulated device.
        gib: memory of the smallest GPU; 0 for the simulated device.
        versions: by name: driver, torch, CUDA, NCCL, Python, packages ("not installed" if absent), commit.
        system: operating system, processor and number of cores.
    """

    device: str
    gpus: tuple[str, ...]
    gib: float
    versions: dict[str, str]
    system: str

    @property
    def is_simulated(self) -> bool:
        return self.device == SIMULATED

    @property
    def environment(self) -> dict[str, str]:
        """The variables for processes that use the device: tests take the simulated one where torch sees no GPU."""
        return {"CUDA_VISIBLE_DEVICES": ""} if self.is_simulated else {}

    def has(self, package: str) -> bool:
        return self.versions[package] != "not installed"


def find_machine(device: str) -> GpuMachine:
    """Return this machine.

    A separate process asks the driver, so that this process holds no memory of a GPU.

    Raises:
        RuntimeError: if the device does not work here.
    """
    command = [sys.executable, "-m", __name__, device]
    environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": ""} if device == SIMULATED else {})}
    root = Path(__file__).resolve().parent.parent
    found = subprocess.run(
        command, capture_output=True, text=True, timeout=_MOST_SECONDS, cwd=root, env=environment, check=False
    )
    if found.returncode:
        raise RuntimeError(f"The device {device} does not work here: {found.stderr.strip()[-2000:]}")
    return from_json(json.loads(found.stdout.splitlines()[-1]))


def from_json(facts: dict[str, Any]) -> GpuMachine:
    return GpuMachine(**{**facts, "gpus": tuple(facts["gpus"])})


# --- in the separate process


def _describe(device: str) -> GpuMachine:
    import torch

    gpus, memory = [], [0.0]
    if device == CUDA:
        if not torch.cuda.is_available():
            raise SystemExit("torch sees no GPU. Use --device simulated to try the program without a GPU.")
        for index in range(torch.cuda.device_count()):
            torch.ones(1024, device=f"cuda:{index}").sum().item()  # a kernel runs
            facts = torch.cuda.get_device_properties(index)
            memory.append(facts.total_memory / 2**30)
            gpus.append(f"{facts.name}, {memory[-1]:.0f} GiB, sm_{facts.major}{facts.minor}")
        memory.pop(0)
    else:
        from tests import simulated

        if torch.__version__ < simulated.LEAST_TORCH:
            raise SystemExit(
                f"the simulated device requires torch {simulated.LEAST_TORCH}; this is {torch.__version__}"
            )
        simulated.build()
    versions = {
        "driver": _driver() if device == CUDA else "none",
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or "none",
        "NCCL": _nccl(),
        "Python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
        "commit": _output("git", "rev-parse", "HEAD") or _UNKNOWN,
    }
    return GpuMachine(
        device, tuple(gpus), round(min(memory), 1), versions, f"{platform.platform()}, {os.cpu_count()} cores"
    )


def _nccl() -> str:
    import torch

    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return "none"
    from torch.cuda import nccl

    return ".".join(map(str, nccl.version()))


def _driver() -> str:
    found = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    if not found and Path("/proc/driver/nvidia/version").exists():
        match = re.search(r"\d+\.\d+(\.\d+)?", Path("/proc/driver/nvidia/version").read_text())
        found = match[0] if match else ""
    return found.splitlines()[0] if found else _UNKNOWN


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _output(*command: str) -> str:
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.strip() if found.returncode == 0 else ""


if __name__ == "__main__":
    print(json.dumps(asdict(_describe(sys.argv[1]))))
