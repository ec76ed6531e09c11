"""Modules that not every rank runs (`fsdp.cond`), and the participation of the other ranks in their collectives.

A *region* is such a module. A *visit* is a collective call of a region, on ranks that run the module and on ranks that
do not. In the first round of a visit, the ranks exchange which ranks run the region. If no rank runs it, the visit
ends. If all ranks run it, the module runs as usual, but with a separate order of units, so that predictions are the
same on all ranks. Otherwise the visit is *mixed*: ranks that run the region announce every all-gather and reduction in
advance, and the other ranks wait for announcements and join.

In forward the other ranks wait until the visit ends. In backward they have no graph of the region, so they wait at
*positions* in the order of the forward, which backward passes from the last to the first. If a rank reaches a unit in
backward before the backward of a later mixed visit is complete, it waits until all ranks are at this position or
before it. The ranks that are furthest from the end continue, and the other ranks serve. Ranks that run different
regions therefore serve each other in turn, without information about each other's graphs.

`fsdp.join` treats the root as a region: ranks without batches do not run it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import reduce
from itertools import chain
from operator import or_
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from fsdp.engine.autograd import differentiable_tensors, in_backward
from fsdp.engine.forward_hooks import Call
from fsdp.engine.grad_buffer import GradientSync
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.names import clean_name
from fsdp.engine.participation import Participation
from fsdp.engine.runtime import Runtime, running, runtime_of
from fsdp.engine.schedule import ExecutionOrder
from fsdp.engine.unit import NO_MODULES, ModuleGroup, TrainingState, Unit, unit_of, unit_of_wrapper, units_of
from fsdp.uneven.messages import Kind, Message, Talk, bits_of


def cond(module: nn.Module, run_here: bool, /, *args: Any, **kwargs: Any) -> Any:
    """Collective. Run a module on a subset of the ranks, while the other ranks take part in its collectives.

    For example, use it for a vision tower and a batch without images, an expert without tokens, or a dropped layer.
    All ranks must call this function in the forward of the outermost wrapper (or module under `fully_shard`), at the
    same place and for the same module. In a small message, the ranks exchange whether they run the module:

    - if no rank runs the module, its parameters are not all-gathered;
    - if all ranks run the module, the effect is the same as a direct call;
    - otherwise, the other ranks join the all-gathers in forward and backward and contribute zero gradients: the
      gradients are the sum over the ranks that ran the module, divided by the number of all ranks.

    Calls may be nested, and may be in modules with activation checkpointing. Backward must run before the next
    forward. The message blocks the host.

    Args:
        module: a part of a sharded model: a unit, a module that contains units, or a plain module.
        run_here: True if this rank runs the module.
        args, kwargs: the inputs of the module; ignored on ranks that do not run the module.

    Returns:
        The module's output, or None on a rank that does not run the module.

    Raises:
        TypeError: if `module` is not an `nn.Module`.
        ValueError: if the module is not part of the wrapped model that runs.
        RuntimeError: on every rank, if ranks call the function for different modules or run different units, or if the
            module raised an exception on a rank; also for a second call in a forward if not all ranks run both calls.
    """
    runtime = _runtime_of(module)
    unit = unit_of_wrapper(module)
    own = module if unit is None else unit.module
    return visits_of(runtime).visit(own, bool(run_here), lambda: module(*args, **kwargs))


def _runtime_of(module: nn.Module) -> Runtime:
    if not isinstance(module, nn.Module):
        raise TypeError(f"fsdp.cond runs an nn.Module, got a {type(module).__name__}: wrap the function in a module")
    for inner in module.modules():
        unit = unit_of(inner)
        if unit is not None:
            return runtime_of(unit)
    runtime = running()
    if runtime is not None:
        return runtime
    raise ValueError(
        f"fsdp.cond: {type(module).__name__} has no wrapped modules, and no wrapped model is running: call it inside "
        "the forward of the outermost FullyShardedDataParallel"
    )


END = -1  # the position after backward has passed all places

# A position encodes, in a single integer, the places in the root's forward, in a visit, in a nested visit, and so on.
LEVELS = 4
_BITS = 15


def position_at(place: int, level: int = 0, base: int = 0) -> int:
    """Return the position of a place (from 1) in the root's forward, or at a `level` in the visit at `base`."""
    if level >= LEVELS:
        raise RuntimeError(
            f"fsdp.cond: modules that not every rank runs can be nested at most {LEVELS - 1} deep, inside fsdp.join "
            f"{LEVELS - 2}"
        )
    return base + (place << _BITS * (LEVELS - 1 - level))


