"""Faults in the forward."""

from __future__ import annotations

import signal
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tests.faults.fault import (
    ENDED,
    GATHER,
    GONE,
    Fault,
    also,
    assigns,
    ends_by,
    exits,
    in_forward,
    raises,
    skip,
    sleeps,
    stops_for,
    usual,
)

if TYPE_CHECKING:
    from tests.faults.job import Job


def flips_a_bit(job: Job) -> None:
    """Have one bit change of what is sent next, on its way."""
    from unittest import mock

    import torch.distributed as dist

    send = dist.ProcessGroup.send

    def send_flipped(group: dist.ProcessGroup, tensors: list[Tensor], peer: int, tag: int) -> Any:
        patch.stop()
        (tensor,) = (each.clone() for each in tensors)
        tensor.view(torch.uint8)[-1] ^= 1
        return send(group, [tensor], peer, tag)

    patch = mock.patch.object(dist.ProcessGroup, "send", send_flipped)
    patch.start()


def without_gradients(job: Job) -> None:
    """Have the rest of the training be in a `no_grad`."""
    job.stack.enter_context(torch.no_grad())


forward = partial(Fault, at="forward 2")

# fmt: off
FAULTS = {
    "forward": [
        *usual("forward 2", unit=GATHER),
        *usual("forward 2", in_forward, "inside of it", unit=r"(all-gather|exchange) of .*(blocks|root)"),
        forward("an error inside of the forward of all ranks, which is caught", "exceptions",
            in_forward(raises(IndexError("no such word"))), victim=None, rank="IndexError",
            after="kept train train trained"),
        forward("a bit changes on its way", "values", flips_a_bit, program="check_messages setup train train train",
            rank="a message from rank 1 was damaged in transit", unit=GATHER,
            remedy=r"fsdp\.recover\(model\), on every rank"),
        forward("out of memory in the forward", "memory",
            in_forward(raises(torch.OutOfMemoryError("Tried to allocate 20 MiB"))),
            rank=rf"{ENDED} OutOfMemoryError: Tried to allocate", unit=r"(all-gather|exchange) of .*(blocks|root)",
            by="others"),
        forward("ended by the launcher", "SIGTERM", ends_by(signal.SIGTERM), rank=GONE, ends="SIGTERM"),
        forward("a crash in native code", "SIGSEGV", ends_by(signal.SIGSEGV), rank=GONE, ends="SIGSEGV"),
        forward("os._exit(0)", "death", exits, rank=GONE, unit=GATHER, ends="status 0"),
        forward("stopped for four seconds", "SIGSTOP for seconds", stops_for(6),
            rank="rank 1: gives no answer: it is stopped", unit=GATHER, by="one", raises=False, after="trained"),
        forward("slow by a second", "slow ranks", sleeps(1), quiet=True, after="trained"),
        forward("a batch less", "skipping", lambda job: (_ for _ in ()).throw(StopIteration), at="batch 3",
            rank=r"rank 1", unit=GATHER, by="others"),
        forward("evaluation on one rank", "extra calls", also("evaluate"), at="batch 2",
            rank=r"Rank 1 runs forward \d+ in eval\(\) without gradients", unit="all-gather of",
            remedy="the same mode on every rank"),
        forward("two units in another order", "order", assigns(order=(1, 0)),
            rank=r"Rank 1 ran blocks\.1 before blocks\.0 in forward", unit=r"ran blocks\.0 first",
            remedy="the same units in the same order"),
        forward("two units in another order in the first step", "order", assigns(order=(1, 0)), at="forward",
            rank=r"Rank 1 ran blocks\.1 before blocks\.0 in forward", unit=r"ran blocks\.0 first",
            remedy="the same units in the same order"),
        forward("a unit is left out", "skipping", assigns(order=(0,)),
            rank=r"Rank 1 left blocks\.1 out of forward", unit=r"blocks\.1", remedy=r"fsdp\.cond"),
        forward("a unit is used twice", "extra calls", assigns(order=(0, 0, 1)),
            rank=r"Rank 1 ran blocks\.0 twice in forward", unit=r"blocks\.0",
            remedy="the same units in the same order"),
        forward("a forward more", "extra calls", also("forward"),
            rank=r"Rank 1 began forward \d+ while ranks? [-0, 23]+ (is|are) in backward", unit="root|blocks",
            remedy=r"fsdp\.join"),
        forward("no gradients on one rank", "modes", without_gradients,
            rank=r"Rank 1 runs forward \d+ without gradients", unit="root|blocks", remedy=r"torch\.no_grad\(\)"),
        forward("a forward is left out", "skipping", skip, rank=ENDED, unit=GATHER, by="others"),
    ],
}
# fmt: on
