"""Two states are compared by name, to the last bit or within a tolerance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def assert_same_state(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """The names, their order, shapes, dtypes and values are the same to the last bit."""
    assert list(found) == list(expected)
    for name, value in expected.items():
        if isinstance(value, Tensor):
            assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
            assert torch.equal(found[name], value), name
        else:
            assert found[name] == value, name


def assert_close_state(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], rtol: float = 1e-9, atol: float = 1e-10
) -> None:
    """The names and their order are the same, and the values within rounding of float64."""
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert_close(found[name], value, name, rtol, atol)


def assert_close(found: Tensor, expected: Tensor, name: str, rtol: float = 1e-9, atol: float = 1e-10) -> None:
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol, msg=lambda text: f"{name}: {text}")
