"""Shards that do not belong together, or are not all there, are refused with the rank and the key."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.checkpoint.formats.test_consolidate_fairscale import recorded
from tests.helpers.legacy_sources import truth
from tests.helpers.local_shards import Shards, consolidated


def refused(shards: Shards, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        consolidated(shards)


def changed(change: Callable[[list[Any], list[Any]], None], name: str = "flat-3") -> Shards:
    shards = copy.deepcopy(recorded(name))
    change(*shards)
    return shards


# Lists


def test_lists_must_be_of_one_length() -> None:
    weights, metadata = recorded("flat-3")
    refused((weights[:2], metadata), "got 2 of weights and 3 of metadata")
    refused(([], []), "got 0 of weights and 0 of metadata")


def test_missing_ranks_and_another_order_are_noticed() -> None:
    weights, metadata = recorded("flat-3")
    refused((weights[:2], metadata[:2]), r"'flat_param_0' has 28 elements on the 2 ranks given .*say 40 .*is missing")
    refused((weights[1:], metadata[1:]), r"'flat_param_0' has 26 elements on the 2 ranks given")
    refused((weights[::-1], metadata[::-1]), "rank 0: 'flat_param_0' ends with 2 elements of padding, but rank 1")
    weights, metadata = recorded("flat-2")
    refused(([*weights, weights[1]], [*metadata, metadata[1]]), "60 elements on the 3 ranks given .* say 40")


# Weights


def cut(weights: list[Any], _: list[Any]) -> None:
    weights[1]["flat_param_0"] = weights[1]["flat_param_0"][:9]


def cut_into_padding(weights: list[Any], _: list[Any]) -> None:
    weights[2]["flat_param_0"] = weights[2]["flat_param_0"][:1]


def cast(weights: list[Any], _: list[Any]) -> None:
    weights[1]["flat_param_0"] = weights[1]["flat_param_0"].half()


def drop_a_shard(weights: list[Any], _: list[Any]) -> None:
    del weights[1]["inner.flat_param_0"]


WEIGHTS: dict[str, tuple[Callable[[list[Any], list[Any]], object], str]] = {
    "a missing shard": (drop_a_shard, r"rank 1: 'inner.flat_param_0' is missing in its weights"),
    "a missing buffer": (
        lambda weights, _: weights[0].pop("norm.running_mean"),
        "rank 0: 'norm.running_mean' is missing",
    ),
    "a cut shard": (cut, r"has 35 elements on the 3 ranks given \(14 on rank 0, 9 on rank 1, 12 on rank 2,"),
    "less than padding": (cut_into_padding, "rank 2: 'flat_param_0' has 1 elements, but its metadata say that 2 are"),
    "another dtype": (cast, "'flat_param_0' .*torch.float32, torch.float16, torch.float32"),
    "no tensor": (lambda weights, _: weights[2].update(flat_param_0="text"), "rank 2: 'flat_param_0' is a str"),
}


@pytest.mark.parametrize(("change", "message"), WEIGHTS.values(), ids=WEIGHTS)
def test_weights_that_do_not_fit_are_named(change: Any, message: str) -> None:
    refused(changed(change), message)


def test_a_missing_shard_of_a_later_rank_is_an_error_without_strict() -> None:
    with pytest.raises(ValueError, match=r"rank 1: 'inner.flat_param_0' is missing"):
        consolidated(changed(drop_a_shard), strict=False)


def test_keys_that_nothing_names_are_refused_when_strict() -> None:
    shards = changed(lambda weights, _: weights[0].update(odd=torch.ones(1)))
    refused(shards, "rank 0: 'odd' is in its weights, but not in its metadata")
    assert consolidated(shards, strict=False).keys() == truth("flat-3").keys()


def test_without_strict_what_the_first_rank_lacks_is_left_out() -> None:
    def drop(weights: list[Any], _: list[Any]) -> None:
        del weights[0]["inner.flat_param_0"], weights[0]["norm.running_mean"]

    found = consolidated(changed(drop), strict=False)
    parameters = {"inner.0.weight", "inner.2.weight", "inner.2.bias", "inner.3.weight", "inner.3.bias"}
    assert truth("flat-3").keys() - found.keys() == {"norm.running_mean", *parameters}


# Metadata


def test_metadata_of_another_model_name_the_first_difference() -> None:
    def widen(_: list[Any], metadata: list[Any]) -> None:
        metadata[1]["param_metadata"][1]["params"]["flat_param_0"]["names"][0] = "7.weight"

    refused(changed(widen), r"rank 1 and rank 0 have shards of different models: 'names' of flat_param_0 in unit inner")


def test_metadata_with_other_units_are_of_another_model() -> None:
    def drop(_: list[Any], metadata: list[Any]) -> None:
        metadata[2]["param_metadata"].pop()

    refused(changed(drop), r"the list of units is \[''\] on rank 2 and \['', 'inner'\] on rank 0")


def test_shards_of_two_forms_do_not_fit() -> None:
    flat, unflattened = recorded("flat-3"), recorded("unflattened-3")
    refused((flat[0], unflattened[1]), "rank 0: 'first.weight' is missing")
    refused(([*flat[0][:2], unflattened[0][2]], [*flat[1][:2], unflattened[1][2]]), "rank 2 and rank 0 .* parameters")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda one: one.pop("buffer_names"), "KeyError: 'buffer_names'"),
        (lambda one: one["param_metadata"][0].pop("shared_param_info"), "KeyError: 'shared_param_info'"),
        (lambda one: one["param_metadata"][0]["params"]["flat_param_0"]["numels"].pop(), "4 names, 4 shapes and 3 num"),
        (
            lambda one: one["param_metadata"][0]["params"]["flat_param_0"]["shapes"].__setitem__(0, torch.Size([3])),
            r"first.weight of flat_param_0 has shape \(3,\) and 25 elements",
        ),
    ],
    ids=["no buffers", "no ties", "lengths", "shapes"],
)
def test_what_is_no_metadata_is_named(spoil: Callable[[Any], None], message: str) -> None:
    shards = changed(lambda _, metadata: spoil(metadata[1]))
    refused(shards, f"the metadata of rank 1 are not what local_metadata_dict.* {message}")


def test_weights_in_the_place_of_metadata_are_refused() -> None:
    weights, metadata = recorded("flat-2")
    refused((metadata, weights), "metadata of rank 0 are not what")
    refused(([[], []], metadata), "weights of rank 0 are a list")
