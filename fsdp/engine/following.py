"""What a root's runtime does because of other ranks: trusting their values, and taking part in their backwards."""

from __future__ import annotations

from collections.abc import Callable

from fsdp.engine.autograd import BackwardPass, FollowedPass
from fsdp.engine.deferred_init import require_values_everywhere
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.memory import return_freed_memory
from fsdp.engine.reduction import Reductions
from fsdp.engine.unit import Unit
from fsdp.engine.verify import agree_on_values


class FollowsOthers:
    """The part of `Runtime` that no forward or backward of this rank needs."""

    units: list[Unit]
    handles: list[FlatParamHandle]
    sync_gradients: bool
    _reductions: Reductions
    _backward: BackwardPass | FollowedPass | None
    _begin_backward: Callable[[], None]
    _finish_backward: Callable[[], None]
    _await_values = True  # some units, until it was looked at
    _has_compared_values = False  # not yet: a checkpoint may be loaded before anything is computed

    @property
    def is_in_backward(self) -> bool:
        """Whether a backward of this root is running."""
        return self._backward is not None and self._backward.is_alive

    def trust_values(self, unit: Unit) -> None:
        """Collective the first time. Raise RuntimeError if parameters have no values, or other ones on other ranks."""
        if self._await_values:
            require_values_everywhere(unit, "compute")
            self._await_values = any(one.awaits_values_somewhere for one in self.units)
        if not self._has_compared_values:
            agree_on_values([(one.name, one) for one in self.units])
            self._has_compared_values = True
            return_freed_memory()

    def follow_backward(self, is_reduced: bool, is_fresh: bool) -> None:
        """Other ranks run a backward: begin one here, if there is none of its own.

        Args:
            is_reduced: whether gradients are reduced in it, or accumulate.
            is_fresh: whether the others had no gradients before it.
        """
        if self.is_in_backward:
            return
        if is_fresh:
            for handle in self.handles:
                handle.zero_grad()
        self.sync_gradients = is_reduced
        self._backward = FollowedPass()
        self._begin_backward()

    def end_followed_backward(self) -> None:
        """The backward that `follow_backward` began has ended on the other ranks."""
        self._finish_backward()
        self.sync_gradients = True

    def serve_reduction(self, handle: FlatParamHandle) -> None:
        """Take part in the reduction of a handle of which others have a gradient."""
        unit = next(unit for unit in self.units if handle in unit.handles)
        handle.gradients.owe()
        unit.incomplete.discard(handle)
        if self.sync_gradients:
            self._reductions.submit(handle, unit.postdivide, keep=True)
