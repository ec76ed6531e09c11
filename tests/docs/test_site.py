"""The site is built without a warning, and needs no network to be read and searched."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.hugging_face import needs
from tests.helpers.paths import ROOT

pytestmark = [
    needs("sphinx", "myst_parser", "furo", "sphinx_copybutton"),
    needs("transformers", "accelerate", "lightning"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "--fail-on-warning",
        "--keep-going",
        "--quiet",
        "-d",
        str(folder / "cache"),
    ]
    built = subprocess.run(
        [*command, "docs", str(folder / "html")], cwd=ROOT, text=True, capture_output=True, check=False
    )
    assert built.returncode == 0, built.stderr
    return folder / "html"


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        tags = re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", page.read_text(encoding="utf-8"))
        assert not [tag for tag in tags if re.search(r"""(?:src|href)=["'](?:https?:)?//""", tag)], page.name
    assert not [
        sheet for sheet in site.rglob("*.css") if re.search(r"url\(['\"]?(?:https?:)?//", sheet.read_text("utf-8"))
    ]


def test_it_is_searched_without_a_server(site: Path) -> None:
    """The index is a script, which pages may load where they may not read files."""
    index = (site / "searchindex.js").read_text(encoding="utf-8")
    assert index.startswith("Search.setIndex(")
    assert '"reference/wrapper"' in index
    assert "summon_full_params" in index


def test_the_reference_has_signatures_with_types(site: Path) -> None:
    page = re.sub(r"<[^>]+>", "", (site / "reference" / "checkpoint.html").read_text(encoding="utf-8"))
    assert "path: str | PathLike[str]" in page
