"""Marks of tests that need optional packages."""

from __future__ import annotations

import importlib.util

import pytest


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skip, with a reason, where a package is not installed."""
    absent = [name for name in packages if importlib.util.find_spec(name) is None]
    reason = f"{', '.join(absent)}: not installed"
    return pytest.mark.skipif(bool(absent), reason=reason)
