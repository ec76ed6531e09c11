"""`GradientBuffer` collects the gradients of a handle's parameters in a flat tensor for the next reduction."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from enum import Enum, auto
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from fsdp.distributed.communicator import Communicator
from fsdp.engine.layout import NO_SLOTS, Layout

_SMALL_NUMEL = 1 << 18  # copies of more elements take longer than their call


class GradientSync(Enum):
    """The stages of a reduction that a backward runs."""

    NONE = auto()  # unsharded gradients accumulate on each rank
    SHARDS = auto()  # gradients are reduce-scattered and accumulate as shards, not summed over replicas
    FULL = auto()  # gradients are reduced, including accumulated gradients


class Taken(NamedTuple):
    """A flat gradient, taken for a reduction."""

    flat: Tensor  # ``[padded_numel]``
    divisor: float  # still to be divided by this
    places: list[list[Tensor]]  # the views for the parameters; empty if `flat` is a copy


class GradientBuffer:
    """Gathers the gradients of a layout's parameters in a flat tensor, arranged like the gathered buffer.

    The buffer outlives a backward under `no_sync`, so two facts are recorded for each parameter: whether its place
    contains a value (`_filled`, until the buffer is taken), and whether the gradient has arrived in this backward
    (`_arrived`).

    The buffer contains no elements for frozen parameters, which are not sent, if the layout supports this. All ranks
    freeze the same parameters, and choose the layout when no gradient is accumulated on any rank. A reduction omits
    parameters that no rank used in its backward, after the ranks exchanged which parameters these are.

    Args:
        layout: where each gradient is placed in the shards.
        dtype: the dtype in which the gradient is sent.
        sum_dtype: the minimum dtype in which gradients of multiple backwards are summed.
        device: the device of the buffer.
        expected: for each parameter, whether it gets a gradient at all.
        comm: the ranks of the first reduction.

    Attributes:
        missing: the number of parameters whose gradients have not arrived in this backward.
    """

    def __init__(
        self,
        layout: Layout,
        dtype: torch.dtype,
        sum_dtype: torch.dtype,
        device: torch.device,
        expected: Sequence[bool],
        comm: Communicator,
    ) -> None:
        self.comm = comm
        self._whole = self.layout = layout
        self._left_out = NO_SLOTS  # parameters without room in `layout`
        self.dtype = dtype
        self._sum_dtype = torch.promote_types(dtype, sum_dtype)
        self._device = device
        self.sync = GradientSync.FULL  # of the running backward
        self.is_reduced = True  # by the running backward
        self.was_scattered = False  # the previous backward reduce-scattered all gradients on all ranks
        self._flat: Tensor | None = None
        self._divisor = 1.0  # applied when the buffer is taken
        self._spare: Taken | None = None  # kept by `reuse`, without memory
        self._scattered: Sequence[Tensor] = ()  # flat sums of earlier backwards, still without replicas
        self._owes = False  # other ranks have gradients: contribute zeros if this rank has none
        self._filled = bytearray(len(layout.slots))
        self._has_scattered = bytearray(len(layout.slots))
        self._arrived = bytearray(len(layout.slots))
        self._fills_unused = False
        self.used = bytearray(len(layout.slots))  # gradients were taken since the last backward began
        self.times_taken = 0  # since then
        self.has_arrived = False  # any gradient, since then
        self.awaited: Sequence[bool] = ()  # for each parameter, whether autograd announced a gradient
        self._places: list[list[Tensor]] = []
        self.expect(expected)

    @property
    def is_empty(self) -> bool:
        """True if there is no gradient to reduce."""
        return self._flat is None and not self._owes

    @property
    def nbytes(self) -> int:
        """The bytes of accumulated, unreduced gradients."""
        return sum(each.nbytes for each in (self._flat, *self._scattered) if each is not None)

    def begin_backward(self, expected: Sequence[bool], sync: GradientSync, fills_unused: bool) -> None:
        """Expect gradients, reduced as far as `sync` says, optionally with zeros for parameters that no rank used."""
        if expected != self._expects:
            self.expect(expected)
        self._leave_out(self._frozen if self.sync is GradientSync.FULL else self._left_out & self._frozen)
        self.was_scattered = self.sync is GradientSync.SHARDS
        self.sync, self.is_reduced = sync, sync is not GradientSync.NONE
        self._fills_unused = fills_unused and self.is_reduced and self._expected > 0
        self._owes |= self._fills_unused or (sync is GradientSync.FULL and any(self._has_scattered))
        self.used = bytearray(len(self.used))
        self.times_taken, self.has_arrived, self.awaited = 0, False, ()
        self.begin_round()

    def begin_round(self) -> None:
        """Expect every gradient (again)."""
        self._arrived = bytearray(len(self._arrived))
        self.missing = self._expected

    def add(self, slot: int, grad: Tensor, divisor: float) -> None:
        """Add ``grad / divisor`` at a parameter's place, or write it there; skip one frozen since its forward."""
        if not self._expects[slot]:
            return
        if self._flat is None:
            flat = self._allocate()
            # If exact, small gradients are divided when taken; large gradients would be read and written once more.
            # A narrowed sum could overflow.
            own, is_exact = flat.dtype, math.frexp(divisor)[0] == 0.5 and flat.numel() <= _SMALL_NUMEL
            self._divisor = divisor if is_exact and torch.promote_types(grad.dtype, own) is own else 1.0
        for place, part in zip(self._places[slot], self.layout.divided(slot, grad), strict=True):
            _put(place, part, divisor / self._divisor, is_filled=bool(self._filled[slot]))
        self._filled[slot] = 1
        self.has_arrived = True
        if not self._arrived[slot]:
            self._arrived[slot] = 1
            self.missing -= 1

    def _allocate(self) -> Tensor:
        dtype = self.dtype if self.is_reduced else self._sum_dtype
        spare, self._spare = self._spare, None
        if spare is not None and spare.flat.dtype is dtype:
            self._flat, _, self._places = spare
            self._flat.untyped_storage().resize_(self._flat.nbytes)
        else:
            self._flat = self.comm.empty(self.layout.padded_numel, dtype, self._device)
            self._places = self.layout.places(self._flat)
        return self._flat

    def reuse(self, taken: Taken) -> None:
        """Free the memory of a copied flat gradient and reuse the tensor, because creating views is slow."""
        storage = taken.flat.untyped_storage()
        if taken.places and storage.resizable():
            storage.resize_(0)
            self._spare = taken

    def owe(self, unused: Collection[int] = ()) -> None:
        """Contribute zeros to the next reduction if this rank has no gradient. Leave out the parameters in `unused`."""
        self._owes = True
        self._leave_out(self._left_out.union(unused))

    @property
    def filled(self) -> bytes:
        """A flag for each parameter: a gradient is accumulated on this rank or on other ranks."""
        if self._owes:
            return b"\1" * len(self._filled)
        return bytes(map(max, self._filled, self._has_scattered))

    @property
    def arrived(self) -> list[bool]:
        """A flag for each parameter: a gradient is accumulated on this rank, or was taken since backward began."""
        has = zip(self.used, self._filled, self._has_scattered, strict=True)
        zeros = self._expects if self._fills_unused else [False] * len(self._expects)
        return [any(one) or is_zero for one, is_zero in zip(has, zeros, strict=True)]

    @property
    def missed(self) -> list[int]:
        """The numbers of `awaited` parameters for which a user's function returned None."""
        return [slot for slot, is_awaited in enumerate(self.awaited) if is_awaited and not self.used[slot]]

    def forget(self, slots: Sequence[int]) -> None:
        """Drop the accumulated gradients of some parameters."""
        for slot in slots:
            self._filled[slot] = self._has_scattered[slot] = 0
            for part in self._scattered[slot :: len(self._filled)]:
                part.zero_()

    def expect(self, expected: Sequence[bool]) -> None:
        """Set which parameters require gradients from now on; accumulated gradients stay."""
        self._expects, self._expected = expected, sum(expected)
        self.missing = self._expected
        self._frozen = frozenset({slot for slot, expects in enumerate(expected) if not expects}) or NO_SLOTS
        self._leave_out(self._left_out & self._frozen)

    def _leave_out(self, slots: frozenset[int]) -> None:
        """Leave these parameters out of the buffer; accumulated gradients of all other parameters stay."""
        if slots == self._left_out:
            return
        self._left_out, self.layout, self._spare = slots, self._whole.leaving_out(slots), None
        if self._flat is not None:
            before = self._places
            self._allocate()
            for new, old in zip(self._places, before, strict=True):
                for place, value in zip(new, old):  # noqa: B905 (one may be empty)
                    place.copy_(value)

    def fits(self, dtype: torch.dtype, sum_dtype: torch.dtype, device: torch.device) -> bool:
        """Return whether the buffer was created with these arguments."""
        return (self.dtype, self._sum_dtype, self._device) == (dtype, torch.promote_types(dtype, sum_dtype), device)

    def rescale(self, factor: float) -> None:
        """Multiply accumulated gradients by a factor."""
        self._divisor /= factor
        for part in self._scattered:
            part.mul_(factor)

    def take(self) -> Taken:
        """Return the flat gradient in `dtype`, with zeros for missing gradients; the buffer is empty afterwards."""
        if self._flat is None and self._owes:
            self._allocate()
        flat, every, filled = self._flat, self._places, self._filled
        if flat is None:
            raise ValueError("nothing has been accumulated")
        self._empty()
        self.times_taken += 1
        for slot, is_filled in enumerate(filled):
            if is_filled or (self._fills_unused and self._expects[slot]):
                self.used[slot] = 1
            if not is_filled:
                for place in every[slot]:
                    place.zero_()
        self.layout.clear_gaps(flat)
        if flat.dtype is self.dtype:
            return Taken(flat, self._divisor, every)
        return Taken(divided(flat, self._divisor).to(self.dtype), 1.0, [])

    def skip(self) -> None:
        """Count as taken without a gradient; the buffer is empty afterwards."""
        self._empty()
        self.times_taken += 1

    def hold(self, parts: Sequence[Tensor]) -> bool:
        """Add sums of earlier backwards to a sum over the shard's ranks; return True if the result is held in turn.

        Args:
            parts: this rank's shard of the sum, divided by parameters; multiple shards are concatenated.
        """
        for part, held in zip(parts, self._scattered):  # noqa: B905 (`_scattered` may be empty)
            if held.numel():  # empty for parameters thawed since
                part.add_(held)
        self.used = bytearray(map(max, self.used, self._has_scattered))
        is_held = self.sync is GradientSync.SHARDS
        self._scattered = parts if is_held else ()
        self._has_scattered = bytearray(self.used) if is_held else bytearray(len(self._filled))
        return is_held

    def note_held(self, used: Sequence[int]) -> None:
        """Record which parameters any rank used, if this rank holds shards of their sums."""
        if self._scattered:
            self._has_scattered = bytearray(map(bool, used))

    def of_shard(self, reduced: Tensor, rank: int) -> Tensor:
        """Return the gradient of the rank's shard ``[shard_numel]``, with zeros for omitted parameters."""
        if self.layout is self._whole:
            return reduced
        shard = reduced.new_zeros(self._whole.shard_numel)
        for whole, part in zip(
            self._whole.local_shards(shard, rank), self.layout.local_shards(reduced, rank), strict=True
        ):
            whole[: part.numel()] = part
        return shard

    def drop(self) -> None:
        """Discard accumulated gradients."""
        if not self.is_empty:
            self._empty()
        if self._scattered:
            self._scattered, self._has_scattered = (), bytearray(len(self._filled))

    def _empty(self) -> None:
        self._flat, self._places, self._owes = None, [], False
        self._filled = bytearray(len(self._filled))


