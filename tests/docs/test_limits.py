"""docs/limits.md: the messages in its table are messages of the library."""

from __future__ import annotations

import ast
import re
from functools import cache

from tests.helpers.paths import ROOT

HEADER = ["subject", "limit", "message", "instead"]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def rows() -> list[list[str]]:
    text = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")
    header, _, *found = [cells(line) for line in text.splitlines() if line.startswith("|")]
    assert header == HEADER
    return found


def texts_of(code: str) -> list[str]:
    """Return the strings of a module that are no docstrings; variable parts of a message are an ellipsis."""
    found, tree = [], ast.parse(code)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            found.append(node.value)
    return found


@cache
def messages() -> str:
    files = sorted((ROOT / "fsdp").rglob("*.py"))
    return "\n".join(text for file in files for text in texts_of(file.read_text(encoding="utf-8")))


def test_the_strings_of_a_module_are_found_with_their_variable_parts() -> None:
    code = '"""A docstring."""\nraise ValueError(f"{name} is " "sharded")'
    assert "... is sharded" in texts_of(code)
    assert "A docstring." not in texts_of(code)


def test_every_row_is_complete() -> None:
    assert all(len(row) == len(HEADER) and all(row) for row in rows())


def test_the_messages_of_the_table_are_messages_of_the_library() -> None:
    quoted = [text for row in rows() for text in re.findall(r'"([^"]+)"', row[2])]
    assert len(quoted) > 50
    assert [text for text in quoted if text not in messages()] == []
