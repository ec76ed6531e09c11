"""`KeptShard` keeps parameters sharded over fewer ranks than the optimizer's shards, until the next use.

Three placements use this class. ``reshard_after_forward=<int>`` keeps parameters from forward to backward, for example
over the ranks of a machine: backward then all-gathers only from these ranks (an idea of torch and ZeRO++, Wang et al.,
2023: hierarchical partitioning). Placements that also shard the optimizer state along the replica axis keep parameters
across steps, along the shard axis: each use all-gathers along the shard axis only. The third is the subclass
`fsdp.layers.host_copy.HostCopy`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from torch import Tensor

from fsdp.distributed.collectives import Communicator, Pending
from fsdp.distributed.communicator import in_stage
from fsdp.distributed.devices import Arrival


class KeptShard:
    """This rank's shard of the parameters, over fewer ranks than the shards that the optimizer steps.

    Args:
        comm: the ranks that keep the unsharded parameters together.
        lasts: If True, the shard is kept until `forget`; otherwise until the next `gather`.

    Attributes:
        tag: a separate tag of the communicator, once ranks have agreed.
    """

    def __init__(self, comm: Communicator, lasts: bool) -> None:
        self.comm, self.lasts = comm, lasts
        self.tag = 0
        self._shard: Tensor | None = None
        self._pending: Pending | Arrival | None = None  # fills the shard
        self._state: Hashable = None

    def __str__(self) -> str:
        return f"kept among {self.comm.world_size} of them"

    def alike(self) -> KeptShard:
        """Return a new object for the same ranks."""
        return KeptShard(self.comm, self.lasts)

    def padded(self, numel: int) -> int:
        """Return the size of a buffer that can be divided into equal shards."""
        return -(-numel // self.comm.world_size) * self.comm.world_size

    def arrived(self, full: Tensor, state: Hashable) -> None:
        """Record that a buffer ``[padded]`` is unsharded, from shards in this state; it may be kept later."""

    def keep(self, full: Tensor, state: Hashable) -> None:
        """Keep this rank's shard of a buffer ``[padded]``, which was gathered from shards in this state."""
        self._shard = full.detach().view(self.comm.world_size, -1)[self.comm.rank].clone()
        self._state = state

    def fill(self, shard: Tensor, state: Hashable, gather: Callable[[Tensor], Pending]) -> None:
        """Collective. Start to gather the shard ``[padded / world_size]`` from shards in this state."""
        self._shard, self._state, self._pending = shard, state, gather(shard)

    def has(self, state: Hashable) -> bool:
        """Return whether the parameters of shards in this state can be gathered from the kept shards."""
        return self._shard is not None and self._state == state

    def gather(self, full: Tensor, name: str, stage: str) -> Pending:
        """Collective. Start to fill a buffer ``[padded]``."""
        shard = self.take(name)
        what, tag = in_stage(stage, f"all-gather of {name} from ranks nearby", self.tag)
        return self.comm.all_gather(full, shard, what, tag)

    def take(self, name: str) -> Tensor:
        """Return the kept shard, which is then no longer kept unless it lasts.

        Raises:
            ValueError: if nothing is kept.
        """
        shard = self._shard
        if shard is None:
            raise ValueError(f"{name}: nothing is kept")
        self._wait()
        if not self.lasts:
            self._shard = None
        return shard

    def forget(self) -> None:
        """Release the kept shard."""
        self._wait()
        self._shard = None

    def _wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()
