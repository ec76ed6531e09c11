"""FairScale's `ReduceScatterBucketer`, by itself. Training here has buckets of its own (`engine.reduction`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fsdp.distributed.collectives import Communicator, communicator
from fsdp.distributed.communicator import Group, default_group

Callback = Callable[[Tensor], None]


class _Bucket:
    """What waits for one reduction.

    Args:
        comm: over which ranks.
        capacity: of how many elements for each rank.
    """

    def __init__(self, comm: Communicator, capacity: int) -> None:
        self.waiting: list[tuple[Sequence[Tensor], Callback | None]] = []
        self.offset = 0  # elements for each rank that wait
        self._comm, self._capacity = comm, capacity
        self._tag = comm.new_tag()

    def fits(self, numel: int) -> bool:
        return self.offset + numel <= self._capacity

    def add(self, input_list: Sequence[Tensor], callback: Callback | None) -> None:
        # Copies, because callers free their gradients as soon as they have handed them over.
        self.waiting.append(([each.clone() for each in input_list], callback))
        self.offset += input_list[0].numel()

    def flush(self) -> None:
        waiting, self.waiting, self.offset = self.waiting, [], 0
        if waiting:
            self.reduce(waiting)

    def reduce(self, waiting: Sequence[tuple[Sequence[Tensor], Callback | None]]) -> None:
        ranks = range(self._comm.world_size)
        full = torch.cat([inputs[rank].reshape(-1) for rank in ranks for inputs, _ in waiting])
        reduced = self._comm.reduce_scatter(full, "a bucket of reductions", self._tag).wait()
        self._comm.settle()
        parts = reduced.split([inputs[0].numel() for inputs, _ in waiting])
        for part, (inputs, callback) in zip(parts, waiting, strict=True):
            if callback is not None:
                callback(part.view_as(inputs[0]))


class ReduceScatterBucketer:
    """Sums lists of tensors over ranks, each rank getting its own; small ones wait for each other.

    Args:
        bucket_cap_mb: MiB that wait at most for one reduction, over all ranks; with 0 or less nothing waits.
    """

    def __init__(self, bucket_cap_mb: float = 25) -> None:
        self.bucket_cap_mb = bucket_cap_mb
        self.buckets: dict[tuple[torch.dtype, torch.device, Any], _Bucket] = {}

    @torch.no_grad()
    def reduce_scatter_async(
        self, input_list: Sequence[Tensor], group: Group | None, callback_fn: Callback | None = None
    ) -> None:
        """Collective. Sum over ranks what each has for this one, now or at a later call.

        Args:
            input_list: a tensor for each rank of `group`, alike in shape, dtype and device.
            group: the ranks.
            callback_fn: called with this rank's sum, as soon as there is one.

        Raises:
            ValueError: for another number of tensors, or different ones.
        """
        group = default_group(group)
        first = input_list[0] if input_list else None
        if first is None or len(input_list) != group.size():
            raise ValueError(f"reduce_scatter_async needs a tensor for each of {group.size()}, got {len(input_list)}")
        if {(each.shape, each.dtype, each.device) for each in input_list} != {(first.shape, first.dtype, first.device)}:
            raise ValueError("reduce_scatter_async needs tensors of one shape, dtype and device for all ranks")
        key = (first.dtype, first.device, group)
        capacity = int(max(self.bucket_cap_mb, 0) * 2**20) // first.element_size() // group.size()
        if key not in self.buckets:
            self.buckets[key] = _Bucket(communicator(group, first.device), capacity)
        bucket = self.buckets[key]
        if first.numel() > capacity:
            bucket.reduce([(input_list, callback_fn)])
            return
        if not bucket.fits(first.numel()):
            bucket.flush()
        bucket.add(input_list, callback_fn)

    @torch.no_grad()
    def flush(self) -> None:
        """Collective. Reduce what waits, and call what waits for it."""
        for bucket in self.buckets.values():
            bucket.flush()

    def teardown(self) -> None:
        """Let go of all memory, after `flush`.

        Raises:
            RuntimeError: if something waits.
        """
        for (dtype, _, _), bucket in self.buckets.items():
            if bucket.waiting:
                raise RuntimeError(f"teardown: {len(bucket.waiting)} reductions of {dtype} wait; call flush() first")
        self.buckets.clear()
