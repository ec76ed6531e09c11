"""Tests of timeouts of sockets, which no clock of a test can replace: their times become longer until they suffice."""

from __future__ import annotations

from collections.abc import Callable

PACES = (1.0, 10.0)


def at_some_pace(check: Callable[[float], None]) -> None:
    """Call a function with a factor for all of its times, and again with a larger one if an error shows a timeout.

    On a busy machine, what sleeps for a tenth of a second may sleep for a whole one. What is wrong fails at each pace.
    """
    for pace in PACES[:-1]:
        try:
            return check(pace)
        except (OSError, RuntimeError):  # other ranks of a `TimeoutError` have a `RuntimeError`
            continue
    return check(PACES[-1])
