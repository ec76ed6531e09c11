"""Messages between the ranks of a world, in memory: what is sent, what is lost, and which connections are closed.

As on gloo, a message leaves when its receiver has asked for it, and its memory is read then: at once, or when one of the
two waits for it, which is drawn from the seed. So a sender that writes again too early is found.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp.testing.schedule import Schedule, Task

_TorchWork = dist.Work


@dataclass(frozen=True)
class Fault:
    """A fault that befalls one message of a rank, where a call of a collective of torch's counts as one message.

    Attributes:
        rank: that sends it.
        at: its number among the messages of this rank, from 0.
        effect: an exception, which the rank raises; "die": the rank ends without a word, as a killed process does;
            "lose": the message never arrives; "flip": it arrives with one bit changed.
    """

    rank: int
    at: int
    effect: BaseException | str

    def __post_init__(self) -> None:
        if not isinstance(self.effect, BaseException) and self.effect not in ("die", "lose", "flip"):
            raise ValueError(f'the effect of a fault is an exception, "die", "lose" or "flip", got {self.effect!r}')


class Death(BaseException):
    """Ends a rank without a word; no `except Exception` holds it up."""


class Work(_TorchWork):
    """Something under way on one rank.

    Args:
        wires: of the world.
        what: it is, for people.
        rank: this one.
        peers: the ranks without which it cannot complete.
        tensors: that it reads or writes; they live until it has ended.
    """

    def __init__(self, wires: Wires, what: str, rank: int, peers: Sequence[int], tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.wires, self.what, self.rank, self.peers, self.tensors = wires, what, rank, peers, tensors
        self.deliver: Callable[[], None] | None = None  # ends it, once all that it needs is there
        self.is_done = False
        self.error = ""
        self.waiters: list[Task] = []

    def end(self, error: str = "") -> None:
        self.is_done, self.error, self.deliver = True, error, None
        self.wires.schedule.wake(self.waiters)

    def wait(self, timeout: timedelta | None = None) -> bool:
        wires = self.wires
        with wires.schedule.turn(self.rank):
            if not self.is_done and self.deliver is not None:
                self.deliver()
            if self.is_done:
                wires.schedule.pause()
            while not self.is_done:
                wires.check(self.rank, self.peers)
                wires.schedule.block(self.waiters, self.what)
                if not self.is_done and self.deliver is not None:
                    self.deliver()
        if self.error:
            raise RuntimeError(self.error)
        return True

    def is_completed(self) -> bool:
        return self.is_done

    def is_success(self) -> bool:
        return self.is_done and not self.error

    def result(self) -> list[Tensor]:
        return list(self.tensors)

    def get_future(self) -> torch.futures.Future[Any]:
        # torch waits for futures in C++, where nobody hands the baton on: so we wait.
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(list(self.tensors))
        return future


class Wires:
    """All connections of one world.

    Attributes:
        gone: ranks that have ended by an exception or without a word; their connections are closed.
        failure: why nothing can come any more, which is what every wait raises; empty while something can.
        sent: how many messages each rank has sent.
    """

    def __init__(self, ranks: int, schedule: Schedule, faults: Sequence[Fault]) -> None:
        self.schedule = schedule
        self.gone: set[int] = set()
        self.failure = ""
        self.sent = [0] * ranks
        self._faults = {(fault.rank, fault.at): fault for fault in faults}
        # By group, sender, receiver and tag: messages that nobody has asked for, or receivers that none has come for.
        self._sends: dict[Any, deque[tuple[Work, Tensor, bool]]] = {}
        self._receives: dict[Any, deque[tuple[Work, Tensor]]] = {}
        self.values: dict[str, bytes] = {}  # of the store
        self.store_waiters: list[Task] = []
        self.meetings: dict[Any, Any] = {}  # collectives that some ranks have come to

    def check(self, rank: int, peers: Sequence[int]) -> None:
        """Raise what keeps a rank from going on with these."""
        if rank in self.gone:
            raise Death
        for peer in peers:
            if peer in self.gone:
                raise RuntimeError(f"Connection closed by peer: rank {peer} is gone")
        if self.failure:
            raise RuntimeError(self.failure)

    def close(self, rank: int) -> None:
        """Close the connections of a rank, with what it has sent and nobody has taken."""
        self.gone.add(rank)
        for messages in self._sends.values():
            kept = [each for each in messages if each[0].rank != rank]
            messages.clear()
            messages.extend(kept)
        self.schedule.wake_all()

    def fault(self, rank: int) -> str:
        """Count a message, and return what befalls it: nothing, "lose" or "flip"; or raise."""
        number = self.sent[rank]
        self.sent[rank] = number + 1
        fault = self._faults.get((rank, number)) if self._faults else None
        if fault is None:
            return ""
        if isinstance(fault.effect, BaseException):
            raise fault.effect
        if fault.effect == "die":
            raise Death
        return fault.effect

    def send(self, group: str, rank: int, peer: int, tag: int, tensor: Tensor) -> Work:
        work = Work(self, f"rank {peer} to take a message", rank, (peer,), (tensor,))
        with self.schedule.turn(rank):
            self.check(rank, (peer,))
            fault = self.fault(rank)
            key = group, rank, peer, tag
            if fault == "lose":
                work.end()
            elif asked := self._receives.get(key):
                self._match(work, tensor, fault == "flip", *asked.popleft())
                if not asked:
                    del self._receives[key]
            else:
                self._sends.setdefault(key, deque()).append((work, tensor, fault == "flip"))
        return work

    def receive(self, group: str, rank: int, peer: int, tag: int, tensor: Tensor) -> Work:
        work = Work(self, f"a message of rank {peer}", rank, (peer,), (tensor,))
        with self.schedule.turn(rank):
            self.check(rank, (peer,))
            key = group, peer, rank, tag
            if sent := self._sends.get(key):
                self._match(*sent.popleft(), work, tensor)
                if not sent:
                    del self._sends[key]
            else:
                self._receives.setdefault(key, deque()).append((work, tensor))
        return work

    def _match(self, sending: Work, sent: Tensor, is_flipped: bool, receiving: Work, received: Tensor) -> None:
        def deliver() -> None:
            error = copied(sent, received, f"from rank {sending.rank} to rank {receiving.rank}")
            if is_flipped and not error:
                flip(received)
            sending.end(error)
            receiving.end(error)

        sending.deliver = receiving.deliver = deliver
        # So that each end finds out, if it waits for it already; and now and then at once.
        if self.schedule.coin() or sending.waiters or receiving.waiters:
            deliver()


def copied(source: Tensor, target: Tensor, way: str) -> str:
    """Copy a tensor as its bytes, as a network does, behind autograd's back; return what keeps us from it, or nothing."""
    if source.nbytes != target.nbytes:
        return f"a message {way} has {source.nbytes} bytes, and {target.nbytes} were asked for"
    for tensor, what in ((source, "is to be sent"), (target, "is to be received into")):
        if not tensor.is_contiguous():
            return f"a message {way}: what {what} is not contiguous"
        if tensor.untyped_storage().nbytes() < tensor.nbytes:
            return f"a message {way}: the memory of what {what} was freed before the message was through"
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
    return ""


