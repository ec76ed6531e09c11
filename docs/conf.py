"""Configuration of the documentation site, which `make docs` builds in build/site."""

from __future__ import annotations

import logging
import re
from typing import Any

from sphinx.application import Sphinx

import fsdp

project = "fsdp"
author = "fsdp contributors"
copyright = "fsdp contributors, BSD 3-Clause"
version = release = fsdp.__version__

# Libraries that the integrations import say on their way what this machine has not.
for name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(name).setLevel(logging.ERROR)

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
html_theme = "furo"
html_title = f"fsdp {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["errors.js"]
html_copy_source = False
html_use_index = html_domain_indices = False  # there is the reference, and the search

myst_heading_anchors = 4  # links to headings, by the names that they have on GitHub

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
maximum_signature_line_length = 88
napoleon_use_ivar = True


def mark_code(app: Sphinx, what: str, name: str, documented: Any, options: Any, lines: list[str]) -> None:
    """Turn `code` of a docstring into what Sphinx takes for code, letters that follow it, as in `Tensor`s, included."""
    lines[:] = re.sub(r"(`{1,2})([^`]+)\1", r"``\2``\\ ", "\n".join(lines)).split("\n")


def name_pages(app: Sphinx, page: str, source: list[str]) -> None:
    """Show the title of a page, or of its section, in links whose text is a file's name."""
    source[0] = re.sub(r"\[([\w/]+\.md)\]\((\1[^)]*)\)", r"[](\2)", source[0])


def setup(app: Sphinx) -> None:
    app.connect("source-read", name_pages)
    app.connect("autodoc-process-docstring", mark_code)
