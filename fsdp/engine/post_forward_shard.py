"""Whole parameters between forward and backward, spread over fewer ranks than their shards are.

Between keeping a unit whole (no second gather) and giving everything back (the least memory) lies keeping it among the
ranks of one machine: each has an equal part of the whole buffer, and backward gathers from those only. The idea is that
of torch's ``reshard_after_forward=<int>``, and of ZeRO++ (Wang et al., 2023: hierarchical partitioning).
"""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from fsdp.distributed.collectives import Communicator, Pending


class PostForwardShard:
    """What one handle keeps on this rank.

    Args:
        comm: the ranks that keep the whole together.

    Attributes:
        tag: its own among those of the communicator, once ranks have agreed.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.tag = 0
        self._part: Tensor | None = None
        self._state: Hashable = None

    def padded(self, numel: int) -> int:
        """The size of a buffer that can be cut into equal parts."""
        return -(-numel // self.comm.world_size) * self.comm.world_size

    def keep(self, full: Tensor, state: Hashable) -> None:
        """Keep this rank's part of a buffer ``[padded]``, which was gathered from shards in this state."""
        self._part = full.detach().view(self.comm.world_size, -1)[self.comm.rank].clone()
        self._state = state

    def has(self, state: Hashable) -> bool:
        """Whether the whole of shards in this state can be gathered from what is kept."""
        return self._part is not None and self._state == state

    def gather(self, full: Tensor, name: str) -> Pending:
        """Collective over the ranks nearby. Start to fill a buffer ``[padded]``; what is kept is let go afterwards."""
        part, self._part = self._part, None
        if part is None:
            raise ValueError(f"{name}: nothing is kept")
        return self.comm.all_gather(full, part, f"all-gather of {name} from ranks nearby", self.tag)

    def forget(self) -> None:
        """Keep nothing."""
        self._part = None
