"""A process that is forked from a rank, for tests of processes beside the ranks."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any


class Forked:
    """A fork of this process that calls a function, with the methods of `subprocess.Popen` that tests use.

    The fork has imported all modules of this process, which takes a new interpreter seconds. It has no other threads
    and must not use process groups. `stdin` and `stdout` are text files at the other ends of its pipes.

    Args:
        body: the function; the exit status is 1 if it raises an exception.
    """

    def __init__(self, body: Callable[..., Any], *args: Any) -> None:
        (requests, stdin), (stdout, answers) = os.pipe(), os.pipe()
        self.returncode: int | None = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of other threads
            self.pid = os.fork()
        if self.pid == 0:
            os.close(stdin)
            os.close(stdout)
            _call(requests, answers, body, *args)
        os.close(requests)
        os.close(answers)
        self.stdin, self.stdout = os.fdopen(stdin, "w"), os.fdopen(stdout)

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float = 60.0) -> int:
        """Return the exit status, or the negative number of the signal that has ended the process."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} has not ended in {timeout} s")
            time.sleep(0.01)
        return code

    def poll(self) -> int | None:
        """Return the exit status as `wait` does, or None while the process runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def communicate(self) -> None:
        """Close the pipes and wait for the end."""
        self.stdin.close()
        self.stdout.close()
        self.wait()

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *error: object) -> None:
        self.communicate()


def _call(requests: int, answers: int, body: Callable[..., Any], *args: Any) -> None:
    """Call the function in the fork, which ends without the exit handlers of the rank."""
    status = 1
    try:
        sys.stdin, sys.stdout = os.fdopen(requests), os.fdopen(answers, "w")
        body(*args)
        sys.stdout.flush()
        status = 0
    except BaseException:  # noqa: BLE001 - the rank reads the exit status
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)
