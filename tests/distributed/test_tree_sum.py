"""`TreeSum` adds up in an order that depends on nothing but how many summands there are."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fsdp.distributed.micro_batch_sums import MicroBatchSums
from fsdp.distributed.tree_sum import TreeSum


def by_halves(leaves: list[Tensor]) -> Tensor:
    """The tree as a recursion: the longest power of two that is shorter than all goes to the left."""
    if len(leaves) == 1:
        return leaves[0]
    left = 1 << (len(leaves) - 1).bit_length() - 1
    return by_halves(leaves[:left]) + by_halves(leaves[left:])


@given(st.integers(1, 70), st.integers(0, 1 << 30))
def test_the_sum_is_that_of_a_binary_tree(count: int, seed: int) -> None:
    leaves = list(torch.randn(count, 3, generator=torch.Generator().manual_seed(seed)))
    tree = TreeSum()
    for number, leaf in enumerate(leaves, 1):
        tree.add(leaf.clone())
        assert tree.count == number
        assert len(tree._parts) <= math.log2(number) + 1
    assert torch.equal(tree.total(), by_halves(leaves))
    assert tree.count == 0


@given(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24]), st.integers(0, 1 << 30))
def test_micro_batches_that_come_together_make_no_difference(ranks: int, seed: int) -> None:
    leaves = list(torch.randn(24, 5, generator=torch.Generator().manual_seed(seed)))
    sums = MicroBatchSums(24)
    sums.begin()
    shown = torch.zeros(5)
    for first in range(0, 24, ranks):
        pieces = [leaf.clone() for leaf in leaves[first : first + ranks]]
        shown += sums.add(sums.step, 7, pieces, torch.float32)
        assert sums.added == {first + ranks}
        assert shown.any() == (first + ranks == 24)
    assert torch.equal(shown, by_halves(leaves) / 24)


def test_what_was_sent_in_another_step_is_left_out() -> None:
    sums = MicroBatchSums(2)
    sums.begin()
    before = sums.require_step("a gradient")
    sums.begin()
    assert not sums.add(before, 0, [torch.ones(1)], torch.float32)
    assert sums.added == set()
    sums.add(sums.step, 0, [torch.ones(1)], torch.float32)
    assert sums.add(sums.step, 0, [torch.ones(1)], torch.float32) == 1
    sums.end()
    with pytest.raises(RuntimeError, match="a gradient: this backward belongs to no micro-batch"):
        sums.require_step("a gradient")


def test_no_zero_is_negative_at_any_number_of_ranks() -> None:
    for ranks in (1, 2):
        sums, shown = MicroBatchSums(2), torch.tensor([])
        sums.begin()
        for number in range(0, 2, ranks):
            found = sums.add(sums.step, 0, [torch.tensor([-0.0]) for _ in range(ranks)], torch.float32)
            shown = shown + found if number else found
        assert not shown.signbit()


def test_sums_are_of_float32_or_wider() -> None:
    sums = MicroBatchSums(257)
    sums.begin()
    ones = [torch.ones(1, dtype=torch.bfloat16) for _ in range(256)]
    sums.add(sums.step, 0, ones, torch.float32)
    last = sums.add(sums.step, 0, [torch.full((1,), 258.0, dtype=torch.bfloat16)], torch.float32)
    assert last == (256 + 258) / 257  # in bfloat16, 257 would be 256
