"""`QuantizedReduceScatter` is a communicator that sends gradients as quantised blocks, with error feedback.

Each rank sends a piece of its gradient directly to each other rank. The receiver dequantises the pieces for its shard
and adds them in float32, in the order of ranks. The receiver's own piece is not quantised, and neither are sums, unlike
in a ring.

With error feedback (Seide et al., "1-bit stochastic gradient descent", 2014), a rank adds the rounding errors of the
sent pieces to its next gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fsdp.distributed.block_codes import DTYPES, BlockCodes
from fsdp.distributed.communicator import Communicator, Pending, Tag, words_of
from fsdp.distributed.custom_collectives import InFront
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.layout import Layout


class Feedback:
    """The rounding errors of a handle's gradients, which are added to the next gradient.

    Args:
        handle: the handle of the gradients.
        comm: the communicator for exact reductions, without a front.

    Attributes:
        handle: the argument.
        sent: ``[world_size - 1, shard_numel]`` in bfloat16, the errors of this rank's messages to each other rank; None
            before the first reduction.
        received: ``[shard_numel]`` in float32, the errors of all ranks for this rank's shard, after `settle` or a load.
    """

    def __init__(self, handle: FlatParamHandle, comm: Communicator) -> None:
        self.handle, self._comm = handle, comm
        self.sent: Tensor | None = None
        self.received: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of the errors on this rank."""
        return sum(each.nbytes for each in (self.sent, self.received) if each is not None)

    def add_to(self, rows: Tensor) -> None:
        """Add the errors to the gradient's rows ``[world_size, n]`` in float32, one for each rank."""
        if self.sent is not None or self.received is not None:
            whole = self._whole(rows.device)
            layout = self.handle.gradients.layout
            if layout is not self.handle.layout:  # excludes parameters that no rank has used
                part = torch.zeros_like(rows)
                _copy(self.handle.layout, whole, layout, part)
                whole = part
            rows += whole

    def keep(self, errors: Tensor) -> None:
        """Replace the errors by `errors` ``[world_size - 1, n]``, of the pieces just sent to other ranks."""
        comm, layout = self.handle.reduce_comm, self.handle.gradients.layout
        if layout is self.handle.layout:
            self.sent, self.received = errors.bfloat16(), None
            return
        part, whole = errors.new_zeros(comm.world_size, errors.shape[1]), self._whole(errors.device)
        set_peers_rows(part, comm.rank, errors)
        _copy(layout, part, self.handle.layout, whole)  # keeps the errors of excluded parameters
        self.sent = peers_rows(whole, comm.rank).bfloat16()
        if self.received is not None:
            self.received = whole[comm.rank].clone()

    def settle(self) -> Tensor:
        """Collective. Return the errors ``[shard_numel]`` of all ranks for this rank's shard, and delete them."""
        whole = self._whole(self.handle.storage.device)
        what, tag = f"feedback of {self.handle.name}", ("feedback", self.handle.tags.reduce)
        self.sent = self.received = None
        return self._comm.reduce_scatter(whole.view(-1), what, tag).wait().clone()

    def begin_with(self, errors: Tensor | None) -> None:
        """Replace all errors by `errors` ``[shard_numel]`` in float32, for this rank's shard."""
        self.sent, self.received = None, errors

    def _whole(self, device: torch.device) -> Tensor:
        """Return all errors ``[world_size, shard_numel]`` in float32."""
        comm, numel = self.handle.reduce_comm, self.handle.layout.shard_numel
        whole = torch.zeros(comm.world_size, numel, device=device)
        if self.sent is not None:
            set_peers_rows(whole, comm.rank, self.sent.to(device, whole.dtype))
        if self.received is not None:
            whole[comm.rank] = self.received
        return whole


