"""`SharedMemory` transfers large messages between processes on one host, without the copies of sockets.

Each rank of a group allocates memory that the other ranks map. A message is stored in a *slot* of the sender's memory.
gloo only sends the position of the message, with the tag of the payload. Mismatched operations and the end of a
process therefore have the same effects as with gloo alone. For each reader, a slot has a byte that counts the messages
read. The slot is free again when all counts equal the numbers of sent messages. The sender never waits for this, but
uses another slot. The number of messages in flight is bounded by the senders; free slots above a limit are released.

The memory is not part of the file system. The system frees the memory when all processes that map it have ended, for
any reason. `posix_fallocate` extends the memory, so a lack of memory is detected in this call, not in a later write.
"""

from __future__ import annotations

import ctypes
import json
import logging
import mmap
import os
import secrets
import struct
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from fsdp.distributed.communicator import Messages, own_rank
from fsdp.distributed.messages import Receiving, as_bytes, as_tensor, blank
from fsdp.distributed.switches import SHARED_MEMORY, is_off

_RESERVED = 1 << 36  # bytes of address space, without memory
_MOST = 5  # slots of the largest size: two gradients in flight, one that is being filled, and two shards
_PAGE, _LINE = 1 << 12, 64
_PLACE = struct.Struct("<qq")  # the offsets of a slot and of a payload
_NONCE_BYTES = 16

_log = logging.getLogger(__name__)


