"""The recorded order of units, which predicts the next unit so that it can be unsharded in advance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class ExecutionOrder(Generic[T]):
    """Records each pass and predicts the next pass from the last one.

    At the first difference, prediction stops until the end of the pass, and the next pass is predicted from the actual
    order. An order that occurred twice in succession is *settled*.
    """

    def __init__(self) -> None:
        self._last: list[T] = []
        self._ahead: list[Sequence[T]] = []  # for each place of the last pass, what `enter` returns
        self._current: list[T] = []
        self._on_course = False
        self.is_settled = False

    def begin(self) -> None:
        """Start a new pass; the previous pass, if it was recorded, becomes the prediction."""
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
        self._on_course = False
        return ()

    def at_expected_end(self) -> bool:
        """Return whether the item entered last ended the last two passes as well."""
        return self.is_settled and self._on_course and len(self._current) == len(self._last)


def _next_two(order: Sequence[T], place: int) -> Sequence[T]:
    ahead: list[T] = []
    for number in range(place + 1, len(order)):
        # A unit may run several times in a row (recomputed, or shared): its parameters are here already.
        if order[number] is not order[place] and not (ahead and order[number] is ahead[0]):
            ahead.append(order[number])
            if len(ahead) == 2:
                break
    return ahead
