"""Short messages from each rank to all ranks, in rounds, while ranks may run different operations.

A round is a small all-gather over all ranks of a root. In each round a rank either *announces* its next operation, or
*waits* at a position. All ranks perform a single announced operation: ranks that announced it continue, and the other
ranks take part and announce their next operation again. Diverging ranks are therefore detected and named before any
rank waits for a collective that is never issued.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from enum import IntEnum, auto
from typing import NamedTuple

import torch

from fsdp.distributed.collectives import Communicator
from fsdp.distributed.devices import HOST


class Kind(IntEnum):
    """The kinds of messages, with the operation of the sending rank."""

    WAIT = auto()  # waits at position `subject`
    FINISHED = auto()  # is out of batches, and takes part in operations of other ranks
    VISIT = auto()  # reaches region `subject`; `argument`: whether it runs the region
    FORWARD = auto()  # all-gathers unit `subject` for a forward
    BACKWARD = auto()  # all-gathers unit `subject` for a backward
    REDUCE = auto()  # reduces the gradient of handle `subject`
    LEAVE = auto()  # has run region `subject`; `argument`: whether a backward may follow
    FAILED = auto()  # raised an exception in region `subject`
    CLIP_NORM = auto()
    CLIP_VALUE = auto()
    STEP = auto()  # steps optimizer `subject`
    ZERO_GRAD = auto()  # zeroes gradients by optimizer `subject`, or by the model


_PASSIVE = (Kind.WAIT, Kind.FINISHED)
# Operations in which other ranks can take part regardless of their next operation, by priority.
_TURNS: dict[int, int] = {Kind.FORWARD: 0, Kind.BACKWARD: 0, Kind.REDUCE: 1}
_LAST = 2


class Message(NamedTuple):
    """A rank's part of a round: four 64-bit integers."""

    kind: int
    subject: int = 0
    argument: int = 0
    extra: int = 0

    @property
    def is_event(self) -> bool:
        """Return whether waiting ranks must perform an operation."""
        return self.kind not in _PASSIVE

    @property
    def topic(self) -> tuple[int, ...]:
        """The part of a message that must be equal on all ranks that announce the same operation."""
        return self.kind, self.subject, 0 if self.kind == Kind.LEAVE else self.extra


def bits_of(number: float) -> int:
    """Return the bits of a float as an integer for a message."""
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


def float_of(bits: int) -> float:
    """Return the float of an integer from `bits_of`."""
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])


class Talk:
    """Rounds of messages among all ranks of a root, including replicas."""

    def __init__(self, comms: Sequence[Communicator], describe: Callable[[Message], str]) -> None:
        self.comms = [comm for comm in comms if comm.world_size > 1 and comm.peers_answer]
        self._describe = describe

    def exchange(self, mine: Message) -> list[Message]:
        """Collective. Return the messages of all ranks in this round; raise RuntimeError if a rank failed."""
        rows = torch.tensor([mine], dtype=torch.int64, device=HOST)
        for comm in self.comms:
            everyone = rows.new_empty(rows.numel() * comm.world_size)
            there = comm.on_host.for_device(HOST)
            there.all_gather(everyone, rows.view(-1), f"talk about {self._describe(mine)}", "talk").wait()
            rows = everyone.view(-1, rows.shape[1])
        messages = [Message(*row) for row in rows.tolist()]
        for rank, message in enumerate(messages):
            if message.kind == Kind.FAILED:
                raise RuntimeError(
                    f"rank {rank} of the model failed in {self._describe(message)}: see its traceback. This rank took "
                    "part, and stops as well."
                )
        return messages

    def event_in(self, messages: Sequence[Message]) -> Message | None:
        """Return the operation that all ranks perform next: all-gathers first, then reductions, then the others."""
        events = [(rank, message) for rank, message in enumerate(messages) if message.is_event]
        if not events:
            return None
        first, event = min(events, key=lambda one: _TURNS.get(one[1].kind, _LAST))
        for rank, other in events if event.kind not in _TURNS else ():
            if other.topic != event.topic:
                raise RuntimeError(
                    f"the ranks of the model run different things: rank {first} is at {self._describe(event)} and rank "
                    f"{rank} at {self._describe(other)}. Every rank must call fsdp.cond for the same modules in the "
                    "same order, inside the same outer modules."
                )
        return max((one for _, one in events if one.topic == event.topic), key=lambda one: one.argument)
