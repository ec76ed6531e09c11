"""What users want of a unit: when its whole parameters are given back, and what is gathered ahead of its turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsdp.engine.unit import Unit


@dataclass
class Wishes:
    """Of one unit.

    Attributes:
        reshard_after_forward, reshard_after_backward: whether whole parameters are given back then.
        forward_prefetch, backward_prefetch: units to gather ahead; None for those that are expected to come next.
        keeps_as_root: it is outermost, and has its parameters from forward to backward, which begins with it.
    """

    reshard_after_forward: bool
    reshard_after_backward: bool = True
    forward_prefetch: Sequence[Unit] | None = None
    backward_prefetch: Sequence[Unit] | None = None
    keeps_as_root: bool = False

    @property
    def frees_after_forward(self) -> bool:
        """Whether whole parameters are given back after a forward."""
        return self.reshard_after_forward and not self.keeps_as_root

    def frees_after_backward(self, is_synchronised: bool) -> bool:
        """Whether they are after a backward; what stays after forward also stays while gradients accumulate."""
        return self.reshard_after_backward and (is_synchronised or self.frees_after_forward)

    def set_reshard_after_forward(self, reshard: bool) -> None:
        """As a user says, also of the outermost unit."""
        self.reshard_after_forward, self.keeps_as_root = reshard, False

    def ahead(self, is_backward: bool) -> Sequence[Unit] | None:
        """What is to be gathered ahead; None if the user has not said."""
        return self.backward_prefetch if is_backward else self.forward_prefetch

    def of_copy(self) -> Wishes:
        """Those of a copied unit, which may become an inner one; other units may not be copied with it."""
        return replace(self, forward_prefetch=None, backward_prefetch=None, keeps_as_root=False)
