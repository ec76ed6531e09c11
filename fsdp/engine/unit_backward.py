"""`UnitBackward` records the progress of backward through one unit.

A unit may run multiple times before a backward. Ranks may use a parameter in different calls of the unit, but all ranks
run the same calls, and backward reaches the same calls on all ranks. Collectives of a unit in backward are therefore
ordered by its calls.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp.engine.handle import FlatParamHandle


class UnitBackward:
    """Records the progress of backward through a unit: calls reached, and gradients of parameters and inputs.

    Backward reaches the last call first: the *age* of a call is 1 for the last call before backward began, and higher
    for earlier calls.

    Attributes:
        oldest: the age of the oldest pending call when backward began; 0 if there was none.
        reached: the age of the oldest reached call; 0 before the first.
        missing: the handles with incomplete gradients.
        complete: the handles with complete gradients that wait for their turn to be reduced.
    """

    def __init__(self) -> None:
        self._made = 0
        self._pending: dict[int, weakref.ref[Any]] = {}  # calls that no backward has reached, the oldest first
        self.begin(())

    def add(self, call: object) -> int:
        """Register a finished forward whose backward may run as long as `call` is alive; return the call's number."""
        self._made += 1
        while self._pending and next(reversed(self._pending.values()))() is None:
            self._pending.popitem()
        self._pending[self._made] = weakref.ref(call)
        return self._made

    def begin(self, handles: Iterable[FlatParamHandle]) -> None:
        """Begin a backward that may bring gradients of these handles.

        Pending calls may remain for a later backward, for example if this backward runs during a forward.
        """
        self._before_backward, self.reached = self._made, 0
        self._pending = {number: call for number, call in self._pending.items() if call() is not None}
        self.oldest = max(map(self._age, self._pending), default=0)
        self.missing = set(handles)
        self.complete: set[FlatParamHandle] = set()
        self._elsewhere: int | None = None  # references to unsharded parameters, except from reached calls
        self._checkpoints: list[weakref.ref[Any]] = []  # of the reached calls
        self._inside: set[int] = set()  # ids of calls: backward reached the outputs, but not the inputs

    def reach(self, number: int) -> None:
        """Record that backward reached a call."""
        self._pending.pop(number, None)
        self.reached = max(self.reached, self._age(number))

    def await_reads(self, references: int, of_call: int, checkpoints: Sequence[weakref.ref[Any]]) -> None:
        """Record the parts of a reached call that will read parameters, perhaps after all gradients have arrived.

        Args:
            references: the number of references to the memory of the unsharded parameters.
            of_call: the references of the call's graph.
            checkpoints: the call's checkpoints, see `Call`.
        """
        self._elsewhere = (references if self._elsewhere is None else self._elsewhere) - of_call
        self._checkpoints += checkpoints

    @property
    def has_counted(self) -> bool:
        """Return whether references to the unsharded parameters have been counted in this backward."""
        return self._elsewhere is not None

    def reads_on(self, references: int) -> bool:
        """Return whether backward will read parameters again in reached calls, given the present references.

        Operations on detached parameters may have saved them, or a checkpoint around inner units is not recomputed yet.
        """
        if self._elsewhere is not None and references > self._elsewhere:
            return True
        return bool(self._checkpoints) and any(checkpoint() is not None for checkpoint in self._checkpoints)

    def await_inputs(self, call: object) -> None:
        """Record that backward continues through the inputs of a reached call, until `leave`."""
        self._inside.add(id(call))

    def leave(self, call: object) -> None:
        """Record that backward computed the gradients of the inputs of a call."""
        self._inside.discard(id(call))

    @property
    def may_come(self) -> bool:
        """Return whether backward may still reach older calls."""
        return self.reached < self.oldest

    @property
    def is_over(self) -> bool:
        """Return whether backward has reached all calls, even if gradients are incomplete."""
        return self.reached >= max(self.oldest, 1)

    @property
    def is_through(self) -> bool:
        """Return whether backward has reached all calls and all gradients of parameters and inputs have arrived."""
        return not (self.missing or self._inside or self.reached < self.oldest)

    def _age(self, number: int) -> int:
        return self._before_backward - number + 1
