"""The end of a rank's process as that of a program, which the processes of the pool do not come to by themselves."""

from __future__ import annotations

import ctypes
import sys
import traceback
from typing import NoReturn


def end_process(error: BaseException | None = None) -> NoReturn:
    """Run exit handlers, and end the interpreter; with an error, as if it was not caught.

    A program that is started takes seconds to import torch. The pool reports the exit status, 1 for an error.
    """
    if error is not None:
        traceback.print_exception(error)
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    sys.stderr.flush()
    ctypes.pythonapi.Py_Exit(int(error is not None))
    raise AssertionError("the process has ended")
