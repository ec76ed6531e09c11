"""When things happen: one `Runtime` for all units of a root, driven by their hooks.

A step, as the hooks report it:

1. *Forward of a unit.* Its parameters are awaited; before it computes, the gather of the unit expected next is
   issued, so that it travels while this one computes. Afterwards its memory is given back, unless backward needs
   it at once (the root, the last unit of the forward) or the user asked to keep it.
2. *Backward reaches a unit's outputs.* The same, along the order that the last backward took.
3. *A gradient is complete.* When the last parameter of a handle has its gradient the whole parameters are given
   back and the reduction is started; it is finished later, when a third one wants to start or at the end.
4. *Backward ends.* What did not complete (unused parameters) is settled, reductions are finished, units are idle.

So at most the units in computation, one prefetched unit and two reductions are alive beside the shards.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from fsdp._agreement import agree
from fsdp._autograd import at_end_of_backward, call_when_passed, in_backward
from fsdp._handle import FlatParamHandle
from fsdp._reductions import Reductions
from fsdp._schedule import ExecutionOrder
from fsdp._unit import TrainingState, Unit, units_in

if TYPE_CHECKING:
    from collections.abc import Iterator


class Runtime:
    """Decides when the units of one tree gather, free and reduce.

    Collective at construction: the ranks compare what they have built.

    Args:
        root: the outermost unit.
        keep_root: don't free the root's parameters between forward and backward.
        bucket_bytes: see `Reductions`.

    Raises:
        RuntimeError: if an inner unit already belongs to a root of its own, or the ranks built different models.
    """

    def __init__(self, root: Unit, *, keep_root: bool, bucket_bytes: int) -> None:
        self.root = root
        named_units = units_in(root)
        self.units = [unit for _, unit in named_units]
        agree(root.comm, named_units)
        self._adopt(named_units)
        self._root_reshards = root.reshard_after_forward
        if keep_root:
            root.reshard_after_forward = False
        self.sync_gradients = True
        self._handle_units = {handle: unit for unit in self.units for handle in unit.handles}
        self._reductions = Reductions(bucket_bytes, lambda handle: self._handle_units[handle].postdivide)
        self._forward_order: ExecutionOrder[Unit] = ExecutionOrder()
        self._backward_order: ExecutionOrder[Unit] = ExecutionOrder()
        self._running: list[Unit] = []  # units whose forward is running, the innermost last
        self._in_backward = False

    def _adopt(self, named_units: list[tuple[str, Unit]]) -> None:
        for name, unit in named_units:
            if unit is not self.root and unit.runtime is not None and unit.runtime.root is unit:
                raise RuntimeError(
                    f"a second root: unit '{name}' was called on its own before the "
                    f"{type(self.root.module).__name__} around it, and became a root itself. Call the outermost "
                    "unit first, or `_reset_lazy_init()` on the inner one before the outer one is used."
                )
        for name, unit in named_units:
            if unit.runtime is not None:
                unit.runtime.ensure_idle(f"become part of another {type(self.root.module).__name__}")
            unit.runtime = self
            unit.rename(name)

    # --- forward ------------------------------------------------------------------------------------------------

    def before_forward(self, unit: Unit, args: Any, kwargs: Any) -> Any:
        """Hook: `unit` is about to compute."""
        if unit.close_loading is not None:
            unit.close_loading()  # a load that was given up by an exception
        if unit.state is TrainingState.SUMMON_FULL_PARAMS:
            return self._refuse_training_while_summoned(unit)
        if self._in_backward and in_backward():
            self._fetch_for_backward(unit)  # activation checkpointing computes its forward again
            return self._watch_inputs(unit, args, kwargs)
        if not self._running or unit is self.root:
            self._begin_forward()
        self._running.append(unit)
        unit.state = TrainingState.FORWARD
        following = self._forward_order.enter(unit)
        unit.gather()
        if following is not None:
            following.gather()
        unit.unshard()
        return self._watch_inputs(unit, args, kwargs)

    def _begin_forward(self) -> None:
        if self._running or self._in_backward:
            self._recover()
        for unit in self.units:
            if unit.runtime is not self:
                raise RuntimeError(
                    f"a second root: unit '{unit.name}' now belongs to another root, since it was wrapped and called "
                    "there. Use only one of the two, or call `_reset_lazy_init()` on this one first."
                )
        self._forward_order.begin()

    def after_forward(self, unit: Unit, output: Any, failed: bool) -> None:
        """Hook: `unit` has computed, or `failed` to."""
        if unit.state is TrainingState.SUMMON_FULL_PARAMS:
            return
        recomputed = self._in_backward and in_backward()
        if not recomputed and (not self._running or self._running.pop() is not unit):
            return  # a forward that was given up: the next one recovers
        if failed:
            if not recomputed:
                self._give_up_forward(unit)
            return
        needs_backward = torch.is_grad_enabled() and unit.watch_outputs(output)
        if recomputed:
            return
        unit.state = TrainingState.IDLE
        needed_at_once = needs_backward and self._forward_order.at_expected_end()
        if unit.reshard_after_forward and not needed_at_once:
            unit.reshard()
        if not self._running:
            self._end_forward(keep=needs_backward)

    def _end_forward(self, keep: bool) -> None:
        for unit in self.units:
            # Kept for a backward that doesn't come, or prefetched in vain.
            if not keep or unit.is_gathering:
                unit.reshard()
        self._settle()

    def _give_up_forward(self, unit: Unit) -> None:
        unit.state = TrainingState.IDLE
        unit.reshard()
        if not self._running:
            self._end_forward(keep=False)

    def _watch_inputs(self, unit: Unit, args: Any, kwargs: Any) -> Any:
        # A frozen parameter has no gradient whose arrival would tell that backward is done with it.
        if not unit.has_frozen_handle or not torch.is_grad_enabled():
            return None

        def passed() -> None:
            unit.input_gradients_due -= 1
            self._free_after_backward(unit)

        watched = call_when_passed(passed, (args, kwargs))
        due = watched[0] is not args or watched[1] is not kwargs
        unit.input_gradients_due += due
        return watched if due else None

    def _refuse_training_while_summoned(self, unit: Unit) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{unit.name}: forward inside summon_full_params() works for inference only, because gradients would "
                "go to the summoned copies and be lost. Use torch.no_grad(), or leave the context first."
            )

    # --- backward -----------------------------------------------------------------------------------------------

    def before_backward(self, unit: Unit, versions: list[int]) -> None:
        """Hook: backward has reached an output of `unit`, computed from shards of these versions."""
        if unit.changed_since(versions):
            raise RuntimeError(
                f"{unit.name}: its parameters were changed (by an optimizer step?) between forward and backward, so "
                "gradients would belong to neither the old nor the new values. Run backward before the change, or "
                "forward again after it."
            )
        self._ensure_backward()
        if unit.state is not TrainingState.BACKWARD_PRE:
            unit.state = TrainingState.BACKWARD_PRE
            self._fetch_for_backward(unit)

    def _ensure_backward(self) -> None:
        if self._in_backward:
            return
        self._in_backward = True
        at_end_of_backward(self._end_backward)
        self._backward_order.begin()
        for unit in self.units:
            unit.begin_backward()

    def _fetch_for_backward(self, unit: Unit) -> None:
        following = self._backward_order.enter(unit)
        unit.gather()
        if following is not None:
            following.gather()
        unit.unshard()

    def gradient_complete(self, unit: Unit, handle: FlatParamHandle) -> None:
        """Hook: every parameter of `handle` has its gradient."""
        self._ensure_backward()
        unit.state = TrainingState.BACKWARD_POST
        unit.incomplete.discard(handle)
        handle.gradients.begin_backward()  # re-entrant checkpoints may bring a second round
        self._free_after_backward(unit)
        if self.sync_gradients:
            self._reductions.submit(handle)

    def _free_after_backward(self, unit: Unit) -> None:
        if unit.incomplete or unit.input_gradients_due > 0:
            return
        if self.sync_gradients or unit.reshard_after_forward:
            unit.reshard()

    def _end_backward(self) -> None:
        for unit in self.units:
            for handle in unit.handles:
                if not self.sync_gradients:
                    handle.mark_unreduced()
                elif not handle.gradients.is_empty:
                    self._reductions.submit(handle)
        self._reductions.finish()
        for unit in self.units:
            unit.state = TrainingState.IDLE
            unit.input_gradients_due = 0
            if self.sync_gradients or unit.reshard_after_forward or unit.is_gathering:
                unit.reshard()
        self._settle()
        self._in_backward = False

    # --- between steps ------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside accumulate whole gradients without reducing them."""
        self.ensure_idle("enter no_sync()")
        outer, self.sync_gradients = self.sync_gradients, False
        try:
            yield
        finally:
            self.sync_gradients = outer

    def ensure_idle(self, what: str) -> None:
        """Raise RuntimeError unless nothing runs; what a failed forward or backward left behind is cleared first."""
        if self._running or (self._in_backward and in_backward()):
            raise RuntimeError(f"cannot {what} in the middle of a forward or backward of {self.root.name}")
        if self._in_backward:
            self._recover()

    def forget(self) -> None:
        """Let go of all units: the next one used finds out again which is outermost."""
        self.ensure_idle("reset")
        self.release()
        for unit in self.units:
            unit.runtime = None
        self.root.reshard_after_forward = self._root_reshards

    def release(self) -> None:
        """Free what is kept whole between passes (after `no_sync` without resharding, or without a backward)."""
        for unit in self.units:
            unit.reshard()
        self._settle()

    def _recover(self) -> None:
        """Back to idle after a forward or backward that was given up; its unreduced gradients are dropped."""
        self._running.clear()
        self._in_backward = False
        self._reductions.abandon()
        for unit in self.units:
            unit.state = TrainingState.IDLE
            unit.input_gradients_due = 0
            for handle in unit.handles:
                handle.drop_gradients()
            unit.reshard()
        self._settle()

    def _settle(self) -> None:
        for comm in {handle.comm for unit in self.units for handle in unit.handles}:
            comm.settle()
