"""torch's FSDP2 names for this library: after `install`, code that imports `fully_shard` from torch uses this library.

import fsdp.compat.fsdp2

fsdp.compat.fsdp2.install()

from torch.distributed.fsdp import fully_shard
"""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed.fsdp as torchs

import fsdp

# The common names of torch and this library.
_NAMES = (
    "CPUOffloadPolicy DataParallelMeshDims FSDPModule GradientReductionHandle MixedPrecisionPolicy OffloadPolicy "
    "UnshardHandle fully_shard register_fsdp_forward_method share_comm_ctx"
)
PROVIDED: dict[str, Any] = {name: getattr(fsdp, name) for name in _NAMES.split()}
_TORCHS = {name: getattr(torchs, name) for name in PROVIDED if hasattr(torchs, name)}
# Prefixes of modules that do not change: torch's implementation, modules that require it, and this library.
_OWN = ("torch.distributed.fsdp._fully_shard._", "torch.distributed._composable.replicate_with_fsdp", "fsdp.")

# The names replaced by `install`, as a module's dictionary and a key.
_found: list[tuple[dict[str, Any], str]] = []


def install() -> None:
    """Replace torch's FSDP2 names by this library's, in all modules that have imported them or will import them.

    The effect is limited to this process. Call this function before sharding. Afterwards, torch's pipelines and state
    dict functions treat modules under this library's `fully_shard` as sharded. A repeated call also updates modules
    that were imported since the previous call.
    """
    ours = {id(each): PROVIDED[name] for name, each in _TORCHS.items()}
    _found.extend(_exchange(_modules(), ours))


def uninstall() -> None:
    """Undo `install`: restore torch's names in torch, and in all modules updated by `install`.

    Sharded models continue to work. Modules that were imported after `install` keep this library's names.
    """
    theirs = {id(PROVIDED[name]): each for name, each in _TORCHS.items()}
    _exchange([*_modules("torch."), *_found], theirs)
    _found.clear()


def _modules(below: str = "") -> list[tuple[dict[str, Any], str]]:
    """Return the namespaces of all modules, except this library's and torch's own implementation."""
    every = sys.modules.copy()  # other threads may import modules meanwhile
    modules = {id(each): each for name, each in every.items() if name.startswith(below) and not name.startswith(_OWN)}
    dictionaries = [names for module in modules.values() if isinstance(names := getattr(module, "__dict__", 0), dict)]
    return [(names, key) for names in dictionaries for key in list(names)]


def _exchange(places: list[tuple[dict[str, Any], str]], by_id: dict[int, Any]) -> list[tuple[dict[str, Any], str]]:
    """Replace objects at `places` by the objects in `by_id`, and return the places with a replaced object."""
    exchanged = []
    for names, key in places:
        if id(names.get(key)) in by_id:
            names[key] = by_id[id(names[key])]
            exchanged.append((names, key))
    return exchanged
