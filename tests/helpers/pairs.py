"""Samples of grids: few enough to run, and every two values of two options still meet.

Defects that need a certain value of one option, or of two together, are found as the whole product would find
them; what needs three is found by chance.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest


def every_pair(**values: Sequence[Any]) -> list[dict[str, Any]]:
    """Rows with one value for each option, in which every pair of values of two options occurs.

    The row with most pairs that are still missing is taken each time, the first of several; so the same call
    gives the same rows, and the very first one has the first value of every option.
    """
    names = list(values)
    rows = [tuple(enumerate(row)) for row in itertools.product(*(range(len(v)) for v in values.values()))]
    pairs = [set(itertools.combinations(row, 2)) for row in rows]
    missing = set().union(*pairs)
    # By how many missing pairs each row had when it was last looked at, which is never less than it has now.
    queue = [(-len(found), number) for number, found in enumerate(pairs)]
    chosen = []
    while missing:
        known, number = heapq.heappop(queue)
        found = len(pairs[number] & missing)
        if found < -known:
            heapq.heappush(queue, (-found, number))
            continue
        missing -= pairs[number]
        chosen.append({names[option]: values[names[option]][choice] for option, choice in rows[number]})
    return chosen


def parametrize_pairs(**values: Sequence[Any]) -> Callable[..., Any]:
    """As `pytest.mark.parametrize` for several arguments, of which only every pair of values is tried."""
    rows = [pytest.param(*row.values(), id="-".join(map(_shown, row.values()))) for row in every_pair(**values)]
    return pytest.mark.parametrize(list(values), rows)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "-".join(f"{name}={_shown(each)}" for name, each in value.items()) or "default"
    return getattr(value, "__name__", str(value))
