"""`HostCopy` keeps a unit's parameters in host memory from forward to backward, instead of a second all-gather.

Use it if the network is slower than copies between host and accelerator. The copy to the host overlaps with the unit's
forward, and the copy back is prefetched like an all-gather. Between forward and backward, each rank holds a whole copy
of the model's parameters on the host, in the compute dtype.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from fsdp.distributed.collectives import LONE_RANK, Pending
from fsdp.distributed.communicator import after_use_of
from fsdp.distributed.devices import copy_stream_of
from fsdp.engine.kept_shard import KeptShard


class HostCopy(KeptShard):
    """All parameters of a handle in (pinned) host memory: a post-forward shard over a single rank."""

    def __init__(self) -> None:
        super().__init__(LONE_RANK, lasts=False)
        self._came_back = False  # the unsharded parameters were copied from the host

    def __str__(self) -> str:
        return "kept on the host until backward"

    def alike(self) -> HostCopy:
        return HostCopy()

    def arrived(self, full: Tensor, state: Hashable) -> None:
        if torch.is_grad_enabled() and not self._came_back:
            self._copy(full, state)
        self._came_back = False

    def keep(self, full: Tensor, state: Hashable) -> None:
        if not self.has(state):
            self._copy(full, state)
        self._wait()  # the caller frees the buffer

    def _copy(self, full: Tensor, state: Hashable) -> None:
        self._wait()
        self._shard, self._pending = copy_stream_of(full.device).copied_to_host(full.detach())
        self._state = state

    def gather(self, full: Tensor, name: str, stage: str) -> Pending:
        copied = self.take(name)
        self._came_back = True
        copy_stream = copy_stream_of(full.device)
        with copy_stream.fork():
            full.copy_(copied, non_blocking=True)
        arrival = copy_stream.arrival()
        return Pending(f"copy of {name} from the host", (arrival,), lambda: after_use_of(copied, full))
