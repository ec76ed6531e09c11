"""Frozen parameters of any class become bytes and come back; no process group is needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fsdp.layers.managed_params import is_packed
from fsdp.layers.packing import Packing
from tests.helpers.quantised import Doubled, Rows8

DTYPES = [torch.int8, torch.uint8, torch.int64, torch.bool, torch.float8_e4m3fn, torch.bfloat16, torch.float64]
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


class Bundle(Tensor):
    """Any tensors in one, with any metadata."""

    parts: dict[str, Tensor]

    @staticmethod
    def __new__(cls, parts: dict[str, Tensor], metadata: Any) -> Bundle:
        made: Bundle = Tensor._make_wrapper_subclass(cls, (len(parts),), dtype=torch.float32)
        return made

    def __init__(self, parts: dict[str, Tensor], metadata: Any) -> None:
        self.metadata = metadata
        self.inner_names = list(parts)
        for name, part in parts.items():
            setattr(self, name, part)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return self.inner_names, self.metadata

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], metadata: Any, size: Any, stride: Any) -> Bundle:
        return cls(inner, metadata)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return "Bundle(...)"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls({name: getattr(args[0], name) for name in args[0].inner_names}, args[0].metadata)
        raise NotImplementedError(func)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(SHAPES)
    values = torch.randint(0, 2, shape).to(dtype)
    return values.transpose(0, -1) if values.dim() > 1 and draw(st.booleans()) else values


def bits(tensor: Tensor) -> list[Any]:
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


@given(parts=st.lists(tensors(), min_size=1, max_size=4), is_nested=st.booleans())
def test_a_parameter_comes_back_from_its_bytes(parts: list[Tensor], is_nested: bool) -> None:
    named = {f"part{number}": part for number, part in enumerate(parts)}
    value = Bundle({"outer": parts[0], "inner": Bundle(named, "inner")}, ("any", 1)) if is_nested else Bundle(named, 2)
    packing = Packing("weight", value)
    packed = packing.pack(value)
    assert (packed.dtype, list(packed.shape)) == (torch.uint8, [packing.nbytes])
    assert packing.nbytes % 16 == 0
    again: Any = packing.unpack(packed)
    assert (type(again), again.metadata, again.inner_names) == (Bundle, value.metadata, value.inner_names)
    found = again.inner if is_nested else again
    for name, part in named.items():
        back = getattr(found, name)
        assert (back.shape, back.dtype, back.stride()) == (part.shape, part.dtype, torch.empty_like(part).stride())
        assert bits(back) == bits(part)
    assert packing.pack(packed) is packed


def test_what_is_unpacked_shares_the_memory_of_the_bytes() -> None:
    value = Rows8.of(torch.randn(3, 5))
    packing = Packing("weight", value)
    packed = packing.pack(value)
    seen: Any = packing.unpack(packed)
    packed.zero_()
    assert not seen.values.any()
    assert not seen.scale.any()


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(3, 5),
        torch.zeros(16, dtype=torch.uint8),
        Rows8.of(torch.ones(5, 3)),
        Rows8.of(torch.ones(3, 5, dtype=torch.bfloat16)),
        Doubled.of(torch.ones(3, 5)),
    ],
    ids=["plain", "other bytes", "shape", "metadata", "class"],
)
def test_a_value_in_another_form_is_an_error(other: Tensor) -> None:
    packing = Packing("layer.weight", Rows8.of(torch.randn(3, 5)))
    with pytest.raises(
        ValueError, match=r"layer\.weight is Rows8 \[3, 5\] of \(values \[3, 5\] int8, .*cannot be set to"
    ):
        packing.pack(other)


def test_addresses_in_metadata_are_no_difference_between_ranks() -> None:
    class Kind:
        pass

    texts = {Packing("weight", Bundle({"part": torch.ones(2)}, Kind())).description for _ in range(3)}
    assert len(texts) == 1


def test_devices_in_metadata_are_those_of_the_bytes() -> None:
    packing = Packing("weight", Bundle({"part": torch.ones(2)}, {"devices": (torch.device("cpu"), [3])}))
    here: Any = packing.unpack(torch.empty(packing.nbytes, dtype=torch.uint8, device="meta"))
    assert here.metadata == {"devices": (torch.device("meta"), [3])}
    packing.check(Bundle({"part": torch.ones(2)}, {"devices": (torch.device("cuda", 1), [3])}))
    with pytest.raises(ValueError, match="cannot be set to"):
        packing.check(Bundle({"part": torch.ones(2)}, {"devices": (torch.device("cpu"), [4])}))


class Failing(Bundle):
    """A class whose methods raise exceptions, in one direction or in both."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return (["missing"] if self.metadata == "flatten" else self.inner_names), self.metadata

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], metadata: Any, size: Any, stride: Any) -> Failing:
        raise AssertionError("wrong inner tensors")


def test_exceptions_of_a_class_name_the_parameter() -> None:
    with pytest.raises(TypeError, match=r"layer\.weight: a Failing cannot be flattened .*\(AttributeError.*ignored"):
        Packing("layer.weight", Failing({"part": torch.ones(2)}, "flatten"))
    packing = Packing("layer.weight", Failing({"part": torch.ones(2)}, "unflatten"))
    with pytest.raises(TypeError, match=r"layer\.weight: Failing .* cannot be rebuilt .*wrong inner.*ignored"):
        packing.unpack(torch.zeros(packing.nbytes, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"layer\.weight is Failing .*cannot be set to this value: .*flattened"):
        packing.check(Failing({"part": torch.ones(2)}, "flatten"))


@pytest.mark.parametrize("dtype", [torch.uint1, torch.int4, torch.uint16, torch.float8_e8m0fnu])
def test_dtypes_that_torch_hardly_supports_are_packed(dtype: torch.dtype) -> None:
    value = torch.arange(6, dtype=torch.uint8).view(dtype)
    packing = Packing("weight", value)
    assert bits(packing.unpack(packing.pack(value))) == [0, 1, 2, 3, 4, 5]


def test_frozen_parameters_of_other_kinds_than_plain_floats_are_packed() -> None:
    weight = torch.ones(2, 2)
    packed = [weight.to(torch.int8), weight.to(torch.float8_e5m2), weight.bool(), Rows8.of(weight)]
    others = [weight, weight.bfloat16(), weight.to(torch.complex64)]
    assert all(is_packed(nn.Parameter(each, requires_grad=False)) for each in packed)
    assert not any(is_packed(nn.Parameter(each, requires_grad=False)) for each in others)
    assert not is_packed(nn.Parameter(Rows8.of(weight), requires_grad=True))
