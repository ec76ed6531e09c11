"""Owners are chosen by pure arithmetic: balanced, stable, and where the elements are."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp.engine.layout import ContiguousLayout, Layout
from fsdp.engine.rows_layout import RowsLayout
from fsdp.optim_utils.ownership import Cost, OwnedItem, Ownership, choose_owners, matrix_cost

GPT = {
    f"blocks.{block}.{name}": shape
    for block in range(12)
    for name, shape in {"qkv": (2304, 768), "out": (768, 768), "up": (3072, 768), "down": (768, 3072)}.items()
}


def items_of(
    shapes: dict[str, tuple[int, ...]], world_size: int, layout: type[Layout] = RowsLayout, cost: Cost = matrix_cost
) -> list[OwnedItem]:
    packed = layout.of(shapes.items(), world_size)
    found = []
    for number, slot in enumerate(packed.slots):
        intervals = [packed.interval(number, rank) for rank in range(world_size)]
        held = tuple(0 if each is None else each.numel for each in intervals)
        found.append(OwnedItem(slot.name, slot.shape, cost(slot.shape), held, 4))
    return found


def ownership(items: list[OwnedItem]) -> Ownership:
    return Ownership(choose_owners(items, tuple(range(len(items[0].held)))))


@pytest.mark.parametrize("cost", [matrix_cost, math.prod])
@pytest.mark.parametrize("layout", [RowsLayout, ContiguousLayout])
@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_the_ranks_costs_are_within_ten_percent_of_each_other(
    world_size: int, layout: type[Layout], cost: Cost
) -> None:
    costs = ownership(items_of(GPT, world_size, layout, cost)).costs.values()
    assert max(costs) <= 1.1 * min(costs)


def test_the_order_of_the_items_does_not_matter() -> None:
    items = items_of(GPT, 3)
    mixed = random.Random(0).sample(items, len(items))
    assert ownership(mixed).owner_of == ownership(items).owner_of


@given(shapes=st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=12), world_size=st.integers(1, 5))
def test_nobody_has_more_than_a_share_and_the_last_that_was_given(shapes: list[list[int]], world_size: int) -> None:
    items = items_of({str(n): tuple(shape) for n, shape in enumerate(shapes)}, world_size)
    owners = [one.owner for one in choose_owners(items, tuple(range(world_size)))]
    assert len(owners) == len(items)
    assert set(owners) <= set(range(world_size))
    share = sum(item.cost for item in items) / world_size
    for rank in range(world_size):
        own = [item.cost for item, owner in zip(items, owners, strict=True) if owner == rank]
        assert sum(own) <= share * (1 + 1e-6) + max(own, default=0)


def test_a_parameter_goes_to_the_rank_that_has_it() -> None:
    """Four equal matrices in one flat vector on four ranks, each of which has one of them: nothing travels."""
    plan = ownership(items_of(dict.fromkeys("abcd", (8, 8)), 4, ContiguousLayout))
    assert plan.owner_of == {"a": 0, "b": 1, "c": 2, "d": 3}
    assert [plan.received(rank) for rank in range(4)] == [0, 0, 0, 0]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_bytes_are_as_the_formula_says_where_everything_is_equal(world_size: int) -> None:
    plan = ownership(items_of(dict.fromkeys("abcdefgh", (16, 4)), world_size))
    owned_bytes = 8 * 16 * 4 * 4
    formula = 2 * (world_size - 1) / world_size**2 * owned_bytes
    assert [plan.received(rank) for rank in range(world_size)] == [formula] * world_size


def test_costs_of_matrices() -> None:
    assert matrix_cost(torch.Size([3, 5])) == 3 * 5 * 3
    assert matrix_cost(torch.Size([7, 2, 2])) == 28 * 4
    assert matrix_cost(torch.Size([6])) == 6
    assert matrix_cost(torch.Size([])) == 1
    assert matrix_cost(torch.Size([0, 4])) == 0


def test_the_table_has_all_parameters_and_ranks() -> None:
    shapes = {"entry": (3, 4), "scale": ()}
    plan = Ownership(choose_owners(items_of(shapes, 2), (0, 2)), sharded=["bias"])
    text = str(plan)
    assert all(shown in text for shown in ("entry", "3 x 4", "1 (0-d)", "rank 0:", "rank 2:"))
    assert "rank 1" not in text
    assert text.endswith("stepped where they are sharded: bias")
