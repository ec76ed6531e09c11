"""The norm of tensors sharded over ranks, bitwise equal for every sharding.

Floating-point sums depend on their order. Each square is therefore converted to integers, with the same scale on all
ranks, because sums of integers do not depend on the order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fsdp.distributed.communicator import Communicator

_BLOCK = 1 << 16  # elements at a time, so that intermediate values fit in the processor's cache
_BITS = 62  # of a sum in an integer, which never overflows
_INTEGERS = 3
_LEAST_EXPONENT = -1000  # of the largest element; its inverse is also a floating-point number


def exact_norm(comms: Sequence[Communicator], tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Collective. Return the 2-norm of the tensors of all ranks together, a float64 number on `device`.

    Squares are computed in float64, exactly for narrower dtypes, and summed in fixed point: as three integers of
    ``62 - b`` bits each, for fewer than ``2**b`` elements. So the error of each square is at most
    ``2**(3 * b - 187)`` of the largest square, and for 10**12 elements (b = 40) the total error at most ``2**-27`` of
    the largest square.

    Args:
        comms: communicators that together, in sequence, reach all ranks with a part of the tensors.
        tensors: this rank's tensors. An element on multiple ranks counts for each rank.
    """
    own = [torch.view_as_real(each) if each.is_complex() else each for each in tensors]
    own = [each.detach().reshape(-1) for each in own if each.numel()]
    largest = [each.abs().max().to(device, torch.float64) for each in own]
    largest.append(torch.zeros((), dtype=torch.float64, device=device))
    most = maximum(comms, torch.stack(largest).max(), "the largest element, for a norm").item()
    numel = torch.tensor(sum(each.numel() for each in own), dtype=torch.int64, device=device)
    numel = over_all(comms, numel, "sum", "the number of elements, for a norm")
    if not 0 < most < math.inf:
        return torch.tensor(most, dtype=torch.float64, device=device)
    exponent = max(math.frexp(most)[1], _LEAST_EXPONENT)
    bits = _BITS - int(numel).bit_length()
    sums = torch.zeros(_INTEGERS, dtype=torch.int64, device=device)
    for each in own:
        for part in each.split(_BLOCK):
            rest = part.double().mul_(2.0**-exponent).square_()  # less than 1
            digits: list[Tensor] = []
            for _ in range(_INTEGERS):
                rest.mul_(2.0**bits)
                whole = rest.floor() if len(digits) < _INTEGERS - 1 else rest.round()
                digits.append(whole.long().sum())
                rest.sub_(whole)
            sums += torch.stack(digits).to(device)
    total = 0
    sums = over_all(comms, sums, "sum", "squares, for a norm")
    for digit in sums.tolist():  # Python integers do not overflow
        total = (total << bits) + digit
    norm = math.ldexp(math.sqrt(total / (1 << _INTEGERS * bits)), exponent)
    return torch.tensor(norm, dtype=torch.float64, device=device)


def over_all(comms: Sequence[Communicator], tensor: Tensor, op: str, what: str) -> Tensor:
    """Collective. Return the sum or the maximum over all ranks that the communicators together reach."""
    for comm in comms:
        tensor = comm.all_reduce(tensor, op, what).wait()
    return tensor


def maximum(comms: Sequence[Communicator], value: Tensor, what: str) -> Tensor:
    """Collective. Return the maximum of a floating-point number over all ranks; NaN if any rank has NaN."""
    # Some backends ignore NaN in a maximum over ranks, so a flag is sent with the value.
    is_nan = value.isnan()
    both = over_all(comms, torch.stack([value.masked_fill(is_nan, 0.0), is_nan.to(value.dtype)]), "max", what)
    return both[0].masked_fill(both[1] > 0, math.nan)
