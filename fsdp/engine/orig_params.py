"""Original parameters for the optimizer: this rank's piece of each, under its own name.

With ``use_orig_params=True`` a flat parameter is not registered in modules; in the place of each parameter it was made
of stands a `PieceParameter`, a view of the shard. So optimizers have groups, learning rates and missing gradients per
parameter, and everything else goes on with flat vectors: a step on the pieces is a step on the shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.engine.flat_param import FlatParameter, ParamInfo, give_attributes
from fsdp.engine.layout import Layout
from fsdp.engine.placeholder import Placeholder, unreduced_gradient


class Pieces:
    """The pieces of one flat parameter's shard, and their gradients.

    Args:
        flat_param: this rank's shard.
        layout: what is where in it.
        rank: this rank.
        places: for each parameter, where it is used.
    """

    def __init__(
        self, flat_param: FlatParameter, layout: Layout, rank: int, places: Sequence[Sequence[ParamInfo]]
    ) -> None:
        self._flat_param = flat_param
        self._intervals = [layout.interval(slot, rank) for slot in range(len(layout.slots))]
        self.params: list[nn.Parameter] = [
            self._new(slot, layout, flat_param.requires_grad) for slot in range(len(layout.slots))
        ]
        self._pointers: list[int] = []
        self.alias()
        self.entries: list[tuple[nn.Module, str, nn.Parameter]] = [
            (place.module, place.name, param) for param, used in zip(self.params, places, strict=True) for place in used
        ]

    def _new(self, slot: int, layout: Layout, requires_grad: bool) -> nn.Parameter:
        interval, kept = self._intervals[slot], layout.slots[slot]
        offset, numel, start = (interval.offset, interval.numel, interval.start) if interval else (0, 0, 0)
        kind = self._flat_param.shard_storage.piece_parameter
        piece = kind.of(self._flat_param, offset, numel, requires_grad, kept.name, kept.shape, start)
        give_attributes(piece, self._flat_param.attributes[slot])
        return piece

    def _of(self, shard: Tensor, slot: int) -> Tensor:
        interval = self._intervals[slot]
        return shard[interval.offset : interval.offset + interval.numel] if interval else shard[:0]

    # What another kind of pieces does in another way: a part of a vector, as a piece shows it, and the other way round.

    absent: list[Tensor] | None = None  # what modules see of parameters that are sharded; None: placeholders

    def _show(self, slot: int, part: Tensor) -> Tensor:
        """Something in the form of a piece that lies at `part` of a vector."""
        return part

    def _have(self, slot: int, part: Tensor) -> None:
        """Let a piece lie at `part` of the shard."""
        self.params[slot].data = part

    def _flat(self, slot: int, tensor: Tensor) -> Tensor:
        """The memory of something in the form of a piece, as a vector."""
        return tensor.detach()

    def part_of(self, slot: int, value: Tensor) -> Tensor | None:
        """This rank's part, as a vector, of a value that is spread over ranks; None for a whole one."""
        return None

    def give_memory(self, slots: Iterable[int]) -> None:
        """Show memory for parameters without values, where they show none until it is given."""

    # --- values -------------------------------------------------------------------------------------------------

    @property
    def requires_grad(self) -> list[bool]:
        """A flag for each parameter: it is trained."""
        return [piece.requires_grad for piece in self.params]

    @property
    def versions(self) -> tuple[int, ...]:
        """The version of each, where the shard's own counter does not tell."""
        return ()

    def alias(self) -> None:
        """Make the pieces views of the shard, which may be another tensor now."""
        shard = self._flat_param.detach()
        for slot in range(len(self.params)):
            self._have(slot, self._of(shard, slot))
        self._pointers = [_pointer(self._flat(slot, piece)) for slot, piece in enumerate(self.params)]

    def absorb(self) -> list[int]:
        """Write to the shard what users have assigned to the ``.data`` of pieces, and follow what they froze.

        Returns:
            The numbers of the parameters of which it shows that they were written.

        Raises:
            RuntimeError: for another shape or dtype.
        """
        for slot, (piece, pointer) in enumerate(zip(self.params, self._pointers, strict=True)):
            if _pointer(self._flat(slot, piece)) != pointer:
                self._take_back(slot, piece)
        self._flat_param.requires_grad_(any(self.requires_grad))
        return []

    def _take_back(self, slot: int, piece: Any) -> None:
        ours, given = self._of(self._flat_param.detach(), slot), self._flat(slot, piece)
        if given.shape == piece.whole_shape and given.shape != ours.shape:
            given = given.reshape(-1)[piece.offset : piece.offset + ours.numel()]
        if given.shape != ours.shape or given.dtype != ours.dtype:
            raise RuntimeError(
                f"{piece.fqn}: its .data was replaced by {given.dtype} of shape {tuple(piece.shape)}. This rank's "
                f"piece is {ours.dtype} of shape {tuple(ours.shape)}, the whole parameter is "
                f"{tuple(piece.whole_shape)}: assign one of these, change it inside "
                "`with model.summon_full_params():`, or cast the whole model."
            )
        ours.copy_(given)
        self._have(slot, ours)
        self._flat_param.valueless.discard(slot)

    # --- gradients ----------------------------------------------------------------------------------------------

    def show_gradients(self, used: Sequence[int], missed: Sequence[int] = ()) -> None:
        """Give the pieces their parts of the shard's gradient; those not `used` keep having none.

        Args:
            used: for each parameter, whether anything was added to its gradient on any rank.
            missed: the numbers of those of which that was expected, and is true only if the gradient is not zero.
        """
        self._flat_param.bring_gradient()
        grad = self._flat_param.grad
        for slot, piece in enumerate(self.params):
            if isinstance(piece.grad, Placeholder):
                piece.grad = None
            if grad is None or (piece.grad is None and not used[slot]):
                continue
            if piece.grad is not None or slot not in missed or self._of(grad, slot).any():
                piece.grad = self._show(slot, self._of(grad, slot))

    def gradient_in(self, grad: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        """A piece's part of a gradient of the whole shard, and that in the form of the piece."""
        part = self._of(grad, slot)
        return part, self._show(slot, part)

    def vector_of(self, slot: int, grad: Tensor) -> Tensor:
        """A gradient in the form of a piece, as a vector."""
        return self._flat(slot, grad)

    def mark_unreduced(self, filled: Sequence[int]) -> None:
        """Let the missing gradients say why they are missing.

        Args:
            filled: for each parameter, whether something is accumulated.
        """
        for slot, piece in enumerate(self.params):
            if filled[slot] and piece.grad is None:
                piece.grad = unreduced_gradient(piece.fqn, piece)  # type: ignore[attr-defined]  # both kinds have it

    @property
    def zeroed(self) -> list[int]:
        """The numbers of those without a gradient: what was accumulated for them, the user has dropped."""
        return [slot for slot, piece in enumerate(self.params) if piece.grad is None]

    def forget_zeroed(self) -> None:
        """Free the shard's gradient if all pieces' were zeroed."""
        if self._flat_param.grad is not None and all(piece.grad is None for piece in self.params):
            self._flat_param.forget_gradient()

    def collect_gradients(self) -> None:
        """Follow what users did to the pieces' gradients: zeroed (None) ones are zero in the shard's as well."""
        self.forget_zeroed()
        if self._flat_param.grad is None and any(piece.grad is not None for piece in self.params):
            self._flat_param.grad = torch.zeros_like(self._flat_param.detach())  # for gradients that users assigned
        grad = self._flat_param.grad
        if grad is None or isinstance(grad, Placeholder):
            return
        for slot, piece in enumerate(self.params):
            ours = self._of(grad, slot)
            if piece.grad is None or isinstance(piece.grad, Placeholder):
                ours.zero_()
            elif _address(self._flat(slot, piece.grad)) != _address(ours):
                ours.copy_(self._flat(slot, piece.grad))
                piece.grad = self._show(slot, ours)


# Of a shard, its layout, this rank, and the places of each parameter.
NewPieces = Callable[[FlatParameter, Layout, int, Sequence[Sequence[ParamInfo]]], Pieces]


def _pointer(tensor: Tensor) -> int:
    # Of an empty piece too: a rank that has nothing of a parameter must notice that it was replaced, as the others do.
    return tensor.data_ptr() or tensor.untyped_storage().data_ptr()


def _address(tensor: Tensor) -> tuple[int, int]:
    """Return where a tensor lies; also an empty one, whose own pointer is null."""
    return tensor.untyped_storage().data_ptr(), int(tensor.storage_offset())
