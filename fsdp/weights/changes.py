"""Changes of weights since the last stream, encoded as elements, as runs, or completely, whichever is shortest.

A rank compares the bytes of its part of a bucket, in the dtype in which they are sent, with a copy on the host. Equal
bytes are not sent, and the result is bitwise equal to complete weights. The rank also sends a checksum of the changed
part, which the receiver compares.
"""

from __future__ import annotations

import struct
from enum import IntEnum, auto

import torch
from torch import Tensor

from fsdp.checkpoint.checksums import crc32

_HEAD = struct.Struct("<BBBxIQQ")  # the form, the widths of elements and distances, the checksum, two counts
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Form(IntEnum):
    ELEMENTS = auto()
    RUNS = auto()
    ALL = auto()


class Snapshot:
    """The weights of a model's last stream, for ``stream_weights(..., since=snapshot)``. Every rank creates a snapshot.

    Each rank keeps a host copy of the bytes that it sends. All copies together contain the weights once, in the dtype
    of the stream. All weights are sent if the snapshot is empty, or is from a stream with different settings. If a
    stream fails, the snapshot is cleared, so that the next stream sends all weights.

    Attributes:
        sent_nbytes: the number of bytes that this rank sent in the last stream.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Delete the copy."""
        self._key = self._stream = ""
        self._parts: list[Tensor] = []
        self.sent_nbytes = 0

    @property
    def nbytes(self) -> int:
        """The number of bytes of this rank's copy."""
        return sum(map(len, self._parts))

    def base(self, key: str) -> str:
        """Return the identifier of the last stream if its plan has this key, otherwise an empty string."""
        return self._stream if self._key == key else ""

    def begin(self, is_complete: bool) -> None:
        """Prepare for a stream of complete weights, or of changes."""
        parts = self._parts
        self.clear()
        self._parts = [] if is_complete else parts

    def encoded(self, number: int, part: Tensor, width: int) -> Tensor:
        """Return the bytes to send for a part of a bucket, and keep a copy of the part."""
        if number == len(self._parts):  # in a stream of complete weights
            self._parts.append(part.clone())
            found = part
        else:
            found = changes(self._parts[number], part, width)
            self._parts[number].copy_(part)
        self.sent_nbytes += len(found)
        return found

    def complete(self, key: str, stream: str) -> None:
        """Record that a stream has succeeded."""
        self._key, self._stream = key, stream


def changes(before: Tensor, after: Tensor, width: int) -> Tensor:
    """Return the encoded changes between two tensors of bytes ``[n]``, compared in elements of `width` bytes."""
    words = after.view(_WORDS[width])
    places = (before.view(_WORDS[width]) != words).nonzero().view(-1)
    values = words[places].view(torch.uint8)
    steps = _narrow(_distances(places))
    is_first = torch.ones(len(places), dtype=torch.bool, device="cpu")
    is_first[1:] = places[1:] != places[:-1] + 1
    starts = is_first.nonzero().view(-1)
    counts = _distances(torch.cat([starts, starts.new_tensor([len(places)])]))[1:]
    runs = _narrow(torch.cat([_distances(places[starts]), counts]))
    forms = {
        _Form.ALL: [after],
        _Form.ELEMENTS: [steps.view(torch.uint8), values],
        _Form.RUNS: [runs.view(torch.uint8), values],
    }
    form = min(forms, key=lambda each: sum(map(len, forms[each])))
    wide = {_Form.ELEMENTS: steps, _Form.RUNS: runs}.get(form, after).itemsize
    head = _HEAD.pack(form, width, wide, _checksum(after), len(places), len(starts))
    return torch.cat([torch.frombuffer(bytearray(head), dtype=torch.uint8), *forms[form]])


def apply_changes(encoded: Tensor, part: Tensor, what: str) -> None:
    """Apply encoded changes to a tensor of bytes in place; raise ValueError if the result differs from the sender's."""
    try:
        form, width, wide, checksum, count, runs = _HEAD.unpack(bytes(encoded[: _HEAD.size].numpy()))
        body = encoded[_HEAD.size :]
        if form == _Form.ALL:
            part.copy_(body)
        else:
            numbers = count if form == _Form.ELEMENTS else 2 * runs
            distances = body[: numbers * wide].clone().view(_UNSIGNED[wide]).long()
            places = distances[: len(distances) if form == _Form.ELEMENTS else runs].cumsum(0)
            if form == _Form.RUNS:
                lengths = distances[runs:]
                ends = lengths.cumsum(0)
                places = (places - ends + lengths).repeat_interleave(lengths) + torch.arange(count, device="cpu")
            part.view(_WORDS[width])[places] = body[numbers * wide :].clone().view(_WORDS[width])
    except (KeyError, IndexError, RuntimeError, struct.error) as error:
        raise ValueError(f"the changes of {what} are not valid: {error}") from None
    if _checksum(part) != checksum:
        raise ValueError(f"after its changes, {what} differs from the sender's weights. Send all weights again")


# Distances are not negative. Wider dtypes are signed, because torch supports few operations on unsigned dtypes.
_UNSIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _distances(places: Tensor) -> Tensor:
    """Return the first number of an ascending sequence, and the differences of the following numbers."""
    return places.diff(prepend=places.new_zeros(1))


def _narrow(numbers: Tensor) -> Tensor:
    """Return numbers in the smallest dtype that contains all of them."""
    largest = int(numbers.max()) if len(numbers) else 0
    return numbers.to(next(dtype for dtype in _UNSIGNED.values() if largest <= torch.iinfo(dtype).max))


def _checksum(part: Tensor) -> int:
    return crc32(part.numpy().data)
