"""Staging tensors of special kinds: subclasses, wrappers, sparse and quantised ones; and putting copies back."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdp import StateDictStager
from fsdp.state_dict_utils import origins, restore
from tests.helpers.on_ranks import on_ranks


def staged(tree: Any) -> Any:
    return StateDictStager().stage(tree)


def share(*tensors: Tensor) -> bool:
    return len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1


class Tagged(Tensor):
    """A plain subclass: memory of its own, and attributes."""

    tag: Any

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was called on it")


class Slotted(Tensor):
    __slots__ = ("note",)
    note: Any


class TwoTensor(Tensor):
    """A wrapper of two tensors, as quantised weights are."""

    first: Tensor
    second: Tensor
    note: str

    @staticmethod
    def __new__(cls, first: Tensor, second: Tensor, requires_grad: bool = False) -> TwoTensor:
        self = Tensor._make_wrapper_subclass(
            cls, first.shape, dtype=first.dtype, device=first.device, requires_grad=requires_grad
        )
        self.first, self.second = first, second
        return self

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["first", "second"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> TwoTensor:
        return TwoTensor(inner["first"], inner["second"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return TwoTensor(args[0].first, args[0].second)
        raise AssertionError(f"{func} was called on it")


class Opaque(Tensor):
    """A wrapper that tells nobody what it wraps."""

    @staticmethod
    def __new__(cls) -> Opaque:
        return Tensor._make_wrapper_subclass(cls, (2, 3), dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise AssertionError(f"{func} was called on it")


class Pickled(nn.Parameter):
    """A parameter that knows how it is rebuilt, from tensors that exist only meanwhile."""

    start: int

    @staticmethod
    def of(memory: Tensor, start: int) -> Pickled:
        made = Tensor._make_subclass(Pickled, memory[start:], True)
        made.start = start
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        whole = torch.empty(0).set_(self.untyped_storage())
        return Pickled.of, (whole, self.start)


# Parameters and subclasses


@pytest.mark.parametrize("requires_grad", [True, False])
def test_parameters_stay_parameters(requires_grad: bool) -> None:
    param = nn.Parameter(torch.arange(4.0), requires_grad=requires_grad)
    copied, view = staged([param, param.detach()[1:]])
    assert type(copied) is nn.Parameter
    assert (copied.requires_grad, copied.is_leaf) == (requires_grad, True)
    assert torch.equal(copied, param)
    assert share(copied, view)
    assert not view.requires_grad


def test_the_result_of_a_computation_is_a_leaf_as_in_a_file() -> None:
    copied = staged(nn.Parameter(torch.ones(2)) * 2)
    assert copied.requires_grad
    assert copied.is_leaf


def test_attributes_of_tensors_are_copied_with_the_rest() -> None:
    weight = torch.ones(3)
    param = nn.Parameter(torch.zeros(2))
    param.related = {"weight": weight, "itself": param}  # type: ignore[attr-defined]
    copied, other = staged([param, weight])
    assert copied.related["weight"] is other
    assert copied.related["itself"] is copied


def test_a_plain_subclass_keeps_class_and_attributes_without_being_called() -> None:
    original = torch.arange(3.0).as_subclass(Tagged)
    original.tag = ["kept"]
    copied = staged(original)
    assert type(copied) is Tagged
    assert copied.tag == ["kept"]
    assert copied.tag is not original.tag
    assert copied.as_subclass(Tensor).tolist() == [0, 1, 2]


def test_slots_of_a_subclass_are_copied() -> None:
    original = torch.ones(2).as_subclass(Slotted)
    original.note = ["kept"]
    copied = staged(original)
    assert copied.note == ["kept"]
    assert copied.note is not original.note


def test_a_subclass_with_a_way_of_its_own_to_pickle_is_rebuilt_in_that_way() -> None:
    memory = torch.arange(5.0)
    copied, whole = staged([Pickled.of(memory, 2), memory])
    assert type(copied) is Pickled
    assert copied.tolist() == [2, 3, 4]
    assert share(copied, whole)


def test_a_wrapper_is_taken_apart_and_put_together() -> None:
    first, second = torch.arange(3.0), torch.zeros(3)
    original = TwoTensor(first, second, requires_grad=True)
    original.note = "kept"
    copied, alias = staged([original, first])
    assert type(copied) is TwoTensor
    assert (copied.requires_grad, copied.note) == (True, "kept")
    assert copied.first is alias
    assert copied.second.tolist() == [0, 0, 0]
    assert not share(copied.first, first)


def test_a_parameter_that_is_a_wrapper_stays_a_parameter() -> None:
    copied = staged(nn.Parameter(TwoTensor(torch.ones(2), torch.zeros(2))))
    assert type(copied) is TwoTensor
    assert isinstance(copied, nn.Parameter)
    assert copied.requires_grad


def test_a_wrapper_that_cannot_be_taken_apart_is_an_error_that_names_it() -> None:
    with pytest.raises(TypeError, match=r"the tree\['w'\]: a .*Opaque of shape \(2, 3\).*__tensor_flatten__"):
        staged({"w": Opaque()})


# Layouts


def test_sparse_tensors_are_copied_by_their_parts() -> None:
    original = torch.eye(3).to_sparse()
    copied = staged(original)
    original.values().zero_()
    assert copied.is_coalesced()
    assert torch.equal(copied.to_dense(), torch.eye(3))


def test_an_uncoalesced_tensor_stays_so() -> None:
    original = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.tensor([1.0, 2.0]), (3,), check_invariants=True)
    copied = staged(original)
    assert not copied.is_coalesced()
    assert copied._values().tolist() == [1, 2]
    assert copied.to_dense().tolist() == [0, 3, 0]


COMPRESSED = [torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc]


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("layout", COMPRESSED, ids=str)
def test_compressed_tensors_are_copied_by_their_parts(layout: torch.layout) -> None:
    blocks = (2, 2) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None
    original = torch.eye(4).to_sparse(layout=layout, blocksize=blocks)
    copied = staged(original)
    original.values().zero_()
    assert copied.layout == layout
    assert torch.equal(copied.to_dense(), torch.eye(4))


@pytest.mark.filterwarnings("ignore:.*quantize:UserWarning")
@pytest.mark.parametrize("per_channel", [False, True])
def test_quantised_tensors_keep_their_scales(per_channel: bool) -> None:
    weight = torch.arange(12.0).view(3, 4)
    if per_channel:
        scales, zeros = torch.tensor([0.5, 1.0, 2.0]), torch.tensor([0, 1, 2])
        original = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
    else:
        original = torch.quantize_per_tensor(weight, 0.5, 3, torch.qint8)
    copied = staged([original, original.t()] if not per_channel else [original])
    assert all(share(copied[0], other) for other in copied)
    assert torch.equal(copied[0].dequantize(), original.dequantize())
    assert not share(copied[0], original)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
def test_a_layout_without_memory_that_can_be_seen_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"the tree\[0\]: a torch.Tensor of shape \(2, 2\).*layout"):
        staged([torch.ones(2, 2).to_mkldnn()])


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
def test_of_nested_tensors_the_jagged_ones_are_copied_and_strided_ones_are_an_error() -> None:
    parts = [torch.ones(2), torch.zeros(3)]
    copied = staged(torch.nested.nested_tensor(parts, layout=torch.jagged))
    assert [part.tolist() for part in copied.unbind()] == [[1, 1], [0, 0, 0]]
    with pytest.raises(TypeError, match="keeps its values in an inaccessible place"):
        staged(torch.nested.nested_tensor(parts, layout=torch.strided))


def test_tensors_on_the_meta_device_stay_there() -> None:
    whole = torch.empty(4, 5, device="meta")
    copied, row = staged([whole, whole[1]])
    assert copied.is_meta
    assert copied.shape == (4, 5)
    assert copied.untyped_storage() is row.untyped_storage()


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_staging_in_special_modes_gives_ordinary_tensors(mode: Any) -> None:
    param = nn.Parameter(torch.ones(2))
    with mode():
        copied = staged([param, torch.ones(2)])
    assert copied[0].requires_grad
    assert not any(each.is_inference() for each in copied)


def test_inference_tensors_can_be_staged() -> None:
    with torch.inference_mode():
        original = torch.ones(2)
    assert not staged(original).is_inference()


def test_a_default_device_does_not_matter() -> None:
    large = torch.ones(1 << 20)
    torch.set_default_device("meta")
    try:
        copied = staged([large, torch.ones(2, device="cpu")])
    finally:
        torch.set_default_device(None)
    assert torch.equal(copied[0], large)
    assert copied[1].tolist() == [1, 1]


# Back to where they came from


@pytest.fixture
def elsewhere() -> Callable[..., None]:
    """Copies of these tensors say that they came from the meta device, where restoring them can be seen."""

    def claim(*copies: Tensor) -> None:
        for copied in copies:
            copied.untyped_storage().staged_from = torch.device("meta")  # type: ignore[attr-defined]

    return claim


def test_a_copy_knows_the_devices_it_came_from(elsewhere: Any) -> None:
    weight = torch.ones(2)
    copied = staged({"a": weight, "view": weight[1:], "b": torch.ones(3), "empty": torch.empty(0)})
    elsewhere(copied["b"])
    assert origins(copied) == ["cpu", "meta", "cpu"]


def test_a_copy_is_restored_with_its_views_and_classes(elsewhere: Any) -> None:
    weight = torch.ones(4)
    copied = staged({"w": nn.Parameter(weight), "view": weight[1:3], "stays": torch.zeros(2)})
    elsewhere(copied["w"])
    restored = restore(copied)
    assert type(restored["w"]) is nn.Parameter
    assert restored["w"].is_meta
    assert restored["view"].untyped_storage() is restored["w"].untyped_storage()
    assert share(restored["stays"], copied["stays"])  # it is where it belongs


def test_devices_can_be_saved_with_a_copy_and_restored_after_loading(elsewhere: Any) -> None:
    weight = torch.ones(4)
    empty = torch.empty(0)
    copied = staged({"w": weight, "view": weight[1:3], "e": [empty, empty[:]], "x": torch.zeros(2)})
    elsewhere(copied["x"])
    file = io.BytesIO()
    torch.save({"state": copied, "devices": origins(copied)}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    restored = restore(loaded["state"], loaded["devices"])
    assert restored["x"].is_meta
    assert restored["w"].device.type == "cpu"
    assert share(restored["w"], restored["view"])


@pytest.mark.parametrize("devices", [["cpu"], ["cpu"] * 3])
def test_devices_of_another_tree_are_an_error(devices: list[str]) -> None:
    with pytest.raises(ValueError, match=rf"2 storages, but there are {len(devices)} devices"):
        restore(staged([torch.ones(1), torch.ones(1)]), devices)


def test_deepcopy_of_a_copy_is_a_copy_in_memory_of_its_own() -> None:
    copied = staged(torch.ones(3))
    assert not share(copy.deepcopy(copied), copied)


# DTensors


@on_ranks(3)
def test_dtensors_keep_their_placements_and_local_parts_are_copied() -> None:
    mesh = init_device_mesh("cpu", (3,))
    whole = torch.arange(14.0).view(7, 2)
    original = distribute_tensor(whole, mesh, [Shard(0)])
    param = nn.Parameter(distribute_tensor(whole, mesh, [Replicate()]))
    copied, other, local = staged([original, param, original.to_local()])
    assert isinstance(copied, DTensor)
    # torch may give an equal mesh of an earlier run, which it has kept; a copy would want process groups of its own.
    assert copied.device_mesh == mesh
    assert copied.device_mesh.get_group() is mesh.get_group()
    assert (copied.placements, copied.shape, copied.stride()) == ((Shard(0),), (7, 2), (2, 1))
    assert isinstance(other, nn.Parameter)
    assert other.requires_grad
    assert share(copied.to_local(), local)
    assert not share(local, original.to_local())
    original.to_local().zero_()
    assert torch.equal(copied.full_tensor(), whole)


class UnderWay(Tensor):
    """As the functional collectives' results: a wrapper whose values are there once they were waited for."""

    held: Tensor
    waits: int

    @staticmethod
    def __new__(cls, held: Tensor) -> UnderWay:
        self = Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)
        self.held, self.waits = held, 0
        return self

    def trigger_wait(self) -> Tensor:
        self.waits += 1
        return self.held

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise AssertionError(f"{func} was called on it")


def test_the_result_of_a_collective_is_awaited_and_staged_as_a_tensor() -> None:
    assert hasattr(AsyncCollectiveTensor, "trigger_wait")
    result = UnderWay(torch.ones(2))
    copied = staged([result, result])
    assert result.waits == 1
    assert type(copied[0]) is Tensor
    assert copied[1] is copied[0]
    assert not share(copied[0], result.held)
