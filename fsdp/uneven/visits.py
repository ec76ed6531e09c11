"""Modules that not every rank runs (`fsdp.cond`), and how those that don't still take part in their collectives.

A *region* is such a module, a *visit* one call of it by all ranks, whether they run it or not. In the round in which
they come to it they learn who does. If nobody does, nothing more happens; if all do, it runs as always, with an order
of units of its own, so that what is expected next is alike on all ranks. Otherwise the visit is *mixed*: those that run
it announce every gather and every reduction before they begin it, and the others wait for announcements and join in.

In forward the others wait until the visit is left. In backward they have no graph of the region, so they wait at
*positions*: places in the order of the forward, which backward passes from the last to the first. A rank that comes to
a unit in backward, while a mixed visit that came later in forward is still owed its backward, waits until all ranks are
at this position or before it. The foremost ranks go on, the others serve. So ranks that run different regions serve
each other in turn, without knowing the order of each other's graphs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fsdp.engine.autograd import differentiable_tensors, in_backward
from fsdp.engine.forward_hooks import Call
from fsdp.engine.unit import Unit
from fsdp.uneven.messages import Kind, Message
from fsdp.uneven.regions import Region, Visit, position_at
from fsdp.uneven.serving import TOLD, Serving

if TYPE_CHECKING:
    from fsdp.engine.runtime import Runtime

_MANY = 100_000  # places in a forward, after which visits whose backward has not come are given up


class Visits(Serving):
    """The regions of one root, and the visits that are not over.

    Args:
        runtime: of the root.
    """

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self._visited: dict[Region, bool] = {}  # in this forward, and whether mixed
        self._places = 0  # in this forward
        self._positions: dict[Unit, int] = {}
        self._within: dict[Unit, Region] = {}  # in which units ran last
        self._with_graph: set[Unit] = set()  # whose last forward has one
        self._of_root: Visit | None = None

    # --- what the runtime asks in forward -----------------------------------------------------------------------

    @property
    def is_inside(self) -> bool:
        """Whether a visit is running."""
        return bool(self._open)

    def region_of(self, unit: Unit, is_backward: bool) -> Region | None:
        """The region in whose order a unit runs; None for the root's."""
        if is_backward:
            return self._within.get(unit)
        return self._open[-1].region if self._open else None

    def begin_forward(self) -> None:
        """A forward begins."""
        self._visited.clear()
        if not self._owed or self._places > _MANY:
            self._owed.clear()
            self._places = 0

    def enter(self, unit: Unit, call: Call) -> None:
        """`unit` computes next, in forward."""
        visit = self._open[-1] if self._open else None
        if call.recomputed:
            call.position = self._positions.get(unit, 0)
        else:
            self._positions[unit] = call.position = self._next_position()
            self._with_graph.discard(unit)
        if visit is not None:
            self._within[unit] = visit.region
            call.visit = visit if visit.is_mixed else None
            visit.add(unit)
            return
        if call.recomputed:
            return
        self._within.pop(unit, None)
        if any(unit in owed.region.units for owed in self._owed if owed.region in self._visited):
            raise RuntimeError(
                f"{unit.name} is called without fsdp.cond, in the forward in which only some ranks ran it with "
                "fsdp.cond. Use fsdp.cond for every call of it."
            )

    def expect_backward(self, unit: Unit, call: Call) -> None:
        """A call's backward may come."""
        if not call.recomputed:
            self._with_graph.add(unit)
        if call.visit is not None and (not call.recomputed or call.visit.is_reentrant):
            call.visit.calls.append(call)

    def recomputes_alone(self, unit: Unit) -> bool:
        """Whether ranks may compute a unit again at different times, in this backward.

        Checkpointing that keeps the graph begins with the first tensor that backward misses, of whatever part of what
        is checkpointed; which part that is depends on what the rank ran. (A re-entrant one begins on all ranks alike.)
        """
        return self.is_uneven and unit in self._with_graph

    def begin_root(self, unit: Unit) -> None:
        """The outermost unit that runs now begins its forward: in `fsdp.join`, that is a visit of all ranks."""
        if self._open:
            return
        self.begin_forward()
        if self.joining is not None and unit is self._runtime.root:
            self._of_root = self.open(unit.module, True)

    def end_root(self, unit: Unit, output: Any) -> None:
        """A unit has ended its forward."""
        if self._of_root is not None and unit is self._runtime.root:
            visit, self._of_root = self._of_root, None
            visit.is_differentiable = bool(differentiable_tensors(output))
            self.close(visit)

    def fail_root(self, unit: Unit) -> None:
        """A unit's forward has raised."""
        if self._of_root is not None and unit is self._runtime.root:
            visit, self._of_root = self._of_root, None
            error = sys.exc_info()[1]
            self.fail(visit, error if isinstance(error, Exception) else None)

    def end_join(self) -> None:
        """All ranks go on alike."""
        self.joining = self._of_root = None
        self.abandon()
        self._places = 0

    def abandon(self) -> None:
        """Forget all visits: something was given up."""
        for things in (self._open, self._owed, self._visited, self._touched):
            things.clear()

    # --- visits -------------------------------------------------------------------------------------------------

    def visit(self, module: nn.Module, run_here: bool, compute: Callable[[], Any]) -> Any:
        """Collective. Run `compute` where `run_here`, and take part in its collectives where not.

        Returns None where it did not run, and if nobody ran it.
        """
        if self._runtime.is_in_backward and in_backward():
            return self._recompute(self._directory.region(module), run_here, compute)
        visit = self.open(module, run_here)
        if visit is None:
            return None
        try:
            output = compute() if run_here else None
            if not run_here:
                self.follow(visit)
            visit.is_differentiable = run_here and bool(differentiable_tensors(output))
        except BaseException as error:
            self.fail(visit, error if isinstance(error, Exception) else None)
            raise
        self.close(visit)
        return output

    def open(self, module: nn.Module, run_here: bool) -> Visit | None:
        """Collective. Come to a region; None if no rank runs it."""
        region = self._directory.region(module)
        if not self._open and not self._runtime.is_computing:
            self._runtime.trust_values(self._runtime.root)
            self.begin_forward()
        position = self._next_position()
        rows = self.announce(Message(Kind.VISIT, region.number, run_here, position))
        return self._enter(region, rows, run_here, position)

    def _recompute(self, region: Region, run_here: bool, compute: Callable[[], Any]) -> Any:
        # Checkpointing may stop before the end, at another place on each rank: so this must not wait for others. What
        # there was to agree on is known from the forward, and what is gathered again is announced as in backward.
        visit = region.last
        if run_here is not (visit is not None and visit.runs_here):
            raise RuntimeError(
                f"fsdp.cond: activation checkpointing recomputes {self._directory.name(region.number)} with "
                f"run_here={run_here}, unlike its forward. Decide outside of the checkpoint, or have it preserve the "
                "random state (preserve_rng_state=True)."
            )
        if visit is None:
            return None
        if visit.is_mixed and not visit.was_owed:
            return self._recompute_reentrant(visit, compute)
        if not run_here:
            return None
        self._open.append(visit)
        try:
            return compute()
        finally:
            self._open.remove(visit)

    def _recompute_reentrant(self, visit: Visit, compute: Callable[[], Any]) -> Any:
        # The forward was without a graph. Now all ranks are here at the same time, so it is as in forward.
        visit.is_reentrant = True
        self._open.append(visit)
        output = compute() if visit.runs_here else None
        if not visit.runs_here:
            self.follow(visit)
        visit.is_differentiable = visit.runs_here and bool(differentiable_tensors(output))
        self.close(visit)
        return output

    def follow(self, visit: Visit) -> None:
        """Take part in a visit's forward that others run."""
        while visit in self._open:
            self.serve_one(visit.position)

    def close(self, visit: Visit) -> None:
        """The visit's forward has ended here."""
        if not visit.is_mixed:
            self._open.remove(visit)
        elif visit.runs_here:
            rows = self.announce(Message(Kind.LEAVE, visit.region.number, visit.is_differentiable))
            self._leave(visit, rows)

    def fail(self, visit: Visit, error: Exception | None) -> None:
        """The visit's forward was given up here; by an `error`, the ranks that take part in it are told to, as well."""
        is_told = visit.is_mixed and visit.runs_here and visit in self._open
        self.abandon()
        if error is None or getattr(error, TOLD, False):
            return
        setattr(error, TOLD, True)
        if is_told:
            with suppress(RuntimeError):  # which all ranks raise now; what this one has raised says more
                self.talk.exchange(Message(Kind.FAILED, visit.region.number))

    def _enter(self, region: Region, rows: Sequence[Message], run_here: bool, position: int) -> Visit | None:
        runs = [row.kind == Kind.VISIT and bool(row.argument) for row in rows]
        region.last = None
        if not any(runs):
            return None
        visit = Visit(region, position, len(self._open) + 1, run_here, is_mixed=not all(runs))
        self._refuse_second(visit)
        self._visited[region] = visit.is_mixed
        self._owed = [owed for owed in self._owed if owed.region is not region]
        region.last = visit
        if visit.is_mixed:
            self._mixed.update(visit.units)
            if torch.is_grad_enabled():
                self._touched.update(region.around)
        if not self._open and self.joining is not None:
            self.joining.is_uneven, self.joining.running_ranks = visit.is_mixed, sum(runs)
        region.forward_order.begin()
        self._open.append(visit)
        return visit

    def _refuse_second(self, visit: Visit) -> None:
        before = self._visited.get(visit.region)
        if before is not None and torch.is_grad_enabled() and (before or visit.is_mixed):
            raise RuntimeError(
                f"fsdp.cond: {self._directory.name(visit.region.number)} runs a second time in one forward, and not on "
                "all ranks each time. Run it once with all of its inputs, or on all ranks or none."
            )

    def _leave(self, visit: Visit, rows: Sequence[Message]) -> None:
        if visit in self._open:  # not if others recompute what is inside of something that this rank does not run
            self._open.remove(visit)
        self._mixed.update(visit.units)
        for unit in visit.units:
            unit.reshard()  # alike on all ranks from here on
        is_owed = any(row.argument for row in rows if row.kind == Kind.LEAVE)
        if is_owed:
            visit.was_owed = True
            self._owed.append(visit)
            self.is_uneven = self._runtime.is_in_backward

    def _next_position(self) -> int:
        if not self._open:
            self._places += 1
            return position_at(self._places)
        visit = self._open[-1]
        visit.places += 1
        return position_at(visit.places, visit.level, visit.position)
