"""Run the programs of `tests/helpers/silent_failures.py` with each library, as a table for docs/faults.md.

    python -m tests.tools.silent_failures            # print the table
    python -m tests.tools.silent_failures --write    # put it in the page

`tests/training/test_silent_failures.py` compares the page with results of the torch version that the page names.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

from tests.helpers.ranks import RankPool
from tests.helpers.silent_failures import CASES, LIBRARIES, OURS, PEERS, RIGHT, WARNED, WRONG, Case, outcome

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "faults.md"
BEGIN, END = "<!-- begin: python -m tests.tools.silent_failures --write -->", "<!-- end -->"
VERSION = torch.__version__.partition("+")[0]
LENGTH = 64  # characters of a peer's message


def conditions() -> str:
    """Return the line above the table."""
    return f"torch {VERSION}, CPU, gloo, 2 ranks:"


def cell(result: str, library: str) -> str:
    """Return a result as the table shows it."""
    if result in (RIGHT, WRONG):
        return result if result == RIGHT else f"**{result}**"
    if result.startswith(WARNED):
        if library in OURS:
            return "a warning that names it"
        return f"**{WARNED.strip()}** {_shortened(result.removeprefix(WARNED))}"
    return "an error that names it" if library in OURS else _shortened(result)


def _shortened(message: str) -> str:
    message = message.replace("`", "").replace("|", "\\|")
    return f"`{message if len(message) <= LENGTH else message[:LENGTH].rstrip() + '...'}`"


def row(case: Case, cells: dict[str, str]) -> str:
    """Return a row of the table; both libraries of this package share a cell if their results are equal."""
    first, second = (cells[library] for library in OURS)
    ours = first if first == second else f"{OURS[0]}: {first}; {OURS[1]}: {second}"
    return " | ".join([f"| [{case.title}](#{case.anchor})", *(cells[peer] for peer in PEERS), f"{ours} |"])


def table(pool: RankPool) -> str:
    """Run all cases and return the table."""
    ranks = pool(2, timeout=60, grace=1)
    lines = [conditions(), "", f"| case | {' | '.join(PEERS)} | fsdp |", "|---|---|---|---|"]
    for case in CASES:
        lines.append(row(case, {name: cell(outcome(ranks, case.title, name), name) for name in LIBRARIES}))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the table in docs/faults.md")
    write = parser.parse_args().write
    with tempfile.TemporaryDirectory() as folder:
        pool = RankPool(Path(folder))
        try:
            text = table(pool)
        finally:
            pool.close()
    if write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.partition(END)[2]}")
    else:
        print(text)


if __name__ == "__main__":
    main()
