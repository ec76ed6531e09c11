"""`BlockCodes` quantises tensors for messages, to integers of 8 or 4 bits with a float32 scale for each block.

A block consists of consecutive elements of a row; the last block of a row may be shorter. The scale of a block is the
largest absolute value, divided by the largest integer (127 or 7). This module is pure arithmetic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32)

_SCALE_BYTES = 4
_LEAST_SCALE = torch.finfo(torch.float32).tiny  # avoids division by zero, or by a number without precision
# Less than the largest number, so that the product of the largest integer and a rounded-up scale does not overflow.
_MOST = torch.finfo(torch.float32).max * (1 - torch.finfo(torch.float32).eps)


@dataclass(frozen=True)
class BlockCodes:
    """The format of quantised rows: each row contains the float32 scales of all blocks, followed by the integers.

    A decoded value differs from the original by at most half a scale, in addition to the rounding of float32. Zeros
    are exact. If a block contains a value that is not finite, all values of the block become NaN.

    Args:
        bits: 8, or 4 with two integers in each byte.
        block: the number of elements that share a scale, an even number.

    Raises:
        ValueError: for unsupported values of `bits` or `block`.
    """

    bits: int
    block: int

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError(f"bits must be 8 or 4, got {self.bits!r}")
        if type(self.block) is not int or self.block < 2 or self.block % 2:
            raise ValueError(f"block must be an even positive number of elements, got {self.block!r}")

    def nbytes(self, numel: int) -> int:
        """Return the number of bytes of a row with `numel` elements."""
        return _SCALE_BYTES * self._num_blocks(numel) + -(-numel * self.bits // 8)

    def encoded(self, rows: Tensor) -> Tensor:
        """Quantise rows ``[r, n]`` in one of the `DTYPES`, and return their bytes ``[r, nbytes(n)]``."""
        num_rows, numel = rows.shape
        padded = self._num_blocks(numel) * self.block
        blocks = F.pad(rows.float(), (0, padded - numel)).view(num_rows, -1, self.block)
        most = blocks.abs().amax(dim=2)
        # The scale of a block with NaN or an infinity is NaN, so its integers have no effect.
        most.masked_fill_(most.isinf(), math.nan)
        scales = most.div_(self._largest).clamp_(_LEAST_SCALE, _MOST / self._largest)
        integers = (blocks / scales.unsqueeze(2)).round_().view(num_rows, padded)
        return torch.cat([scales.view(torch.uint8), self._packed(integers, numel)], dim=1)

    def decoded(self, message: Tensor, numel: int) -> Tensor:
        """Return the decoded float32 rows ``[r, numel]`` of bytes ``[r, nbytes(numel)]``."""
        end = _SCALE_BYTES * self._num_blocks(numel)
        # Copied, because the bytes may not be aligned.
        scales = message[:, :end].clone(memory_format=torch.contiguous_format).view(torch.float32)
        values = self._unpacked(message[:, end:])[:, :numel]
        return values * scales.repeat_interleave(self.block, dim=1)[:, :numel]

    @property
    def _largest(self) -> int:
        return (1 << (self.bits - 1)) - 1

    def _num_blocks(self, numel: int) -> int:
        return -(-numel // self.block)

    def _packed(self, integers: Tensor, numel: int) -> Tensor:
        """Return the bytes of the first `numel` integers of each row."""
        if self.bits == 8:
            return integers[:, :numel].to(torch.int8).view(torch.uint8)
        halves = (integers[:, : numel + numel % 2] + 8).to(torch.uint8)
        return halves[:, ::2] + halves[:, 1::2] * 16

    def _unpacked(self, message: Tensor) -> Tensor:
        if self.bits == 8:
            return message.view(torch.int8).float()
        return torch.stack([message & 15, message >> 4], dim=2).flatten(1).float() - 8
