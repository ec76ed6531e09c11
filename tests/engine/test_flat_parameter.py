"""`FlatParameter` by itself: values, views, metadata, and copies."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fsdp import FlatParameter
from fsdp.engine.layout import ContiguousLayout


def params(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def test_the_originals_are_left_alone() -> None:
    plain = params((2, 3), (4,))
    flat = FlatParameter(plain)
    with torch.no_grad():
        flat.zero_()
    assert all(param.count_nonzero() == param.numel() for param in plain)


@pytest.mark.parametrize("requires_grad", [True, False])
def test_it_is_trained_as_it_is_told(requires_grad: bool) -> None:
    assert FlatParameter(params((3,)), requires_grad).requires_grad is requires_grad
    assert FlatParameter(params((3,))).requires_grad


@pytest.mark.parametrize("nothing", [[], (), None, 7, params((3,))[0], iter(params((3,)))], ids=repr)
def test_it_needs_a_list_of_parameters(nothing: Any) -> None:
    with pytest.raises(ValueError, match="needs a non-empty list or tuple of parameters"):
        FlatParameter(nothing)


@pytest.mark.parametrize(
    "stranger", [torch.ones(3), FlatParameter(params((3,))), "weight"], ids=["tensor", "flat", "str"]
)
def test_it_flattens_plain_parameters_only(stranger: Any) -> None:
    with pytest.raises(ValueError, match=f"flattens plain parameters, got a {type(stranger).__name__}"):
        FlatParameter([*params((2,)), stranger])


@pytest.mark.parametrize(
    ("other", "listing"),
    [
        (nn.Parameter(torch.ones(3).double()), "dtype, got a: torch.float32, b: torch.float64"),
        (nn.Parameter(torch.ones(3, device="meta")), "device, got a: cpu, b: meta"),
        (nn.Parameter(torch.ones(3), requires_grad=False), "requires_grad, got a: True, b: False"),
    ],
    ids=["dtype", "device", "frozen"],
)
def test_parameters_that_differ_are_named(other: nn.Parameter, listing: str) -> None:
    with pytest.raises(ValueError, match=f"flattens parameters of one {listing}. Create a FlatParameter for each"):
        FlatParameter([*params((2,)), other], names=["a", "b"])


def test_metadata_lists_names_shapes_and_sizes() -> None:
    flat = FlatParameter(params((2, 3), ()), names=["a.weight", "scale"])
    assert flat.metadata() == (("a.weight", "scale"), (torch.Size((2, 3)), torch.Size(())), (6, 1))
    assert FlatParameter(params((2, 3), ())).metadata()[0] == ("0", "1")


def test_its_layout_is_the_contiguous_one() -> None:
    flat = FlatParameter(params((2, 3), ()), names=["a", "b"])
    assert flat.make_layout(3) == ContiguousLayout.of([("a", (2, 3)), ("b", ())], 3)
    assert flat.make_layout().world_size == 1


def through_pickle(flat: FlatParameter) -> FlatParameter:
    return pickle.loads(pickle.dumps(flat))


def through_a_file(flat: FlatParameter) -> FlatParameter:
    file = io.BytesIO()
    torch.save(flat, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("travel", [through_pickle, through_a_file, copy.copy, copy.deepcopy])
def test_it_travels_with_its_names_and_shapes(travel: Callable[[FlatParameter], Any], requires_grad: bool) -> None:
    flat = FlatParameter(params((2, 3), (), (0, 4)), requires_grad, names=["a", "b", "c"])
    arrived = travel(flat)
    assert type(arrived) is FlatParameter
    assert arrived.metadata() == flat.metadata()
    assert arrived.requires_grad is requires_grad
    assert torch.equal(arrived, flat)
    assert all(map(torch.equal, arrived.get_param_views(), flat.get_param_views()))
