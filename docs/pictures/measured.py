"""Draws docs/pictures/measured.svg from the table of results in docs/benchmarks.md.

python docs/pictures/measured.py
"""

from __future__ import annotations

import re
from pathlib import Path

from _svg import GRADIENT, PEER, UNSHARDED, Drawing

HERE = Path(__file__).parent


def figures(page: str) -> list[tuple[str, float, float]]:
    """Return the model, and its time and CPU time for communication relative to the best peer."""
    section = page.split("\n## Results\n")[1].split("\n##")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    measured = [row for row in rows if len(row) > 2 and re.fullmatch(r"0\.\d\d", row[1])]
    return [(row[0].replace("`", ""), float(row[1]), float(row[2])) for row in measured]


def draw(page: str, path: Path) -> None:
    rows = figures(page)
    drawing = Drawing(900, 60 + 66 * len(rows))
    drawing.legend(350, 10, (UNSHARDED, "time of a step"), (GRADIENT, "CPU time for communication"), step=150)
    for row, (what, *parts) in enumerate(rows):
        y = 44 + 66 * row
        drawing.text(340, y + 30, what, anchor="end")
        for bar, (part, color) in enumerate(zip(parts, (UNSHARDED, GRADIENT), strict=True)):
            drawing.box(350, y + 25 * bar, 450 * part, 22, color)
            drawing.text(358 + 450 * part, y + 16 + 25 * bar, f"{part:.2f}")
    drawing.line([(800, 40), (800, 44 + 66 * len(rows))], PEER)
    drawing.text(800, 24, "1: the best peer", anchor="middle")
    drawing.save(path)


if __name__ == "__main__":
    draw((HERE.parent / "benchmarks.md").read_text(encoding="utf-8"), HERE / "measured.svg")
