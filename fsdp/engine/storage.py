"""`ShardStorage` stores a unit's shards and their gradients between uses: on the compute device.

Each flat parameter uses a storage, which allocates memory, copies the shard to the compute device for all-gathers, and
accumulates reduced gradients. Subclasses keep shards in host memory or in files (`fsdp.layers.offload`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from fsdp.distributed.devices import CopyStream, copy_stream_of
from fsdp.engine.flat_param import FlatParameter
from fsdp.engine.orig_params import LocalShard


class ShardStorage:
    """Storage on the compute device, without copies."""

    flat_parameter: type[FlatParameter] = FlatParameter
    local_shard: type[LocalShard] = LocalShard
    is_elsewhere = False  # the shard must be copied to the compute device
    keeps_shards = False  # shards and gradients stay in place when the module is moved
    is_resident = True  # shard and gradient are on the compute device without copies
    files: Any = None  # the mapped files that contain shards, for storages on disk
    state_device: torch.device | None = None  # of tensors in state dicts. Default: the compute device

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def copy_stream(self) -> CopyStream:
        """The stream for copies to and from the compute device."""
        return copy_stream_of(self.device)

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate zeros ``[numel]`` for a shard, on the device where shards are kept."""
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def adopt(self, flat_param: FlatParameter) -> None:
        """Store a shard whose values were moved or cast (``module.to(...)``)."""

    def read_ahead(self) -> None:
        """Prepare a shard for use soon."""

    def release(self) -> None:
        """Release a shard and gradient not required soon."""

    def check(self, what: str, state: Iterable[Any] = ()) -> None:
        """Raise RuntimeError if the values, or the values of the optimizer's `state`, cannot be read and written."""

    def check_readable(self, what: str, state: Iterable[Any] = ()) -> None:
        """Raise RuntimeError if the values, or the values of the optimizer's `state`, cannot be read."""
        self.check(what, state)

    def staged(self, flat_param: FlatParameter, dtype: torch.dtype) -> Tensor:
        """Return the shard on the compute device in `dtype`; the shard itself if possible."""
        return flat_param.vector.to(self.device, non_blocking=True).to(dtype)

    def brought(self, flat_param: FlatParameter, dtype: torch.dtype) -> Tensor:
        """Return the same as `staged`, for the current stream; `copy_stream.settle` waits for the copy."""
        if not self.is_elsewhere:
            return self.staged(flat_param, dtype)
        copy_stream = self.copy_stream
        with copy_stream.fork():
            shard = self.staged(flat_param, dtype)
        copy_stream.arrival().wait()
        return shard

    def accept(self, flat_param: FlatParameter, reduced: Tensor) -> None:
        """Add a reduced gradient ``[shard_numel]`` on the compute device in the kept dtype to the shard's."""
        flat_param.hold_gradient(reduced)
