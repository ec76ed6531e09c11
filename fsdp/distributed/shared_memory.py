"""`SharedMemory` carries large messages between processes on one host, without the copies of sockets.

Each rank of a group has memory that the other ranks map. A message lies in a *slot* of the sender's memory; gloo
carries its place only, as a message with the tag that the payload would have. So ranks that run different operations
still wait for each other, and the end of a process still ends the waits of the others. A slot is free again when its
readers have counted it as read, in a byte of the slot for each. The sender never waits for that: it takes another
slot. How much is on its way is bounded by those who send, and free slots above a limit return to the system.

The memory has no name in the file system. The system frees it when the processes that map it have ended, for any
reason. It grows by `posix_fallocate`: a system without memory is an error of this call, and not of a later write.
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

_RESERVED = 1 << 36  # addresses, without memory
_MOST = 5  # slots of the largest size: two gradients on their way and one that fills, and two shards
_PAGE, _LINE = 1 << 12, 64
_PLACE = struct.Struct("<qq")  # the beginnings of a slot and of a payload
_NONCE_BYTES = 16

_log = logging.getLogger(__name__)


class _Memory:
    """A mapping of the memory of one rank: slots with a count of reads for each other rank, and a payload."""

    def __init__(self, fd: int, ranks: int) -> None:
        self._bytes = mmap.mmap(fd, _RESERVED)
        self._tensor = torch.frombuffer(self._bytes, dtype=torch.uint8)
        self._ranks = ranks
        self._head = -(-ranks // _LINE) * _LINE  # bytes of the counts

    def payload(self, start: int, nbytes: int) -> Tensor:
        return self._tensor[start : start + nbytes]

    def count_read(self, slot: int, rank: int) -> None:
        """Count a message in a slot as read by a rank; the only writer of the count is this rank."""
        self._bytes[slot + rank] = (self._bytes[slot + rank] + 1) % 256

    def unmap(self, start: int, nbytes: int) -> None:
        """Leave the pages of a payload to the process that has written them, until this one reads them again."""
        first, end = -(-start // _PAGE) * _PAGE, (start + nbytes) // _PAGE * _PAGE
        if first < end:
            self._bytes.madvise(mmap.MADV_DONTNEED, first, end - first)

    @property
    def nonce(self) -> bytes:
        """A random number at the beginning, by which another process recognises the memory."""
        return self._bytes[:_NONCE_BYTES]


@dataclass
class _Slot:
    """A part of this rank's memory."""

    size: int
    sent: bytearray  # for each rank, how many messages from here were sent to it, modulo 256
    owner: weakref.ref[Any] | None = None  # the memory of a tensor that lies here


