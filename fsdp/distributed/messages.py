"""Point-to-point messages on gloo: tags, checksums, and the lifetime of the buffers in flight."""

from __future__ import annotations

import re
import socket
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp.distributed.communicator import (
    ClosedConnectionError,
    DamagedMessageError,
    backend_names,
    behind,
    finish,
    made_once_for_groups,
    ranks_of,
)
from fsdp.distributed.devices import HOST, host_bytes

_LATE = re.compile("timed? ?out", re.IGNORECASE)  # part of gloo's errors if the connection is not closed

# Lower tags are reserved for the user's point-to-point messages on the same group. Tags of gloo have 31 bits.
_FIRST_TAG = 1 << 20
_TAGS = (1 << 31) - _FIRST_TAG


class Sending:
    """A shard in flight to the peers; gloo's works keep the sent tensors alive until `finish`."""

    num_waits = 0  # begun

    def __init__(self, works: Sequence[Any], what: str) -> None:
        self._works, self._what = works, what
        self.is_finished = False

    def finish(self) -> None:
        try:
            finish((self,), self._what)
        except RuntimeError:
            self._works = ()
            raise
        self._works, self.is_finished = (), True

    def wait(self, *limit: timedelta) -> None:
        _await(self, self._works, limit)


class Receiving:
    """A message that this rank is receiving; its buffer is kept until the message is awaited.

    After an exception during a step, a model may be released before all messages have arrived. gloo (seen in torch
    2.13) stops reading from a peer when a message arrives for a freed buffer, and reports the arrival only in a wait.
    The buffer is therefore kept until the process ends.
    """

    num_waits = 0  # begun
    _under_way: ClassVar[set[Receiving | Leaving]] = set()

    def __init__(self, group: Any, tensor: Tensor, peer: int, number: int) -> None:
        self._group, self._peer = group, peer
        try:
            self._work = group.recv([tensor], peer, number)
        except RuntimeError as error:
            raise self._explained(error) from error
        self._under_way.add(self)

    def wait(self, *limit: timedelta) -> None:
        try:
            _await(self, (self._work,), limit)
        except DamagedMessageError:
            self._under_way.discard(self)
            raise
        except RuntimeError as error:
            raise self._explained(error) from error
        self._under_way.discard(self)

    @classmethod
    def forget(cls, group: Any) -> None:
        """Release the pending messages of a group with closed connections, because they no longer arrive."""
        for each in list(cls._under_way):  # to which other threads add theirs
            if behind(each._group) is group:
                cls._under_way.discard(each)

    @property
    def sender(self) -> int | None:
        """The global rank of the sender; None if torch does not know it."""
        ranks = ranks_of(self._group)
        return ranks[self._peer] if ranks else None

    def _explained(self, error: RuntimeError) -> RuntimeError:
        if (sender := self.sender) is None:
            return error
        text = f"no message arrives from rank {sender}: {error}"
        return RuntimeError(text) if _LATE.search(text) else ClosedConnectionError(text, sender)


class Leaving:
    """A message that this rank is sending; its tensor is kept until the message is awaited.

    gloo (seen in torch 2.13) stops writing to a peer if the tensor of a queued message was freed. An abandoned message
    is therefore kept until the process ends, like the messages of `Receiving`.
    """

    num_waits = 0  # begun

    def __init__(self, group: Any, work: Any) -> None:
        self._group, self._work = group, work
        Receiving._under_way.add(self)

    def wait(self, *limit: timedelta) -> None:
        _await(self, (self._work,), limit)
        Receiving._under_way.discard(self)


def _await(message: Sending | Receiving | Leaving | _Checked, works: Iterable[Any], limit: Sequence[timedelta]) -> None:
    """Wait for a message. Skip works that another wait has completed: gloo would wait for another message.

    The other wait was interrupted, or is that of a signal handler which runs between two works of this wait.
    """
    message.num_waits += 1
    for work in works:
        if not (message.num_waits > 1 and work.is_completed()):
            work.wait(*limit)


def check_messages(enabled: bool = True) -> None:
    """Send a checksum after every message between ranks on gloo, and compare the checksum on the receiving rank.

    If a bit changes in transit, in a network card, a cable or memory, the receiving rank raises an error before using
    the data. The error contains the collective and both ranks. Without checksums, the bit would change the weights.
    The check reads all sent and received data once more. Call this function on all ranks with the same argument, before
    wrapping. If enabled, wrapping over any backend other than gloo raises an error: links of NCCL have separate
    checksums.
    """
    global _are_checked
    _are_checked = enabled


_are_checked = False


