"""`exact_norm` is right, and the same bits however elements are divided."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp.layers.exact_norm import exact_norm

HOST = torch.device("cpu")
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(st.lists(FLOATS, min_size=1, max_size=40), st.data())
def test_it_is_the_norm_and_no_division_changes_it(values: list[float], data: st.DataObject) -> None:
    whole = torch.tensor(values, dtype=torch.float32)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(values)), max_size=4)))
    order = data.draw(st.permutations(range(len(cuts) + 1)))
    parts = list(whole.tensor_split(cuts))
    norm = exact_norm([], [whole], HOST)
    assert norm.dtype is torch.float64
    assert norm.equal(exact_norm([], [parts[number] for number in order], HOST))
    assert norm.item() == pytest.approx(math.hypot(*values), rel=1e-12, abs=0)


def test_many_small_elements_beside_a_large_one_are_not_lost() -> None:
    small = torch.full((1 << 18,), 1e-6)
    norm = exact_norm([], [torch.ones(1), small], HOST).item()
    assert norm == pytest.approx(math.sqrt(1 + (1 << 18) * small[0].item() ** 2), rel=1e-15)


@pytest.mark.parametrize(
    ("values", "expected"),
    [([], 0.0), ([0.0], 0.0), ([1.0, math.inf], math.inf), ([math.nan, math.inf], math.nan), ([1e-300], 1e-300)],
)
def test_what_is_not_ordinary(values: list[float], expected: float) -> None:
    norm = exact_norm([], [torch.tensor(values, dtype=torch.float64)], HOST).item()
    assert norm == pytest.approx(expected, rel=1e-12, nan_ok=True)


def test_complex_elements_and_narrow_ones() -> None:
    norm = exact_norm([], [torch.tensor([3 + 4j]), torch.tensor([12.0], dtype=torch.bfloat16)], HOST)
    assert norm.item() == 13.0
