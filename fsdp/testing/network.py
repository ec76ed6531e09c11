"""Messages between the ranks of a world, in memory, with lost messages and closed connections.

As in gloo, a message is transferred after its receiver requests it: immediately, or when the sender or receiver
waits for it, depending on the seed. Its memory is read only at this time, so a test detects a sender that overwrites
the memory too early.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp.testing.schedule import Schedule, Task


@dataclass(frozen=True)
class Fault:
    """A fault in a message of a rank; a call of a torch collective counts as a single message.

    Attributes:
        rank: the sender.
        at: the number of the message among the messages of this rank, from 0.
        effect: an exception, which the rank raises; "die": the rank exits without a report, like a killed process;
            "lose": the message never arrives; "flip": the message arrives with a changed bit.
    """

    rank: int
    at: int
    effect: BaseException | str

    def __post_init__(self) -> None:
        if not isinstance(self.effect, BaseException) and self.effect not in ("die", "lose", "flip"):
            raise ValueError(f'the effect of a fault is an exception, "die", "lose" or "flip", got {self.effect!r}')


class Death(BaseException):
    """Ends a rank without a report; `except Exception` does not catch it."""


class Transfer:
    """A transfer for which a rank can wait.

    Args:
        what: the description of the transfer for reports.
        peers: the ranks required to complete the transfer.

    Attributes:
        is_done: True after the transfer.
        error: the error message of a failed transfer; otherwise empty.
        waiters: the waiting threads.
    """

    def __init__(self, network: Network, rank: int, what: str, peers: Sequence[int]) -> None:
        self.network, self.rank, self.what, self.peers = network, rank, what, peers
        self.is_done, self.error = False, ""
        self.waiters: list[Task] | None = None

    def deliver(self) -> None:
        """Complete the transfer if all its requirements are met."""
        raise NotImplementedError

    def end(self, error: str = "") -> None:
        self.is_done, self.error = True, error
        if self.waiters:
            self.network.schedule.wake(self.waiters)

    def wait(self, timeout: timedelta | None = None) -> bool:
        schedule = self.network.schedule
        with schedule.turn(self.rank):
            if not self.is_done:
                self.deliver()
            if self.is_done:
                schedule.pause()
            while not self.is_done:
                self.network.check(self.rank, self.peers)
                self.waiters = self.waiters or []
                schedule.block(self.waiters, self.what)
                if not self.is_done:
                    self.deliver()
        if self.error:
            raise RuntimeError(self.error)
        return True

    def is_completed(self) -> bool:
        return self.is_done

    def is_success(self) -> bool:
        return self.is_done and not self.error


class Message(Transfer):
    """The sending or receiving end of a message, with the other end if known."""

    def __init__(self, network: Network, rank: int, peer: int, tensor: Tensor, is_sent: bool, fault: str = "") -> None:
        what = f"rank {peer} to take a message" if is_sent else f"a message of rank {peer}"
        super().__init__(network, rank, what, (peer,))
        self.tensor, self.is_sent, self.fault = tensor, is_sent, fault
        self.other: Message | None = None

    def deliver(self) -> None:
        other = self.other
        if other is None:
            return
        sent, asked = (self, other) if self.is_sent else (other, self)
        error = copied(sent.tensor, asked.tensor, f"from rank {sent.rank} to rank {asked.rank}")
        if sent.fault and not error:
            flipped(asked.tensor)
        self.other = other.other = None
        self.end(error)
        other.end(error)


class Work(Transfer, dist.Work):
    """A collective in flight, which torch's C++ code accepts as a work.

    Args:
        tensors: the inputs and outputs, which are kept alive.

    Attributes:
        complete: a function that completes the collective on all ranks; None until all ranks take part.
    """

    def __init__(
        self, network: Network, rank: int, what: str, members: Sequence[int], tensors: Sequence[Tensor]
    ) -> None:
        dist.Work.__init__(self)
        Transfer.__init__(self, network, rank, what, members)
        self._tensors = tensors
        self.complete: Callable[[], None] | None = None

    def deliver(self) -> None:
        if self.complete is not None:
            self.complete()

    def result(self) -> list[Tensor]:
        return list(self._tensors)

    def get_future(self) -> torch.futures.Future[Any]:
        # torch would wait for the future in C++ without passing the baton, so this method waits instead.
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(list(self._tensors))
        return future


Key = tuple[str, int, int, int]  # group, sender, receiver, tag
_Ends = dict[Key, list[Message]]


class Network:
    """All connections of a world.

    Attributes:
        gone: the ranks that have exited by an exception or without a report; their connections are closed.
        failure: the reason why no more messages can arrive, which every wait raises; otherwise empty.
        sent: the number of sent messages of each rank.
    """

    def __init__(self, ranks: int, schedule: Schedule, faults: Sequence[Fault]) -> None:
        self.schedule = schedule
        self.gone: set[int] = set()
        self.failure = ""
        self.sent = [0] * ranks
        self._faults = {(fault.rank, fault.at): fault for fault in faults}
        self._sent: _Ends = {}  # sent messages without a request
        self._asked: _Ends = {}  # requested messages before they are sent
        self.values = dist.HashStore()  # the store of all ranks
        self.store_waiters: list[Task] = []
        self.meetings: dict[Any, Any] = {}  # incomplete collectives, with the calls of some ranks

    @property
    def faults_to_come(self) -> list[Fault]:
        return [fault for fault in self._faults.values() if self.sent[fault.rank] <= fault.at]

    def check(self, rank: int, peers: Sequence[int]) -> None:
        """Raise the error that prevents communication of `rank` with `peers`, if any."""
        if rank in self.gone:
            raise Death
        if self.failure:
            raise RuntimeError(self.failure)
        for peer in peers if self.gone else ():
            if peer in self.gone:
                raise RuntimeError(f"Connection closed by peer: rank {peer} is gone")

    def close(self, rank: int) -> None:
        """Close the connections of a rank, and discard its messages that were not requested."""
        self.gone.add(rank)
        for key in [key for key in self._sent if key[1] == rank]:
            del self._sent[key]
        self.schedule.wake_all()

    def fault(self, rank: int) -> str:
        """Count a message, and return its fault: an empty string, "lose" or "flip"; or raise the fault's exception."""
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

    def send(self, group: str, rank: int, peer: int, tag: int, tensor: Tensor) -> Message:
        with self.schedule.turn(rank):
            self.check(rank, (peer,))
            message = Message(self, rank, peer, tensor, is_sent=True, fault=self.fault(rank))
            if message.fault == "lose":
                message.end()
            else:
                self._meet(message, (group, rank, peer, tag), self._asked, self._sent)
        return message

    def receive(self, group: str, rank: int, peer: int, tag: int, tensor: Tensor) -> Message:
        with self.schedule.turn(rank):
            self.check(rank, (peer,))
            message = Message(self, rank, peer, tensor, is_sent=False)
            self._meet(message, (group, peer, rank, tag), self._sent, self._asked)
        return message

    def _meet(self, message: Message, key: Key, others: _Ends, own: _Ends) -> None:
        """Match an end of a message with the other end, or store the end until the other end arrives."""
        waiting = others.get(key)
        if waiting is None:
            own.setdefault(key, []).append(message)
            return
        other = waiting.pop(0)
        if not waiting:
            del others[key]
        message.other, other.other = other, message
        # Deliver immediately, or when either end waits.
        if other.waiters or self.schedule.draw():
            message.deliver()