def flip(tensor: Tensor) -> None:
    """Change one bit in the middle of a tensor's memory."""
    if tensor.nbytes:
        memory = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
        memory[tensor.nbytes // 2] ^= 1


class MemoryStore(dist.Store):
    """The store of a world, by which torch brings new groups together; each rank has an object of its own."""

    def __init__(self, wires: Wires, rank: int) -> None:
        super().__init__()
        self._wires, self._rank = wires, rank

    def set(self, key: str, value: Any) -> None:
        with self._wires.schedule.turn(self._rank):
            self._wires.values[key] = value.encode() if isinstance(value, str) else bytes(value)
            self._wires.schedule.wake(self._wires.store_waiters)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._wires.values[key]

    def add(self, key: str, amount: int) -> int:
        with self._wires.schedule.turn(self._rank):
            total = int(self._wires.values.get(key, b"0")) + amount
            self.set(key, str(total))
            return total

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        with self._wires.schedule.turn(self._rank):
            expected, desired = (each.encode() if isinstance(each, str) else bytes(each) for each in (expected, desired))
            if self._wires.values.get(key, b"") == expected:
                self.set(key, desired)
            return self._wires.values.get(key, expected)

    def check(self, keys: list[str]) -> bool:
        return all(key in self._wires.values for key in keys)

    def delete_key(self, key: str) -> bool:
        return self._wires.values.pop(key, None) is not None

    def num_keys(self) -> int:
        return len(self._wires.values)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        with self._wires.schedule.turn(self._rank):
            while not self.check(keys):
                self._wires.check(self._rank, ())
                self._wires.schedule.block(self._wires.store_waiters, f"the other ranks ({', '.join(keys)})")
