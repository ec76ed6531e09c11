"""Copying, offloading and comparing state trees, and making their like on CPU, in one process and over ranks."""

from __future__ import annotations

import ast
import io
import re
from collections import OrderedDict, UserDict, defaultdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from fsdp import state_dict_utils
from fsdp.state_dict_utils import (
    CompanionMismatch,
    check_state_dict_similarity,
    copy_state_dict,
    create_cpu_state_dict,
    gather_state_dict,
    offload_state_dict_to_cpu,
)
from tests.helpers.on_ranks import on_ranks
from tests.helpers.state_trees import (
    Moments,
    assert_same_tree,
    counting,
    mesh_of,
    plain_tree,
    spread,
    spread_everywhere,
)


def test_the_package_knows_nothing_of_sharded_models() -> None:
    for file in Path(state_dict_utils.__file__).parent.glob("*.py"):
        nodes = ast.walk(ast.parse(file.read_text()))
        imported = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        rooms = {".".join(name.split(".")[:2]) for name in imported if name.startswith("fsdp")}
        assert rooms <= {"fsdp.distributed", "fsdp.state_dict_utils"}, file.name


# Containers


class Named(dict[str, Any]):
    """A dict with something beside its items, like the state dicts of modules."""

    label = "none"


class Listed(list[Any]):
    """A list that is not made from its items."""

    def __init__(self, *, size: int) -> None:
        super().__init__([0] * size)


def test_containers_keep_their_types() -> None:
    default: defaultdict[str, Any] = defaultdict(list, a=1)
    user, view = UserDict(a=1), MappingProxyType({"a": 1})
    tree: tuple[Any, ...] = (default, user, view, OrderedDict(a=1), Moments(1, 2), torch.Size([1, 2]), [()], {})
    new = gather_state_dict(tree)
    assert new == tree
    assert list(map(type, new)) == list(map(type, tree))
    assert new[0]["missing"] == []
    assert all(one is not other for one, other in zip(new[:5], tree[:5], strict=True))


def test_what_a_mapping_knows_beside_its_items_is_kept() -> None:
    tree = nn.BatchNorm1d(2).state_dict()
    assert gather_state_dict(tree)._metadata == tree._metadata  # type: ignore[attr-defined]
    named = Named(a=1)
    named.label = "mine"
    new = gather_state_dict(named)
    assert type(new) is Named
    assert new.label == "mine"


def test_a_container_that_cannot_be_built_becomes_a_plain_one() -> None:
    assert type(gather_state_dict(Listed(size=2))) is list


# Copying


def test_copying_fills_an_existing_tree_and_keeps_its_tensors() -> None:
    source, into = plain_tree(), create_cpu_state_dict(plain_tree())
    kept = into["model"]["weight"]
    result = copy_state_dict(source, into)
    assert result is into
    assert_same_tree(result, plain_tree())
    assert_same_tree(source, plain_tree())
    assert result["model"]["weight"] is kept
    assert kept.data_ptr() != source["model"]["weight"].data_ptr()


def test_copying_replaces_other_leaves_by_copies() -> None:
    file = io.BytesIO(b"new")
    into: dict[str, Any] = {"lr": 0.1, "file": io.BytesIO(), "pair": (1, "old"), "name": None}
    copy_state_dict({"lr": 0.2, "file": file, "pair": (2, "new"), "name": "x"}, into)
    assert into["file"] is not file
    assert_same_tree(into, {"lr": 0.2, "file": io.BytesIO(b"new"), "pair": (2, "new"), "name": "x"})


def test_a_tuple_at_the_root_is_returned_anew_around_the_same_tensors() -> None:
    into = (torch.zeros(2), 0)
    result = copy_state_dict((torch.ones(2), 1), into)
    assert_same_tree(result, (torch.ones(2), 1))
    assert result[0] is into[0]


def test_copying_writes_parameters_in_place_and_casts_to_their_dtype() -> None:
    weight = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    copy_state_dict([counting(3)], [weight])
    assert_same_tree(weight.data, counting(3, dtype=torch.bfloat16))


@on_ranks(4)
def test_copying_dtensors_copies_each_ranks_part() -> None:
    source, _ = spread_everywhere()
    into = create_cpu_state_dict(source)
    for name, tree in into.items():
        for key, tensor in tree.items():
            assert tensor.to_local().untyped_storage().data_ptr() == 0 or (
                tensor.to_local().data_ptr() != source[name][key].to_local().data_ptr()
            )
    assert copy_state_dict(source, into) is into
    assert_same_tree(into, source)


