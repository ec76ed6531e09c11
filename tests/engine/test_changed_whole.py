"""Weights written through the modules, where they are whole between steps: in a world of one, and under `no_sync`.

Elsewhere a placeholder stands in their place, which refuses. What is assigned is in `test_changed_parameters.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.helpers.changed_params import LAYOUTS, ChangedTwins, by_data, find, in_place
from tests.helpers.models import Wrap
from tests.helpers.on_ranks import on_ranks
from tests.helpers.pairs import parametrize_pairs

PATHS = ["entry.weight", "scale", "trunk.0.weight", "trunk.2.0.bias"]


def seen_in(model: nn.Module, path: str) -> nn.Parameter:
    """What a user finds under the name of a parameter."""
    module, _, name = path.rpartition(".")
    return getattr(find(model, module), name)


@parametrize_pairs(write=[in_place, by_data], world_size=[1, 2], layout=list(LAYOUTS))
@on_ranks("world_size")
def test_weights_that_are_whole_between_steps_are_written(write: Callable[[nn.Parameter], None], layout: str) -> None:
    twins = ChangedTwins(layout, reshard_after_forward=False)

    def change() -> None:
        for model in twins.models:
            for path in PATHS:
                write(seen_in(model, path))

    twins.train(change, whole=True)


@parametrize_pairs(write=[in_place, by_data], world_size=[1, 2], layout=list(LAYOUTS))
@on_ranks("world_size")
def test_what_was_written_is_saved(write: Callable[[nn.Parameter], None], layout: str) -> None:
    twins = ChangedTwins(layout, reshard_after_forward=False)

    def change() -> None:
        for _ in range(2):
            for model in twins.models:
                write(seen_in(model, "entry.weight"))
            twins.assert_close()
            assert torch.equal(seen_in(twins.sharded, "entry.weight"), twins.sharded.state_dict()["entry.weight"])

    twins.train(change, whole=True)


@parametrize_pairs(layout=list(LAYOUTS), write=[in_place, by_data])
@on_ranks(1)
def test_a_lone_rank_may_write_whenever_nothing_runs(write: Callable[[nn.Parameter], None], layout: str) -> None:
    twins = ChangedTwins(layout)
    for _ in range(3):
        for model in twins.models:
            for path in PATHS:
                write(seen_in(model, path))
        twins.step()
        twins.assert_close()


@parametrize_pairs(write=[in_place, by_data], layout=list(LAYOUTS))
@on_ranks(2)
def test_frozen_weights_that_are_whole_are_written(write: Callable[[nn.Parameter], None], layout: str) -> None:
    twins = ChangedTwins(layout, frozen_first, reshard_after_forward=False)

    def change() -> None:
        for model in twins.models:
            write(seen_in(model, "0.weight"))

    twins.train(change, whole=True)


def frozen_first(wrap: Wrap) -> nn.Module:
    torch.manual_seed(0)
    return wrap(nn.Sequential(nn.Linear(5, 5).requires_grad_(False), nn.Linear(5, 5)))


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(1)
def test_data_of_another_shape_is_refused_by_name(layout: str) -> None:
    twins = ChangedTwins(layout)
    weight = seen_in(twins.sharded, "entry.weight")
    before = weight.data
    weight.data = torch.ones(5, 7)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"entry\.weight: expected shape \(7, 5\), got \(5, 7\)"):
            twins.sharded(torch.ones(2, 5))
    weight.data = before
    twins.train(lambda: None)
