"""The API reference has every public name."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from pathlib import Path

import pytest

import fsdp
from tests.helpers.paths import ROOT

ENTRIES = re.findall(
    r"^\.\. auto(?:class|function):: ([\w.]+)(?:\(.*\))?$",
    "\n".join(page.read_text(encoding="utf-8") for page in sorted(ROOT.glob("docs/reference/*.rst"))),
    re.MULTILINE,
)
# Modules to import from. Names of `fsdp.wrap` are those of the package.
MODULES = ["fsdp.checkpoint", "fsdp.optim_utils", "fsdp.state_dict_utils", "fsdp.testing", "fsdp.weights"]
# Modules that only some programs import; each has few names, and much that is its own affair.
INTEGRATIONS = {
    "fsdp.accelerate": {"Accelerator", "outermost"},
    "fsdp.compat.fairscale": {"DummyProcessGroup", "install", "uninstall"},
    "fsdp.compat.fsdp2": {"install", "uninstall"},
    "fsdp.lightning": {"FullyShardedStrategy"},
    "fsdp.transformers": {"Trainer"},
}


def public_names(code: str) -> set[str]:
    """Return what a module says is for others: `__all__`, or what it defines and imports under the same name again."""
    names: set[str] = set()
    for node in ast.parse(code).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.ImportFrom):
            names |= {alias.name for alias in node.names if alias.name == alias.asname}
    return {name for name in names if not name.startswith("_")}


def test_public_names_are_found() -> None:
    assert public_names("from a import b, c as c, d as e\ndef f(): ...\nclass _G: ...") == {"c", "f"}
    assert public_names("def f(): ...\n__all__ = ['g']") == {"g"}


def test_names_of_the_package_are_in_the_reference() -> None:
    functions_and_classes = {name for name in fsdp.__all__ if f"fsdp.{name}" not in MODULES}
    assert not {f"fsdp.{name}" for name in functions_and_classes}.difference(ENTRIES)


@pytest.mark.parametrize("module", MODULES)
def test_names_of_its_modules_are_in_the_reference(module: str) -> None:
    code = Path(importlib.import_module(module).__file__ or "").read_text(encoding="utf-8")
    again = {name for name in fsdp.__all__ if hasattr(fsdp, name)}  # by their shorter name
    assert not {f"{module}.{name}" for name in public_names(code) - again}.difference(ENTRIES)


@pytest.mark.parametrize("module", [*MODULES, "fsdp.wrap"])
def test_a_star_import_brings_public_names_only(module: str) -> None:
    names: dict[str, object] = {}
    exec(f"from {module} import *", names)
    del names["__builtins__"]
    public = {entry.rpartition(".")[2] for entry in ENTRIES if entry.rpartition(".")[0] in (module, "fsdp")}
    assert names
    assert not set(names).difference(public, {"AutoWrapPolicy"})


def test_the_reference_has_nothing_else_and_nothing_twice() -> None:
    assert len(ENTRIES) == len(set(ENTRIES))
    for entry in ENTRIES:
        module, _, name = entry.rpartition(".")
        if module in INTEGRATIONS:
            assert name in INTEGRATIONS[module]
        else:
            assert hasattr(fsdp if module == "fsdp" else importlib.import_module(module), name), entry


@pytest.mark.parametrize("module", sorted(INTEGRATIONS))
def test_integrations_are_in_the_reference(module: str) -> None:
    assert not {f"{module}.{name}" for name in INTEGRATIONS[module]}.difference(ENTRIES)
