"""The order in which units run, learned by watching, so that the next one can be unsharded before it is needed."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class ExecutionOrder(Generic[T]):
    """Records one pass after the other and predicts from the last one.

    The prediction stops for the rest of a pass at the first difference, and the next pass is predicted from what
    really happened. An order that was seen twice running is *settled*.
    """

    def __init__(self) -> None:
        self._last: list[T] = []
        self._current: list[T] = []
        self._on_course = False
        self.is_settled = False

    def begin(self) -> None:
        """A new pass starts; the one before, if it recorded anything, becomes what is expected."""
        if self._current:
            self.is_settled = self._on_course and len(self._current) == len(self._last)
            self._last, self._current = self._current, []
        self._on_course = bool(self._last)

    def enter(self, item: T) -> list[T]:
        """`item` runs now. Returns the next two other ones expected, fewer if there are none or it can't be known."""
        place = len(self._current)
        self._current.append(item)
        if not self._on_course:
            return []
        if place >= len(self._last) or self._last[place] is not item:
            self._on_course = self.is_settled = False
            return []
        ahead: list[T] = []
        for number in range(place + 1, len(self._last)):
            following = self._last[number]
            # A unit may run several times in a row (recomputed, or shared): what it needs is here already.
            if following is not item and not (ahead and following is ahead[0]):
                ahead.append(following)
                if len(ahead) == 2:
                    break
        return ahead

    def at_expected_end(self) -> bool:
        """Return whether the item entered last ended the last two passes as well."""
        return self.is_settled and self._on_course and len(self._current) == len(self._last)
