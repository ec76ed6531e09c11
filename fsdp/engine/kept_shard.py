"""`KeptShard` keeps parameters over fewer ranks than shards are divided over, until they are used again.

Three placements use it. ``reshard_after_forward=<int>`` keeps them from forward to backward, over the ranks of a
machine for instance: backward all-gathers from those only. The idea is torch's, and that of ZeRO++ (Wang et al., 2023:
hierarchical partitioning). Placements whose optimizer state is sharded along the replica axis as well keep them from a
step to the next, along the shard axis: each use all-gathers along the shard axis only. The third is a subclass,
`fsdp.layers.host_copy.HostCopy`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from torch import Tensor

from fsdp.distributed.collectives import Communicator, Pending
from fsdp.distributed.communicator import in_stage
from fsdp.distributed.devices import Arrival


class KeptShard:
    """This rank's shard of the parameters, over fewer ranks than the optimizer steps shards of.

    Args:
        comm: the ranks that keep the unsharded parameters together.
        lasts: it is kept until `forget`; otherwise until the next `gather`.

    Attributes:
        tag: its own among those of the communicator, once ranks have agreed.
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
        """Return a new one over the same ranks."""
        return KeptShard(self.comm, self.lasts)

    def padded(self, numel: int) -> int:
        """Return the size of a buffer that can be divided into equal shards."""
        return -(-numel // self.comm.world_size) * self.comm.world_size

    def arrived(self, full: Tensor, state: Hashable) -> None:
        """Note that a buffer ``[padded]`` is unsharded, of shards in this state; it may be kept later."""

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
        """Return the shard that is kept; it is kept no longer, unless it lasts.

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
        """Keep nothing."""
        self._wait()
        self._shard = None

    def _wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()
