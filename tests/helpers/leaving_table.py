"""The table of docs/leaving.md: how exactly trainings go to other libraries and back."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from tests.helpers.forms import FORMS
from tests.helpers.leaving import CLOSE, PAGE, RANKS, WAYS, Way, cross
from tests.helpers.ranks import RankError, RankPool

BEGIN, END = "<!-- begin: python -m tests.tools.compare_leaving --write -->", "<!-- end -->"
# Two gradients have one sum. Of more of them, or of the batches of all ranks, each library has an order of its own.
SAME_ORDER = {"plain torch": [1], "transformers": [1]}


class Outcome(NamedTuple):
    """One crossing; `losses` are the differences on the ranks, and None if weights or optimizer were not the same."""

    world_size: int
    losses: Sequence[float] | None

    @property
    def is_same(self) -> bool:
        return self.losses is not None and max(self.losses) <= CLOSE


class Row(NamedTuple):
    """A line of the table: on which numbers of ranks all bits are the same, and on which also the next loss."""

    way: Way
    ranks: list[int]
    exact: list[int]

    @classmethod
    def of(cls, way: Way, outcomes: Sequence[Outcome]) -> Row:
        sizes = sorted({one.world_size for one in outcomes})
        same = [size for size in sizes if all(one.is_same for one in outcomes if one.world_size == size)]
        inexact = {one.world_size for one in outcomes if one.losses is None or any(one.losses)}
        ordered = SAME_ORDER.get(way.library, [1, 2])
        return cls(way, same, [size for size in same if size in ordered and size not in inexact])

    def __str__(self) -> str:
        section, library = self.way
        anchor = re.sub(r"[^\w -]", "", section).lower().replace(" ", "-")
        bits = "yes" if self.ranks else "no"
        cells = [library, f"[{section}](#{anchor})", bits, bits, bits, _listed(self.ranks), _listed(self.exact)]
        return f"| {' | '.join(cells)} |"

    @classmethod
    def read(cls, line: str) -> Row:
        library, section, *_, ranks, exact = (cell.strip() for cell in line.strip("|").split(" | "))
        ways = Way(section.removeprefix("[").partition("](")[0], library)
        return cls(ways, *([int(size) for size in re.findall(r"\d+", cell)] for cell in (ranks, exact)))


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes)) or "none"


def rows_in_page() -> dict[Way, Row]:
    """Return the lines of the table in the page."""
    text = PAGE.read_text("utf-8").partition(BEGIN)[2].partition(END)[0]
    rows = [Row.read(line) for line in text.strip().splitlines()[2:]]
    return {row.way: row for row in rows}


def write(table: str) -> None:
    """Put a table in the page."""
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.partition(END)[2]}", "utf-8")


def table() -> str:
    """Return the table, of every crossing in both directions."""
    head = "library | by | model | optimizer | bits equal | on ranks | next loss equal to the bit on ranks"
    with TemporaryDirectory() as folder:
        pool = RankPool(Path(folder), ["transformers.models.llama.modeling_llama"])
        try:
            rows = [Row.of(way, _outcomes(pool, way, Path(folder))) for way in WAYS]
        finally:
            pool.close()
    return "\n".join([f"| {head} |", "|---|---|---|---|---|---|---|", *map(str, rows)])


def _outcomes(pool: RankPool, way: Way, folder: Path) -> list[Outcome]:
    found = []
    for is_back, form, size in product([False, True], FORMS, RANKS):
        with TemporaryDirectory(dir=folder) as place:
            try:
                losses = pool(size).run(cross, way, is_back, form, Path(place))
            except RankError as error:
                print(f"{way}, {'back' if is_back else 'there'}, {form}, {size} ranks: {error}", file=sys.stderr)
                losses = None
        found.append(Outcome(size, losses))
    return found
