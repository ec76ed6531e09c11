"""Functions to find running calls on Python's stack."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import CodeType, FrameType

from torch import nn

MODULE_CALL = nn.Module._call_impl.__code__  # runs around the forward of each module


def frames_from(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and its callers, without the line numbers of `traceback.walk_stack`."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def calls_on(stack: FrameType | None, methods: Mapping[CodeType, object]) -> Iterator[FrameType]:
    """Yield the frames, the last call first, that run one of `methods` on the corresponding object."""
    for frame in frames_from(stack):
        if frame.f_code in methods and frame.f_locals.get("self") is methods[frame.f_code]:
            yield frame


def is_called_from(module: str) -> bool:
    """Return whether a function of a module is running on this thread."""
    return any(frame.f_globals.get("__name__") == module for frame in frames_from(sys._getframe(1)))
