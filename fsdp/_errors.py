"""The library's own exceptions; everything a user can cause is a `ValueError`, `TypeError` or `RuntimeError`."""

from __future__ import annotations

import sys
import traceback
from typing import Any


class InternalError(RuntimeError):
    """An invariant of the library is broken: a bug in the library, not in the code that uses it.

    The message and the stack are printed as well as raised, because autograd may swallow what a hook raises.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        print(f"fsdp internal error: {message}", file=sys.stderr)
        traceback.print_stack(file=sys.stderr)


class NotCopied:
    """Part of a wrapped module: copying or pickling it says what to do instead, whichever part is met first."""

    _message = ""

    def __deepcopy__(self, memo: Any) -> Any:
        raise NotImplementedError(
            f"{self._message} A module wrapped by FullyShardedDataParallel cannot be deep-copied yet: build a second "
            "one and copy the weights with load_state_dict(model.state_dict()).".lstrip()
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotImplementedError(
            f"{self._message} A module wrapped by FullyShardedDataParallel cannot be pickled yet: save its "
            "state_dict().".lstrip()
        )
