"""Fingerprints of unsharded parameters, computed during sharding to compare the ranks' values later.

If ranks have different seeds, their shards belong to different models. Each rank therefore keeps 64 bits of each
unsharded parameter until the ranks compare them at first use. Parameters that were written since (loaded, changed
while summoned, assigned, written to the shard) may have been different before and are excluded. A separate fingerprint
of the shard is used to detect writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

import torch
from torch import Tensor, nn

from fsdp.distributed.devices import byte_view
from fsdp.distributed.dtensor import local_part
from fsdp.distributed.gather_extension import values_of
from fsdp.engine.flat_param import FlatParameter

_WORDS = 1 << 16  # words of 8 bytes at a time, so that intermediate values fit in the processor's cache
# The number of such blocks at once, by type of device. On accelerators, kernel launches are more expensive than memory.
_BLOCKS = {"cpu": 1}
_BLOCKS_ELSEWHERE = 32
_SAMPLES = (4, 16)  # number of places, and of elements in each place
_STEP = 6364136223846793005  # an odd multiplier (of Knuth's 64-bit generator)
_MASK = (1 << 64) - 1
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by item size


def fingerprint(tensor: Tensor) -> int:
    """Return 64 bits that depend on every bit of a tensor and its position, on any device, but not on the dtype.

    The result is a polynomial of the `block_sums`.
    """
    found = 0
    for one in block_sums(tensor).tolist():
        found = (found * _STEP + one) & _MASK
    return found


def block_sums(tensor: Tensor) -> Tensor:
    """Return 64 bits for each block of a tensor, on its device, without a synchronization.

    Words of 8 bytes are multiplied by random odd numbers and summed modulo 2**64: multilinear hashing (Carter and
    Wegman, Universal classes of hash functions, 1979). Integer sums do not depend on the order. The upper half of each
    word is first mixed into the lower half, because the topmost bit is otherwise lost in the product.
    """
    # As bytes, because a parameter may begin or end in the middle of a word.
    data = byte_view(tensor.detach().resolve_conj().resolve_neg().contiguous())
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
    return torch.cat(sums) if sums else data.new_empty(0, dtype=torch.int64)


def fingerprint_of_range(values: Tensor, start: int) -> int:
    """Return 64 bits for a range of elements; the sum over all ranges modulo 2**64 is the value for the whole tensor.

    Like `fingerprint`, but with a word for each element, depending on the element's position in the whole tensor.

    Args:
        values: the elements, contiguous in memory.
        start: the position of the first element in the whole tensor.
    """
    words = _words(values)
    start *= words.numel() // max(values.numel(), 1)
    weights, found = _weights(words.device, _WORDS), torch.zeros((), dtype=torch.int64, device=words.device)
    for first in range(start - start % _WORDS, start + words.numel(), _WORDS):
        begin, end = max(first, start), min(first + _WORDS, start + words.numel())
        mixed = _mixed(words[begin - start : end - start])
        found += mixed.mul_(weights[begin - first : end - first]).sum().mul_(_factor(first // _WORDS))
    return int(found) & _MASK


def fingerprint_of_rows(values: Tensor, dim: int, first: int, total: int) -> int:
    """Return the 64 bits of `fingerprint_of_range` for slices of a tensor along `dim`.

    Args:
        values: the slices; their elements form runs at equal distances in the whole tensor.
        dim: the dimension along which the tensor is divided.
        first, total: the index of the first slice, and the size of the whole tensor along `dim`.
    """
    words = _words(values)
    if not words.numel():
        return 0
    row = values.shape[dim + 1 :].numel() * (words.numel() // values.numel())
    run, distance = values.shape[dim] * row, total * row
    weights, found = _weights(words.device, _WORDS), torch.zeros((), dtype=torch.int64, device=words.device)
    blocks = -(-words.numel() // run * distance // _WORDS)
    factors = torch.tensor([_factor(block) for block in range(blocks)], device=words.device)
    for begin in range(0, words.numel(), _WORDS):
        part = _mixed(words[begin : begin + _WORDS])
        numbers = torch.arange(begin, begin + part.numel(), device=words.device)
        places = numbers // run * distance + numbers % run + first * row
        found += part.mul_(weights[places % _WORDS]).mul_(factors[places // _WORDS]).sum()
    return int(found) & _MASK


def _words(values: Tensor) -> Tensor:
    """Return the elements of a tensor as a vector of integers of the same size, two for each complex number."""
    real = torch.view_as_real(values.detach().resolve_conj()) if values.is_complex() else values.detach()
    return real.resolve_neg().reshape(-1).contiguous().view(_INTEGERS[real.element_size()])


def _mixed(words: Tensor) -> Tensor:
    """Return words of 8 bytes, in which each bit of an element affects many bits."""
    mixed = words.to(torch.int64, copy=True).mul_(_STEP)
    return mixed.bitwise_xor_((mixed >> 32).bitwise_and_(0xFFFFFFFF))


def _factor(block: int) -> int:
    """Return the 64 bits, as an int64, by which the words of a block of the whole tensor are multiplied."""
    number = pow(_STEP, block, 1 << 64)
    return number - ((number & 1 << 63) << 1)


def sampled(tensor: Tensor) -> Tensor:
    """Return some elements of a tensor from few positions, to read only these parts of a mapped file."""
    places, together = _SAMPLES
    if tensor.numel() <= places * together:
        return tensor.detach()
    starts = torch.linspace(0, tensor.numel() - together, places, dtype=torch.float64, device=tensor.device).long()
    chosen = (starts[:, None] + torch.arange(together, device=tensor.device)).view(-1)
    return tensor.detach()[torch.unravel_index(chosen, tensor.shape)]


def _products(part: Tensor) -> Tensor:
    """Return the mixed words ``[ceil(n / 8)]`` of n bytes, in separate memory."""
    if part.numel() % 8 or part.storage_offset() % 8:
        padded = part.new_zeros(-(-part.numel() // 8) * 8)
        padded[: part.numel()] = part
        part = padded
    words = part.view(torch.int64)
    return (words >> 32).bitwise_and_(0xFFFFFFFF).bitwise_xor_(words)  # the shift is arithmetic


@cache
def _weights(device: torch.device, count: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(0x5EED)  # does not change the user's generator
    numbers = torch.randint(-(1 << 62), 1 << 62, (count,), generator=generator, device="cpu")
    return (2 * numbers + 1).to(device)


class Fingerprints:
    """This rank's fingerprints of the unsharded parameters of a flat parameter, and of its shard of each parameter.

    The fingerprint of an `unsharded` parameter is None if the parameter had no values, or was changed after sharding.
    """

    def __init__(self, unsharded: Iterable[int | None], shards: Iterable[int]) -> None:
        self.unsharded, self._shards = list(unsharded), list(shards)

    def only(self, slots: Iterable[int]) -> Fingerprints:
        """Return the fingerprints of some of the parameters."""
        kept = list(slots)
        return Fingerprints((self.unsharded[slot] for slot in kept), (self._shards[slot] for slot in kept))

    def forget(self, slots: Iterable[int]) -> None:
        """Remove the fingerprints of parameters with new values."""
        for slot in slots:
            self.unsharded[slot] = None

    def forget_written(self, shards: Sequence[Tensor]) -> None:
        """Remove the fingerprints of parameters whose shards were written."""
        for slot, (shard, before) in enumerate(zip(shards, self._shards, strict=True)):
            if self.unsharded[slot] is not None and fingerprint(shard) != before:
                self.unsharded[slot] = None

    def follow(self, shards: Sequence[Tensor]) -> None:
        """Recompute the fingerprints of shards after a cast or move on all ranks."""
        self._shards = [
            before if known is None else fingerprint(shard)
            for known, before, shard in zip(self.unsharded, self._shards, shards, strict=True)
        ]


def first_difference(by_rank: Sequence[Sequence[int | None]]) -> tuple[int, int, int] | None:
    """Return the first rank that differs from rank 0, the number of the first different parameter, and their count.

    Parameters that are unknown on any rank are ignored.
    """
    unequal = [(rank, found) for rank, found in enumerate(by_rank) if found != by_rank[0]]
    known = [all(one is not None for one in each) for each in zip(*by_rank, strict=True)] if unequal else []
    for rank, found in unequal:
        pairs = zip(known, found, by_rank[0], strict=True)
        odd = [number for number, (is_known, mine, first) in enumerate(pairs) if is_known and mine != first]
        if odd:
            return rank, odd[0], len(odd)
    return None


def take_fingerprints(
    flat_param: FlatParameter, params: Sequence[nn.Parameter], rank: int, world_size: int, replicas: int = 1
) -> None:
    """Record fingerprints of the values from which a shard was created, because the unsharded values are freed.

    Args:
        flat_param: the shard.
        params: the original parameters.
        rank, world_size: the number of the shard, and the number of shards.
        replicas: the number of ranks with this shard.
    """
    layout = flat_param.make_layout(world_size)
    if world_size * replicas > 1 and layout.numel > 0:
        values = [values_of(local_part(param)) for param in params]
        unsharded = [None if value.is_meta else fingerprint(value) for value in values]
        shards = zip(unsharded, layout.local_shards(flat_param.vector, rank), strict=True)
        own = [0 if whole is None else fingerprint(shard) for whole, shard in shards]
        flat_param.fingerprints = Fingerprints(unsharded, own)
