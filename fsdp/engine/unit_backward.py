"""`UnitBackward` knows how far backward has come with one unit.

A unit may run several times before the backward of all. Which parameters are used in which of its calls, ranks need
not have in common; that there was a call, and that backward comes to it, they have. So what they do together with a
unit in backward follows its calls.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp.engine.handle import FlatParamHandle


class UnitBackward:
    """Knows how far backward has come with a unit: with its calls, and with the gradients of parameters and inputs.

    Backward comes to the last call first: the *age* of a call is 1 for the last one that was made before backward
    began, and higher for older ones.

    Attributes:
        oldest: the age of the oldest call that was pending when backward began; 0 if there was none.
        reached: the age of the oldest call that backward has come to; 0 before it comes to any.
        missing: the handles whose gradients are not all there.
        complete: those whose gradients are, and that will be reduced when it is their turn.
    """

    def __init__(self) -> None:
        self._made = 0
        self._pending: dict[int, weakref.ref[Any]] = {}  # calls that no backward has come to, the oldest first
        self.begin(())

    def add(self, call: object) -> int:
        """Register a forward that has ended, and whose backward may run for as long as it lives; return its number."""
        self._made += 1
        while self._pending and next(reversed(self._pending.values()))() is None:
            self._pending.popitem()
        self._pending[self._made] = weakref.ref(call)
        return self._made

    def begin(self, handles: Iterable[FlatParamHandle]) -> None:
        """A backward begins, which may bring gradients of these handles.

        A backward inside of a forward, for instance, leaves pending calls for a later backward.
        """
        self._before_backward, self.reached = self._made, 0
        self._pending = {number: call for number, call in self._pending.items() if call() is not None}
        self.oldest = max(map(self._age, self._pending), default=0)
        self.missing = set(handles)
        self.complete: set[FlatParamHandle] = set()
        self._elsewhere: int | None = None  # references to unsharded parameters besides those of calls that it came to
        self._checkpoints: list[weakref.ref[Any]] = []  # of these calls
        self._inside: set[int] = set()  # ids of calls: backward has come to their outputs, and not to their inputs

    def reach(self, number: int) -> None:
        """Record that backward has come to a call."""
        self._pending.pop(number, None)
        self.reached = max(self.reached, self._age(number))

    def await_reads(self, references: int, of_call: int, checkpoints: Sequence[weakref.ref[Any]]) -> None:
        """Record what of a call that backward has come to will read parameters, perhaps after it has their gradients.

        Args:
            references: to the memory of the unsharded parameters, which are here.
            of_call: the references of the call's graph.
            checkpoints: of the call, see `Call`.
        """
        self._elsewhere = (references if self._elsewhere is None else self._elsewhere) - of_call
        self._checkpoints += checkpoints

    @property
    def has_counted(self) -> bool:
        """Return whether references to the unsharded parameters have been counted in this backward."""
        return self._elsewhere is not None

    def reads_on(self, references: int) -> bool:
        """Return whether backward will read parameters again in calls that it has come to, given the references now.

        Operations on detached parameters have saved them, or a checkpoint around inner units is not recomputed yet.
        """
        if self._elsewhere is not None and references > self._elsewhere:
            return True
        return bool(self._checkpoints) and any(checkpoint() is not None for checkpoint in self._checkpoints)

    def await_inputs(self, call: object) -> None:
        """Record that backward continues through the inputs of a call that it has come to, until `leave`."""
        self._inside.add(id(call))

    def leave(self, call: object) -> None:
        """Record that backward has the gradients of the inputs of a call."""
        self._inside.discard(id(call))

    @property
    def may_come(self) -> bool:
        """Return whether backward may come to calls yet that are older than those that it has come to."""
        return self.reached < self.oldest

    @property
    def is_over(self) -> bool:
        """Return whether backward has come to all calls, perhaps not with all gradients yet."""
        return self.reached >= max(self.oldest, 1)

    @property
    def is_through(self) -> bool:
        """Return whether backward has come to all calls, with all gradients of parameters and of inputs."""
        return not (self.missing or self._inside or self.reached < self.oldest)

    def _age(self, number: int) -> int:
        return self._before_backward - number + 1
