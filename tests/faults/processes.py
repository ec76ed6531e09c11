"""Faults of processes: threads, forks, and signals that come while a rank waits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import traceback

from tests.faults.fault import Action, Fault, also, in_forward
from tests.faults.job import Job

CHILD = 4.0  # seconds that a forked child is given


def in_child(*operations: str) -> Action:
    """Perform operations in a forked child, and show what it says."""

    def do(job: Job) -> None:
        place = job.folder / f"child {job.rank}"
        sys.stderr.flush()
        child = os.fork()
        if not child:
            try:
                also(*operations)(job)
                place.write_text("")
            except BaseException as error:  # noqa: BLE001 - it is what is looked for
                place.write_text(f"{type(error).__name__}: {error}")
            finally:
                os._exit(0)
        until = time.monotonic() + CHILD
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if time.monotonic() > until:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                break
            time.sleep(0.01)
        if place.exists():
            print(place.read_text(), file=sys.stderr)

    return do


def in_thread(*operations: str) -> Action:
    """Perform operations in another thread, while this one goes on."""

    def do(job: Job) -> None:
        def run() -> None:
            try:
                also(*operations)(job)
            except BaseException:  # noqa: BLE001 - as threading shows it
                print(traceback.format_exc(), file=sys.stderr)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        job.stack.callback(thread.join, 5)

    return do


def in_thread_meanwhile(*operations: str) -> Action:
    """Perform operations in another thread, and wait for it in the middle of the forward."""

    def do(job: Job) -> None:
        in_thread(*operations)(job)
        time.sleep(0.5)

    return in_forward(do)


def signalled_while_waiting(number: signal.Signals) -> Action:
    """Get a signal while waiting for rank 1, which comes late."""

    def do(job: Job) -> None:
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # the harness ignores it
        subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -{number.value} {os.getpid()}"])

    return do


WAITING = "setup train batch let_wait forward backward step"

FAULTS = {
    "processes": [
        Fault(
            "forward in a forked child",
            "forks",
            "batch 2",
            in_child("forward"),
            rank=r"rank 1\b",
            unit="fork",
            by="victim",
        ),
        Fault(
            "a state dict in a forked child",
            "forks",
            "batch 2",
            in_child("state_dict"),
            rank=r"rank 1\b",
            unit="fork",
            by="victim",
        ),
        Fault(
            "a checkpoint in a forked child",
            "forks",
            "batch 2",
            in_child("save"),
            rank=r"rank 1\b",
            unit="fork",
            by="victim",
        ),
        Fault("a child that does nothing", "forks", "batch 2", in_child("batch"), quiet=True, after="trained"),
        Fault(
            "evaluation in a thread, in the middle of a forward",
            "threads",
            "forward 2",
            in_thread_meanwhile("evaluate"),
            rank=r"rank 1\b",
            unit="thread",
            by="victim",
        ),
        Fault(
            "the same in all ranks",
            "threads",
            "forward 2",
            in_thread_meanwhile("evaluate"),
            victim=None,
            rank="rank|thread",
            unit="thread",
        ),
        Fault(
            "a state dict in a thread, in the middle of a forward",
            "threads",
            "forward 2",
            in_thread_meanwhile("state_dict"),
            victim=None,
            rank="middle of a forward",
        ),
        Fault(
            "Ctrl-C while ranks wait",
            "interrupts",
            "let_wait",
            signalled_while_waiting(signal.SIGINT),
            program=WAITING,
            rank="rank 0 was ended by KeyboardInterrupt",
            unit="all-gather",
            victim=0,
            raises=False,
            by="others",
        ),
        Fault(
            "ended by the launcher while ranks wait",
            "SIGTERM",
            "let_wait",
            signalled_while_waiting(signal.SIGTERM),
            program=WAITING,
            rank="rank 0:? is gone",
            unit="all-gather",
            victim=0,
            ends="SIGTERM",
        ),
    ],
}
