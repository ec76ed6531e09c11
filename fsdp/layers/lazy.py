"""Lazy names of a package, whose modules are imported at the first use of a name (PEP 562)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from fsdp.layers.foreign_names import refuse_missing


def lazily(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the functions `__getattr__` and `__dir__` of a package.

    Args:
        package: the package's ``__name__``.
        homes: for each module, the names that it defines, separated by spaces. With an empty text, the module itself is
            a name of the package.
    """
    places = {name: (home, name) for home, names in homes.items() for name in names.split()}
    places |= {home.rpartition(".")[2]: (home, "") for home, names in homes.items() if not names}

    def load(name: str) -> Any:
        if name == "__all__" and places:  # for `help`, and `from fsdp.weights import *`
            return sorted(places)
        if name not in places:
            refuse_missing(package, name)
        home, attribute = places[name]
        module = import_module(home)
        value = getattr(module, attribute) if attribute else module
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *places})

    return load, names
