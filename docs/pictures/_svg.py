"""A drawing in SVG: rectangles and texts, in pixels from the upper left corner."""

from __future__ import annotations

from html import escape
from pathlib import Path

SHARD, UNSHARDED, GRADIENT, STEP, WAIT, PEER = "#9ecae9", "#4c78a8", "#54a24b", "#b279a2", "#e45756", "#bab0ac"

# In a viewer with a dark theme; the background has the site's colour.
DARK = "<style>@media (prefers-color-scheme: dark) { svg { color: #cfd0d0 } .ground { fill: #131416 } }</style>"


class Drawing:
    def __init__(self, width: int, height: int) -> None:
        self._lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
            'font-size="14" color="black">',
            DARK,
            f'<rect class="ground" width="{width}" height="{height}" fill="white"/>',
        ]

    def box(self, x: float, y: float, width: float, height: float, color: str, title: str = "") -> None:
        inside = f"<title>{escape(title)}</title>" if title else ""
        self._lines.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.3):.1f}" height="{height:.1f}" fill="{color}" '
            f'stroke="white" stroke-width="0.5">{inside}</rect>'
        )

    def text(self, x: float, y: float, words: str, *, anchor: str = "start", color: str = "currentColor") -> None:
        self._lines.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{escape(words)}</text>'
        )

    def line(self, points: list[tuple[float, float]], color: str) -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._lines.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')

    def legend(self, x: float, y: float, *entries: tuple[str, str], step: int = 220) -> None:
        for number, (color, words) in enumerate(entries):
            self.box(x + step * number, y, 14, 14, color)
            self.text(x + step * number + 20, y + 12, words)

    def save(self, path: Path) -> None:
        path.write_text("\n".join([*self._lines, "</svg>\n"]), encoding="utf-8")
