"""What tests of other libraries' checkpoints share: all that a source has, as tensors and values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp.checkpoint.formats.source import Source, TensorReader
from fsdp.checkpoint.json_values import decoded
from fsdp.checkpoint.safetensors import DTYPES
from tests.helpers.paths import DATA
from tests.tools.record_fairscale_checkpoint import CASES


def all_of(reader: TensorReader) -> dict[str, Tensor]:
    """Each tensor, read in ranges of three elements."""
    found = {}
    for name, stored in reader.tensors.items():
        found[name] = torch.empty(stored.shape, dtype=stored.dtype)
        flat = found[name].view(-1)
        for start in range(0, flat.numel(), 3):
            reader.read(name, flat[start : start + 3], start)
    return found


def weights_of(source: Source) -> dict[str, Tensor]:
    """All weights, tied ones under all their names."""
    found = all_of(source.model)
    return {**found, **{name: found[first] for name, first in source.aliases.items()}}


def state_of(source: Source) -> dict[str, dict[str, Any]]:
    """The optimizer's state by names and keys; numbers as tensors of their dtype."""
    assert source.optimizer is not None
    tensors = all_of(source.optimizer)
    found: dict[str, dict[str, Any]] = {}
    for name, kinds in source.optimizer_rest["state"].items():
        entry = found.setdefault(name, {})
        for key, kind in kinds.items():
            if kind[0] == "elements":
                entry[key] = tensors.pop(f"{name}/{key}")
                assert entry[key].dtype == DTYPES[kind[1]]
            elif kind[0] == "number":
                entry[key] = torch.tensor(decoded(kind[2]), dtype=DTYPES[kind[1]])
            else:
                entry[key] = decoded(kind[1])
    assert not tensors
    return found


def groups_of(source: Source) -> list[tuple[dict[str, Any], list[str]]]:
    """Settings and names of each parameter group."""
    return [(decoded(group["options"]), group["params"]) for group in source.optimizer_rest["groups"]]


def assert_same_values(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """To the bit, numbers as numbers."""
    assert found.keys() == expected.keys()
    for name, entry in expected.items():
        assert found[name].keys() == entry.keys(), name
        for key, value in entry.items():
            own, other = torch.as_tensor(found[name][key]), torch.as_tensor(value)
            assert own.shape == other.shape, (name, key)
            assert torch.equal(own, other.to(own.dtype)), (name, key)


RECORDED = DATA / "fairscale"
every_case = pytest.mark.parametrize("name", CASES)
NAMES = ("first.weight", "first.bias", "norm.weight", "norm.bias")
NAMES_INSIDE = ("inner.0.weight", "inner.2.bias", "inner.3.weight", "inner.3.bias")


def truth(name: str) -> dict[str, Any]:
    return torch.load(RECORDED / name / "whole.pt", weights_only=True)
