"""How a rank takes part in what others run and it does not: gathers, reductions, and the order of backwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING

from fsdp.engine.forward_hooks import Call, TrainingState
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.unit import Unit
from fsdp.uneven.messages import Kind, Message, Talk
from fsdp.uneven.regions import Directory, Region, Visit

if TYPE_CHECKING:
    from fsdp.engine.runtime import Runtime
    from fsdp.uneven.join import Joining

END = -1  # the position behind everything that backward passes

_BITS = 60  # in one number of a message

TOLD = "_fsdp_told"  # on an exception that all ranks raise, or that cannot be told to them


class Serving:
    """The backward half of `Visits`: what was agreed in forward is served here.

    Args:
        runtime: of the root.
    """

    _enter: Callable[[Region, Sequence[Message], bool, int], Visit | None]
    _leave: Callable[[Visit, Sequence[Message]], None]
    follow: Callable[[Visit], None]
    begin_forward: Callable[[], None]

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._directory = Directory(runtime.root, runtime.units, runtime.handles)
        self.talk = Talk(runtime.root.everyone, self._directory.describe)
        self._open: list[Visit] = []  # that are running, the innermost last
        self._owed: list[Visit] = []  # mixed ones whose backward may come
        self._mixed: set[Unit] = set()  # units of mixed visits, which may be whole on some ranks only
        self._touched: set[FlatParamHandle] = set()  # of units around regions that ran somewhere
        self.is_uneven = False  # ranks run, and recompute, different things in this backward
        self.joining: Joining | None = None

    # --- what the runtime asks in backward ----------------------------------------------------------------------

    def begin_backward(self) -> None:
        """A backward begins."""
        for region in self._directory.regions:
            region.backward_order.begin()
        for visit in self._owed:
            visit.reduced.clear()
        self.is_uneven = bool(self._owed)

    def wait(self, call: Call) -> None:
        """In backward, before the unit of `call`: serve until no rank is further from the end than this one."""
        if any(visit.position > call.position for visit in self._owed):
            self._wait_at(call.position)

    def reach(self, unit: Unit, call: Call) -> None:
        """Backward has reached a call.

        Raises:
            RuntimeError: if other ranks no longer wait for that.
        """
        if call.visit is None:
            return
        if call.visit not in self._owed:
            raise RuntimeError(
                f"{unit.name}: backward comes a second time, or after a later forward, through a module that only some "
                "ranks ran with fsdp.cond or in fsdp.join; the others no longer wait for it. Run one backward after "
                "each forward."
            )
        call.visit.reached.add(call)

    def announce_gradient(self, unit: Unit, handle: FlatParamHandle) -> None:
        """A gradient is complete, and is about to be reduced (or left to accumulate)."""
        visit = next((visit for visit in self._owed if visit.runs_here and unit in visit.units), None)
        if visit is not None:
            visit.reduced.add(handle)
            number = self._directory.handles.index(handle)
            self.announce(Message(Kind.REDUCE, number, 0, self._runtime.backward_mode))

    def end_backward(self) -> None:
        """Backward has ended here: serve until it has on all ranks."""
        for visit in list(self._owed):
            for unit in visit.units if visit.runs_here else ():
                for handle in unit.handles:
                    if handle not in visit.reduced and not handle.gradients.is_empty:
                        self._runtime.reduce(unit, handle)
        if self._owed:
            self._wait_at(END)
            self.settle_owed(Kind.WAIT)

    def settle_owed(self, kind: Kind) -> None:
        """Collective. At the end of a backward: it is over for those visits that it came to, on any rank."""
        owed, self._owed = self._owed, []
        for start in range(0, len(owed), _BITS):
            some = owed[start : start + _BITS]
            came = [bool(visit.reached) or (visit.runs_here and not visit.calls) for visit in some]
            bits = sum(1 << number for number, has_come in enumerate(came) if has_come)
            anywhere = reduce(or_, (row.extra for row in self.round(Message(kind, END, 0, bits))[0]))
            self._owed += [visit for number, visit in enumerate(some) if not anywhere >> number & 1]

    def take_mixed(self) -> set[Unit]:
        """Units that may be whole on some ranks only; backward is over, so they should be whole on none."""
        self.is_uneven = False
        mixed, self._mixed = self._mixed, {unit for visit in self._owed for unit in visit.units}
        return mixed

    def is_touched(self, handle: FlatParamHandle) -> bool:
        """Whether it has a part of a module that only some ranks ran."""
        return handle in self._touched

    def take_touched(self) -> set[FlatParamHandle]:
        """Handles with a part of a module that only some ranks ran: all must reduce their gradients."""
        touched, self._touched = self._touched, set()
        return touched

    # --- rounds -------------------------------------------------------------------------------------------------

    def announce(self, message: Message) -> list[Message]:
        """Tell all ranks what this one is about to do, and take part in what comes first; the messages of all."""
        while True:
            rows, event = self.round(message)
            if event is None or not message.is_event:
                return rows
            if event.topic != message.topic:
                self.perform(event, rows)
                continue
            if event.argument and not message.argument and event.kind in (Kind.FORWARD, Kind.BACKWARD):
                for handle in self._directory.units[event.subject].handles:
                    handle.serve_gather()  # it is whole here already, and not there
            return rows

    def round(self, message: Message) -> tuple[list[Message], Message | None]:
        """One round: the messages of all, and what of it is done first."""
        try:
            rows = self.talk.exchange(message)
            return rows, self.talk.event_in(rows)
        except RuntimeError as error:
            setattr(error, TOLD, True)
            raise

    def serve_one(self, position: int) -> bool:
        """One round of waiting, with what others announce in it. True if no rank is further than `position`."""
        rows, event = self.round(Message(Kind.WAIT, position))
        if event is not None:
            self.perform(event, rows)
            return False
        return max(row.subject for row in rows if row.kind == Kind.WAIT) <= position

    def _wait_at(self, position: int) -> None:
        while not self.serve_one(position):
            pass

    # --- taking part --------------------------------------------------------------------------------------------

    def perform(self, event: Message, rows: Sequence[Message]) -> None:
        """Take part in what another rank does."""
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
            self.joining.perform(event)

    def _serve_visit(self, event: Message, rows: Sequence[Message]) -> None:
        if not self._open and not self._runtime.is_computing:
            self.begin_forward()
        visit = self._enter(self._directory.region_of_number(event.subject), rows, False, event.extra)
        if visit is not None:
            self.follow(visit)

    def _serve_gather(self, event: Message) -> None:
        unit = self._directory.units[event.subject]
        is_backward = event.kind == Kind.BACKWARD
        if is_backward:
            self._follow_backward(event)
        elif unit.state is TrainingState.IDLE:
            unit.follow_mode()
        self._note(event)
        if event.argument:
            for handle in unit.handles:
                handle.serve_gather()

    def _follow_backward(self, event: Message) -> None:
        self._runtime.follow_backward(is_reduced=bool(event.extra & 1), is_fresh=bool(event.extra & 2))

    def mixed_visit(self, unit: Unit, is_backward: bool) -> Visit | None:
        """The visit in which a unit computes now, if that has to be announced to other ranks."""
        if self._open:
            return self._open[-1] if self._open[-1].is_mixed else None
        owed = [visit for visit in self._owed if is_backward and unit in visit.units]
        return max(owed, key=lambda visit: visit.position, default=None)

    def gather(self, unit: Unit, is_backward: bool, region: Region | None) -> None:
        """Gather a unit with the other ranks, which do not know about it.

        Args:
            unit: what to gather.
            is_backward: what for.
            region: in whose order all ranks are to note it.
        """
        gathers = not unit.is_unsharded
        if gathers:
            unit.reshard()  # a part of it may be whole, here and not elsewhere
        number, kind = self._directory.units.index(unit), Kind.BACKWARD if is_backward else Kind.FORWARD
        mode = self._runtime.backward_mode if is_backward else 0
        noted = 0 if region is None else region.number + 1
        message = Message(kind, number, gathers, mode | noted << 2)
        self.announce(message)
        self._note(message)
        unit.unshard()

    def _note(self, message: Message) -> None:
        # At the same time on all ranks, so that all expect the same the next time.
        noted = message.extra >> 2
        if noted:
            region = self._directory.region_of_number(noted - 1)
            region.order(message.kind == Kind.BACKWARD).enter(self._directory.units[message.subject])
            if region.last is not None:
                region.last.add(self._directory.units[message.subject])
