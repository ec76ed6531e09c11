"""Fixtures for users' tests: ``pytest_plugins = ["fsdp.testing.pytest_plugin"]`` in a ``conftest.py``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fsdp.testing.stream_order import StreamOrder
from fsdp.testing.streams import check_streams


@pytest.fixture
def stream_order() -> Iterator[StreamOrder]:
    """Run a test inside `check_streams`; the test fails at its end if operators are unordered."""
    with check_streams() as order:
        yield order