def copied(source: Tensor, target: Tensor, way: str) -> str:
    """Copy a tensor's bytes like a network, without autograd; return an error message, or an empty string."""
    if source.nbytes != target.nbytes:
        return f"a message {way} has {source.nbytes} bytes, but {target.nbytes} were requested"
    for tensor, what in ((source, "is to be sent"), (target, "is to be received into")):
        if not tensor.is_contiguous():
            return f"a message {way}: what {what} is not contiguous"
        if tensor.untyped_storage().nbytes() < tensor.nbytes:
            return f"a message {way}: the memory of what {what} was freed before the message was through"
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
    return ""


def flipped(tensor: Tensor) -> Tensor:
    """Change a bit in the middle of a tensor's memory, and return the tensor."""
    if tensor.nbytes:
        memory = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
        memory[tensor.nbytes // 2] ^= 1
    return tensor


class MemoryStore(dist.Store):
    """The store of a world, which torch uses to connect new groups. Each rank uses a separate object."""

    def __init__(self, network: Network, rank: int) -> None:
        super().__init__()
        self._network, self._rank, self._values = network, rank, network.values

    def _changed(self, change: Callable[..., Any], *args: Any) -> Any:
        with self._network.schedule.turn(self._rank):
            result = change(*args)
            self._network.schedule.wake(self._network.store_waiters)
            return result

    def set(self, key: str, value: Any) -> None:
        self._changed(self._values.set, key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values.get(key)

    def add(self, key: str, amount: int) -> int:
        total: int = self._changed(self._values.add, key, amount)
        return total

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        found: bytes = self._changed(self._values.compare_set, key, expected, desired)
        return found

    def check(self, keys: list[str]) -> bool:
        return self._values.check(keys)

    def delete_key(self, key: str) -> bool:
        return self._values.delete_key(key)

    def num_keys(self) -> int:
        return self._values.num_keys()

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        with self._network.schedule.turn(self._rank):
            while not self.check(keys):
                self._network.check(self._rank, ())
                self._network.schedule.block(self._network.store_waiters, f"the other ranks ({', '.join(keys)})")
