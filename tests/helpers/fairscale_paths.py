"""FairScale's import paths for the length of a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fsdp.compat import fairscale


@contextmanager
def fairscale_installed() -> Iterator[None]:
    """Also where FairScale itself is installed."""
    fairscale.install(force=True)
    try:
        yield
    finally:
        fairscale.uninstall()