class _Slots(_Memory):
    """The memory of this rank."""

    def __init__(self, ranks: int) -> None:
        self._fd = os.memfd_create("fsdp.exchange")
        weakref.finalize(self, os.close, self._fd).atexit = False
        os.ftruncate(self._fd, _RESERVED)
        os.posix_fallocate(self._fd, 0, _PAGE)
        super().__init__(self._fd, ranks)
        self._bytes[:_NONCE_BYTES] = secrets.token_bytes(_NONCE_BYTES)
        self._begin, self._largest = self._tensor.data_ptr(), 0
        self._slots: dict[int, _Slot] = {}  # by their beginnings, in order

    @property
    def address(self) -> tuple[int, int, str]:
        return os.getpid(), self._fd, self.nonce.hex()

    def empty(self, nbytes: int) -> Tensor | None:
        """Return bytes in a slot, which is free again when they are, and were read; None if there is no memory."""
        try:
            start = self._take(nbytes, is_bounded=True)
        except OSError:
            return None
        memory = (ctypes.c_char * nbytes).from_buffer(self._bytes, start + self._head)
        self._slots[start].owner = weakref.ref(memory)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def put(self, message: Tensor, readers: Sequence[int]) -> tuple[int, int]:
        """Return the beginnings of the slot and of the payload of a message, which is copied unless it is in a slot.

        Raises:
            RuntimeError: if the system has no memory for it.
        """
        payload = message.data_ptr() - self._begin
        start = self._slot_at(payload)
        if start is None:
            try:
                start = self._take(message.nbytes)
            except OSError as error:
                raise RuntimeError(
                    f"rank {own_rank()}: no shared memory for a message of {message.nbytes} bytes: {error}. Leave more "
                    f"memory free, or start all ranks with {SHARED_MEMORY}=0 in the environment: messages go through "
                    "sockets then"
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
        """Return the beginning of a free slot for a payload, which may be a new one.

        Raises:
            OSError: if the system has no memory for it, or it is above the limit and `is_bounded`.
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
                raise OSError("many messages are on their way already")
        start = self._gap(size)
        os.posix_fallocate(self._fd, start, size)
        self._bytes[start : start + self._head] = bytes(self._head)
        self._slots = dict(sorted([*self._slots.items(), (start, _Slot(size, bytearray(self._ranks)))]))
        return start

    def _gap(self, size: int) -> int:
        """Return the first place that has no slot."""
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
        """Return the memory of free slots to the system."""
        for start in list(filter(self._is_free, self._slots)):
            self._bytes.madvise(mmap.MADV_REMOVE, start, self._slots.pop(start).size)

    def forget(self) -> None:
        """Free all slots but those of tensors: no rank reads any more."""
        for start, slot in self._slots.items():
            slot.sent = bytearray(self._bytes[start : start + self._ranks])


class SharedMemory:
    """The way through shared memory between the ranks of a group, which all are on this host.

    Args:
        group: the gloo group.
        own: the memory of this rank.
        others: the memory of each other rank.
        least: the bytes of the smallest message that is not sent through gloo, the same on all ranks.
    """

    def __init__(self, group: Any, own: _Slots, others: dict[int, _Memory], least: int) -> None:
        self._group, self._own, self._others, self._least = group, own, others, least

    @classmethod
    def among(cls, group: Any, all_gather_bytes: Callable[[bytes], list[bytes]], least: int) -> SharedMemory | None:
        """Collective. Return the way between the ranks of a group; None if any two of them cannot share memory.

        Args:
            group: the gloo group.
            all_gather_bytes: of the group's communicator.
            least: see `SharedMemory`.
        """
        own, others = None, {}
        with suppress(OSError, ValueError, AttributeError):  # no Linux, no room, or a limit of addresses
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
            _log.info("messages between ranks %s go through sockets: not all of them can share memory", told)
            return None
        return cls(group, own, others, least)

    def sender(self, outgoing: Messages) -> Callable[[Tensor, int, int], Any]:
        """Return a function that sends these tensors, each to a rank under a tag.

        A tensor that goes to several ranks is copied once.
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
        """Start to receive a tensor from a rank under a tag."""
        if into.nbytes < self._least:
            return Receiving(self._group, into, peer, number)
        return Reading(self._group, self._others[peer], into, peer, number)

    def lend(self, like: Tensor, peer: int, number: int) -> Lent:
        """Start to receive a tensor of the size and dtype of `like`, which is read where the sender has put it."""
        return Lent(self._group, self._others[peer], like, peer, number)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """Return a tensor ``[numel]`` that is sent without a copy; None if there are many already."""
        memory = self._own.empty(numel * dtype.itemsize)
        return None if memory is None else memory.view(dtype)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies in the memory that other ranks read."""
        return self._own.holds(tensor)

    def forget(self) -> None:
        """Free what was sent and will not be read any more: all ranks have come to rest."""
        self._own.forget()


class Reading:
    """A large message that this rank is receiving.

    Args:
        memory: of the sender.
        into: the tensor that the message is copied to.
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
            self._was_read = True  # before the sender may write something else there
            self.give_back()

    def _arrived(self, *limit: timedelta) -> Tensor:
        self._arrival.wait(*limit)
        self._slot, self._start = _PLACE.unpack(as_bytes(self._told))
        return self._memory.payload(self._start, self._into.nbytes)

    def give_back(self) -> None:
        """Let the sender use the slot of the message again."""
        self._memory.unmap(self._start, self._into.nbytes)
        self._memory.count_read(self._slot, self._rank)


class Lent(Reading):
    """A message that is read where the sender has put it; `into` only has its size and dtype.

    Attributes:
        value: the message, between `wait` and `give_back`; it must not be written.
    """

    value: Tensor

    def wait(self, *limit: timedelta) -> None:
        self.value = self._arrived(*limit).view(self._into.dtype).view(self._into.shape)


def _mapped(process: int, fd: int, nonce: str, ranks: int) -> _Memory:
    """Return the memory of another process.

    Raises:
        OSError: if this process may not, or cannot, map it.
        ValueError: if it is the memory of a process with the same number on another host.
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
