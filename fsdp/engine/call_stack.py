"""The calls that are running are found on Python's stack, and our own are kept from compilers."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FrameType
from typing import Any, TypeVar

from torch import nn
from torch._C._dynamo import eval_frame

Function = TypeVar("Function", bound=Callable[..., Any])

MODULE_CALL = nn.Module._call_impl.__code__  # runs around the forward of each module


def calls_on(stack: FrameType | None, methods: Mapping[CodeType, object]) -> Iterator[FrameType]:
    """Yield the frames of a stack, the last call first, in which a method runs of the object that is given for it."""
    while stack is not None:
        if stack.f_code in methods and stack.f_locals.get("self") is methods[stack.f_code]:
            yield stack
        stack = stack.f_back


def runs_on_another_thread(module: nn.Module) -> bool:
    """Return whether another thread of this process is in a call of the module."""
    frames = (frame for thread, frame in sys._current_frames().items() if thread != threading.get_ident())
    return any(any(calls_on(frame, {MODULE_CALL: module})) for frame in frames)


def is_called_from(module: str) -> bool:
    """Return whether the public method that calls this helper was called by the code of a module."""
    return sys._getframe(3).f_globals.get("__name__") == module  # asked by a helper, which the method calls


def uncompiled(function: Function) -> Function:
    """Exclude a function, and all functions that it calls, from compilation: it moves data, or examines all models.

    The effect is the same as `torch.compiler.disable`, which takes seconds to import and has a slower wrapper.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # a traced caller has a graph break instead
    skip = eval_frame._FrameAction.SKIP  # private, what that way comes to as well (torch 2.11 and 2.13)
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return function
