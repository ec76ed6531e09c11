"""Configuration of the documentation site, which `make docs` builds in build/site."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

import fsdp

project = "fsdp"
author = "fsdp contributors"
copyright = "fsdp contributors, BSD 3-Clause"
version = release = fsdp.__version__

# Libraries that the integrations import warn about missing features of this machine.
for name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(name).setLevel(logging.ERROR)

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
html_theme = "furo"
html_title = f"fsdp {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["errors.js", "excerpts.js"]
html_copy_source = False
highlight_language = "none"  # of fences that name none: commands, and what they print
rst_prolog = ".. highlight:: python\n"  # of the reference, whose code is that of docstrings
html_use_index = html_domain_indices = False  # there is the reference, and the search

myst_heading_anchors = 4  # links to headings, by the names that they have on GitHub

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
maximum_signature_line_length = 88
napoleon_use_ivar = True


def mark_code(app: Sphinx, what: str, name: str, documented: Any, options: Any, lines: list[str]) -> None:
    """Convert `code` in a docstring to Sphinx's markup, including letters directly after it, as in `Tensor`s."""
    lines[:] = re.sub(r"(`{1,2})([^`]+)\1", r"``\2``\\ ", "\n".join(lines)).split("\n")


def index_words(app: Sphinx, page: str, source: list[str]) -> None:
    """Convert `<!-- search: words -->` to index entries of that place, which a search for any of the words shows
    first.
    """

    def entries(comment: re.Match[str]) -> str:
        return "```{index} " + ", ".join(f"! {word}" for word in re.split(r",\s*", comment[1])) + "\n```\n"

    source[0] = re.sub(r"^<!-- search: (.+?) -->$", entries, source[0], flags=re.MULTILINE | re.DOTALL)


def name_pages(app: Sphinx, page: str, source: list[str]) -> None:
    """Show the title of a page, or of its section, in links whose text is a file's name."""
    source[0] = re.sub(r"\[([\w/]+\.md)\]\((\1[^)]*)\)", r"[](\2)", source[0])


def write_texts(app: Sphinx, error: Exception | None) -> None:
    """Write the text of all pages as a script, for excerpts: a page that is opened as a file cannot read another."""
    if error or app.builder.name != "html":
        return
    texts = {}
    for page in sorted(app.env.found_docs):
        html = Path(app.builder.get_outfilename(page)).read_text(encoding="utf-8")
        article = html.partition('<article role="main"')[2].partition(">")[2].partition("</article>")[0]
        article = re.sub(r'<a class="headerlink".*?</a>|</t[dh]>', " ", article, flags=re.DOTALL)
        # Results lead to sections and to paragraphs with index entries.
        texts[page] = re.sub(r"<(?!/?(?:section|p)\b)[^>]*>", "", article)
    script = Path(app.outdir, "_static", "texts.js")
    script.write_text(f"const TEXTS = {json.dumps(texts, ensure_ascii=False)};\n", encoding="utf-8")


def setup(app: Sphinx) -> None:
    app.connect("source-read", name_pages)
    app.connect("source-read", index_words)
    app.connect("build-finished", write_texts)
    app.connect("autodoc-process-docstring", mark_code)
