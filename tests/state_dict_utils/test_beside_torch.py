"""The functions beside torch's private ones of the same names, on the same trees: as there, or as the page says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from torch.distributed import _state_dict_utils as torchs
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, init_from_local_shards
from torch.distributed.checkpoint import _nested_dict as torchs_checkpoints

from fsdp.state_dict_utils import (
    CompanionMismatch,
    broadcast_state_dict,
    check_state_dict_similarity,
    copy_state_dict,
    create_cpu_state_dict,
    distribute_state_dict,
    flatten_state_dict,
    gather_state_dict,
    offload_state_dict_to_cpu,
    unflatten_state_dict,
)
from tests.helpers.on_ranks import on_ranks
from tests.helpers.state_trees import assert_same_tree, counting

# Flat keys

KEYS = st.text("abc01", min_size=1, max_size=2)
LEAVES = st.integers() | st.text(max_size=3) | st.none() | st.builds(counting, st.integers(0, 3))
NODES = st.recursive(
    LEAVES,
    lambda inner: st.dictionaries(KEYS, inner, min_size=1, max_size=3) | st.lists(inner, min_size=1, max_size=3),
    max_leaves=12,
)
TREES = st.dictionaries(KEYS, NODES, max_size=3)
for_all_trees = settings(max_examples=40, deadline=None)


@for_all_trees
@given(TREES)
def test_keys_and_paths_are_torchs(tree: dict[str, Any]) -> None:
    ours, theirs = flatten_state_dict(tree), torchs._flatten_state_dict(tree)
    assert_same_tree(ours[0], theirs[0])
    assert dict(ours[1]) == theirs[1]


@for_all_trees
@given(TREES, st.data())
def test_mappings_of_torch_make_the_trees_that_torch_makes(tree: dict[str, Any], data: st.DataObject) -> None:
    for flatten in (torchs._flatten_state_dict, torchs_checkpoints.flatten_state_dict):
        flat, mapping = flatten(tree)
        assert_same_tree(unflatten_state_dict(flat, mapping), tree)
        part = {key: value for key, value in flat.items() if data.draw(st.booleans())}
        assert_same_tree(unflatten_state_dict(part, mapping), torchs._unflatten_state_dict(part, mapping))


@for_all_trees
@given(TREES, st.data())
def test_a_part_of_the_keys_makes_the_tree_that_torch_makes(tree: dict[str, Any], data: st.DataObject) -> None:
    flat, mapping = flatten_state_dict(tree)
    part = {key: value for key, value in flat.items() if data.draw(st.booleans())}
    made = unflatten_state_dict(part, mapping)
    assert_same_tree(made, torchs._unflatten_state_dict(part, dict(mapping)))
    assert_same_tree(torchs._unflatten_state_dict(flat, dict(mapping)), unflatten_state_dict(flat, mapping))


def test_a_value_is_set_at_any_path_as_torch_sets_it() -> None:
    flat, mapping = flatten_state_dict({"state": {"a": {"step": 1}}, "groups": [{"lr": 0.5}]})
    theirs = torchs._unflatten_state_dict(flat, dict(mapping))
    for key, path in (("more", ("groups", 2, "lr")), ("state.b.step", ("state", "b", "step")), ("new", ("x", 1, 0))):
        flat[key], mapping[key] = 7, path
        torchs._set_element(theirs, path, 7)
    assert unflatten_state_dict(flat, mapping) == theirs
    assert theirs["groups"] == [{"lr": 0.5}, None, {"lr": 7}]


# Sharded tensors


def sharded_tensor() -> ShardedTensor:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    place = ShardMetadata([2 * rank, 0], [2, 3], f"rank:{rank}/cpu")
    return init_from_local_shards([Shard(counting(2, 3), place)], 2 * world_size, 3)


@pytest.mark.filterwarnings("ignore:.*ShardedTensor.*")
@on_ranks(1, 2, 3)
def test_a_sharded_tensor_is_an_error_with_its_path() -> None:
    tree, plain = {"a": {"b": sharded_tensor()}}, {"a": {"b": torch.zeros(2 * dist.get_world_size(), 3)}}
    calls: list[Callable[..., Any]] = [
        lambda **options: gather_state_dict(tree, **options),
        lambda **options: offload_state_dict_to_cpu(tree, **options),
        lambda **options: create_cpu_state_dict(tree, **options),
        lambda **options: copy_state_dict(tree, plain, **options),
        lambda **options: copy_state_dict(plain, tree, **options),
        lambda **options: check_state_dict_similarity(tree, tree, **options),
        lambda **options: broadcast_state_dict(tree, plain, "cpu", **options),
        lambda **options: broadcast_state_dict(plain, tree, "cpu", **options),
        lambda **options: distribute_state_dict(tree, plain, "cpu", **options),
        lambda **options: distribute_state_dict(plain, tree, "cpu", dist.group.WORLD, **options),
    ]
    for call in calls:
        for type_check in (True, False):
            # Of what is broadcast, rank 0 has the tree, and the others learn that it cannot be sent.
            with pytest.raises((TypeError, RuntimeError), match=r"a\.b: a ShardedTensor, .* device_mesh"):
                call(type_check=type_check)
    assert_same_tree(plain, {"a": {"b": torch.zeros(2 * dist.get_world_size(), 3)}})
    with pytest.raises(TypeError, match=r"^a\.b: a ShardedTensor"):
        flatten_state_dict(tree)
    assert flatten_state_dict(tree, type_check=False)[0]["a.b"] is tree["a"]["b"]


# What the page says is different


@on_ranks(2)
def test_keys_are_added_or_refused_where_torch_ignores_or_removes_them() -> None:
    cpu = torch.device("cpu")
    full = {"both": counting(2), "full": counting(3), "number": 7} if dist.get_rank() == 0 else {}
    for strict in (False, True):
        theirs: dict[str, Any] = {"both": torch.zeros(2), "local": torch.zeros(1)}
        torchs._broadcast_state_dict(full, theirs, cpu, strict=strict)
        assert_same_tree(theirs, {"both": counting(2)} | ({} if strict else {"local": torch.zeros(1)}))
    ours = {"both": torch.zeros(2), "local": torch.zeros(1)}
    broadcast_state_dict(full, ours, cpu)
    everything = {"both": counting(2), "local": torch.zeros(1), "full": counting(3), "number": 7}
    assert_same_tree(ours, everything)
    with pytest.raises(CompanionMismatch, match=r"'full', 'number' are in the full tree only"):
        broadcast_state_dict(full, {"both": torch.zeros(2), "local": torch.zeros(1)}, cpu, strict=True)


def test_unknown_leaves_are_passed_on_where_torch_copies_them() -> None:
    leaf = {1, 2}
    with pytest.raises(ValueError, match="Unexpected value type"):
        torchs._gather_state_dict({"a": [leaf]})
    with pytest.raises(TypeError, match=r"^a\.0: a set is neither"):
        gather_state_dict({"a": [leaf]})
    assert torchs._gather_state_dict({"a": [leaf]}, type_check=False)["a"][0] is not leaf
    assert gather_state_dict({"a": [leaf]}, type_check=False)["a"][0] is leaf
    assert create_cpu_state_dict({"a": [leaf]}, type_check=False)["a"][0] is not leaf


def test_targets_are_written_where_torch_replaces_or_stretches_them() -> None:
    into = {"a": torch.zeros(3), "step": 0}
    assert torchs._copy_state_dict({"a": torch.ones(1), "step": 7}, into) == {"a": into["a"], "step": 7}
    assert_same_tree(into, {"a": torch.ones(3), "step": 0})
    with pytest.raises(CompanionMismatch, match=r"^a: tensor \[1\] of float32 and tensor \[3\] of float32"):
        copy_state_dict({"a": torch.ones(1), "step": 7}, into)
    copy_state_dict({"a": counting(3), "step": 7}, into)
    assert_same_tree(into, {"a": counting(3), "step": 7})
