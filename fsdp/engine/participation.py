"""The seam between the runtime and ranks that do different things.

The runtime assumes that all ranks run all units, in one order, and begin a backward together: then each collective that
it issues is issued by the others as well, and nothing is to be told. `EvenRanks` says just that. Where ranks run
different modules, or run out of batches, somebody else takes its place, and is asked at the points where it matters.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from fsdp.distributed import paths
from fsdp.distributed.communicator import own_rank
from fsdp.engine.call_stack import MODULE_CALL, calls_on
from fsdp.engine.forward_hooks import Call
from fsdp.engine.grad_buffer import GradientSync
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.schedule import ExecutionOrder
from fsdp.engine.unit import Unit


class Participation(Protocol):
    """The questions that the runtime asks about other ranks, and the events that it reports for them."""

    @property
    def is_uneven(self) -> bool:
        """True if ranks run, or recompute, different things in the backward that runs."""

    @property
    def is_joining(self) -> bool:
        """True if some ranks may have no more batches, and take part in the others' steps and in nothing else."""

    @property
    def stage(self) -> str:
        """The pass that all ranks are in, or were in last: its direction and mode; empty where ranks may differ."""

    def enter(self, call: Call, *, is_outermost: bool) -> None:
        """Collective. The forward of a unit begins, or (if it `is_outermost`) the forward of all."""

    def leave(self, call: Call, output: Any, *, needs_backward: bool) -> None:
        """Collective. The forward of a unit has ended."""

    def fail(self, unit: Unit) -> None:
        """The forward of a unit has raised."""

    def order(
        self, unit: Unit, usual: ExecutionOrder[Unit], *, is_backward: bool, is_recomputed: bool
    ) -> ExecutionOrder[Unit] | None:
        """Return the order by which all ranks know which units come next; a unit is about to be unsharded.

        Returns None if other ranks don't know: then they have been told to take part in the all-gather, or all ranks
        come to it together, and nothing may be prefetched.
        """

    def begin_backward(self, reduced: Sequence[FlatParamHandle]) -> None:
        """A backward begins, which reduces gradients of these handles."""

    def reach(self, call: Call) -> None:
        """Collective. Backward has reached the outputs of a call for the first time.

        Raises:
            RuntimeError: if other ranks no longer wait for that.
        """

    def announce_gradient(self, unit: Unit, handle: FlatParamHandle) -> bool:
        """Collective. A gradient is complete. Returns False if it is to be reduced at the end of backward only."""

    def end_backward(self) -> None:
        """Collective. Backward has ended on this rank."""

    def abandon(self) -> None:
        """A forward or backward was given up."""

    def announce_clip_norm(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> None:
        """Collective. Gradients are about to be clipped by their norm."""

    def announce_clip_value(self, clip_value: float) -> None:
        """Collective. Gradients are about to be clipped by value."""


class EvenRanks:
    """All ranks do the same, so that nothing has to be said. All-gathers are tagged with the pass that all are in."""

    is_uneven = False
    is_joining = False
    stage = ""
    _outermost: Unit
    _pass: paths.Pass  # that runs, or ran last
    _around: paths.Pass  # the forward before the backward that runs, or around it

    def enter(self, call: Call, *, is_outermost: bool) -> None:
        if is_outermost:
            self._outermost = unit = call.unit
            has_graph = torch.is_grad_enabled()
            mode = "" if unit.mode == "train()" else f" in {unit.mode}"
            self.stage = f"forward{mode}{'' if has_graph else ' without gradients'}"
            modes = (f"in {unit.mode}", "with gradients" if has_graph else "without gradients")
            self._pass = paths.path.begin("forward", unit.name, unit.ranks, modes)
        if not call.recomputed:
            self._pass.come_to(call.unit.name)

    def leave(self, call: Call, output: Any, *, needs_backward: bool) -> None:
        self._pass.is_over |= call.unit is self._outermost and not call.recomputed

    def fail(self, unit: Unit) -> None:
        pass

    def order(
        self, unit: Unit, usual: ExecutionOrder[Unit], *, is_backward: bool, is_recomputed: bool
    ) -> ExecutionOrder[Unit]:
        return usual

    def begin_backward(self, reduced: Sequence[FlatParamHandle]) -> None:
        unit = self._outermost
        accumulates = " under no_sync()" if unit.policy.sync is GradientSync.NONE else ""
        divisor, usual = unit.predivide * unit.postdivide, unit.comm.world_size * unit.replicas.world_size
        divided = f" with gradients divided by {divisor:g}" if divisor != usual else ""
        self.stage = f"backward{accumulates}{divided}"
        modes = (accumulates.strip() or "with reduction", f"with gradients divided by {divisor:g}")
        self._around = self._pass
        self._pass = paths.path.begin("backward", unit.name, unit.ranks, modes, list(_trained(reduced)))

    def reach(self, call: Call) -> None:
        self._pass.come_to(call.unit.name)

    def announce_gradient(self, unit: Unit, handle: FlatParamHandle) -> bool:
        return True

    def end_backward(self) -> None:
        self._pass.is_over, self._pass = True, self._around

    def abandon(self) -> None:
        """Raise RuntimeError if what looks like a forward that was given up is another thread's."""
        for thread, frame in sys._current_frames().items():
            running = calls_on(frame, {MODULE_CALL: self._outermost.module})
            if thread != threading.get_ident() and any(running):
                raise RuntimeError(
                    f"rank {own_rank()}: {self._outermost.name} is called while another thread is in its "
                    "forward. A sharded model unshards its parameters for one thread at a time: call it from one "
                    "thread, or with a lock around each forward and backward, in the same order on every rank."
                )

    def announce_clip_norm(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> None:
        pass

    def announce_clip_value(self, clip_value: float) -> None:
        pass


def _trained(handles: Sequence[FlatParamHandle]) -> Iterator[str]:
    """Yield what gets gradients, for people."""
    for handle in handles:
        if not handle.has_frozen:
            yield handle.name
            continue
        each = zip(handle.layout.slots, handle.requires_grad_each, strict=True)
        frozen = [slot.name for slot, is_trained in each if not is_trained]
        if len(frozen) < len(handle.layout.slots):
            yield f"{handle.name} without {', '.join(frozen)}"
