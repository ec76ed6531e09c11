"""Faults in the backward, in the reduction of gradients, while they accumulate, and when they are clipped."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from tests.faults.fault import (
    DIFFERENT,
    ENDED,
    TRAIN,
    Fault,
    also,
    assigns,
    in_backward,
    instead,
    raises,
    skip,
    sleeps,
    stops_for,
    updates,
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


def with_loss(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Job], None]:
    def do(job: Job) -> None:
        job.loss = change(job.loss)

    return do


backward = partial(Fault, at="forward 2", unit=BACKWARD)
reduction = partial(Fault, at="forward 2")
clipping = partial(Fault, program=CLIPPING, at="clip 2", unit="clip_grad_norm_")
accumulation = partial(Fault, program=ACCUMULATING, at="accumulate 2", unit=BACKWARD)

# fmt: off
FAULTS = {
    "backward": [
        *usual("forward 2", in_backward, unit=BACKWARD),
        backward("an error inside of the backward of all ranks, which is caught", "exceptions",
            in_backward(raises(ValueError("overflow"))), victim=None, rank="overflow", unit="",
            after="kept train train trained"),
        backward("out of memory inside of the backward", "memory",
            in_backward(raises(torch.OutOfMemoryError("Tried to allocate"))), rank=f"{ENDED} OutOfMemoryError",
            by="others"),
        backward("stopped for seconds in the backward", "SIGSTOP for seconds", in_backward(stops_for(6)),
            rank="rank 1: gives no answer", by="one", raises=False, after="trained"),
        backward("slow in the backward", "slow ranks", in_backward(sleeps(1)), unit="", quiet=True, after="trained"),
        backward("no backward on one rank", "skipping", skip, at="backward 2",
            rank=r"Rank 1 began forward \d+ while ranks? [-0, 23]+ (is|are) in backward", remedy=OFTEN),
        backward("a second backward", "extra calls", lambda job: job.loss.backward(retain_graph=True), at="backward 2",
            rank=r"rank 1 is in backward|Rank 1 began backward", remedy=OFTEN),
        backward("a loss that is detached", "structure", with_loss(lambda loss: loss.detach()), at="backward 2",
            rank=ENDED + " RuntimeError", by="others"),
        backward("a loss that is not a number", "values", with_loss(lambda loss: loss * float("nan")), at="backward 2",
            program="setup detect train train train", rank="rank 1: the gradient of ",
            unit="head.bias of unit 'root"),
    ],
    "reduction": [
        reduction("no_sync on one rank", "modes", without_sync, unit=BACKWARD, remedy="no_sync"),
        reduction("a hook that raises on one rank", "exceptions", assigns(hook_fails=True),
            at="backward 2", program="setup register_hook train train train",
            rank=f"{ENDED} RuntimeError.*the communication hook", unit=BACKWARD, by="others"),
        reduction("a hook on one rank only", "options", also("register_hook"), at="batch",
            unit="register_comm_hook", remedy="[Mm]ake the same call"),
        reduction("another hook", "options", instead("register_other_hook"), at="register_hook",
            program="setup register_hook train train", unit="communication hook", remedy="[Ee]very rank"),
        reduction("another divisor since the second step", "options",
            lambda job: job.model.set_gradient_divide_factors(1.0, 8.0),
            rank=r"Rank 1 runs backward \d+ with gradients divided by 8", unit="root|blocks",
            remedy="factors that divide gradients"),
        reduction("a parameter frozen since the second step", "structure",
            lambda job: next(job.model.parameters()).requires_grad_(False),
            rank=r"Rank 1 did not train root \(Net\) in backward", unit="root|blocks",
            remedy="Freeze and unfreeze the same parameters"),
    ],
    "clipping": [
        *usual("clip 2", unit=r"norm of gradients|clip_grad_norm_\(\)", program=CLIPPING),
        clipping("clipping is left out", "skipping", skip, program=CLIPPING + " train",
            rank=r"rank 1 in forward", remedy="which every rank must call"),
        clipping("clipping on one rank only", "extra calls", also("clip"), at="step 2", program=TRAIN,
            rank=r"Rank 1 is in clip_grad_norm_\(\), which every rank must call",
            remedy="Make the same calls on every rank"),
        clipping("another bound", "options", updates("clipping", max_norm=0.5),
            unit="max_norm|at most 0.5", remedy=DIFFERENT),
        clipping("another norm", "options", updates("clipping", norm_type=1.0),
            unit="norm_type|norm of gradients \\(norm_type=1", remedy=DIFFERENT),
        clipping("the largest element", "options", updates("clipping", norm_type=float("inf")), remedy=DIFFERENT),
        clipping("values instead of the norm", "modes", instead("clip_values"), program=CLIPPING + " train"),
        clipping("torch's function on one rank", "modes", instead("clip_to_one"), unit="", quiet=True),
        clipping("clipping under no_sync", "order", without_sync, at="forward 2", victim=None,
            rank="rank|cannot clip", unit="flat|head|root", remedy="outside no_sync", after="kept"),
    ],
    "accumulation": [
        *usual("accumulate 2", unit="all-gather", program=ACCUMULATING),
        accumulation("a micro-batch less", "skipping", skip),
        accumulation("a micro-batch more", "extra calls", also("accumulate")),
        accumulation("the last micro-batch is not reduced", "modes", without_sync, at="forward 3", remedy="no_sync"),
        accumulation("a micro-batch is reduced too early", "modes", instead("forward", "backward"), remedy="no_sync"),
        accumulation("a step before the reduction", "order", also("step"),
            rank=f"{ENDED} RuntimeError: SGD.step", remedy="no_sync", by="others"),
        accumulation("an error while accumulating, which all catch", "exceptions",
            in_backward(raises(ValueError("overflow"))), program="setup train accumulate accumulate", victim=None,
            rank="overflow", unit="", after="step_zero train train"),
    ],
}
# fmt: on