class Region:
    """A module that not every rank runs."""

    def __init__(self, number: int, module: nn.Module, handles: Mapping[nn.Module, Sequence[FlatParamHandle]]) -> None:
        self.number = number
        self.units = [unit for unit in units_of(module.modules()) if not isinstance(unit.module, ModuleGroup)]
        own = set(module.modules()).difference(*(unit.module.modules() for unit in self.units))
        # Handles of enclosing units with parameters of this region: only ranks that run it have gradients for these.
        self.around = {handle for inner in own for handle in handles.get(inner, ())}
        self.last: Visit | None = None  # in the last forward that reached this region; None if no rank ran it
        # Orders of its units in forward (False) and backward. The root's orders must not depend on the running ranks.
        self.orders: dict[bool, ExecutionOrder[Unit]] = {False: ExecutionOrder(), True: ExecutionOrder()}


class Visit:
    """A collective call of a region that at least one rank runs."""

    def __init__(self, region: Region, position: int, level: int, runs_here: bool, is_mixed: bool) -> None:
        self.region = region
        self.position, self.level, self.places = position, level, 0
        self.runs_here, self.is_mixed = runs_here, is_mixed
        self.units = list(region.units)  # and other units that ran during the visit
        self.calls: list[Call] = []  # the calls whose backward may follow
        self.reached: set[Call] = set()
        self.is_differentiable = False  # backward may reach the outputs
        self.is_reentrant = False  # only the recomputation has a graph
        self.was_owed = False  # the forward had a graph on some rank
        self.reduced: set[FlatParamHandle] = set()

    def add(self, unit: Unit) -> None:
        if unit not in self.units:
            self.units.append(unit)


class Directory:
    """Numbers for the modules, units and handles of a root, equal on all ranks."""

    def __init__(self, runtime: Runtime) -> None:
        self._root, self.units, self.handles = runtime.root, runtime.units, runtime.handles
        self._modules: list[tuple[str, nn.Module]] = []
        self._numbers: dict[nn.Module, int] = {}
        self._list_modules()
        self._by_module: dict[nn.Module, list[FlatParamHandle]] = {}  # the handles of each module's parameters
        for handle in self.handles:
            for place in chain.from_iterable(handle.places):
                self._by_module.setdefault(place.module, []).append(handle)
        self.regions: dict[nn.Module, Region] = {}  # all regions reached so far

    def region(self, module: nn.Module) -> Region:
        """Return the region of a module, and create it if required. The module must be part of the root's module."""
        if module not in self.regions:
            self.regions[module] = Region(self._number(module), module, self._by_module)
        return self.regions[module]

    def region_of_number(self, number: int) -> Region:
        """Return the region with a number received from another rank."""
        if number >= len(self._modules):
            self._list_modules()
        return self.region(self._modules[number][1])

    def name(self, number: int) -> str:
        return clean_name(self._modules[number][0]) or self._root.name

    def describe(self, message: Message) -> str:
        """Return a description of the operation in a message, for errors."""
        kind, subject = Kind(message.kind), message.subject
        if kind in (Kind.VISIT, Kind.LEAVE, Kind.FAILED):
            return ("the end of " if kind is Kind.LEAVE else "") + f"fsdp.cond of {self.name(subject)}"
        if kind in (Kind.FORWARD, Kind.BACKWARD):
            return f"the {kind.name.lower()} of {self.units[subject].name}"
        if kind is Kind.REDUCE:
            return f"the gradient of {self.handles[subject].name}"
        if kind in (Kind.WAIT, Kind.FINISHED):
            return "waiting for other ranks"
        return f"{kind.name.lower()} in fsdp.join"

    def _list_modules(self) -> None:
        """Assign numbers to added modules; existing numbers, which regions use, do not change."""
        for name, found in self._root.module.named_modules():
            if found not in self._numbers:
                self._numbers[found] = len(self._modules)
                self._modules.append((name, found))

    def _number(self, module: nn.Module) -> int:
        if module not in self._numbers:
            self._list_modules()  # modules may have been added
        if module not in self._numbers:
            raise ValueError(
                f"fsdp.cond: this {type(module).__name__} is not inside {self._root.name}, so other ranks cannot "
                "identify it. Pass a module of the wrapped model."
            )
        return self._numbers[module]


