"""The error that an invariant of the library is broken."""

from __future__ import annotations

import sys
import traceback


class InternalError(RuntimeError):
    """An invariant of the library is broken: a bug in the library, not in the code that uses it.

    The message and the stack are printed as well as raised, because autograd may swallow what a hook raises.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        print(f"fsdp internal error: {message}", file=sys.stderr)
        traceback.print_stack(file=sys.stderr)
