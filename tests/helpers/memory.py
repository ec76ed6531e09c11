"""Bytes of the tensors of this process."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from fsdp import get_fsdp_instances
from fsdp.engine.placeholder import Placeholder
from fsdp.layers.fingerprints import fingerprint

_WITHOUT_MEMORY = (Placeholder, FakeTensor)


def live_bytes(dtype: torch.dtype | None = None) -> int:
    """Return the bytes of all storages that tensors use, or tensors of this dtype. Each storage counts once."""
    fingerprint(torch.ones(1))  # which keeps a table from the first time on
    gc.collect()
    return bytes_with_garbage(dtype)


def bytes_with_garbage(dtype: torch.dtype | None = None) -> int:
    """Return `live_bytes` with those of tensors that were deleted, but not collected yet."""
    # Compilers keep fake tensors for as long as the process lives, with sizes that may be symbols.
    tensors = [one for one in gc.get_objects() if isinstance(one, Tensor) and not isinstance(one, _WITHOUT_MEMORY)]
    # The storage of a `DTensor` has the size of the whole parameter, and no memory; its local tensor is listed too.
    tensors = [tensor for tensor in tensors if not isinstance(tensor, DTensor) and not tensor.is_meta]
    storages = [tensor.untyped_storage() for tensor in tensors if dtype in (None, tensor.dtype)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def handles_of(model: nn.Module) -> list[Any]:
    """Return the handles of all units of the wrapper."""
    return [handle for wrapper in get_fsdp_instances(model) for handle in wrapper._unit.handles]


def mappings() -> Iterator[tuple[int, int, str]]:
    """Yield the address ranges that the process has mapped, and the path of the file; empty if there is none."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, _, _, _, _, *path = line.split(maxsplit=5)
        start, stop = (int(end, 16) for end in place.split("-"))
        yield start, stop, path[0].strip() if path else ""


def mapped_kib(folder: str | os.PathLike[str], what: str) -> int:
    """Return the ``Size`` of the mapped files below a folder, or how much of them is in memory (``Rss``)."""
    total, is_below = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_below = f"{os.fspath(folder)}/" in line
        elif is_below and line.startswith(f"{what}:"):
            total += int(line.split()[1])
    return total