class QuantizedSums:
    """The sums of the gradients of all handles that reduce over a communicator, with error feedback for each handle."""

    def __init__(
        self, codes: BlockCodes, handles: Sequence[FlatParamHandle], comm: Communicator, has_feedback: bool
    ) -> None:
        self.codes, self._handles = codes, list(handles)
        self.feedback = {handle: Feedback(handle, comm) for handle in handles} if has_feedback else {}
        self._by_tag: dict[int | str, FlatParamHandle] = {}

    def handles_of(self, tag: Tag) -> list[FlatParamHandle]:
        """Return the handles whose gradients are reduced together under a tag."""
        tags = words_of(tag)
        if not all(each in self._by_tag for each in tags):  # the handles have new tags
            self._by_tag = {handle.tags.reduce: handle for handle in self._handles}
        return [self._by_tag[each] for each in tags]

    def prepared(self, rows: Tensor, handle: FlatParamHandle, comm: Communicator) -> tuple[Tensor, Tensor]:
        """Return the messages of a handle ``[world_size - 1, bytes]`` for other ranks, and this rank's own row ``[n]``.

        The `rows` ``[world_size, n]`` are the gradient's pieces for each rank. They are overwritten.
        """
        rows, feedback = rows.float(), self.feedback.get(handle)
        if feedback is not None:
            feedback.add_to(rows)
        values = peers_rows(rows, comm.rank)
        messages = self.codes.encoded(values)
        if feedback is not None:
            errors = values.sub_(self.codes.decoded(messages, values.shape[1]))
            feedback.keep(finite(errors))
        return messages, rows[comm.rank].clone()


class Quantizing(InFront):
    """A communicator that quantises gradients before they are sent."""

    def __deepcopy__(self, memo: dict[int, object]) -> Communicator:
        return self._behind  # the errors belong to the gradients of the original model

    @property
    def plain(self) -> Communicator:
        """The communicator that sums exactly."""
        return self._behind

    def _sum(
        self,
        messages: Tensor,
        own: Tensor,
        decoded: Callable[[Tensor], Tensor],
        what: str,
        tag: Tag,
        dtype: torch.dtype,
    ) -> Pending:
        """Send a row of `messages` to each other rank. The result is the sum of all pieces, in the order of ranks."""
        outgoing = [*messages]
        outgoing.insert(self.rank, own)

        def summed(received: list[Tensor]) -> Tensor:
            total = torch.zeros_like(received[self.rank])
            for rank, piece in enumerate(received):
                total += piece if rank == self.rank else decoded(piece)
            return total.to(dtype)

        return self._behind.swap(outgoing, what, tag, summed)


class QuantizedReduceScatter(Quantizing):
    """A communicator with reduce-scatters of quantised gradients."""

    _collective: QuantizedSums

    def reduce_scatter(self, full: Tensor, what: str, tag: Tag, dtype: torch.dtype | None = None) -> Pending:
        require_quantizable(full, what)
        sums = self._collective
        handles = sums.handles_of(tag)
        numels = [handle.gradients.layout.shard_numel for handle in handles]
        rows = full.view(self.world_size, -1).split(numels, dim=1)
        each = [sums.prepared(one, handle, self) for one, handle in zip(rows, handles, strict=True)]
        messages, own = torch.cat([one for one, _ in each], dim=1), torch.cat([one for _, one in each])
        return self._sum(messages, own, lambda piece: self._decoded(piece, numels), what, tag, dtype or full.dtype)

    def _decoded(self, message: Tensor, numels: Sequence[int]) -> Tensor:
        codes = self._collective.codes
        parts = message.view(1, -1).split([codes.nbytes(numel) for numel in numels], dim=1)
        return torch.cat([codes.decoded(part, n) for part, n in zip(parts, numels, strict=True)], dim=1).view(-1)


def require_quantizable(gradient: Tensor, what: str) -> None:
    """Raise TypeError for a gradient of an unsupported dtype."""
    if gradient.dtype not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise TypeError(f"{what}: gradients of {gradient.dtype} cannot be quantised, only of {names}")


def finite(errors: Tensor) -> Tensor:
    """Replace nonfinite errors by 0 in place, because a step with infinities is skipped; return the errors."""
    return errors.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def peers_rows(rows: Tensor, rank: int) -> Tensor:
    """Return a copy of all rows except this rank's, without an index tensor, which would cause a synchronization."""
    return torch.cat([rows[:rank], rows[rank + 1 :]])


def set_peers_rows(rows: Tensor, rank: int, values: Tensor) -> None:
    """Set all rows except this rank's."""
    rows[:rank], rows[rank + 1 :] = values[:rank], values[rank:]


def _copy(source: Layout, values: Tensor, target: Layout, to: Tensor) -> None:
    """Copy gathered values of the parameters that both layouts contain."""
    for here, there in zip(source.places(values.view(-1)), target.places(to.view(-1)), strict=True):
        for value, place in zip(here, there):  # noqa: B905 (a layout may exclude the parameter)
            place.copy_(value)