class _Memory:
    """A mapping of a rank's memory: each slot contains a read count for every rank, and a payload."""

    def __init__(self, fd: int, ranks: int) -> None:
        self._bytes = mmap.mmap(fd, _RESERVED)
        self._tensor = torch.frombuffer(self._bytes, dtype=torch.uint8)
        self._ranks = ranks
        self._head = -(-ranks // _LINE) * _LINE  # bytes of the read counts

    def payload(self, start: int, nbytes: int) -> Tensor:
        return self._tensor[start : start + nbytes]

    def count_read(self, slot: int, rank: int) -> None:
        """Increment the read count of `rank`, which must be this rank, in a slot. No other rank writes this count."""
        self._bytes[slot + rank] = (self._bytes[slot + rank] + 1) % 256

    def unmap(self, start: int, nbytes: int) -> None:
        """Remove the pages of a payload from this process's mapping, until the next read."""
        first, end = -(-start // _PAGE) * _PAGE, (start + nbytes) // _PAGE * _PAGE
        if first < end:
            self._bytes.madvise(mmap.MADV_DONTNEED, first, end - first)

    @property
    def nonce(self) -> bytes:
        """The random number at the beginning, which identifies the memory to other processes."""
        return self._bytes[:_NONCE_BYTES]


@dataclass
class _Slot:
    """A slot of this rank's memory."""

    size: int
    sent: bytearray  # the number of messages sent from this slot, by rank, modulo 256
    owner: weakref.ref[Any] | None = None  # the memory of the tensor in this slot, if any


class _Slots(_Memory):
    """The memory of this rank, and the state of all slots."""

    def __init__(self, ranks: int) -> None:
        self._fd = os.memfd_create("fsdp.exchange")
        weakref.finalize(self, os.close, self._fd).atexit = False
        os.ftruncate(self._fd, _RESERVED)
        os.posix_fallocate(self._fd, 0, _PAGE)
        super().__init__(self._fd, ranks)
        self._bytes[:_NONCE_BYTES] = secrets.token_bytes(_NONCE_BYTES)
        self._begin, self._largest = self._tensor.data_ptr(), 0
        self._slots: dict[int, _Slot] = {}  # by offset, in order

    @property
    def address(self) -> tuple[int, int, str]:
        return os.getpid(), self._fd, self.nonce.hex()

    def empty(self, nbytes: int) -> Tensor | None:
        """Return bytes in a slot, in use until they are released and read; None if the limit or memory is exhausted."""
        try:
            start = self._take(nbytes, is_bounded=True)
        except OSError:
            return None
        memory = (ctypes.c_char * nbytes).from_buffer(self._bytes, start + self._head)
        self._slots[start].owner = weakref.ref(memory)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def put(self, message: Tensor, readers: Sequence[int]) -> tuple[int, int]:
        """Copy a message to a slot if required, and return the offsets of the slot and of the payload.

        Raises:
            RuntimeError: if there is not enough memory for the copy.
        """
        payload = message.data_ptr() - self._begin
        start = self._slot_at(payload)
        if start is None:
            try:
                start = self._take(message.nbytes)
            except OSError as error:
                raise RuntimeError(
                    f"rank {own_rank()}: no shared memory for a message of {message.nbytes} bytes: {error}. Free "
                    f"memory, or start all ranks with {SHARED_MEMORY}=0 in the environment, so that messages use "
                    "sockets"
                ) from error
            payload = start + self._head
            self.payload(payload, message.nbytes).copy_(_as_bytes(message))
        for reader in readers:
            self._slots[start].sent[reader] = (self._slots[start].sent[reader] + 1) % 256
        return start, payload

    def holds(self, tensor: Tensor) -> bool:
        return self._slot_at(tensor.data_ptr() - self._begin) is not None

    def _slot_at(self, place: int) -> int | None:
        return next((start for start, slot in self._slots.items() if start <= place < start + slot.size), None)

    def _take(self, nbytes: int, *, is_bounded: bool = False) -> int:
        """Return the offset of a free slot for a payload; allocate a new slot if required.

        Raises:
            OSError: if there is not enough memory, or if `is_bounded` and a new slot would exceed the limit.
        """
        size = -(-(self._head + nbytes) // _PAGE) * _PAGE
        self._largest = max(self._largest, size)
        for start, slot in self._slots.items():
            if size <= slot.size <= 2 * size and self._is_free(start):
                slot.owner = None
                return start
        if self._nbytes + size > _MOST * self._largest:
            self._release()
            if is_bounded and self._nbytes + size > _MOST * self._largest:
                raise OSError("too many messages are in flight")
        start = self._gap(size)
        os.posix_fallocate(self._fd, start, size)
        self._bytes[start : start + self._head] = bytes(self._head)
        self._slots = dict(sorted([*self._slots.items(), (start, _Slot(size, bytearray(self._ranks)))]))
        return start

    def _gap(self, size: int) -> int:
        """Return the first offset with `size` bytes that no slot uses."""
        found = _PAGE
        for start, slot in self._slots.items():
            if found + size <= start:
                break
            found = start + slot.size
        return found

    @property
    def _nbytes(self) -> int:
        return sum(slot.size for slot in self._slots.values())

    def _is_free(self, start: int) -> bool:
        slot = self._slots[start]
        is_used = slot.owner is not None and slot.owner() is not None
        return not is_used and self._bytes[start : start + self._ranks] == slot.sent

    def _release(self) -> None:
        """Release the memory of free slots to the system."""
        for start in list(filter(self._is_free, self._slots)):
            self._bytes.madvise(mmap.MADV_REMOVE, start, self._slots.pop(start).size)

    def forget(self) -> None:
        """Mark all messages as read, because no rank reads any longer; slots of existing tensors remain in use."""
        for start, slot in self._slots.items():
            slot.sent = bytearray(self._bytes[start : start + self._ranks])


class SharedMemory:
    """Sends and receives messages through shared memory between the ranks of a group on this host.

    Args:
        group: the gloo group.
        own: the memory of this rank.
        others: the memory of each other rank.
        least: the minimum size of messages in shared memory, in bytes, the same on all ranks.
    """

    def __init__(self, group: Any, own: _Slots, others: dict[int, _Memory], least: int) -> None:
        self._group, self._own, self._others, self._least = group, own, others, least

    @classmethod
    def among(cls, group: Any, all_gather_bytes: Callable[[bytes], list[bytes]], least: int) -> SharedMemory | None:
        """Collective. Return the shared memory of a group; None if any two of the ranks cannot share memory.

        Args:
            group: the gloo group.
            all_gather_bytes: the method of the group's communicator.
            least: see `SharedMemory`.
        """
        own, others = None, {}
        with suppress(OSError, ValueError, AttributeError):  # not on Linux, or a limit of memory or address space
            if not is_off(SHARED_MEMORY):
                own = _Slots(group.size())
        told = [json.loads(each) for each in all_gather_bytes(json.dumps(own and own.address).encode())]
        for rank, address in enumerate(told):
            if rank != group.rank() and all(told):
                with suppress(OSError, ValueError):
                    process, fd, nonce = address
                    others[rank] = _mapped(process, fd, nonce, group.size())
        can_share = own is not None and len(others) == group.size() - 1
        if not all(each == b"1" for each in all_gather_bytes(b"1" if can_share else b"0")) or own is None:
            _log.info("messages between ranks %s use sockets, because not all of these ranks can share memory", told)
            return None
        return cls(group, own, others, least)

    def sender(self, outgoing: Messages) -> Callable[[Tensor, int, int], Any]:
        """Return a function that sends one of the tensors to a rank, with a tag.

        A tensor for multiple ranks is copied only once.
        """
        readers: dict[int, list[int]] = {}
        for peer, tensors in outgoing.items():
            for each in tensors:
                readers.setdefault(id(each), []).append(peer)
        places: dict[int, Tensor] = {}

        def send(tensor: Tensor, peer: int, number: int) -> Any:
            if tensor.nbytes < self._least:
                return self._group.send([tensor], peer, number)
            key = id(tensor)
            if key not in places:
                places[key] = as_tensor(_PLACE.pack(*self._own.put(tensor, readers[key])))
            return self._group.send([places[key]], peer, number)

        return send

    def receive(self, into: Tensor, peer: int, number: int) -> Any:
        """Start to receive a tensor from a rank, with a tag, into `into`."""
        if into.nbytes < self._least:
            return Receiving(self._group, into, peer, number)
        return Reading(self._group, self._others[peer], into, peer, number)

    def lend(self, like: Tensor, peer: int, number: int) -> Lent:
        """Start to receive a tensor of the shape and dtype of `like`, which is read in the sender's memory."""
        return Lent(self._group, self._others[peer], like, peer, number)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """Return a tensor ``[numel]`` that can be sent without a copy; None if too many slots are in use."""
        memory = self._own.empty(numel * dtype.itemsize)
        return None if memory is None else memory.view(dtype)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor is in this rank's shared memory."""
        return self._own.holds(tensor)

    def forget(self) -> None:
        """Release messages that will no longer be read; call this after all ranks have stopped communication."""
        self._own.forget()


class Reading:
    """A large message to this rank in flight.

    Args:
        memory: the memory of the sender.
        into: the tensor to which the message is copied.
        number: the tag.
    """

    def __init__(self, group: Any, memory: _Memory, into: Tensor, peer: int, number: int) -> None:
        self._memory, self._into, self._rank = memory, into, group.rank()
        self._told, self._was_read = blank(_PLACE.size), False
        self._arrival = Receiving(group, self._told, peer, number)

    @property
    def sender(self) -> int | None:
        return self._arrival.sender

    def wait(self, *limit: timedelta) -> None:
        if not self._was_read:
            _as_bytes(self._into).copy_(self._arrived(*limit))
            self._was_read = True  # before `give_back`, after which the sender may overwrite the slot
            self.give_back()

    def _arrived(self, *limit: timedelta) -> Tensor:
        self._arrival.wait(*limit)
        self._slot, self._start = _PLACE.unpack(as_bytes(self._told))
        return self._memory.payload(self._start, self._into.nbytes)

    def give_back(self) -> None:
        """Release the slot of the message to the sender."""
        self._memory.unmap(self._start, self._into.nbytes)
        self._memory.count_read(self._slot, self._rank)


class Lent(Reading):
    """A message that is read in the sender's memory, without a copy; only the shape and dtype of `into` are used.

    Attributes:
        value: the message, between `wait` and `give_back`; it must not be written.
    """

    value: Tensor

    def wait(self, *limit: timedelta) -> None:
        self.value = self._arrived(*limit).view(self._into.dtype).view(self._into.shape)


def _mapped(process: int, fd: int, nonce: str, ranks: int) -> _Memory:
    """Map the memory of another process.

    Raises:
        OSError: if this process cannot map the memory, for example without permission.
        ValueError: for this process itself, or for a process with the same number on another host.
    """
    if process == os.getpid():
        raise ValueError("ranks in one process")
    opened = os.open(f"/proc/{process}/fd/{fd}", os.O_RDWR)
    try:
        memory = _Memory(opened, ranks)
    finally:
        os.close(opened)
    if memory.nonce.hex() != nonce:
        raise ValueError(f"file {fd} of process {process} is another")
    return memory


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)
