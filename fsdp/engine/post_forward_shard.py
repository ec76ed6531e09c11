"""`PostForwardShard` keeps unsharded parameters between forward and backward, over fewer ranks than the shards are.

It lies between keeping the unsharded buffer (no second all-gather) and freeing it (the least memory): the ranks of one
machine, say, keep an equal shard of it each, and backward all-gathers from those only. The idea is torch's
``reshard_after_forward=<int>``, and that of ZeRO++ (Wang et al., 2023: hierarchical partitioning).
"""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from fsdp.distributed.collectives import Communicator, Pending
from fsdp.distributed.communicator import in_stage


class PostForwardShard:
    """This rank's shard of the unsharded parameters between forward and backward, over fewer ranks than usual.

    Args:
        comm: the ranks that keep the unsharded parameters together.

    Attributes:
        tag: its own among those of the communicator, once ranks have agreed.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.tag = 0
        self._shard: Tensor | None = None
        self._state: Hashable = None

    def padded(self, numel: int) -> int:
        """Return the size of a buffer that can be divided into equal shards."""
        return -(-numel // self.comm.world_size) * self.comm.world_size

    def keep(self, full: Tensor, state: Hashable) -> None:
        """Keep this rank's shard of a buffer ``[padded]``, which was gathered from shards in this state."""
        self._shard = full.detach().view(self.comm.world_size, -1)[self.comm.rank].clone()
        self._state = state

    def has(self, state: Hashable) -> bool:
        """Return whether the parameters of shards in this state can be gathered from what is kept."""
        return self._shard is not None and self._state == state

    def gather(self, full: Tensor, name: str, stage: str) -> Pending:
        """Collective. Start to fill a buffer ``[padded]``; what is kept is let go afterwards."""
        shard, self._shard = self._shard, None
        if shard is None:
            raise ValueError(f"{name}: nothing is kept")
        what, tag = in_stage(stage, f"all-gather of {name} from ranks nearby", self.tag)
        return self.comm.all_gather(full, shard, what, tag)

    def forget(self) -> None:
        """Keep nothing."""
        self._shard = None
