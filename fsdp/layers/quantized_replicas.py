"""`QuantizedReplicaSums` is a communicator that sums gradients over replicas as quantised blocks.

As in an exact all-reduce, every replica sums a piece of the gradient and sends the sum to all replicas. Pieces and sums
are sent quantised, and pieces are added in float32. All replicas dequantise the same messages, so their optimizer steps
have the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fsdp.distributed.block_codes import BlockCodes
from fsdp.distributed.communicator import Communicator, Pending, Tag, words_of
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.layout import Layout
from fsdp.layers.quantized_reduce import (
    Quantizing,
    finite,
    peers_rows,
    require_quantizable,
    set_peers_rows,
)


class ReplicaFeedback:
    """The rounding errors of a handle's messages (pieces and sums), which are added to the next gradient.

    Attributes:
        handle: the handle of the gradients.
        errors: ``[shard_numel]`` in bfloat16, the errors of this rank's messages; None before the first sum.
    """

    def __init__(self, handle: FlatParamHandle) -> None:
        self.handle = handle
        self.errors: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of the errors on this rank."""
        return 0 if self.errors is None else self.errors.nbytes

    def add_to(self, gradient: Tensor, layout: Layout) -> None:
        """Add the errors to a shard of the gradient ``[n]`` in float32, for the parameters of `layout`."""
        if self.errors is not None:
            for value, error in self._pairs(gradient, layout, self.errors):
                value += error

    def keep(self, errors: Tensor, layout: Layout) -> None:
        """Replace the errors of the parameters of `layout` by `errors` ``[n]``, and keep all other errors."""
        if self.errors is None:
            self.errors = errors.new_zeros(self.handle.layout.shard_numel, dtype=torch.bfloat16)
        for value, kept in self._pairs(errors, layout, self.errors):
            kept.copy_(value)

    def settle(self) -> Tensor:
        """Return the errors ``[shard_numel]`` of this rank in float32, and delete them."""
        errors, self.errors = self.errors, None
        numel, device = self.handle.layout.shard_numel, self.handle.storage.device
        return torch.zeros(numel, device=device) if errors is None else errors.float()

    def begin_with(self, errors: Tensor | None) -> None:
        """Replace all errors by `errors` ``[shard_numel]`` in float32."""
        self.errors = None if errors is None else errors.bfloat16()

    def _pairs(self, part: Tensor, layout: Layout, whole: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the elements of each parameter in a shard of `layout`, and in a shard of the handle's layout."""
        rank = self.handle.comm.rank
        if layout is self.handle.layout:
            yield part, whole
            return
        for value, place in zip(
            layout.local_shards(part, rank), self.handle.layout.local_shards(whole, rank), strict=True
        ):
            yield value, place[: value.numel()]


class ReplicaSums:
    """The sums of gradients over replicas, and their error feedback.

    Args:
        codes: the format of messages.
        handles: the handles that sum over these replicas.
        has_feedback: If True, keep rounding errors.

    Attributes:
        codes: the argument.
        feedback: an object for each handle; empty without error feedback.
    """

    def __init__(self, codes: BlockCodes, handles: Sequence[FlatParamHandle], has_feedback: bool) -> None:
        self.codes = codes
        self.feedback = [ReplicaFeedback(handle) for handle in handles] if has_feedback else []
        self._sums: dict[Tag, _Sum] = {}  # incomplete sums

    def begin(self, pieces: Tensor, tag: Tag) -> None:
        """Add the errors of earlier sums to a gradient ``[replicas, n]`` in float32."""
        if self.feedback:
            by_tag: dict[int | str, ReplicaFeedback] = {each.handle.tags.replica: each for each in self.feedback}
            members = [(each, each.handle.gradients.layout) for each in map(by_tag.__getitem__, words_of(tag))]
            self._sums[tag] = _Sum(members, torch.zeros_like(pieces))
            for feedback, layout, part in self._sums[tag].parts_of(pieces):
                feedback.add_to(part, layout)

    def note_pieces(self, errors: Tensor, rank: int, tag: Tag) -> None:
        """Record the errors ``[replicas - 1, n]`` of the pieces sent to the other replicas."""
        if self.feedback:
            set_peers_rows(self._sums[tag].errors, rank, finite(errors))

    def note_sum(self, errors: Tensor, rank: int, tag: Tag) -> None:
        """Record the errors ``[n]`` of the sum that this rank sends, and store all errors of this reduction."""
        if self.feedback:
            found = self._sums.pop(tag)
            found.errors[rank] = finite(errors)
            for feedback, layout, part in found.parts_of(found.errors):
                feedback.keep(part, layout)


class _Sum(NamedTuple):
    """An incomplete sum of the gradients of these handles, concatenated, with padding at the end."""

    members: list[tuple[ReplicaFeedback, Layout]]
    errors: Tensor  # ``[replicas, n]``

    def parts_of(self, pieces: Tensor) -> Iterator[tuple[ReplicaFeedback, Layout, Tensor]]:
        """Yield the part of each handle in `pieces` ``[replicas, n]``."""
        flat, start = pieces.view(-1), 0
        for feedback, layout in self.members:
            stop = start + layout.shard_numel
            yield feedback, layout, flat[start:stop]
            start = stop


class QuantizedReplicaSums(Quantizing):
    """A communicator with quantised reduce-scatters and all-gathers of gradients over replicas."""

    _collective: ReplicaSums

    def __init__(self, behind: Communicator, collective: ReplicaSums) -> None:
        super().__init__(behind, collective)
        self.sends_pieces = True  # otherwise the backend would all-reduce in a single collective

    def reduce_scatter(self, full: Tensor, what: str, tag: Tag, dtype: torch.dtype | None = None) -> Pending:
        require_quantizable(full, what)
        sums = self._collective
        pieces = full.view(self.world_size, -1).to(torch.float32, copy=True)
        sums.begin(pieces, tag)
        sent = peers_rows(pieces, self.rank)
        numel = sent.shape[1]
        messages = sums.codes.encoded(sent)
        sums.note_pieces(sent - self._decoded(messages, numel), self.rank, tag)

        def decoded(message: Tensor) -> Tensor:
            return self._decoded(message.view(1, -1), numel).view(-1)

        return self._sum(messages, pieces[self.rank].clone(), decoded, what, tag, dtype or full.dtype)

    def all_gather(self, full: Tensor, shard: Tensor, what: str, tag: Tag) -> Pending:
        sums, numel = self._collective, shard.numel()
        own = shard.float().view(1, -1)
        message = sums.codes.encoded(own)
        sums.note_sum((own - self._decoded(message, numel)).view(-1), self.rank, tag)
        arriving = message.new_empty(self.world_size * message.numel())
        pending = self._behind.all_gather(arriving, message.view(-1), what, tag)

        def gathered() -> Tensor:
            messages = pending.wait().view(self.world_size, -1)
            full.view(self.world_size, -1).copy_(self._decoded(messages, numel))
            return full

        return Pending(what, (), gathered)

    def _decoded(self, messages: Tensor, numel: int) -> Tensor:
        return self._collective.codes.decoded(messages, numel)
