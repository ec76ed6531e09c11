"""Faults in the forward."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tests.faults.fault import (
    ENDED,
    GATHER,
    GONE,
    Action,
    Fault,
    also,
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


def runs(*order: int) -> Action:
    """Run the blocks in this order from now on."""
    return lambda job: setattr(job, "order", order)


def without_gradients(job: Job) -> None:
    """Have the rest of the training be in a `no_grad`."""
    job.stack.enter_context(torch.no_grad())


FAULTS = {
    "forward": [
        *usual("forward 2", unit=GATHER),
        *usual("forward 2", in_forward, "inside of it", unit=r"(all-gather|exchange) of .*(blocks|root)"),
        Fault(
            "an error inside of the forward of all ranks, which is caught",
            "exceptions",
            "forward 2",
            in_forward(raises(IndexError("no such word"))),
            rank="IndexError",
            victim=None,
            after="kept train train trained",
        ),
        Fault(
            "a bit changes on its way",
            "values",
            "forward 2",
            flips_a_bit,
            rank="what has come from rank 1 has other bits",
            unit=GATHER,
            remedy=r"fsdp\.recover\(model\), on every rank",
            program="check_messages setup train train train",
        ),
        Fault(
            "out of memory in the forward",
            "memory",
            "forward 2",
            in_forward(raises(torch.OutOfMemoryError("Tried to allocate 20 MiB"))),
            rank=rf"{ENDED} OutOfMemoryError: Tried to allocate",
            unit=r"(all-gather|exchange) of .*(blocks|root)",
            by="others",
        ),
        Fault("ended by the launcher", "SIGTERM", "forward 2", ends_by(signal.SIGTERM), rank=GONE, ends="SIGTERM"),
        Fault("a crash in native code", "SIGSEGV", "forward 2", ends_by(signal.SIGSEGV), rank=GONE, ends="SIGSEGV"),
        Fault("os._exit(0)", "death", "forward 2", exits, rank=GONE, unit=GATHER, ends="status 0"),
        Fault(
            "stopped for four seconds",
            "SIGSTOP for seconds",
            "forward 2",
            stops_for(6),
            rank="rank 1: gives no answer: it is stopped",
            unit=GATHER,
            raises=False,
            by="one",
            after="trained",
        ),
        Fault("slow by a second", "slow ranks", "forward 2", sleeps(1), quiet=True, after="trained"),
        Fault(
            "a batch less",
            "skipping",
            "batch 3",
            lambda job: (_ for _ in ()).throw(StopIteration),
            rank=r"rank 1",
            unit=GATHER,
            by="others",
        ),
        Fault(
            "evaluation on one rank",
            "extra calls",
            "batch 2",
            also("evaluate"),
            rank=r"Rank 1 runs forward \d+ in eval\(\) without gradients",
            unit="all-gather of",
            remedy="the same mode on every rank",
        ),
        Fault(
            "two units in another order",
            "order",
            "forward 2",
            runs(1, 0),
            rank=r"Rank 1 ran blocks\.1 before blocks\.0 in forward",
            unit=r"ran blocks\.0 first",
            remedy="the same units in the same order",
        ),
        Fault(
            "two units in another order in the first step",
            "order",
            "forward",
            runs(1, 0),
            rank=r"Rank 1 ran blocks\.1 before blocks\.0 in forward",
            unit=r"ran blocks\.0 first",
            remedy="the same units in the same order",
        ),
        Fault(
            "a unit is left out",
            "skipping",
            "forward 2",
            runs(0),
            rank=r"Rank 1 left blocks\.1 out of forward",
            unit=r"blocks\.1",
            remedy=r"fsdp\.cond",
        ),
        Fault(
            "a unit is used twice",
            "extra calls",
            "forward 2",
            runs(0, 0, 1),
            rank=r"Rank 1 ran blocks\.0 twice in forward",
            unit=r"blocks\.0",
            remedy="the same units in the same order",
        ),
        Fault(
            "a forward more",
            "extra calls",
            "forward 2",
            also("forward"),
            rank=r"Rank 1 began forward \d+ while ranks? [-0, 23]+ (is|are) in backward",
            unit="root|blocks",
            remedy=r"fsdp\.join",
        ),
        Fault(
            "no gradients on one rank",
            "modes",
            "forward 2",
            without_gradients,
            rank=r"Rank 1 runs forward \d+ without gradients",
            unit="root|blocks",
            remedy=r"torch\.no_grad\(\)",
        ),
        Fault("a forward is left out", "skipping", "forward 2", skip, rank=ENDED, unit=GATHER, by="others"),
    ],
}
