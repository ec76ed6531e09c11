"""Faults in the forward."""

from __future__ import annotations

import signal

import torch

from tests.faults.fault import (
    STUCK,
    Fault,
    also,
    ends_by,
    exits,
    in_forward,
    interrupted,
    raises,
    skip,
    sleeps,
    stops,
    stops_for,
)

GATHER = r"all-gather of (blocks\.[01]|root)"
ENDED = r"rank 1 was ended by"
GONE = r"rank 1 is gone"

FAULTS = {
    "forward": [
        Fault(
            "a bad batch",
            "exceptions",
            "batch 2",
            raises(ValueError("a bad batch")),
            rank=rf"{ENDED} ValueError: a bad batch",
            unit=GATHER,
            by="others",
        ),
        Fault(
            "an error inside of the forward",
            "exceptions",
            "forward 2",
            in_forward(raises(IndexError("no such word"))),
            rank=rf"{ENDED} IndexError: no such word",
            unit=GATHER,
            by="others",
        ),
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
            "out of memory in the forward",
            "memory",
            "forward 2",
            in_forward(raises(torch.OutOfMemoryError("Tried to allocate 20 MiB"))),
            rank=rf"{ENDED} OutOfMemoryError: Tried to allocate",
            unit=GATHER,
            by="others",
        ),
        Fault("killed", "SIGKILL", "forward 2", ends_by(signal.SIGKILL), rank=GONE, unit=GATHER, ends="SIGKILL"),
        Fault(
            "killed inside of the forward",
            "SIGKILL",
            "forward 2",
            in_forward(ends_by(signal.SIGKILL)),
            rank=GONE,
            unit=GATHER,
            ends="SIGKILL",
        ),
        Fault("ended by the launcher", "SIGTERM", "forward 2", ends_by(signal.SIGTERM), rank=GONE, ends="SIGTERM"),
        Fault("a crash in native code", "SIGSEGV", "forward 2", ends_by(signal.SIGSEGV), rank=GONE, ends="SIGSEGV"),
        Fault("os._exit(0)", "death", "forward 2", exits, rank=GONE, unit=GATHER, ends="status 0"),
        Fault(
            "stopped for good",
            "SIGSTOP for good",
            "forward 2",
            stops,
            rank="rank 1: gives no answer: it is stopped",
            unit=GATHER,
            ends=STUCK,
        ),
        Fault(
            "stopped for four seconds",
            "SIGSTOP for seconds",
            "forward 2",
            stops_for(4.5),
            rank="rank 1: gives no answer: it is stopped",
            unit=GATHER,
            raises=False,
            by="others",
            after="trained",
        ),
        Fault("slow by a second", "slow ranks", "forward 2", sleeps(1), quiet=True, after="trained"),
        Fault(
            "loading data for long",
            "slow ranks",
            "batch 2",
            sleeps(5),
            rank="The others wait for rank 1",
            unit=GATHER,
            remedy=r"rank 1: in no collective, at .*in sleep",
        ),
        Fault(
            "Ctrl-C on one rank",
            "interrupts",
            "forward 2",
            interrupted,
            rank=f"{ENDED} KeyboardInterrupt",
            unit=GATHER,
            by="others",
        ),
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
            rank=r"rank 1\b",
            unit="all-gather of",
            remedy="",
        ),
        Fault("a forward is left out", "skipping", "forward 2", skip, unit="all-gather of"),
    ],
}