class Place(NamedTuple):
    """The position of a call of a unit in the forward that all ranks share."""

    position: int = 0
    visit: Visit | None = None  # the mixed visit that contains it


_FIRST = Place()
_MANY = 100_000  # places in a forward, after which visits without a backward are dropped

_BITS_TOLD = 60  # flags in an integer of a message

# The mode of a backward: bits for the `GradientSync`, and a bit that is set if there are no gradients yet.
_SYNC, _WITHOUT_GRADIENTS, _BITS_OF_MODE = 3, 4, 3

TOLD = "_fsdp_told"  # set on exceptions that all ranks raise, or that cannot be sent to other ranks


def visits_of(runtime: Runtime) -> Visits:
    """Return the visits of a root's regions. Before the first call, the root uses no additional communication."""
    if not isinstance(runtime.participation, Visits):
        runtime.participation = Visits(runtime)
        runtime.passes.stop()  # serving ranks do not know the current pass of other ranks
    return runtime.participation


class Visits(Participation):
    """The regions of a root and its open visits: a `Participation` for ranks that run different modules.

    Calls that the runtime began before this object was attached have the first position.
    """

    may_differ = True

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._directory = Directory(runtime)
        self.talk = Talk(runtime.root.everyone, self._directory.describe)
        # Set during fsdp.join: performs operations of other ranks on this rank's shards, if this rank is finished.
        self.joining: Callable[[Message], None] | None = None
        self.is_finished = self.are_some_finished = False  # this rank; some ranks at the start of the last forward
        self.has_after_step = False  # True if finished ranks call a user's function after a step
        self.running_ranks = 0  # the number of ranks in the last forward
        self.is_uneven = False
        self._mode = 0  # the mode of the current backward, for ranks that join it
        self._open: list[Visit] = []  # running visits, the innermost last
        self._owed: list[Visit] = []  # mixed visits whose backward may follow
        self._touched: set[FlatParamHandle] = set()  # handles in `Region.around` of mixed visits
        self._visited: dict[Region, bool] = {}  # the regions visited in this forward; True for mixed visits
        self._count = 0  # the number of places in this forward
        self._places: WeakKeyDictionary[Call, Place] = WeakKeyDictionary()
        self._positions: dict[Unit, int] = {}
        self._within: dict[Unit, Region] = {}  # the region in which a unit ran last
        self._without_graph: set[Unit] = set()  # units whose last forward has no graph on this rank
        self._has_recomputed = False  # a unit with a graph was recomputed since backward last reached a call
        self._of_root: Visit | None = None

    @property
    def is_joining(self) -> bool:
        return self.joining is not None

    @property
    def repeats_steps(self) -> bool:
        return self.has_after_step or not self.is_joining

    def enter(self, call: Call, *, is_outermost: bool) -> None:
        """Record that a unit computes next. During `fsdp.join`, the root's forward is a visit of all ranks."""
        unit = call.unit
        if is_outermost and not self._open:
            self._begin_forward()
            if self.joining is not None and unit is self._runtime.root:
                self._of_root = self.open(unit.module, True)
        position = self._positions.get(unit, 0)
        if not call.recomputed:
            self._positions[unit] = position = self._next_position()
            self._without_graph.add(unit)
        elif unit in self._without_graph and not (self._open and self._open[-1].is_mixed):
            # Re-entrant checkpointing: all ranks that ran the unit recompute it after the same later calls.
            mixed = self._mixed_visit(unit, is_backward=True)
            self._wait_before(0 if mixed is None else mixed.position)
        if self._open:
            visit = self._open[-1]
            self._within[unit] = visit.region
            self._places[call] = Place(position, visit if visit.is_mixed else None)
            visit.add(unit)
            return
        self._places[call] = Place(position)
        if call.recomputed:
            return
        self._within.pop(unit, None)
        if any(unit in owed.region.units for owed in self._owed if owed.region in self._visited):
            raise RuntimeError(
                f"{unit.name} is called without fsdp.cond, in the forward in which only some ranks ran it with "
                "fsdp.cond. Use fsdp.cond for every call of it."
            )

    def leave(self, call: Call, output: Any, *, needs_backward: bool) -> None:
        if needs_backward:
            if not call.recomputed:
                self._without_graph.discard(call.unit)
            mixed = self._places.get(call, _FIRST).visit
            if mixed is not None and (not call.recomputed or mixed.is_reentrant):
                mixed.calls.append(call)
        if self._of_root is not None and call.unit is self._runtime.root and not call.recomputed:
            visit, self._of_root = self._of_root, None
            visit.is_differentiable = bool(differentiable_tensors(output))
            self.close(visit)

    def fail(self, unit: Unit) -> None:
        if self._of_root is not None and unit is self._runtime.root:
            visit, self._of_root = self._of_root, None
            self.give_up(visit, sys.exc_info()[1])

    def _begin_forward(self) -> None:
        self._visited.clear()
        if not self._owed or self._count > _MANY:
            self._owed.clear()
            self._count = 0

    def order(
        self, unit: Unit, usual: ExecutionOrder[Unit], *, is_backward: bool, is_recomputed: bool
    ) -> ExecutionOrder[Unit] | None:
        """Return an order of units that is equal on all ranks, or None to prevent prefetching; see `Participation`."""
        # Non-reentrant checkpointing starts at the first missing tensor, whose checkpoint depends on the modules that
        # this rank ran. Reentrant checkpointing starts at the same place on all ranks.
        if is_recomputed and self.is_uneven and unit not in self._without_graph:
            self._has_recomputed = True
            self._unshard(unit, is_backward, None)
            return None
        open_region = self._open[-1].region if self._open else None
        region = self._within.get(unit) if is_backward else open_region  # None: the unit runs in the root's order
        if self._mixed_visit(unit, is_backward) is not None:
            self._unshard(unit, is_backward, region)
            return None
        order = usual if region is None else region.orders[is_backward]
        if not is_backward or not self.is_uneven:
            return order
        order.enter(unit, is_gathered=False)  # may not be gathered on all ranks
        if unit is not self._runtime.root:
            unit.reshard()  # on some ranks, a recomputation has already unsharded it
        return None

    def _mixed_visit(self, unit: Unit, is_backward: bool) -> Visit | None:
        """Return the mixed visit in which a unit computes, so that operations must be announced; otherwise None."""
        if self._open:
            return self._open[-1] if self._open[-1].is_mixed else None
        owed = [visit for visit in self._owed if is_backward and unit in visit.units]
        return max(owed, key=lambda visit: visit.position, default=None)

    def _unshard(self, unit: Unit, is_backward: bool, region: Region | None) -> None:
        """Announce and unshard a unit; all ranks add the unit to the order of `region`."""
        missing = not all(handle.is_unsharded for handle in unit.handles)
        if missing:
            unit.reshard()  # some handles may be unsharded on this rank only
        number, kind = self._directory.units.index(unit), Kind.BACKWARD if is_backward else Kind.FORWARD
        mode = self._mode if is_backward else 0
        noted = 0 if region is None else region.number + 1
        message = Message(kind, number, missing, mode | noted << _BITS_OF_MODE)
        self.announce(message)
        self._note(message)
        unit.unshard()

    def announce_clip_norm(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> None:
        self.tell(Message(Kind.CLIP_NORM, int(error_if_nonfinite), bits_of(max_norm), bits_of(norm_type)))

    def announce_clip_value(self, clip_value: float) -> None:
        self.tell(Message(Kind.CLIP_VALUE, 0, bits_of(clip_value)))

    def tell(self, message: Message) -> bool:
        """Announce an operation to finished ranks, which perform it too. Return False if no rank is finished."""
        if self.is_finished or not self.are_some_finished:
            return False
        self.announce(message)
        return True

    def end_join(self) -> None:
        """Reset the state after `fsdp.join`; all ranks run the same operations again."""
        self.joining = self._of_root = None
        self.is_finished = self.are_some_finished = False
        self.abandon()
        self._count = 0

    def abandon(self) -> None:
        """Discard all visits after an aborted forward or backward."""
        for things in (self._open, self._owed, self._visited, self._touched):
            things.clear()

    def begin_backward(self) -> None:
        for region in self._directory.regions.values():
            region.orders[True].begin()
        for visit in self._owed:
            visit.reduced.clear()
        self.is_uneven = bool(self._owed)
        syncs = {unit.policy.sync.value for unit in self._runtime.units}
        if len(syncs) > 1 and self.joining is not None:
            raise NotImplementedError(
                "inside fsdp.join: units differ in how far they reduce gradients (set_requires_gradient_sync, "
                "set_requires_all_reduce), which ranks that have finished cannot know. Call these methods of the "
                "outermost module, with recurse=True."
            )
        listed = [param for handle in self._directory.handles for param in handle.listed_params]
        self._has_recomputed = False
        self._mode = min(syncs) | _WITHOUT_GRADIENTS * all(param.grad is None for param in listed)

    def reach(self, call: Call) -> None:
        """Record a call reached by backward, and serve until no rank is further from the end than this rank."""
        place = self._places.get(call, _FIRST)
        if place.visit is not None:
            if place.visit not in self._owed:
                raise RuntimeError(
                    f"{call.unit.name}: backward comes a second time, or after a later forward, through a module that "
                    "only some ranks ran with fsdp.cond or in fsdp.join; other ranks no longer wait for it. Run one "
                    "backward after each forward."
                )
            place.visit.reached.add(call)
        if self._has_recomputed:  # other ranks may still recompute mixed visits before they reach this call
            self._has_recomputed = False
            self._wait_at(place.position)
        else:
            self._wait_before(place.position)

    @property
    def announced(self) -> Collection[FlatParamHandle]:
        if not self.is_uneven:
            return ()
        units = {unit for visit in self._owed for unit in visit.units}
        return {handle for unit in units for handle in unit.handles} | self._touched

    def announce_gradient(self, unit: Unit, handle: FlatParamHandle) -> bool:
        """Announce the reduction of a gradient. Return False if it must wait until the end of backward (`_touched`)."""
        if handle in self._touched:
            return False
        visit = next((visit for visit in self._owed if visit.runs_here and unit in visit.units), None)
        if visit is not None:
            visit.reduced.add(handle)
            number = self._directory.handles.index(handle)
            self.announce(Message(Kind.REDUCE, number, 0, self._mode))
        return True

    def end_backward(self) -> None:
        """Record the end of backward on this rank, and serve until backward ends on all ranks."""
        for visit in list(self._owed):
            for unit in visit.units if visit.runs_here else ():
                for handle in unit.handles:
                    if handle not in visit.reduced and not handle.gradients.is_empty:
                        self._runtime.reduce(unit, handle)
        if self._owed:
            self._wait_at(END)
        self._close_backward(Kind.WAIT)

    def end_followed_backward(self) -> None:
        """Collective. End a backward in which this rank only takes part, because it is out of batches."""
        self._close_backward(Kind.FINISHED)
        self._runtime.finish_backward()
        self._runtime.synchronise(GradientSync.FULL)

    def _close_backward(self, kind: Kind) -> None:
        """Collective. Discard the visits reached by the ending backward on any rank."""
        owed, self._owed = self._owed, []
        for start in range(0, len(owed), _BITS_TOLD):
            some = owed[start : start + _BITS_TOLD]
            came = [bool(visit.reached) or (visit.runs_here and not visit.calls) for visit in some]
            bits = sum(1 << number for number, has_come in enumerate(came) if has_come)
            anywhere = reduce(or_, (row.extra for row in self.round(Message(kind, END, 0, bits))[0]))
            self._owed += [visit for number, visit in enumerate(some) if not anywhere >> number & 1]
        for unit in {unit for visit in owed for unit in visit.units}:
            if unit.state is not TrainingState.FORWARD:
                unit.reshard()  # may be unsharded on only some ranks
        self.is_uneven = False
        self._touched.clear()

    def announce(self, message: Message) -> list[Message]:
        """Announce this rank's next operation, and perform earlier operations; return the messages of all ranks."""
        while True:
            rows, event = self.round(message)
            if event is None or not message.is_event:
                return rows
            if event.topic != message.topic:
                self.perform(event, rows)
                continue
            if event.argument and not message.argument and event.kind in (Kind.FORWARD, Kind.BACKWARD):
                for handle in self._directory.units[event.subject].handles:
                    _serve_gather(handle)  # already unsharded on this rank, but not on another rank
            return rows

    def round(self, message: Message) -> tuple[list[Message], Message | None]:
        """Run a round: return the messages of all ranks, and the operation to perform first."""
        try:
            rows = self.talk.exchange(message)
            return rows, self.talk.event_in(rows)
        except RuntimeError as error:
            setattr(error, TOLD, True)
            raise

    def serve_one(self, position: int) -> bool:
        """Run a waiting round, and perform an announced operation; True if no rank waits at a later position."""
        rows, event = self.round(Message(Kind.WAIT, position))
        if event is not None:
            self.perform(event, rows)
            return False
        return max(row.subject for row in rows if row.kind == Kind.WAIT) <= position

    def _wait_before(self, position: int) -> None:
        """Wait at a position if backward must first pass later mixed visits."""
        if any(visit.position > position for visit in self._owed):
            self._wait_at(position)

    def _wait_at(self, position: int) -> None:
        while not self.serve_one(position):
            pass

    def perform(self, event: Message, rows: Sequence[Message]) -> None:
        if event.kind in (Kind.FORWARD, Kind.BACKWARD):
            self._serve_gather(event)
        elif event.kind == Kind.REDUCE:
            self._follow_backward(event)
            self._runtime.serve_reduction(self._directory.handles[event.subject])
        elif event.kind == Kind.VISIT:
            self._serve_visit(event, rows)
        elif event.kind == Kind.LEAVE:
            visit = self._directory.region_of_number(event.subject).last
            if visit is not None:
                self._leave(visit, rows)
        elif self.joining is not None:
            self.joining(event)

    def _serve_visit(self, event: Message, rows: Sequence[Message]) -> None:
        if not self._open and not self._runtime.is_computing:
            self._begin_forward()
        visit = self._enter(self._directory.region_of_number(event.subject), rows, False, event.extra)
        if visit is not None:
            self._run(visit, lambda: None)

    def _serve_gather(self, event: Message) -> None:
        unit = self._directory.units[event.subject]
        is_backward = event.kind == Kind.BACKWARD
        if is_backward:
            self._follow_backward(event)
        self._note(event)
        if event.argument:
            for handle in unit.handles:
                _serve_gather(handle)

    def _follow_backward(self, event: Message) -> None:
        """Join the backward of another rank, with the `_mode` in `event`, if no backward runs on this rank."""
        if self._runtime.is_in_backward:
            return
        if event.extra & _WITHOUT_GRADIENTS:
            for handle in self._runtime.handles:
                handle.zero_grad()
        self._runtime.synchronise(GradientSync(event.extra & _SYNC))
        self._runtime.follow_backward()

    def _note(self, message: Message) -> None:
        # All ranks do this in the same round, so that their predictions of the next pass are equal.
        noted = message.extra >> _BITS_OF_MODE
        if noted:
            region = self._directory.region_of_number(noted - 1)
            region.orders[message.kind == Kind.BACKWARD].enter(self._directory.units[message.subject])
            if region.last is not None:
                region.last.add(self._directory.units[message.subject])

    def visit(self, module: nn.Module, run_here: bool, compute: Callable[[], Any]) -> Any:
        """Collective. Return the result of `compute` if `run_here`; otherwise, join its collectives and return None."""
        if self._runtime.is_in_backward and in_backward():
            return self._recompute(self._directory.region(module), run_here, compute)
        visit = self.open(module, run_here)
        if visit is None:
            return None
        try:
            output = self._run(visit, compute)
        except BaseException as error:
            self.give_up(visit, error)
            raise
        self.close(visit)
        return output

    def _run(self, visit: Visit, compute: Callable[[], Any]) -> Any:
        if not visit.runs_here:
            while visit in self._open:  # join the operations of other ranks
                self.serve_one(visit.position)
            return None
        output = compute()
        visit.is_differentiable = bool(differentiable_tensors(output))
        return output

    def open(self, module: nn.Module, run_here: bool) -> Visit | None:
        """Collective. Begin a visit of a module's region; return None if no rank runs it."""
        region = self._directory.region(module)
        if not self._open and not self._runtime.is_computing:
            self._runtime.checks.trust_values(self._runtime.root)
            self._begin_forward()
        position = self._next_position()
        rows = self.announce(Message(Kind.VISIT, region.number, run_here, position))
        return self._enter(region, rows, run_here, position)

    def _recompute(self, region: Region, run_here: bool, compute: Callable[[], Any]) -> Any:
        # Checkpointing may stop before the end, at a different place on each rank, so this must not wait for other
        # ranks. The result of the forward's first round is still known. Units that are unsharded again are announced
        # as in backward.
        visit = region.last
        if run_here is not (visit is not None and visit.runs_here):
            raise RuntimeError(
                f"fsdp.cond: activation checkpointing recomputes {self._directory.name(region.number)} with "
                f"run_here={run_here}, unlike its forward. Determine run_here outside the checkpoint, or preserve its "
                "random state (preserve_rng_state=True)."
            )
        if visit is None:
            return None
        if visit.is_mixed and not visit.was_owed:
            # The forward had no graph, so this call is like a forward of all ranks. Backward reaches later regions
            # first, so wait for the ranks that recompute them.
            self._wait_at(visit.position)
            self._touched.update(region.around)
            visit.is_reentrant = True
            self._open.append(visit)
            output = self._run(visit, compute)
            self.close(visit)
            return output
        if not run_here:
            return None
        self._open.append(visit)
        try:
            return compute()
        finally:
            self._open.remove(visit)

    def close(self, visit: Visit) -> None:
        """End a visit's forward on this rank."""
        if not visit.is_mixed:
            self._open.remove(visit)
        elif visit.runs_here:
            rows = self.announce(Message(Kind.LEAVE, visit.region.number, visit.is_differentiable))
            self._leave(visit, rows)

    def give_up(self, visit: Visit, error: BaseException | None) -> None:
        """Abort a visit's forward on this rank. If `error` is an Exception, notify the ranks that take part."""
        is_told = visit.is_mixed and visit.runs_here and visit in self._open
        self.abandon()
        if not isinstance(error, Exception) or getattr(error, TOLD, False):
            return
        setattr(error, TOLD, True)
        if is_told:
            with suppress(RuntimeError):  # all ranks raise it; the original exception of this rank is more specific
                self.talk.exchange(Message(Kind.FAILED, visit.region.number))

    def _enter(self, region: Region, rows: Sequence[Message], run_here: bool, position: int) -> Visit | None:
        runs = [row.kind == Kind.VISIT and bool(row.argument) for row in rows]
        region.last = None
        if not any(runs):
            return None
        visit = Visit(region, position, len(self._open) + 1, run_here, is_mixed=not all(runs))
        before = self._visited.get(region)
        if before is not None and torch.is_grad_enabled() and (before or visit.is_mixed):
            raise RuntimeError(
                f"fsdp.cond: {self._directory.name(region.number)} runs a second time in one forward, and not on all "
                "ranks each time. Run it once with all of its inputs, or on all ranks or none."
            )
        self._visited[region] = visit.is_mixed
        self._owed = [owed for owed in self._owed if owed.region is not region]
        region.last = visit
        if visit.is_mixed and torch.is_grad_enabled():
            self._touched.update(region.around)
        if not self._open and self.joining is not None:
            self.are_some_finished, self.running_ranks = visit.is_mixed, sum(runs)
        region.orders[False].begin()
        self._open.append(visit)
        return visit

    def _leave(self, visit: Visit, rows: Sequence[Message]) -> None:
        if visit in self._open:  # it is not open if other ranks recompute a part that this rank does not run
            self._open.remove(visit)
        for unit in visit.units:
            unit.yet_to_run = NO_MODULES  # ranks may have run different modules of a group
            unit.reshard()  # makes the state equal on all ranks
        is_owed = any(row.argument for row in rows if row.kind == Kind.LEAVE)
        if is_owed:
            visit.was_owed = True
            self._owed.append(visit)
            self.is_uneven = self._runtime.is_in_backward

    def _next_position(self) -> int:
        if not self._open:
            self._count += 1
            return position_at(self._count)
        visit = self._open[-1]
        visit.places += 1
        return position_at(visit.places, visit.level, visit.position)


def _serve_gather(handle: FlatParamHandle) -> None:
    """Take part in an all-gather whose result only other ranks use; this rank's parameters do not change."""
    if handle.is_sharded:
        handle.absorb()
        handle.follow_shard()
        handle.storage.check(handle.name)
        if handle.kept_shard is not None and not handle.kept_shard.lasts:
            handle.kept_shard.forget()  # ranks that use the parameters have released their kept shard
        handle.serve_unshard()
