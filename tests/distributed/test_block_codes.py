"""`BlockCodes`: the errors of quantised rows, their bytes, and values that are zero or not finite."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fsdp.distributed.block_codes import DTYPES, BlockCodes

CODES = st.builds(BlockCodes, bits=st.sampled_from([4, 8]), block=st.sampled_from([2, 6, 256]))
NUMBERS = st.floats(-(2.0**100), 2.0**100, width=32) | st.floats(-8, 8, width=32)


@st.composite
def rows(draw: st.DrawFn) -> Tensor:
    """Rows of any length, of numbers of very different sizes."""
    num_rows, numel = draw(st.integers(1, 3)), draw(st.integers(1, 20))
    values = draw(st.lists(NUMBERS, min_size=num_rows * numel, max_size=num_rows * numel))
    dtype = draw(st.sampled_from(DTYPES))
    limit = min(2.0**100, torch.finfo(dtype).max)
    return torch.tensor(values).clamp(-limit, limit).view(num_rows, numel).to(dtype)


def through(codes: BlockCodes, values: Tensor) -> Tensor:
    message = codes.encoded(values)
    assert message.dtype is torch.uint8
    assert message.shape == (len(values), codes.nbytes(values.shape[1]))
    return codes.decoded(message, values.shape[1])


@given(CODES, rows())
def test_a_value_is_off_by_at_most_half_the_scale_of_its_block(codes: BlockCodes, values: Tensor) -> None:
    found, largest = through(codes, values), 2 ** (codes.bits - 1) - 1
    for row, got in zip(values.double(), found.double(), strict=True):
        for begin in range(0, len(row), codes.block):
            block, other = row[begin : begin + codes.block], got[begin : begin + codes.block]
            scale = max(block.abs().max().item() / largest, torch.finfo(torch.float32).tiny)
            assert (block - other).abs().max().item() <= scale * (0.5 + 2**-15)


@given(CODES, rows())
def test_zeros_and_the_largest_value_of_a_block_arrive(codes: BlockCodes, values: Tensor) -> None:
    found = through(codes, values)
    assert not found[values == 0].any()
    torch.testing.assert_close(found.abs().amax(1), values.float().abs().amax(1), rtol=1e-6, atol=1e-36)


@given(CODES, rows(), st.sampled_from([math.nan, math.inf, -math.inf]), st.data())
def test_what_is_not_finite_arrives_as_nan_and_leaves_other_blocks_alone(
    codes: BlockCodes, values: Tensor, wrong: float, data: st.DataObject
) -> None:
    expected = through(codes, values)
    row, column = data.draw(st.integers(0, len(values) - 1)), data.draw(st.integers(0, values.shape[1] - 1))
    values[row, column] = wrong
    found = through(codes, values)
    begin = column // codes.block * codes.block
    assert found[row, begin : begin + codes.block].isnan().all()
    expected[row, begin : begin + codes.block] = found[row, begin : begin + codes.block] = 0
    assert torch.equal(found, expected)


@given(CODES, st.integers(1, 20), st.sampled_from([1.0, 1 - 2.0**-24, 1 - 2.0**-23, 0.99]))
def test_the_largest_finite_numbers_stay_finite(codes: BlockCodes, numel: int, factor: float) -> None:
    values = torch.full((1, numel), torch.finfo(torch.float32).max * factor)
    values[0, ::2] *= -1
    torch.testing.assert_close(through(codes, values), values, rtol=1e-6, atol=0)


@given(CODES, st.integers(1, 40), st.data())
def test_every_integer_survives_packing(codes: BlockCodes, numel: int, data: st.DataObject) -> None:
    """With a scale of 1, integers are what they were."""
    largest = 2 ** (codes.bits - 1) - 1
    integers = data.draw(st.lists(st.integers(-largest, largest), min_size=numel, max_size=numel))
    integers[:: codes.block] = [largest] * len(integers[:: codes.block])
    values = torch.tensor([integers, integers[::-1]], dtype=torch.float32)
    values[1, :: codes.block] = -largest
    assert torch.equal(through(codes, values), values)


@given(CODES, rows())
def test_rows_have_nothing_to_do_with_each_other(codes: BlockCodes, values: Tensor) -> None:
    alone = torch.cat([through(codes, row.view(1, -1)) for row in values])
    assert torch.equal(through(codes, values), alone)


@given(CODES, rows(), st.integers(0, 3))
def test_a_message_may_begin_at_any_byte(codes: BlockCodes, values: Tensor, skipped: int) -> None:
    message = codes.encoded(values)
    shifted = torch.cat([message.new_zeros(len(values), skipped), message], dim=1)[:, skipped:]
    assert torch.equal(codes.decoded(shifted, values.shape[1]), through(codes, values))


def test_a_byte_for_each_element_or_two_and_four_for_each_block() -> None:
    assert BlockCodes(8, 256).nbytes(1000) == 1000 + 4 * 4
    assert BlockCodes(4, 256).nbytes(1001) == 501 + 4 * 4


@pytest.mark.parametrize(("bits", "block"), [(2, 256), (16, 256), (8, 0), (8, 3), (4, 256.0), (8, -2)])
def test_other_formats_are_errors(bits: int, block: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        BlockCodes(bits, block)
