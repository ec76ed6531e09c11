"""`Participation`: the interface between the runtime and ranks that run different modules.

The runtime calls a `Participation` at the points where ranks may differ. By default all ranks run all units in the same
order, and begin a backward together: each collective of the runtime is issued by all ranks. If ranks run different
modules, or run out of batches, a subclass is attached to the runtime.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from fsdp.engine.forward_hooks import Call
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.schedule import ExecutionOrder
from fsdp.engine.unit import Unit


class Participation:
    """The runtime's questions about other ranks, and its events. By default all ranks do the same.

    Attributes:
        is_uneven: ranks run, or recompute, different modules in the running backward.
        may_differ: ranks may run different modules in a unit.
    """

    is_uneven = False
    may_differ = False

    @property
    def is_joining(self) -> bool:
        """True if some ranks may have no more batches, and only take part in other ranks' steps."""
        return False

    @property
    def announced(self) -> Collection[FlatParamHandle]:
        """The handles whose gradients, in the running backward, may arrive on only some ranks, which announce them."""
        return ()

    @property
    def repeats_steps(self) -> bool:
        """False if finished ranks do nothing after an optimizer step except the step."""
        return True

    def enter(self, call: Call, *, is_outermost: bool) -> None:
        """Collective. The forward of a unit begins; if `is_outermost`, the forward of the model."""

    def leave(self, call: Call, output: Any, *, needs_backward: bool) -> None:
        """Collective. The forward of a unit ends."""

    def fail(self, unit: Unit) -> None:
        """The forward of a unit raises."""

    def order(
        self, unit: Unit, usual: ExecutionOrder[Unit], *, is_backward: bool, is_recomputed: bool
    ) -> ExecutionOrder[Unit] | None:
        """Return the order that predicts the next units on all ranks; a unit is about to be unsharded.

        Returns None if other ranks do not know the order. Then they have been requested to take part in the all-gather,
        or all ranks issue it together, and no unit may be prefetched.
        """
        return usual

    def begin_backward(self) -> None:
        """A backward begins."""

    def reach(self, call: Call) -> None:
        """Collective. Backward reaches the outputs of a call for the first time.

        Raises:
            RuntimeError: if other ranks no longer wait for this.
        """

    def announce_gradient(self, unit: Unit, handle: FlatParamHandle) -> bool:
        """Collective. A gradient is complete. Returns False if it must be reduced only at the end of backward."""
        return True

    def end_backward(self) -> None:
        """Collective. Backward ends on this rank."""

    def abandon(self) -> None:
        """A forward or backward was aborted."""

    def announce_clip_norm(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> None:
        """Collective. Gradients are about to be clipped by their norm."""

    def announce_clip_value(self, clip_value: float) -> None:
        """Collective. Gradients are about to be clipped by value."""
