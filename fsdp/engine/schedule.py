"""The order in which units run, learned by watching, so that the next one can be unsharded before it is needed."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")


class ExecutionOrder(Generic[T]):
    """Records one pass after the other and predicts from the last one.

    The prediction stops for the rest of a pass at the first difference, and the next pass is predicted from what
    really happened. An order that was seen twice running is *settled*.
    """

    def __init__(self) -> None:
        self._last: list[T] = []
        self._ahead: list[Sequence[T]] = []  # for each place of the last pass, what `enter` returns
        self._current: list[T] = []
        self._on_course = False
        self.is_settled = False

    def begin(self) -> None:
        """A new pass starts; the one before, if it recorded anything, becomes what is expected."""
        if self._current:
            self.is_settled = self._on_course and len(self._current) == len(self._last)
            if not self.is_settled:
                self._last = self._current
                self._ahead = [_next_two(self._last, place) for place in range(len(self._last))]
            self._current = []
        self._on_course = bool(self._last)

    def enter(self, item: T) -> Sequence[T]:
        """`item` runs now. Returns the next two other ones expected, fewer if there are none or it can't be known."""
        place = len(self._current)
        self._current.append(item)
        if self._on_course and place < len(self._last) and self._last[place] is item:
            return self._ahead[place]
        self._on_course = self.is_settled = False
        return ()

    def at_expected_end(self) -> bool:
        """Return whether the item entered last ended the last two passes as well."""
        return self.is_settled and self._on_course and len(self._current) == len(self._last)


def _next_two(order: Sequence[T], place: int) -> Sequence[T]:
    ahead: list[T] = []
    for number in range(place + 1, len(order)):
        # A unit may run several times in a row (recomputed, or shared): what it needs is here already.
        if order[number] is not order[place] and not (ahead and order[number] is ahead[0]):
            ahead.append(order[number])
            if len(ahead) == 2:
                break
    return ahead


class Numbered(Protocol):
    """A forward of a unit."""

    number: int


class UnitCalls:
    """The forwards of one unit, and which of them backward has come to.

    A unit may run several times before the backward of all. Which parameters are used in which of its calls, ranks need
    not have in common; that there was a call, and that backward comes to it, they have. So what they do together with
    a unit in backward follows its calls. Backward comes to the last one first: the *age* of a call is 1 for the last
    one that was made before backward began, and higher for older ones.

    Attributes:
        oldest: the age of the oldest call of which there is a graph, when backward began; 0 if there was none.
        reached: the age of the oldest call that backward has come to; 0 before it comes to any.
    """

    def __init__(self) -> None:
        self.oldest = self.reached = 0
        self._made = self._before_backward = 0
        self._with_graph: list[weakref.ref[Numbered]] = []  # those made since the last backward began

    def add(self, call: Numbered) -> None:
        """Backward may come to this forward, which has just ended, for as long as it lives."""
        self._made += 1
        call.number = self._made
        calls = self._with_graph
        while calls and calls[-1]() is None:
            calls.pop()
        calls.append(weakref.ref(call))

    def begin_backward(self) -> None:
        """A backward begins. Older calls that it does not come to are not expected in later ones."""
        self._before_backward, self.reached = self._made, 0
        self.oldest = max((self._age(call) for call in (each() for each in self._with_graph) if call), default=0)
        self._with_graph.clear()

    def reach(self, call: Numbered) -> None:
        """Backward has come to a call."""
        self.reached = max(self.reached, self._age(call))

    @property
    def may_come(self) -> bool:
        """Return whether backward may come to calls yet that are older than those that it has come to."""
        return self.reached < self.oldest

    def _age(self, call: Numbered) -> int:
        return self._before_backward - call.number + 1
