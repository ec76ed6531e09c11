"""Messages between ranks on gloo that leave late, as on a network that is busy."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from fsdp.distributed import collectives
from fsdp.distributed.collectives import DirectExchange
from fsdp.distributed.communicator import communicators

_LATE = ("gather", "exchange")  # what may be under way when a call returns; all others overtake it


class LateGroup:
    """Stands before a gloo group, and begins to send some time after it was told to.

    What is to be sent lives until then, as with gloo, and is sent as it is then: the peer gets what was written to it
    meanwhile, and memory that was freed is an error.
    """

    kind = ""  # of what is sent next

    def __init__(self, group: dist.ProcessGroup, seconds: float) -> None:
        self._group, self._seconds = group, seconds
        self.rank, self.size, self.recv = group.rank, group.size, group.recv

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Any:
        if self.kind not in _LATE:
            return self._group.send([*tensors], peer, tag)
        message = _Late(self._group, (list(tensors), peer, tag), time.monotonic() + self._seconds)
        _sender().put(message)
        return message


class _Late:
    def __init__(self, group: dist.ProcessGroup, message: tuple[list[Tensor], int, int], when: float) -> None:
        self._group, self._message, self._when = group, message, when
        self._is_sent, self._work, self._problem = threading.Event(), None, ""

    def send(self) -> None:
        time.sleep(max(0.0, self._when - time.monotonic()))
        try:
            if any(each.numel() > 0 == each.untyped_storage().nbytes() for each in self._message[0]):
                raise RuntimeError("what is sent has no memory any more")
            self._work = self._group.send(*self._message)
        except RuntimeError as error:
            self._problem = str(error)
        self._is_sent.set()

    def wait(self, *limit: Any) -> None:
        self._is_sent.wait()
        if self._work is None:
            raise RuntimeError(self._problem)
        self._work.wait(*limit)


_queue: SimpleQueue[_Late] | None = None


def _sender() -> SimpleQueue[_Late]:
    """Return the queue of messages, which one thread sends in their order."""
    global _queue
    if _queue is None:
        _queue = SimpleQueue()
        threading.Thread(target=_send_all, args=(_queue,), daemon=True).start()
    return _queue


def _send_all(queue: SimpleQueue[_Late]) -> None:
    while True:
        queue.get().send()


def under_way() -> int:
    """Return how many messages, or groups of messages, nobody has waited for yet, of those inside `late_messages`."""
    return sum(len(way._sent) for way in communicators.values() if isinstance(way.group, LateGroup))


@contextmanager
def late_messages(seconds: float) -> Iterator[None]:
    """Have models that are wrapped inside send what they send on gloo so much later; all ranks are to enter this.

    A rank that is late gets what it needs from others that are not, and goes on before its own messages have left.
    """

    def checked(group: Any, is_ours: bool) -> Any:
        return LateGroup(group, seconds) if is_ours else group

    def noting(way: DirectExchange, what: str, kind: str, *rest: Any) -> Any:
        if isinstance(way.group, LateGroup):
            way.group.kind = kind
        return post(way, what, kind, *rest)

    post = DirectExchange._post
    try:
        with mock.patch.object(collectives, "checked", checked), mock.patch.object(DirectExchange, "_post", noting):
            yield
    finally:
        # Kept for others that ask for the same group, who would be as late as these.
        for key in [key for key, way in communicators.items() if isinstance(way.group, LateGroup)]:
            del communicators[key]
