"""The code on the pages and in docstrings runs, page by page, on two ranks.

The blocks of a page run in order, in one namespace that begins with what `tests.docs.setting` has. Two kinds of
comments in the source of a page, which readers do not see, belong to them:

    <!-- run: code -->          is run as well, at its place: what the next block takes for granted, or is to be shown
    <!-- not run: reason -->    leaves the next block out
"""

from __future__ import annotations

import ast
import re
import textwrap
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import fsdp
from tests.docs.setting import PRELUDE
from tests.helpers.hugging_face import MODULES, PATIENCE
from tests.helpers.needs import needs
from tests.helpers.paths import ROOT
from tests.helpers.ranks import RankPool

PRELOAD = [*MODULES, "peft", "fsdp.lightning"]
MAX_NOT_RUN = 8
# Pages with programs that tests of their own run, in whole or in part.
ELSEWHERE = {"getting_started.md", "leaving.md"}  # test_getting_started, test_leaving
PAGES = [
    path
    for path in [*sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("examples/*/README.md"))]
    if path.name not in ELSEWHERE
]
# What the prelude provides that is the reader's own: a model, and what trains it.
SETTING = {"Block", "Model", "Rotary", "batches_of", "loss", "loss_of", "sharded"}
# What is on other machines.
HERE = {'"cuda"': '"cpu"', ".cuda()": ".cpu()", '"/scratch/': '"scratch/'}

