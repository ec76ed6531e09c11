"""Fingerprints of whole parameters, taken when they are cut: afterwards no rank could tell what others saw.

A rank that was seeded otherwise cuts its shards out of another model, and what is gathered from all ranks is a model
that nobody built. So each rank keeps 64 bits of each whole parameter until the first use, when the ranks compare them.
What has been written since (loaded, summoned and changed, assigned, written to the shard) may have been different
before: it is left out. That the own part was not written shows by a fingerprint of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import cache

import torch
from torch import Tensor

_WORDS = 1 << 16  # of 8 bytes, at a time: what is computed with stays in the processor's cache
# How many times that at once, by kind of device: elsewhere starting a kernel costs more than memory.
_BLOCKS = {"cpu": 1}
_BLOCKS_ELSEWHERE = 32
_STEP = 6364136223846793005  # an odd multiplier (Knuth's, of his generator of 64 bits)
_MASK = (1 << 64) - 1


def fingerprint(tensor: Tensor) -> int:
    """64 bits that depend on every bit of a tensor and on its place, the same on every device; the dtype is not in it.

    Words of 8 bytes times random odd numbers, summed modulo 2**64: multilinear hashing (Carter and Wegman, Universal
    classes of hash functions, 1979), over blocks that are combined as a polynomial. Integer sums have no rounding, so
    their order does not matter. The upper half of each word is mixed into the lower one first, since the product keeps
    nothing else of the topmost bit.
    """
    # As bytes: a parameter need not begin or end at a whole word.
    data = tensor.detach().resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8)
    weights = _weights(data.device, _WORDS)
    sums: list[Tensor] = []
    block = 8 * _WORDS * _BLOCKS.get(data.device.type, _BLOCKS_ELSEWHERE)
    for start in range(0, data.numel(), block):
        part = data[start : start + block]
        whole = part.numel() // (8 * _WORDS) * 8 * _WORDS
        if whole:
            sums.append(_products(part[:whole]).view(-1, _WORDS).mul_(weights).sum(1))
        if whole < part.numel():
            last = _products(part[whole:])
            sums.append(last.mul_(weights[: last.numel()]).sum(0, keepdim=True))
    found = 0
    for one in torch.cat(sums).tolist() if sums else ():
        found = (found * _STEP + one) & _MASK
    return found


def _products(part: Tensor) -> Tensor:
    """The mixed words ``[ceil(n / 8)]`` of n bytes, in memory of their own."""
    if part.numel() % 8 or part.storage_offset() % 8:
        padded = part.new_zeros(-(-part.numel() // 8) * 8)
        padded[: part.numel()] = part
        part = padded
    words = part.view(torch.int64)
    return (words >> 32).bitwise_and_(0xFFFFFFFF).bitwise_xor_(words)  # the shift fills up with the topmost bit


@cache
def _weights(device: torch.device, count: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(0x5EED)  # leaves the user's random numbers alone
    numbers = torch.randint(-(1 << 62), 1 << 62, (count,), generator=generator, device="cpu")
    return (2 * numbers + 1).to(device)


class Fingerprints:
    """Fingerprints of the parameters of one flat parameter, as this rank has seen them.

    Args:
        wholes: of each, when it was whole; None if it had no values, or others than were seen.
        parts: of what this rank keeps of each.
    """

    def __init__(self, wholes: Iterable[int | None], parts: Iterable[int]) -> None:
        self.wholes, self._parts = list(wholes), list(parts)

    @classmethod
    def of(cls, wholes: Sequence[Tensor], parts: Sequence[Tensor]) -> Fingerprints:
        """Take them of unsharded parameters (of `DTensor`s, local parts), and of this rank's shard of each."""
        seen = [not whole.is_meta for whole in wholes]
        return cls(
            (fingerprint(whole) if is_seen else None for whole, is_seen in zip(wholes, seen, strict=True)),
            (fingerprint(part) if is_seen else 0 for part, is_seen in zip(parts, seen, strict=True)),
        )

    def only(self, slots: Iterable[int]) -> Fingerprints:
        """Those of some of the parameters."""
        kept = list(slots)
        return Fingerprints((self.wholes[slot] for slot in kept), (self._parts[slot] for slot in kept))

    def forget(self, slots: Iterable[int]) -> None:
        """These parameters got other values."""
        for slot in slots:
            self.wholes[slot] = None

    def forget_written(self, parts: Sequence[Tensor]) -> None:
        """Forget the parameters whose parts have been written."""
        for slot, (part, before) in enumerate(zip(parts, self._parts, strict=True)):
            if self.wholes[slot] is not None and fingerprint(part) != before:
                self.wholes[slot] = None

    def follow(self, parts: Sequence[Tensor]) -> None:
        """The parts were cast or moved, on all ranks alike."""
        self._parts = [
            before if whole is None else fingerprint(part)
            for whole, before, part in zip(self.wholes, self._parts, parts, strict=True)
        ]


def first_difference(by_rank: Sequence[Sequence[int | None]]) -> tuple[int, int, int] | None:
    """The first rank that has seen another value than rank 0, the number of the first such one, and how many there are.

    Args:
        by_rank: each rank's fingerprints of the same parameters. What any rank does not know counts for none.
    """
    known = [all(one is not None for one in each) for each in zip(*by_rank, strict=True)]
    for rank, found in enumerate(by_rank):
        odd = [number for number, (mine, first) in enumerate(zip(found, by_rank[0], strict=True)) if mine != first]
        odd = list(itertools.compress(odd, (known[number] for number in odd)))
        if odd:
            return rank, odd[0], len(odd)
    return None
