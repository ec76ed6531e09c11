"""Encoded changes are the shortest of their forms, and give the same bytes."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from torch import Tensor

from fsdp.weights.changes import apply_changes, changes

HEAD = 24  # bytes


def changed(before: Tensor, places: list[int], width: int) -> Tensor:
    after = before.clone().view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width])
    after[places] ^= 1
    return after.view(torch.uint8)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "places",
    [[], [0], [999], [0, 999], [3, 4, 5, 6, 7], list(range(0, 1000, 2)), list(range(1000)), [1, 300, 301, 302, 900]],
    ids=lambda places: f"{len(places)} from {places[:1]}",
)
def test_the_result_is_equal_in_every_form(width: int, places: list[int]) -> None:
    before = torch.randint(0, 256, (1000 * width,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    after = changed(before, places, width)
    encoded, found = changes(before, after, width), before.clone()
    apply_changes(encoded, found, "bucket 0")
    assert torch.equal(found, after)
    assert len(encoded) <= HEAD + min(len(after), len(places) * (width + 2))


def test_many_random_changes_cost_two_bytes_for_a_position_at_most() -> None:
    generator = torch.Generator().manual_seed(2)
    before = torch.randn(200_000, generator=generator).bfloat16()
    places = (torch.rand(200_000, generator=generator) < 0.02).nonzero().view(-1)
    after = before.clone()
    after[places] += 1
    count = int((before != after).sum())
    encoded = changes(before.view(torch.uint8), after.view(torch.uint8), 2)
    assert len(encoded) <= HEAD + count * (2 + 2)
    found = before.clone()
    apply_changes(encoded, found.view(torch.uint8), "")
    assert torch.equal(found, after)


def test_far_positions_have_wider_distances() -> None:
    before = torch.zeros(1 << 20, dtype=torch.uint8)
    after = changed(before, [5, 70_000, 1 << 19], 1)
    found = before.clone()
    apply_changes(changes(before, after, 1), found, "")
    assert torch.equal(found, after)


def test_runs_are_shorter_than_elements() -> None:
    before = torch.zeros(4000, dtype=torch.uint8)
    after = changed(before, [*range(100, 600), *range(1000, 1010)], 2)
    assert len(changes(before, after, 2)) <= HEAD + 510 * 2 + 8


@pytest.mark.parametrize("places", [[], [3], list(range(50))])
def test_other_weights_at_the_receiver_are_an_error(places: list[int]) -> None:
    before = torch.zeros(100, dtype=torch.uint8)
    encoded = changes(before, changed(before, places, 1), 1)
    other = before.clone()
    other[70] = 1
    with pytest.raises(ValueError, match="bucket 3 differs from the sender's weights"):
        apply_changes(encoded, other, "bucket 3")


def test_damaged_changes_are_errors() -> None:
    before = torch.zeros(1000, dtype=torch.uint8)
    encoded = changes(before, changed(before, [3, 700], 1), 1)
    for number in range(len(encoded)):
        damaged = encoded.clone()
        damaged[number] ^= 0x55
        found = before.clone()
        with suppress(ValueError):  # no other error
            apply_changes(damaged, found, "bucket 3")
            assert torch.equal(found, changed(before, [3, 700], 1))
    with pytest.raises(ValueError, match="bucket 3"):
        apply_changes(encoded[:10], before, "bucket 3")