# A pair of trees, and how it is said where they differ.
DIFFERENT: dict[str, tuple[Any, Any, str]] = {
    "key": ({"a": {"b": 1, "c": 2}}, {"a": {"b": 1}}, r"^a: 'c' is in .* only, and .* has no such key"),
    "keys": ({}, {1: 2, "x": 3}, r"^the whole tree: 1, 'x' are in .* only, and .* has no such key"),
    "length": ({"a": [1]}, {"a": [1, 2]}, r"^a: 1 items in .*, 2 items in "),
    "kind": ({"a": [1]}, {"a": (1,)}, r"^a: list in .*, tuple in "),
    "leaf": ([{"a": 1}], [3], r"^0: dict in .*, int in "),
    "tensor": ([counting(2)], [3], r"^0: tensor \[2\] of float32 and int"),
    "none": ([None], [counting(2)], r"^0: None and tensor \[2\] of float32"),
    "shape": ({"a": (counting(2, 3),)}, {"a": (counting(3, 2),)}, r"^a\.0: tensor \[2, 3\] .* and tensor \[3, 2\]"),
    "dtype": ([counting(2)], [counting(2).to(torch.int64)], r"^0: dtypes torch.float32 and torch.int64"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_copying_between_different_trees_says_where_and_changes_nothing(name: str) -> None:
    source, into, message = DIFFERENT[name]
    first = counting(2)
    tree = {"first": first, "rest": into}
    with pytest.raises(CompanionMismatch) as caught:
        copy_state_dict({"first": -counting(2), "rest": source}, tree)
    assert caught.value.path[0] == "rest"
    assert re.search(message, str(CompanionMismatch(caught.value.path[1:], caught.value.difference)))
    assert_same_tree(first, counting(2))


def test_tensors_on_the_meta_device_are_neither_source_nor_target() -> None:
    with pytest.raises(CompanionMismatch, match=r"^0: the source is on the meta device, where there are no values"):
        copy_state_dict([torch.empty(2, device="meta")], [torch.empty(2)])
    with pytest.raises(CompanionMismatch, match=r"^0: the target is on the meta device, where there are no values"):
        copy_state_dict([torch.empty(2)], [torch.empty(2, device="meta")])


@on_ranks(2)
def test_dtensors_that_are_spread_differently_are_not_copied() -> None:
    rows, columns = (spread(counting(4, 4), mesh_of(2), [Shard(dim)]) for dim in (0, 1))
    with pytest.raises(
        CompanionMismatch, match=r"^0: of \[4, 4\], Shard\(dim=0\) over .* and of \[4, 4\], Shard\(dim=1\)"
    ):
        copy_state_dict([rows], [columns])
    with pytest.raises(CompanionMismatch, match=r"^0: .* and a plain tensor"):
        copy_state_dict([rows], [counting(4, 4)])
    assert not check_state_dict_similarity([rows], [columns])
    assert not check_state_dict_similarity([rows], [counting(4, 4)])
    assert check_state_dict_similarity([rows], [rows.clone()])


# Comparing


def test_trees_of_equal_form_are_similar() -> None:
    tree, other = plain_tree(), plain_tree()
    other["model"] = dict(reversed([(key, value * 2) for key, value in tree["model"].items()]))
    other["groups"][0]["lr"] = 1.5
    assert check_state_dict_similarity(tree, other)
    assert check_state_dict_similarity(tree, create_cpu_state_dict(tree))


@pytest.mark.parametrize("name", DIFFERENT)
def test_trees_of_different_form_are_not_and_it_can_be_said_where(name: str) -> None:
    first, second, message = DIFFERENT[name]
    assert check_state_dict_similarity(first, second) is False
    with pytest.raises(CompanionMismatch, match=message):
        check_state_dict_similarity(first, second, raise_error=True)


@pytest.mark.parametrize("other", [1.0, "1", True, None])
def test_other_leaves_must_be_of_one_type(other: Any) -> None:
    assert not check_state_dict_similarity([1], [other])
    assert check_state_dict_similarity([other], [other])


def test_a_dtype_that_only_casts_is_different() -> None:
    assert not check_state_dict_similarity([counting(2)], [counting(2, dtype=torch.bfloat16)])


def test_devices_do_not_matter_for_similarity() -> None:
    assert check_state_dict_similarity([counting(2)], [torch.empty(2, device="meta")])


# A CPU tree of the same structure


def test_a_created_tree_has_memory_of_its_own() -> None:
    tree = {
        "tensor": counting(4, 4).t(),
        "scalar": torch.tensor(1),
        "nothing": torch.empty(0, 3),
        "file": io.BytesIO(b"x"),
    }
    new = create_cpu_state_dict(tree)
    assert check_state_dict_similarity(tree, new, raise_error=True)
    assert new["tensor"].is_contiguous()
    assert new["tensor"].data_ptr() != tree["tensor"].data_ptr()  # type: ignore[attr-defined]
    assert new["file"] is not tree["file"]
    assert_same_tree(new["file"], tree["file"])


def test_a_tree_can_be_created_from_the_meta_device() -> None:
    new = create_cpu_state_dict([nn.Parameter(torch.empty(2, device="meta"))])
    assert new[0].device.type == "cpu"
    assert not new[0].requires_grad


@on_ranks(1, 3)
def test_a_created_dtensor_is_spread_as_the_first() -> None:
    tree, _ = spread_everywhere()
    assert check_state_dict_similarity(tree, create_cpu_state_dict(tree, share_memory=True), raise_error=True)


# Offloading


def test_offloading_on_cpu_copies_nothing() -> None:
    tree = plain_tree()
    result = offload_state_dict_to_cpu(tree)
    assert_same_tree(result, tree)
    assert result["model"] is not tree["model"]
    assert result["model"]["weight"].data_ptr() == tree["model"]["weight"].data_ptr()


def test_offloading_detaches() -> None:
    assert not offload_state_dict_to_cpu([nn.Parameter(counting(2))])[0].requires_grad


def test_offloading_what_has_no_values_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"^a\.0: on the meta device, where there are no values"):
        offload_state_dict_to_cpu({"a": [torch.empty(1, device="meta")]})


@on_ranks(3)
def test_chosen_ranks_get_the_offloaded_tree_and_dtensors_stay_sharded() -> None:
    tree = {
        "weight": spread(counting(7), mesh_of(3), [Shard(0)]),
        "bias": spread(counting(2), mesh_of(3), [Replicate()]),
    }
    result = offload_state_dict_to_cpu(tree, ranks_only=(1,))
    assert_same_tree(result, tree if dist.get_rank() == 1 else {})
    with pytest.raises(ValueError, match=r"ranks_only=\(3,\): there is no rank 3, only 0 to 2"):
        offload_state_dict_to_cpu(tree, ranks_only=(3,))
