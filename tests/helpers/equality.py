"""Tensors, states and nests of them are compared: ``same`` is to the last bit, ``close`` within a tolerance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def assert_same(found: Any, expected: Any, what: str = "") -> None:
    """Keys, shapes, dtypes and bits are the same, wherever the tensors are; of a `DTensor`, what this rank holds."""
    for path, one, other in _leaves(found, expected, what):
        if isinstance(other, Tensor):
            assert (one.dtype, one.shape) == (other.dtype, other.shape), path
            assert torch.equal(bits_of(one), bits_of(other)), f"{path}: {one} against {other}"
        else:
            assert one == other, path


def _located(path: str, text: str) -> str:
    return f"{path}: {text}"


def assert_close(found: Any, expected: Any, what: str = "", rtol: float = 1e-9, atol: float = 1e-11) -> None:
    """Keys, shapes and dtypes are the same, and the values within rounding, by default that of float64."""
    for path, one, other in _leaves(found, expected, what):
        if isinstance(other, (Tensor, float)):
            torch.testing.assert_close(one, other, rtol=rtol, atol=atol, msg=partial(_located, path))
        else:
            assert one == other, path


def assert_same_state(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """As `assert_same`, and the names have the same order."""
    assert list(found) == list(expected)
    assert_same(found, expected)


def assert_close_state(
    found: Mapping[str, Any], expected: Mapping[str, Any], rtol: float = 1e-9, atol: float = 1e-11
) -> None:
    """As `assert_close`, and the names have the same order."""
    assert list(found) == list(expected)
    assert_close(found, expected, rtol=rtol, atol=atol)


def bits_of(tensor: Tensor) -> Tensor:
    """The elements in row-major order, as bytes."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().cpu().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def _leaves(found: Any, expected: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    """The leaves of two nests, which must have the same form."""
    if isinstance(expected, Mapping):
        assert found.keys() == expected.keys(), path
        for key in expected:
            yield from _leaves(found[key], expected[key], f"{path}.{key}" if path else str(key))
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), path
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            yield from _leaves(one, other, f"{path}[{number}]")
    else:
        assert isinstance(found, Tensor) is isinstance(expected, Tensor), f"{path}: {found} against {expected}"
        yield path, found, expected
