"""Samples of grids: few enough to run, with every value of every option and many pairs of values.

Defects that need a certain value of one option are found as the whole product would find them, those that need two
often; what needs three is found by chance.
"""

from __future__ import annotations

import heapq
import itertools
from collections import UserList
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest


def every_pair(*, at_most: int | None = None, **values: Sequence[Any]) -> list[dict[str, Any]]:
    """Rows with one value for each option, in which every pair of values of two options occurs.

    The row with most pairs that are still missing is taken each time, the first of several; so the same call
    gives the same rows, and the very first one has the first value of every option.

    Where a row is dear, `at_most` says how many there may be. Then rows with values that have not occurred come first,
    and the last few pairs, which take about half of all rows, are left out.
    """
    names = list(values)
    rows = [tuple(enumerate(row)) for row in itertools.product(*(range(len(v)) for v in values.values()))]
    pairs = [set(itertools.combinations(row, 2)) for row in rows]
    missing = set().union(*pairs)
    new = set(itertools.chain(*rows)) if at_most else set()  # values

    def worth(number: int) -> tuple[int, int]:
        return len(new.intersection(rows[number])), len(pairs[number] & missing)

    # By what each row was worth when it was last looked at, which is never less than it is worth now.
    queue = [(-first, -second, number) for number, (first, second) in enumerate(map(worth, range(len(rows))))]
    heapq.heapify(queue)
    chosen = []
    while missing and len(chosen) != at_most:
        *known, number = heapq.heappop(queue)
        first, second = worth(number)
        if [-first, -second] != known:
            heapq.heappush(queue, (-first, -second, number))
            continue
        missing -= pairs[number]
        new.difference_update(rows[number])
        chosen.append({names[option]: values[names[option]][choice] for option, choice in rows[number]})
    if new:
        raise ValueError(f"{at_most} rows are too few for every value to occur in one")
    return chosen


def parametrize_pairs(*, at_most: int | None = None, **values: Sequence[Any]) -> Callable[..., Any]:
    """As `pytest.mark.parametrize` for several arguments, of which every value and many pairs of values are tried.

    Without `at_most` there are a quarter as many rows as every pair would take, or what every value takes.
    """
    return pytest.mark.parametrize(list(values), _Sample(at_most, values, lambda row: tuple(row.values())))


@dataclass(frozen=True)
class Case:
    """A row of a grid, whose values are attributes."""

    values: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self.values:  # pickle asks for methods before there are values
            raise AttributeError(f"the grid has no {name}")
        return self.values[name]

    def only(self, *names: str) -> dict[str, Any]:
        """Return the values of these names, to be passed on as options."""
        return {name: self.values[name] for name in names}


def parametrize_cases(*, at_most: int | None = None, **values: Sequence[Any]) -> Callable[..., Any]:
    """As `parametrize_pairs`, for a test that takes all values as a `case`; `world_size` stays an argument."""
    if "world_size" not in values:
        return pytest.mark.parametrize("case", _Sample(at_most, values, lambda row: (Case(row),)))
    sample = _Sample(at_most, values, lambda row: (row.pop("world_size"), Case(row)))
    return pytest.mark.parametrize(("world_size", "case"), sample)


class _Sample(UserList[Any]):
    """Rows that are chosen when they are first looked at: ranks import tests as well, and never do."""

    def __init__(
        self, at_most: int | None, values: dict[str, Sequence[Any]], make: Callable[..., tuple[Any, ...]]
    ) -> None:
        self._at_most, self._values, self._make = at_most, values, make

    @cached_property
    def data(self) -> list[Any]:
        at_most, values = self._at_most, self._values
        if at_most is None:
            at_most = max(*map(len, values.values()), len(every_pair(**values)) // 4)
        rows = every_pair(at_most=at_most, **values)
        ids = ["-".join(map(_shown, row.values())) for row in rows]
        return [pytest.param(*self._make(row), id=name) for row, name in zip(rows, ids, strict=True)]


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "-".join(f"{name}={_shown(each)}" for name, each in value.items()) or "default"
    return getattr(value, "__name__", str(value))