def checked(group: Any, is_ours: bool) -> Any:
    """Return `group`, wrapped in a `CheckedGroup` if checksums are enabled.

    Raises:
        RuntimeError: if checksums are enabled and the library does not send the group's messages itself.
    """
    if _are_checked and not is_ours:
        raise RuntimeError(
            "check_messages() supports messages between ranks through gloo only, got a process group of "
            f"{backend_names(group)}, or a custom one: wrap without it"
        )
    return CheckedGroup(group) if _are_checked else group


class CheckedGroup:
    """Wraps a gloo group, and sends a checksum (CRC-32) after each message; the receiver compares the checksum.

    This detects any single bit that changes in transit, and any burst of up to 32 bits.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = group.rank, group.size

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> _Checked:
        own = _checksum(tensors[0])
        works = [self._group.send([*tensors], peer, tag), self._group.send([own], peer, wire_tag(tag, "checksum"))]
        return _Checked(works, own, own.clone, peer)

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> _Checked:
        told = blank(_CHECKSUM_BYTES)
        works = [self._group.recv([*tensors], peer, tag), self._group.recv([told], peer, wire_tag(tag, "checksum"))]
        number = dist.get_process_group_ranks(self._group)[peer]
        return _Checked(works, told, lambda: _checksum(tensors[0]), number)


class _Checked:
    """A message and its checksum in flight."""

    num_waits = 0  # begun

    def __init__(self, works: Sequence[Any], told: Tensor, found: Callable[[], Tensor], rank: int) -> None:
        self._works, self._told, self._found, self._rank = works, told, found, rank

    def is_completed(self) -> bool:
        return False  # `wait` may be called again

    def wait(self, *limit: timedelta) -> None:
        _await(self, self._works, limit)
        found = self._found()
        if not torch.equal(found, self._told):
            raise DamagedMessageError(
                f"a message from rank {self._rank} was damaged in transit (checksum {as_bytes(found).hex()} instead of "
                f"{as_bytes(self._told).hex()}). Memory, a network card or a cable of its machine or of this one "
                f"({socket.gethostname()}) fails. fsdp.recover(model), on every rank, continues from the weights of "
                "the last step; remove the machine if this occurs again"
            )


_CHECKSUM_BYTES = 4


def _checksum(tensor: Tensor) -> Tensor:
    return as_tensor(zlib.crc32(host_bytes(tensor)).to_bytes(_CHECKSUM_BYTES, "big"))


def give_up(group: Any) -> None:
    """Close the connections of a gloo group, so that current and later waits of this rank on it raise an error.

    gloo closes all connections when a wait times out (torch 2.13). This ends all other waits of this rank, and the
    waits of the peers for this rank. A wait for a peer with a closed connection does not time out, so the function
    tries all peers.
    """
    for peer in range(group.size()):
        if peer != group.rank():
            with suppress(RuntimeError):
                group.recv([blank(1)], peer, wire_tag("nothing is sent")).wait(timedelta(milliseconds=1))


def renew(group: Any) -> None:
    """Collective. Reconnect the ranks of a gloo group after `give_up`, for all users of the group.

    A group of torch (private, seen in 2.11 to 2.15) selects its backend by device type. The group neither replaces
    nor deletes a registered backend. The new backend is therefore registered under a type number that torch does not
    use. The new backend uses the gloo device of the old backend, which owns the files and the reading thread.

    Raises:
        RuntimeError: if no unused type numbers are left.
    """
    kind = _renewed.get(group, _NAMELESS)
    if kind not in _KINDS:
        raise RuntimeError(
            f"fsdp.recover() has reconnected the process group '{group.group_name}' {kind - _NAMELESS} times, and "
            "torch supports no more backends for it: start the job again from its last checkpoint"
        )
    _renewed[group] = kind + 1
    Receiving.forget(group)
    store = dist.PrefixStore(f"fsdp.renewal {kind}", group.get_group_store())
    backend = dist.ProcessGroupGloo(store, group.rank(), group.size(), group._get_backend(HOST).options)
    group._register_backend(HOST, dist.ProcessGroup.BackendType(kind), backend)


_KINDS = range(256)  # the type numbers of backends
_NAMELESS = 64  # the first number that torch does not use
_renewed: dict[Any, int] = made_once_for_groups()


@lru_cache(maxsize=1 << 14)
def wire_tag(*meant: Any) -> int:
    """Return the tag of a message on gloo, computed from all properties that must be equal at both ends.

    Two simultaneous messages can have the same tag by chance. This is very unlikely, and causes an error only if ranks
    send the two messages in different orders.
    """
    return _FIRST_TAG + zlib.crc32(repr(meant).encode()) % _TAGS


def blank(nbytes: int) -> Tensor:
    # On the host, even if the user creates the model under `with torch.device("meta")`.
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else blank(0)


def as_bytes(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()
