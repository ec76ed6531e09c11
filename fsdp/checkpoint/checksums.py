"""CRC-32 of tensors in blocks of 4 MiB, combined from the parts that multiple ranks have read or written.

Blocks are counted from a tensor's first byte, so the checksums are the same for any number of ranks. A rank whose part
begins or ends within a block computes the checksum of a *fragment* of the block. Checksums of consecutive fragments
are combined into the checksum of the block (`joined`), so no rank reads another rank's bytes. A fragment has gaps if
the rank holds columns of a matrix; fragments of other ranks fill these gaps. The checksum is the CRC-32 of zlib, gzip
and PNG (ISO 3309).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, reduce
from operator import xor
from typing import NamedTuple

from fsdp.checkpoint.untrusted import short

try:  # using processor instructions, three times as fast as zlib for the same checksum
    from isal.isal_zlib import crc32 as crc32
except ImportError:
    from zlib import crc32 as crc32

BLOCK_BYTES = 4 << 20
_POLYNOMIAL = 0xEDB88320  # bits reversed: the highest bit is the coefficient of x to the power of 0
_ONE = 1 << 31
_ZEROS = memoryview(bytes(1 << 12))
_DIGITS = re.compile(r"[0-9a-f]*")


class Fragment(NamedTuple):
    """Bytes of a block of a tensor; positions are counted from the tensor's first byte, and there may be gaps."""

    name: str
    begin: int
    end: int
    nbytes: int
    checksum: int

    @property
    def block(self) -> int:
        return self.begin // BLOCK_BYTES


def fragment(name: str, begin: int, memory: memoryview) -> Fragment:
    """Return the fragment of some bytes, which must belong to a single block."""
    return Fragment(name, begin, begin + len(memory), len(memory), crc32(memory))


def merged(fragments: Iterable[Fragment]) -> list[Fragment]:
    """Merge the consecutive fragments of each block into a single fragment, with or without gaps."""
    found: list[Fragment] = []
    last: dict[tuple[str, int], int] = {}
    for each in fragments:
        place = last.get((each.name, each.block))
        if place is None or each.begin < found[place].end:
            last[each.name, each.block] = len(found)
            found.append(each)
        else:
            before = found[place]
            checksum = joined(before.checksum, each.checksum, each.end - before.end)
            found[place] = Fragment(each.name, before.begin, each.end, before.nbytes + each.nbytes, checksum)
    return found


def spans(begin: int, end: int, nbytes: int = BLOCK_BYTES) -> Iterator[tuple[int, int]]:
    """Divide bytes ``begin:end`` of a tensor at multiples of `nbytes`, by default at the borders of blocks."""
    while begin < end:
        stop = min(end, (begin // nbytes + 1) * nbytes)
        yield begin, stop
        begin = stop


def block_span(number: int, nbytes: int) -> tuple[int, int]:
    return number * BLOCK_BYTES, min((number + 1) * BLOCK_BYTES, nbytes)


def joined(first: int, second: int, second_nbytes: int) -> int:
    """Return the checksum of two consecutive byte ranges from the checksums of both.

    Appending n bytes multiplies by x to the power of 8n, modulo the polynomial, as in zlib's ``crc32_combine``. A
    checksum is therefore the sum of the contributions of its bytes, in any order, and gaps may be filled later.
    """
    if not first:  # the checksum of no bytes: most blocks are a single fragment
        return second
    if second_nbytes <= len(_ZEROS):  # faster than the product
        return crc32(_ZEROS[:second_nbytes], first) ^ crc32(_ZEROS[:second_nbytes]) ^ second
    return _product(_power(8 * second_nbytes), first) ^ second


def _product(one: int, other: int) -> int:
    found, bit = 0, _ONE
    while one:
        if one & bit:
            found ^= other
            one ^= bit
        bit >>= 1
        other = other >> 1 ^ (_POLYNOMIAL if other & 1 else 0)
    return found


@cache
def _power(exponent: int) -> int:
    if exponent < 2:
        return _ONE >> exponent
    half = _power(exponent // 2)
    return _product(_product(half, half), _power(exponent % 2))


class HoleError(Exception):
    """Bytes of a tensor are in no fragment; the message names them."""


def of_block(fragments: Iterable[Fragment], begin: int, end: int) -> int:
    found, reached = 0, begin
    known = set(fragments)
    for each in sorted(known, key=lambda one: (one.begin, -one.end)):
        if each.begin == reached and each.nbytes == each.end - each.begin:
            found, reached = joined(found, each.checksum, each.nbytes), each.end
    if reached == end:
        return found
    if sum(each.nbytes for each in known) != end - begin:
        raise HoleError(f"bytes {reached} to {end}")
    return reduce(xor, (joined(each.checksum, 0, end - each.end) for each in known))


def by_name(fragments: Iterable[Fragment]) -> dict[str, dict[int, list[Fragment]]]:
    """Return the fragments by the name of the tensor and the number of the block."""
    found: dict[str, dict[int, list[Fragment]]] = {}
    for each in fragments:
        found.setdefault(each.name, {}).setdefault(each.block, []).append(each)
    return found


def of_tensor(fragments: Mapping[int, Iterable[Fragment]], nbytes: int) -> list[int]:
    return [of_block(fragments.get(number, ()), *span) for number, span in enumerate(spans(0, nbytes))]


def as_text(checksums: Iterable[int]) -> str:
    """Return checksums as text, using eight hexadecimal digits for each."""
    return "".join(f"{each:08x}" for each in checksums)


def from_text(text: str) -> list[int]:
    """Return the checksums from a text; the inverse of `as_text`."""
    if len(text) % 8 or not _DIGITS.fullmatch(text):
        raise ValueError(f"{short(text)} does not consist of checksums with eight digits")
    return [int(text[start : start + 8], 16) for start in range(0, len(text), 8)]
