"""The pages of docs show exactly the code that the tests run; and what is said where a package is absent."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from tests.helpers.paths import DATA, ROOT

RECIPES = sorted((DATA / "recipes").glob("*.py"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_page_shows_the_code(path: Path) -> None:
    name = "lightning.md" if path.stem.startswith("lightning") else "hugging_face.md"
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    code = path.read_text(encoding="utf-8").rstrip()
    assert f"```python\n{code}\n```" in page, f"docs/{name} does not show {path.name} as it is"


@pytest.mark.parametrize("package", ["accelerate", "transformers", "lightning"])
def test_without_the_package_the_module_names_the_extra(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    # None is how Python marks a module as absent. Submodules that another test imported would still be found.
    for name in {package, *(name for name in sys.modules if name.startswith(f"{package}."))}:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"fsdp.{package}", raising=False)
    with pytest.raises(ImportError, match=rf"fsdp\.{package} needs {package}.*pip install 'fsdp\[{package}\]'"):
        importlib.import_module(f"fsdp.{package}")
