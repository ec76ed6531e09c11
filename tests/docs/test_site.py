"""The site is built without a warning, needs no network, and a search finds the words that people type."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import re
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.needs import needs
from tests.helpers.paths import ROOT
from tests.helpers.ranks import RankPool

PRELOAD = ["fsdp.lightning", "fsdp.transformers", "fsdp.accelerate"]

pytestmark = [
    needs("sphinx", "myst_parser", "furo", "sphinx_copybutton"),
    needs("transformers", "accelerate", "lightning"),
]


# The page that a search shows first.
SEARCHES = {
    "hang": "troubleshooting",
    "hangs": "troubleshooting",
    "training hangs": "troubleshooting",
    "deadlock": "troubleshooting",
    "stuck": "troubleshooting",
    "timeout": "troubleshooting",
    "NaN": "troubleshooting",
    "loss is nan": "troubleshooting",
    "out of memory": "troubleshooting",
    "CUDA out of memory": "troubleshooting",
    "OOM": "troubleshooting",
    "wrong loss": "troubleshooting",
    "gradient accumulation": "usage",
    "gradient clipping": "usage",
    "multi-node": "getting_started",
    "multi node": "getting_started",
    "torchrun": "getting_started",
    "slurm": "getting_started",
    "Ctrl-C": "getting_started",
    "GAN": "examples",
    "GRPO": "weights",
    "two models": "checkpoints",
    "checkpoint": "checkpoints",
    "resume": "checkpoints",
    "gradient checkpointing": "memory",
    "mixed precision": "precision",
    "hybrid sharding": "sharding",
    "process groups": "sharding",
    "uneven inputs": "usage",
    "conditional layers": "usage",
    "profiling": "performance",
    "slow": "performance",
    "CUDA graphs": "performance",
    "known limits": "limits",
    "supported versions": "support",
    "errors": "errors",
    "lora": "hugging_face",
    "state-dict utilities": "state_dicts",
    "summon_full_params": "reference/wrapper",
}


@pytest.fixture(scope="module")
def site(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; a new rank builds it, because the imports of the documented modules take seconds."""
    folder = tmp_path_factory.mktemp("site")
    status, said = ranks(1, backend=None, timeout=300).run(_build, folder)[0]
    assert status == 0, said
    return folder / "html"


def _build(folder: Path) -> tuple[int, str]:
    """Return the exit status of Sphinx, and the text that it prints."""
    from sphinx.cmd.build import build_main
    from sphinx.search.en import SearchEnglish

    SearchEnglish.stem = cache(SearchEnglish.stem)  # the same words come again, and a stem takes long in Python
    gc.disable()  # the rank ends after the build, a quarter of which would be collections of trees that are in use
    options = ["--fail-on-warning", "--keep-going", "--quiet", "--no-color", "-d", str(folder / "cache")]
    printed = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
        warnings.simplefilter("ignore")  # of Sphinx and its extensions
        return build_main([*options, str(ROOT / "docs"), str(folder / "html")]), printed.getvalue()


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


def test_pages_opened_as_files_show_excerpts_of_what_was_found(site: Path) -> None:
    """Which are in a script, as the index is."""
    texts = (site / "_static" / "texts.js").read_text(encoding="utf-8")
    sections = json.loads(texts.removeprefix("const TEXTS = ").removesuffix(";\n"))
    assert sorted(sections) == sorted(index_of(site)["docnames"])
    assert re.search(r'<p id="index-\d+">A rank that hangs', sections["troubleshooting"])
    assert '<section id="out-of-memory">' in sections["troubleshooting"]
    assert "excerpts.js" in (site / "search.html").read_text(encoding="utf-8")


def index_of(site: Path) -> dict[str, Any]:
    from tests.docs.searching import read_index

    return read_index(site)


@pytest.mark.parametrize("query", SEARCHES)
def test_a_search_shows_the_page_first(site: Path, query: str) -> None:
    from tests.docs.searching import found

    assert found(index_of(site), query)[:1] == [SEARCHES[query]]


def test_no_two_pages_have_one_title(site: Path) -> None:
    titles = index_of(site)["titles"]
    assert len(titles) == len(set(titles))


def test_only_code_is_coloured(site: Path) -> None:
    reference = (site / "reference" / "wrapper.html").read_text(encoding="utf-8")
    assert set(re.findall(r'class="[^"]*highlight-(\w+)', reference)) == {"python"}
    page = (site / "troubleshooting.html").read_text(encoding="utf-8")
    report = re.search(r'class="highlight-(\w+) notranslate"><div class="highlight"><pre>[^\n]*fsdp: rank 0 has', page)
    assert report, page
    assert report[1] == "none"


def test_pictures_have_a_dark_form() -> None:
    for picture in (ROOT / "docs" / "pictures").glob("*.svg"):
        assert "prefers-color-scheme: dark" in picture.read_text(encoding="utf-8"), picture.name


def test_the_reference_has_signatures_with_types(site: Path) -> None:
    page = re.sub(r"<[^>]+>", "", (site / "reference" / "checkpoint.html").read_text(encoding="utf-8"))
    assert "path: str | PathLike[str]" in page
