"""Hooks on methods of the engine, for a while: traces and recordings look on by them, and the engine knows neither."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

from fsdp.engine.runtime import Runtime


def hook_method(
    undo: ExitStack,
    runtime: Runtime,
    owner: type[Any],
    method: str,
    before: Callable[..., None] = lambda *_: None,
    after: Callable[..., None] = lambda *_: None,
) -> None:
    """Call functions with a method's arguments, before and after it, until `undo` is closed.

    Args:
        undo: what ends it.
        runtime: of the model whose objects are meant: itself, its units, and its `steps`.
        owner, method: a class, and the name of its method.
        before, after: called with the arguments, without the object.
    """
    original = getattr(owner, method)

    def hooked(this: Any, *args: Any, **kwargs: Any) -> Any:
        if runtime not in (this, getattr(this, "runtime", None)) and this is not runtime.steps:
            return original(this, *args, **kwargs)
        before(*args)
        result = original(this, *args, **kwargs)
        after(*args)
        return result

    undo.enter_context(mock.patch.object(owner, method, hooked))
