"""Faults of processes: threads, forks, and signals that come while a rank waits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from functools import partial

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

processes = partial(Fault, at="batch 2")

# fmt: off
FAULTS = {
    "processes": [
        processes("forward in a forked child", "forks", in_child("forward"), unit="fork", by="victim"),
        processes("a state dict in a forked child", "forks", in_child("state_dict"), unit="fork", by="victim"),
        processes("a checkpoint in a forked child", "forks", in_child("save"), unit="fork", by="victim"),
        processes("a child that does nothing", "forks", in_child("batch"), quiet=True, after="trained"),
        processes("evaluation in a thread, in the middle of a forward", "threads", in_thread_meanwhile("evaluate"),
            at="forward 2", unit="thread", by="victim"),
        processes("the same in all ranks", "threads", in_thread_meanwhile("evaluate"), at="forward 2", victim=None,
            rank="rank|thread", unit="thread"),
        processes("a state dict in a thread, in the middle of a forward", "threads", in_thread_meanwhile("state_dict"),
            at="forward 2", victim=None, rank="middle of a forward"),
        processes("Ctrl-C while ranks wait", "interrupts", signalled_while_waiting(signal.SIGINT), at="let_wait",
            program=WAITING, victim=0, rank="rank 0 was ended by KeyboardInterrupt", unit="all-gather|exchange",
            by="others", raises=False),
        processes("ended by the launcher while ranks wait", "SIGTERM", signalled_while_waiting(signal.SIGTERM),
            at="let_wait", program=WAITING, victim=0, rank="rank 0:? is gone", unit="all-gather", ends="SIGTERM"),
    ],
}
# fmt: on
