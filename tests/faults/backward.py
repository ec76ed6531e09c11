"""Faults in the backward, in the reduction of gradients, while they accumulate, and when they are clipped."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.faults.fault import (
    DIFFERENT,
    ENDED,
    Fault,
    also,
    in_backward,
    instead,
    raises,
    skip,
    sleeps,
    stops_for,
    usual,
)
from tests.faults.job import Job

OFTEN = r"backward\(\) equally often on every rank"
# What ranks are in when one of them goes wrong in the backward.
BACKWARD = r"(all-gather|reduce-scatter|exchange) (of|for) .*(root|blocks)"
CLIPPING = "setup batch forward backward clip step batch forward backward clip step"
ACCUMULATING = "setup train accumulate accumulate train accumulate train"


def without_sync(job: Job) -> None:
    """Have the rest of the training be in a `no_sync`."""
    job.stack.enter_context(job.model.no_sync())


def hooked(job: Job) -> None:
    """Have the gradient of a flat parameter fail in a communication hook, registered by all ranks."""


def with_loss(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Job], None]:
    def do(job: Job) -> None:
        job.loss = change(job.loss)

    return do


def poisoned(value: float) -> Callable[[Job], None]:
    def do(job: Job) -> None:
        job.loss = job.loss * value

    return do


def clips_to(**options: float) -> Callable[[Job], None]:
    def do(job: Job) -> None:
        job.clipping.update(options)

    return do


FAULTS = {
    "backward": [
        *usual("forward 2", in_backward, unit=BACKWARD),
        Fault(
            "an error inside of the backward of all ranks, which is caught",
            "exceptions",
            "forward 2",
            in_backward(raises(ValueError("overflow"))),
            rank="overflow",
            victim=None,
            after="kept train train trained",
        ),
        Fault(
            "out of memory inside of the backward",
            "memory",
            "forward 2",
            in_backward(raises(torch.OutOfMemoryError("Tried to allocate"))),
            rank=f"{ENDED} OutOfMemoryError",
            unit=BACKWARD,
            by="others",
        ),
        Fault(
            "stopped for seconds in the backward",
            "SIGSTOP for seconds",
            "forward 2",
            in_backward(stops_for(6)),
            rank="rank 1: gives no answer",
            unit=BACKWARD,
            raises=False,
            by="one",
            after="trained",
        ),
        Fault("slow in the backward", "slow ranks", "forward 2", in_backward(sleeps(1)), quiet=True, after="trained"),
        Fault(
            "no backward on one rank",
            "skipping",
            "backward 2",
            skip,
            rank=r"Rank 1 began forward \d+ while ranks? [-0, 23]+ (is|are) in backward",
            unit=BACKWARD,
            remedy=OFTEN,
        ),
        Fault(
            "a second backward",
            "extra calls",
            "backward 2",
            lambda job: job.loss.backward(retain_graph=True),
            rank=r"rank 1 is in backward|Rank 1 began backward",
            unit=BACKWARD,
            remedy=OFTEN,
            by="all",
        ),
        Fault(
            "a loss that is detached",
            "structure",
            "backward 2",
            with_loss(lambda loss: loss.detach()),
            rank=ENDED + " RuntimeError",
            unit=BACKWARD,
            by="others",
        ),
        Fault(
            "a loss that is not a number",
            "values",
            "backward 2",
            poisoned(float("nan")),
            program="setup detect train train train",
            rank="rank 1: the gradient of ",
            unit="head.bias of unit 'root",
        ),
    ],
    "reduction": [
        Fault(
            "no_sync on one rank", "modes", "forward 2", without_sync, rank=r"rank 1\b", unit=BACKWARD, remedy="no_sync"
        ),
        Fault(
            "a hook that raises on one rank",
            "exceptions",
            "backward 2",
            lambda job: setattr(job, "hook_fails", True),
            program="setup register_hook train train train",
            rank=f"{ENDED} RuntimeError.*the communication hook",
            unit=BACKWARD,
            by="others",
        ),
        Fault(
            "a hook on one rank only",
            "options",
            "batch",
            also("register_hook"),
            rank=r"rank 1\b",
            unit="register_comm_hook",
            remedy="[Mm]ake the same call",
        ),
        Fault(
            "another hook",
            "options",
            "register_hook",
            instead("register_other_hook"),
            program="setup register_hook train train",
            rank=r"rank 1\b",
            unit="communication hook",
            remedy="[Ee]very rank",
        ),
        Fault(
            "another divisor since the second step",
            "options",
            "forward 2",
            lambda job: job.model.set_gradient_divide_factors(1.0, 8.0),
            rank=r"Rank 1 runs backward \d+ with gradients divided by 8",
            unit="root|blocks",
            remedy="factors that divide gradients",
        ),
        Fault(
            "a parameter frozen since the second step",
            "structure",
            "forward 2",
            lambda job: next(job.model.parameters()).requires_grad_(False),
            rank=r"Rank 1 did not train root \(Net\) in backward",
            unit="root|blocks",
            remedy="Freeze and unfreeze the same parameters",
        ),
    ],
    "clipping": [
        *usual("clip 2", unit=r"norm of gradients|clip_grad_norm_\(\)", program=CLIPPING),
        Fault(
            "clipping is left out",
            "skipping",
            "clip 2",
            skip,
            program=CLIPPING + " train",
            rank=r"rank 1 in forward",
            unit="clip_grad_norm_",
            remedy="which every rank must call",
        ),
        Fault(
            "clipping on one rank only",
            "extra calls",
            "step 2",
            also("clip"),
            rank=r"Rank 1 is in clip_grad_norm_\(\), which every rank must call",
            unit="clip_grad_norm_",
            remedy="Make the same calls on every rank",
        ),
        Fault(
            "another bound",
            "options",
            "clip 2",
            clips_to(max_norm=0.5),
            program=CLIPPING,
            rank=r"rank 1\b",
            unit="max_norm|at most 0.5",
            remedy=DIFFERENT,
        ),
        Fault(
            "another norm",
            "options",
            "clip 2",
            clips_to(norm_type=1.0),
            program=CLIPPING,
            rank=r"rank 1\b",
            unit="norm_type|norm of gradients of order 1",
            remedy=DIFFERENT,
        ),
        Fault(
            "the largest element",
            "options",
            "clip 2",
            clips_to(norm_type=float("inf")),
            program=CLIPPING,
            rank=r"rank 1\b",
            unit="clip_grad_norm_",
            remedy=DIFFERENT,
        ),
        Fault(
            "values instead of the norm",
            "modes",
            "clip 2",
            instead("clip_values"),
            program=CLIPPING + " train",
            rank=r"rank 1\b",
            unit="clip_grad_norm_",
        ),
        Fault("torch's function on one rank", "modes", "clip 2", instead("clip_to_one"), program=CLIPPING, quiet=True),
        Fault(
            "clipping under no_sync",
            "order",
            "forward 2",
            without_sync,
            victim=None,
            program=CLIPPING,
            rank="rank|cannot clip",
            unit="flat|head|root",
            remedy="outside no_sync",
            after="kept",
        ),
    ],
    "accumulation": [
        *usual("accumulate 2", unit="all-gather", program=ACCUMULATING),
        Fault(
            "a micro-batch less",
            "skipping",
            "accumulate 2",
            skip,
            program=ACCUMULATING,
            rank=r"rank 1\b",
            unit=BACKWARD,
        ),
        Fault(
            "a micro-batch more",
            "extra calls",
            "accumulate 2",
            also("accumulate"),
            program=ACCUMULATING,
            rank=r"rank 1\b",
            unit=BACKWARD,
        ),
        Fault(
            "the last micro-batch is not reduced",
            "modes",
            "forward 3",
            without_sync,
            program=ACCUMULATING,
            rank=r"rank 1\b",
            unit=BACKWARD,
            remedy="no_sync",
        ),
        Fault(
            "a micro-batch is reduced too early",
            "modes",
            "accumulate 2",
            instead("forward", "backward"),
            program=ACCUMULATING,
            rank=r"rank 1\b",
            unit=BACKWARD,
            remedy="no_sync",
        ),
        Fault(
            "a step before the reduction",
            "order",
            "accumulate 2",
            also("step"),
            program=ACCUMULATING,
            rank=f"{ENDED} RuntimeError: SGD.step",
            unit=BACKWARD,
            remedy="no_sync",
            by="others",
        ),
        Fault(
            "an error while accumulating, which all catch",
            "exceptions",
            "accumulate 2",
            in_backward(raises(ValueError("overflow"))),
            victim=None,
            program="setup train accumulate accumulate",
            rank="overflow",
            after="step_zero train train",
        ),
    ],
}
