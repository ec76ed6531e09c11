"""A simulated accelerator: torch's device ``sim``, in host memory, whose kernels run late and in streams.

`install` builds it (once for each version of torch, with the system's C++ compiler) and makes it this process's
accelerator. What runs on it takes the paths that CUDA takes: streams, events, pinned memory, an allocator that gives
freed memory to the next one on the same stream, and collectives by NCCL's rules (`join`). The right order gives the
numbers of the CPU; a wait that is missing gives others, and NaN where memory was freed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

NAME = "sim"
# With torch 2.11 a rank is ended now and then, when a stream's thread frees what torch has made; with 2.13 never.
LEAST_TORCH = torch.torch_version.TorchVersion("2.13")
_MEMORY = 1 << 40  # bytes
_CYCLES = 5000  # of its clock in a microsecond
_SOURCE = Path(__file__).with_name("device.cpp")
# Without assertions for debugging, as torch is built: those of its headers do not fit its libraries (torch 2.11).
_FLAGS = ["-O1", "-std=c++20", "-shared", "-fPIC", "-w", "-DNDEBUG", "-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO"]


def compiler() -> str | None:
    """Return the C++ compiler; None if there is none, and so no simulated device."""
    return shutil.which(os.environ.get("CXX", "c++"))


def build() -> Path:
    """Return the compiled device; if several processes ask at once, one compiles it."""
    text = _SOURCE.read_bytes() + f"{torch.__version__} {sys.version} {_FLAGS}".encode()
    folder = Path(tempfile.gettempdir()) / f"fsdp-simulated-device-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise RuntimeError(f"{folder} is somebody else's, whose code would be loaded: remove it, or set TMPDIR")
    library = folder / f"{hashlib.sha256(text).hexdigest()[:16]}.so"
    with library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed, also by the end of this process
        if not library.exists():
            _compile(library)
    return library


def _compile(library: Path) -> None:
    found = compiler()
    if found is None:
        raise RuntimeError("the simulated device needs a C++ compiler: install one, or say where it is in CXX")
    top = Path(torch.__file__).parent
    includes = [top / "include", top / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    part = library.with_suffix(".part")
    command = [found, *_FLAGS]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", *(f"-I{each}" for each in includes)]
    command += [str(_SOURCE), "-o", str(part), f"-L{top / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10", "-ltorch_python"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the simulated device does not compile with {found}: {done.stderr[-2000:]}")
    part.rename(library)


@cache
def install() -> Any:
    """Make the simulated device this process's accelerator, for good; returns the compiled module."""
    loader = ExtensionFileLoader("simulated_device", str(build()))
    device = module_from_spec(ModuleSpec(loader.name, loader, origin=loader.path))
    loader.exec_module(device)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module(device))
    torch.utils.generate_methods_for_privateuse1_backend()
    dist.Backend.register_backend("simulated", _collectives, devices=[NAME])
    return device


def _collectives(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> Any:
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("simulated", store), rank, world_size, timeout)
    return install().collectives(gloo)


def _module(compiled: Any) -> ModuleType:
    """Return what stands beside `torch.cuda`: ``torch.sim``."""
    module = ModuleType(f"torch.{NAME}")
    generator = torch.Generator(NAME)

    @contextmanager
    def stream(entered: torch.Stream) -> Iterator[None]:
        with entered:
            yield

    names: dict[str, Any] = {
        "Event": lambda **_: torch.Event(NAME),
        "Stream": lambda device=NAME, **_: torch.Stream(device),
        "current_device": lambda: 0,
        "current_stream": lambda device=None: torch.accelerator.current_stream(),
        "default_generators": (generator,),
        "device_count": lambda: 1,
        "empty_cache": lambda: None,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "get_device_properties": lambda device=None: SimpleNamespace(total_memory=_MEMORY),
        "get_rng_state": lambda device=NAME: generator.get_state(),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "manual_seed_all": generator.manual_seed,
        "max_memory_allocated": lambda device=None: compiled.peak(),
        "max_memory_reserved": lambda device=None: compiled.peak(),
        "memory_allocated": lambda device=None: compiled.allocated(),
        "memory_reserved": lambda device=None: compiled.allocated(),
        "reset_peak_memory_stats": lambda device=None: compiled.reset_peak(),
        "set_device": lambda device: None,
        "set_per_process_memory_fraction": lambda part: compiled.limit(int(part * _MEMORY)),
        "set_rng_state": lambda state, device=NAME: generator.set_state(state),
        "stream": stream,
        "synchronize": lambda device=None: torch.accelerator.synchronize(),
        "_host_waits": compiled.host_waits,
        "_is_in_bad_fork": lambda: False,
        "_pin": compiled.pin,
        "_set_delay": compiled.set_delay,
        "_sleep": lambda cycles: compiled.sleep(cycles // _CYCLES),
        "_unpin": compiled.unpin,
    }
    module.__dict__.update(names)
    return module
