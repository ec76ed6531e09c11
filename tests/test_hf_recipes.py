"""docs/hugging_face.md shows exactly the code that the tests run; and what is said where a package is absent."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RECIPES = sorted((ROOT / "tests" / "data" / "recipes").glob("*.py"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_page_shows_the_code(path: Path) -> None:
    page = (ROOT / "docs" / "hugging_face.md").read_text(encoding="utf-8")
    code = path.read_text(encoding="utf-8").rstrip()
    assert f"```python\n{code}\n```" in page, f"docs/hugging_face.md does not show {path.name} as it is"


@pytest.mark.parametrize(("module", "extra"), [("accelerate", "accelerate"), ("transformers", "transformers")])
def test_without_the_package_the_module_names_the_extra(module: str, extra: str) -> None:
    # None in sys.modules is how Python says that a module is not there.
    code = f"import sys; sys.modules[{module!r}] = None; import fsdp; import fsdp.{module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 1
    assert f"ImportError: fsdp.{module} needs {module}" in done.stderr
    assert f"pip install 'fsdp[{extra}]'" in done.stderr
