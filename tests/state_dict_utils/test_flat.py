"""Flattening nested trees into dotted keys and back, and what holds for all trees."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from fsdp.state_dict_utils import (
    FlatMapping,
    broadcast_state_dict,
    check_state_dict_similarity,
    copy_state_dict,
    create_cpu_state_dict,
    flatten_state_dict,
    gather_state_dict,
    unflatten_state_dict,
)
from tests.helpers.state_trees import Moments, assert_same_tree, counting, plain_tree


def test_keys_are_dotted_paths_and_the_mapping_has_the_paths() -> None:
    tree = {"state": {0: {"step": 7}}, "groups": [{"lr": 0.5}], "pair": Moments(1, (2,))}
    flat, mapping = flatten_state_dict(tree)
    assert flat == {"state.0.step": 7, "groups.0.lr": 0.5, "pair.0": 1, "pair.1.0": 2}
    assert mapping == {
        "state.0.step": ("state", 0, "step"),
        "groups.0.lr": ("groups", 0, "lr"),
        "pair.0": ("pair", 0),
        "pair.1.0": ("pair", 1, 0),
    }


def test_the_flat_dict_holds_the_leaves_themselves() -> None:
    tree = plain_tree()
    flat, _ = flatten_state_dict(tree)
    assert flat["model.weight"] is tree["model"]["weight"]


@pytest.mark.parametrize("tree", [{}, [], (), OrderedDict(), {"a": {}}, [[], ()], Moments({}, []), {"": {"": 1}}])
def test_empty_containers_come_back(tree: Any) -> None:
    assert_same_tree(unflatten_state_dict(*flatten_state_dict(tree)), tree)


def test_a_tree_put_together_twice_shares_no_container() -> None:
    flat, mapping = flatten_state_dict({"a": OrderedDict(b=1), "c": {}})
    first = unflatten_state_dict(flat, mapping)
    first["a"]["b"] = 2
    assert unflatten_state_dict(flat, mapping)["a"]["b"] == 1


def test_values_may_be_replaced_in_between() -> None:
    flat, mapping = flatten_state_dict({"a": [1, 2]})
    flat["a.1"] = value = OrderedDict(nested=3)
    tree = unflatten_state_dict(flat, mapping)
    assert tree == {"a": [1, {"nested": 3}]}
    assert tree["a"][1] is value


def test_a_mapping_can_be_pickled() -> None:
    flat, mapping = flatten_state_dict({"a": OrderedDict(b=(1, 2)), "c": Moments(3, [])})
    again = pickle.loads(pickle.dumps(mapping))
    assert again == mapping
    assert_same_tree(unflatten_state_dict(flat, again), {"a": OrderedDict(b=(1, 2)), "c": Moments(3, [])})


def test_plain_paths_make_lists_of_integers_and_dicts_of_others() -> None:
    paths: dict[str, Any] = {"a.0": ("a", 0), "b": ("b",), "c.1": ("c", 1), "c.x": ("c", "x"), "d.2.0": ("d", 2, 0)}
    flat = dict.fromkeys(paths, 1)
    expected = {"a": [1], "b": 1, "c": {1: 1, "x": 1}, "d": [None, None, [1]]}
    assert unflatten_state_dict(flat, paths) == expected
    assert unflatten_state_dict(flat, FlatMapping(paths)) == expected
    assert unflatten_state_dict({"a": 1}, {"a": (0,)}) == {0: 1}


def test_a_part_of_the_keys_makes_a_part_of_the_tree() -> None:
    flat, mapping = flatten_state_dict({"a": OrderedDict(b=1, c=2), "d": (1, 2, 3), "e": Moments(1, 2), "f": {0: 1}})
    part = {key: flat[key] for key in ("f.0", "a.c", "d.1", "e.1")}
    assert_same_tree(
        unflatten_state_dict(part, mapping), {"a": OrderedDict(c=2), "d": (None, 2), "e": Moments(None, 2), "f": {0: 1}}
    )
    assert unflatten_state_dict({}, mapping) == {}


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("value", [7, {"c": 1}])
def test_a_path_through_the_value_of_another_key_is_refused(order: int, value: Any) -> None:
    mapping = dict([("a", ("a",)), ("a.b", ("a", "b"))][::order])
    with pytest.raises(ValueError, match=r"'a(\.b)?' has the path \('a',.*\), where another key has its value"):
        unflatten_state_dict({"a": value, "a.b": 2}, mapping)
    assert value in (7, {"c": 1})


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a": {"b": 1}, "a.b": 2}, r"the key 'a\.b': the values at \('a', 'b'\) and at \('a\.b',\)"),
        ({"a": {1: 1, "1": 2}}, r"the key 'a\.1': the values at \('a', 1\) and at \('a', '1'\)"),
        ({"a": [{}], "a.0": 2}, r"the key 'a\.0': the values at \('a', 0\) and at \('a\.0',\)"),
    ],
)
def test_two_paths_to_one_key_are_an_error_that_names_both(tree: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flatten_state_dict(tree)


def test_only_containers_of_known_leaves_can_be_flattened() -> None:
    with pytest.raises(TypeError, match="a mapping, list or tuple can be flattened, got a Tensor"):
        flatten_state_dict(counting(2))
    with pytest.raises(TypeError, match=r"^a\.0: a object is neither a container"):
        flatten_state_dict({"a": [object()]})
    leaf = object()
    assert flatten_state_dict({"a": [leaf]}, type_check=False)[0] == {"a.0": leaf}


def test_a_key_without_a_path_is_refused() -> None:
    flat, mapping = flatten_state_dict({"a": 1, "b": 2})
    with pytest.raises(ValueError, match=r"keys of the flat dict only: 'c'\. The mapping must have a path"):
        unflatten_state_dict({**flat, "c": 1}, mapping)


# For all trees


def tensors() -> st.SearchStrategy[Tensor]:
    shapes = st.lists(st.integers(0, 3), max_size=3)
    dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool])
    return st.builds(lambda shape, dtype: counting(*shape, dtype=dtype), shapes, dtypes)


# Keys without dots, of one type: no two of them make the same key.
KEYS = st.text("abc", max_size=2)
LEAVES = tensors() | st.integers() | st.text(max_size=3) | st.binary(max_size=3) | st.booleans() | st.just(0.5)
TREES = st.recursive(
    st.dictionaries(KEYS, LEAVES, max_size=3),
    lambda inner: (
        st.dictionaries(KEYS, inner | LEAVES, max_size=3)
        | st.dictionaries(st.integers(0, 5), inner | LEAVES, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=2).map(OrderedDict)
        | st.lists(inner | LEAVES, max_size=3)
        | st.lists(inner | LEAVES, max_size=3).map(tuple)
        | st.builds(Moments, inner | LEAVES, inner)
    ),
    max_leaves=12,
)
for_all_trees = settings(max_examples=60, deadline=None)


@for_all_trees
@given(TREES)
def test_flattening_can_be_undone(tree: Any) -> None:
    flat, mapping = flatten_state_dict(tree)
    assert list(flat) == list(mapping)
    assert_same_tree(unflatten_state_dict(flat, mapping), tree)


@for_all_trees
@given(TREES)
def test_a_created_tree_is_similar_and_takes_all_values(tree: Any) -> None:
    new = create_cpu_state_dict(tree)
    assert check_state_dict_similarity(tree, new, raise_error=True)
    assert_same_tree(copy_state_dict(tree, new), tree)


@for_all_trees
@given(TREES)
def test_a_broadcast_to_nobody_else_is_a_copy(tree: Any) -> None:
    assert_same_tree(broadcast_state_dict(tree, create_cpu_state_dict(tree), "cpu", strict=True), tree)
    assert_same_tree(broadcast_state_dict({"tree": tree}, {}, "cpu", max_coalesced_bytes=64), {"tree": tree})


@for_all_trees
@given(TREES)
def test_gathering_what_is_whole_changes_nothing(tree: Any) -> None:
    assert_same_tree(gather_state_dict(tree), tree)


@for_all_trees
@given(TREES, TREES)
def test_trees_are_similar_exactly_if_their_flat_forms_are(first: Any, second: Any) -> None:
    def form(tree: Any) -> Any:
        flat, mapping = flatten_state_dict([tree])
        # By sorted text: the order of keys does not matter, nor whether a dict or a tuple is a special one.
        leaves = sorted((str(mapping[key]), _form(leaf)) for key, leaf in flat.items())
        return leaves, sorted((str(path), _kind(container)) for path, container in mapping.containers.items())

    assert check_state_dict_similarity(first, first)
    assert check_state_dict_similarity(first, second) == (form(first) == form(second))


def _form(leaf: Any) -> str:
    return f"{leaf.shape} {leaf.dtype}" if isinstance(leaf, Tensor) else _kind(leaf)


def _kind(node: Any) -> str:
    return next((kind.__name__ for kind in (dict, tuple, list) if isinstance(node, kind)), type(node).__name__)