def divided(sums: Tensor, divisor: float) -> Tensor:
    """Divide in place, and return the tensor."""
    return sums if divisor == 1.0 else sums.div_(divisor)


def refuse_gradient(name: str, gradient: Tensor) -> NoReturn:
    """Raise RuntimeError for a gradient with a graph or a sparse layout, which a flat gradient cannot contain."""
    if gradient.requires_grad:
        raise RuntimeError(
            f"{name}: its gradient has a graph (backward(create_graph=True)), but ranks sum gradients without graphs. "
            "Compute gradients that are differentiated again with torch.autograd.grad(..., create_graph=True), and "
            "call backward() for the loss."
        )
    raise RuntimeError(
        f"{name} has a gradient of layout {gradient.layout}, but flat gradients are dense. Create the embedding with "
        "sparse=False."
    )


def _put(place: Tensor, grad: Tensor, divisor: float, *, is_filled: bool) -> None:
    """Write ``grad / divisor`` to a place, or add it to the value at this place."""
    if is_filled:
        place.add_(grad, alpha=1.0 / divisor)
    elif divisor == 1.0:
        place.copy_(grad)
    elif torch.promote_types(grad.dtype, place.dtype) is grad.dtype:
        torch.div(grad, divisor, out=place)  # in the wider dtype: narrowing first might overflow
    else:
        place.copy_(grad).div_(divisor)  # dividing first would lose digits of the wider dtype
