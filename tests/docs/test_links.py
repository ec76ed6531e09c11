"""Links of the pages lead to files and headings that are there, on the site as in a checkout."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("examples/*/*.md")),
]
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def links(text: str) -> list[str]:
    """Return the targets of a page that are no addresses of the web."""
    return [target for target in _LINK.findall(_FENCE.sub("", text)) if not target.startswith(("https://", "http://"))]


@cache
def anchors(page: Path) -> set[str]:
    """Return the names of a page's headings, as links have them."""
    headings = _HEADING.findall(_FENCE.sub("", page.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(page: Path, target: str) -> bool:
    path, _, anchor = target.partition("#")
    file = (page.parent / path).resolve() if path else page
    return not file.exists() or (bool(anchor) and anchor not in anchors(file))


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `b_c` of d's\n\n[x](#a-b_c-of-ds) [y](#e) [z](f.md)\n```\n[w](g.md)\n# h\n```\n")
    assert [target for target in links(page.read_text()) if broken(page, target)] == ["#e", "f.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert not [target for target in links(page.read_text(encoding="utf-8")) if broken(page, target)]


def test_every_page_is_reached_from_the_first_one() -> None:
    """By its table of contents, as the site shows it at the side."""
    listed = re.findall(r"^[\w/]+$", (ROOT / "docs" / "index.md").read_text(encoding="utf-8"), re.MULTILINE)
    pages = {
        path.relative_to(ROOT / "docs").with_suffix("")
        for path in (ROOT / "docs").rglob("*.*")
        if path.suffix in (".md", ".rst")
    }
    assert sorted(listed) == sorted(str(page) for page in pages if str(page) != "index")