_PART = re.compile(
    r"^ *<!-- not run: (?P<reason>.+?) -->\n"
    r"|^ *<!-- run:(?P<hidden>.+?)-->\n"
    r"|^(?P<indent> *)```python\n(?P<shown>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    """Code of a page, and where it is; `left_out` has the reason if it does not run."""

    code: str
    line: int
    left_out: str = ""


def blocks(text: str) -> list[Block]:
    found, reason = [], ""
    for part in _PART.finditer(text):
        if part["reason"]:
            reason = part["reason"]
            continue
        code = part["hidden"] if part["shown"] is None else part["shown"]
        line = text.count("\n", 0, part.start("hidden" if part["shown"] is None else "shown")) + 1
        found.append(Block(textwrap.dedent(code if part["shown"] else code.lstrip(" ")), line, reason))
        reason = ""
    return found


def docstring_blocks(code: str) -> list[Block]:
    """Return what stands indented below a line of a docstring that ends with `::`."""
    found: list[Block] = []
    if "::\n\n" not in code:
        return found  # most files, which take a second to parse
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node)):
            for part in re.finditer(r"::\n\n((?:    .*\n|\n)+)", text + "\n"):
                line = node.body[0].lineno + text.count("\n", 0, part.start(1))
                found.append(Block(textwrap.dedent(part[1]), line))
    return found


def test_code_is_found() -> None:
    page = "<!-- run: a = 1 -->\n```python\nb\n```\nx\n<!-- not run: why -->\n- y\n"
    page += "  ```python\n  c\n  ```\n```\nd\n```\n"
    assert blocks(page) == [Block("a = 1 ", 1), Block("b\n", 3), Block("c\n", 9, "why")]
    docstring = '"""A. ::\n\n        a\n\n        b\n\n    C\n    """'
    assert docstring_blocks(f"def f():\n    {docstring}") == [Block("a\n\nb\n\n", 4)]


def hidden_imports(text: str) -> list[str]:
    """Return the names that shown code uses and only hidden code, the prelude included, has imported before it."""
    shown: set[str] = set()
    hidden, found = {*fsdp.__all__, *_imported(ast.parse(PRELUDE.replace("*", "fsdp")))} - SETTING, []
    for part in _PART.finditer(text):
        code = ast.parse(textwrap.dedent(part["shown"] or (part["hidden"] or "").lstrip(" ")))
        names = [node for node in ast.walk(code) if isinstance(node, ast.Name)]
        known = {node.id for node in names if not isinstance(node.ctx, ast.Load)}
        known |= {node.arg for node in ast.walk(code) if isinstance(node, ast.arg)}
        known |= {node.name for node in ast.walk(code) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        if part["shown"] is None:
            shown |= known
            hidden |= _imported(code)
        else:
            shown |= known | _imported(code)
            line = text.count("\n", 0, part.start("shown")) + 1
            found += sorted({f"line {line}: {node.id}" for node in names if node.id in hidden - shown})
    return found


def _imported(code: ast.AST) -> set[str]:
    imports = [node for node in ast.walk(code) if isinstance(node, (ast.Import, ast.ImportFrom))]
    return {(alias.asname or alias.name).split(".")[0] for node in imports for alias in node.names}


def test_hidden_imports_are_found() -> None:
    page = "<!-- run: from a import b, c -->\n```python\nimport torch\nb = 1\nc(b, nn, torch, model)\n```\n"
    assert hidden_imports(page) == ["line 3: c", "line 3: nn"]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_code_of_the_page_shows_what_it_imports(page: Path) -> None:
    assert not hidden_imports(page.read_text("utf-8"))


def test_little_is_left_out() -> None:
    reasons = [block.left_out for page in PAGES for block in blocks(page.read_text("utf-8")) if block.left_out]
    assert len(reasons) <= MAX_NOT_RUN, reasons


def _packages(path: Path) -> list[str]:
    code = "".join(block.code for block in blocks(path.read_text("utf-8")) if not block.left_out)
    packages = ("transformers", "peft", "accelerate", "lightning", "torchao")
    return [name for name in packages if re.search(rf"(from|import) {name}", code)]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(path, marks=needs(*_packages(path)), id=str(path.relative_to(ROOT)))
        for path in PAGES
        if blocks(path.read_text("utf-8"))
    ],
)
def test_the_code_of_the_page_runs(ranks: RankPool, tmp_path: Path, page: Path) -> None:
    ranks(2, timeout=PATIENCE).run(_run, page, blocks(page.read_text("utf-8")), tmp_path)


def _run(page: Path, code: list[Block], folder: Path) -> None:
    known: dict[str, Any] = {"__name__": page.stem}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(dist, "init_process_group", lambda: None)
        patch.setattr(fsdp, "init_distributed", lambda: torch.device("cpu"))
        warnings.filterwarnings("ignore", category=FutureWarning)  # peft calls what transformers has renamed
        exec(PRELUDE, known)
        for block in code:
            if not block.left_out:
                text = block.code
                for there, here in HERE.items():
                    text = text.replace(there, here)
                # With the lines that it has on the page, for tracebacks.
                exec(compile("\n" * (block.line - 1) + text, page, "exec"), known)
                dist.barrier()  # what one rank has written, others may read
    known.clear()  # or losses hold models, whose classes hold this namespace, and Python does not see graphs


DOCSTRINGS = {
    path: found for path in sorted(ROOT.glob("fsdp/**/*.py")) if (found := docstring_blocks(path.read_text("utf-8")))
}


# What the examples of docstrings take for granted.
GIVEN = {
    "outer.py": "from torch.distributed.device_mesh import init_device_mesh\n"
    "mesh = init_device_mesh('cpu', (2, 1), mesh_dim_names=('site', 'rank'))\ntorch.manual_seed(0)",
    "same_bits.py": "first, last = 0, 1\ndef batch(step, number):\n    return batches[number % 2]",
    "plan_wrapping.py": "model, tokens, policy = Model(), batches[0][0], MixedPrecision(param_dtype=torch.bfloat16)",
}
# What ends what they have begun.
FINALLY = {"trace.py": [Block("train(batches[0])\ntrace.end()", 1)]}


@pytest.mark.parametrize("module", DOCSTRINGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_code_of_docstrings_runs(ranks: RankPool, tmp_path: Path, module: Path) -> None:
    before = Block(GIVEN.get(module.name, "model, optimizer = sharded(use_orig_params=True)"), 1)
    ranks(2).run(_run, module, [before, *DOCSTRINGS[module], *FINALLY.get(module.name, ())], tmp_path)
