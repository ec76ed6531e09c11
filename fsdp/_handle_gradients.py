"""How a handle takes in gradients: whole ones from autograd, one by one, and reduced ones for its shard."""

from __future__ import annotations

import torch
from torch import Tensor

from fsdp._comm import Communicator, Pending
from fsdp._flat_param import FlatParameter
from fsdp._gradients import GradientBuffer
from fsdp._layout import ContiguousLayout
from fsdp._offload import Home
from fsdp._pieces import Pieces
from fsdp._placeholder import Placeholder, unreduced_gradient
from fsdp._whole import WholeParameters


class TakesGradients:
    """The half of `FlatParamHandle` that backward needs."""

    flat_param: FlatParameter
    home: Home
    pieces: Pieces | None
    layout: ContiguousLayout
    reduce_comm: Communicator
    name: str
    tag: int
    gradients: GradientBuffer
    whole: WholeParameters
    _wholes: dict[torch.dtype, WholeParameters]

    def take_gradient(self, slot: int, leaf: Tensor, divisor: float) -> bool:
        """Move a leaf's gradient into the flat buffer; True when it was the last one missing in this backward."""
        gradient, leaf.grad = leaf.grad, None
        if gradient is not None:
            if gradient.layout is not torch.strided:
                raise RuntimeError(
                    f"{self.layout.slots[slot].name} has a gradient of layout {gradient.layout}: flat gradients are "
                    "dense. Make the embedding with sparse=False."
                )
            self.gradients.add(slot, gradient, divisor)
        return self.gradients.is_complete

    def reduce(self) -> Pending:
        """Start to sum the accumulated gradient over the ranks; the result is the shard's, in its dtype."""
        what = f"reduce-scatter of {self.name}"
        return self.reduce_comm.reduce_scatter(self.gradients.take(), what, self.tag, self.flat_param.dtype)

    def accept(self, reduced: Tensor) -> None:
        """Add a reduced gradient to the shard's."""
        self.flat_param._has_unreduced = False
        self.home.check(self.name)
        self.home.accept(self.flat_param, reduced)

    def mark_unreduced(self) -> None:
        """Let the shard's missing gradient say why it is missing, if it is and something is accumulated."""
        self.whole.rest()  # if it stays whole: until the next pass
        if not self.gradients.is_empty:
            self.flat_param._has_unreduced = True
            if self.flat_param.grad is None:
                self.flat_param.grad = unreduced_gradient(self.name, self.flat_param)
            if self.pieces is not None:
                self.pieces.mark_unreduced(self.gradients.filled)

    @property
    def has_unreduced(self) -> bool:
        """Whether gradients wait for their reduction, and were not zeroed."""
        if self.pieces is not None:
            self.pieces.forget_zeroed()
        return self.flat_param._has_unreduced and self.flat_param.grad is not None

    def begin_backward(self, is_summing: bool = False) -> None:
        """Expect every gradient; `is_summing` if this backward's are added to, and not reduced at its end."""
        if self.pieces is not None:
            self.gradients.forget(self.pieces.zeroed)
            self.pieces.collect_gradients()
        # `mark_unreduced` left no None behind: the user has zeroed the gradients since, accumulated ones included.
        if self.flat_param.grad is None:
            self.flat_param.forget_gradient()
            self.gradients.drop()
        self.gradients.begin_backward(is_summing)

    def drop_unreduced(self) -> None:
        """Forget what is accumulated and not reduced."""
        self.flat_param._has_unreduced = False
        self.gradients.drop()
        if isinstance(self.flat_param.grad, Placeholder) and self.flat_param.held_gradient is None:
            self.flat_param.grad = None
        if self.pieces is not None:
            self.pieces.show_gradients([False] * len(self.layout.slots))
        for whole in self._wholes.values():
            for leaf in whole.leaves:
                leaf.grad = None
