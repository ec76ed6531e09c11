"""`TensorPart`, the value of a sharded state dict: what can be done to it, and what DCP asks of it.

No ranks are needed: a part is made for any rank.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from fsdp.engine.boxes import Box
from fsdp.layers.state_dict.sharded import Held, Part, TensorPart
from fsdp.layers.state_dict.summon import LoadTarget

WHOLE = torch.arange(20.0).view(4, 5)


def part_of(whole: Tensor = WHOLE, start: int = 3, stop: int = 17, **facts: Any) -> Any:
    """Rank 1's part of a tensor, in the memory of it."""
    block = Box((0,) * whole.dim(), tuple(whole.shape))
    part = Part(whole.shape, block, start, stop, "layer.weight", 1, is_alone=False)
    return TensorPart.around(part, Held(whole.view(-1)[start:stop], lent_by=id(whole), **facts))


def shards(tensor: TensorPart) -> list[tuple[tuple[int, ...], Tensor]]:
    """Where each box is, and its values, as DCP finds them when it saves."""
    items = tensor.__create_write_items__("model.layer.weight", tensor)
    return [(tuple(item.index.offset), tensor.__get_tensor_shard__(item.index)) for item in items]


# For saving


def test_it_has_shape_and_dtype_of_the_whole() -> None:
    tensor = part_of(WHOLE.double())
    assert (tensor.size(), tensor.dtype, tensor.device) == (torch.Size((4, 5)), torch.float64, torch.device("cpu"))
    assert "elements 3:17 of [4, 5]" in repr(tensor)


def test_a_place_that_it_does_not_hold() -> None:
    with pytest.raises(
        ValueError, match=r"rank 1 holds nothing of layer at .*3, 3.*: it has elements 3:17 of \[4, 5\]"
    ):
        part_of().__get_tensor_shard__(MetadataIndex("layer", (3, 3)))


# Copies


def through_pickle(tensor: Any) -> Any:
    return pickle.loads(pickle.dumps(tensor))


def through_torch_save(tensor: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()))


def staged(tensor: Any) -> Any:
    return StateDictStager().stage({"weight": tensor})["weight"]


def staged_while_blocking(tensor: Any) -> Any:
    return BlockingAsyncStager().stage({"weight": tensor})["weight"]


def cast(tensor: Any) -> Any:
    return tensor.to(torch.float64).to(torch.float32)


every_copy = pytest.mark.parametrize(
    "copied", [torch.clone, copy.deepcopy, through_pickle, through_torch_save, staged, staged_while_blocking, cast]
)


@every_copy
def test_a_copy_is_the_same_part_in_memory_of_its_own(copied: Callable[[Any], Any]) -> None:
    whole = WHOLE.clone()
    found = copied(part_of(whole))
    whole.zero_()
    assert isinstance(found, TensorPart)
    assert (found.shape, found.part) == (WHOLE.shape, part_of().part)
    assert torch.equal(found.local, WHOLE.view(-1)[3:17])
    assert len(shards(found)) == 3


@every_copy
def test_what_must_not_be_saved_stays_so(copied: Callable[[Any], Any]) -> None:
    found = copied(part_of(is_blank=True, unfit="it has no values"))
    assert found.is_blank
    with pytest.raises(RuntimeError, match="it has no values"):
        found.__create_write_items__("layer.weight", found)


def test_tied_ones_stay_tied_in_a_deep_copy() -> None:
    tensor = part_of()
    one, other = copy.deepcopy([tensor, tensor.detach()])
    assert one.local.data_ptr() == other.local.data_ptr()


def test_it_can_be_cast() -> None:
    found = part_of().to(torch.bfloat16)
    assert (found.dtype, found.local.dtype) == (torch.bfloat16, torch.bfloat16)


@pytest.mark.parametrize("value", [torch.ones(4, 5), nn.Parameter(torch.ones(4, 5))])
def test_a_whole_tensor_is_copied_into_it(value: Tensor) -> None:
    tensor = part_of(WHOLE.clone())
    with torch.no_grad():
        tensor.copy_(value)
    assert tensor.local.eq(1).all()


# What it is not


def test_it_cannot_be_computed_with() -> None:
    message = (
        r"aten.add.Tensor is not supported on a part of a tensor.*layer.weight is TensorPart\(elements 3:17 of \[4, 5\]"
    )
    with pytest.raises(NotImplementedError, match=message):
        part_of() + 1


def test_another_part_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"cannot copy .*0:14 of .* into .*3:17 of"):
        part_of().copy_(part_of(start=0, stop=14))


# Targets


def memory_of(value: Any) -> int:
    return (value.local if isinstance(value, TensorPart) else value).data_ptr()


def target() -> Any:
    return LoadTarget.like(WHOLE.shape, WHOLE, lambda value: part_of().part.check(value, WHOLE.dtype))


@pytest.mark.parametrize("value", [part_of(), torch.ones(4, 5), torch.ones(4, 5, dtype=torch.float64)])
def test_a_target_notes_what_fits_and_copies_nothing(value: Tensor) -> None:
    found = target()
    found.copy_(value)
    found.copy_(found)  # as a module does that loads what a state dict lacks from itself
    assert type(found.source) is type(value)
    assert memory_of(found.source) == memory_of(value)
    assert (found.shape, found.dtype, found.device, found.is_meta) == (WHOLE.shape, WHOLE.dtype, WHOLE.device, False)
