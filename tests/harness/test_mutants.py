"""The table of `tests.mutants` names modules and tests that are there."""

from __future__ import annotations

import pytest

from tests.helpers.paths import ROOT
from tests.mutants import CONCERNS, all_waits, files_of, modules_of


@pytest.mark.parametrize(("modules", "tests"), CONCERNS.items())
def test_modules_and_tests_are_where_the_table_says(modules: str, tests: str) -> None:
    assert modules_of(modules)
    assert files_of(tests, ROOT)


def test_every_place_that_waits_has_tests() -> None:
    for tests in {tests for _, tests in all_waits()}:
        assert files_of(tests, ROOT)


def test_a_pattern_that_nothing_matches_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"fsdp/engine/absent\.py.*CONCERNS"):
        modules_of("engine/layout engine/absent")
    with pytest.raises(ValueError, match=r"tests/engine/absent.*CONCERNS"):
        files_of("engine engine/absent", ROOT)
