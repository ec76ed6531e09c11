"""Methods of the engine that are other ones for a while: for layers that look on, and that it does not know."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from fsdp.engine.runtime import Runtime


@contextmanager
def replaced(owner: Any, method: str, by: Callable[..., Any]) -> Iterator[None]:
    """Have a method be another function inside."""
    original = getattr(owner, method)
    setattr(owner, method, by)
    try:
        yield
    finally:
        setattr(owner, method, original)


def followed(
    undo: ExitStack,
    runtime: Runtime,
    owner: type[Any],
    method: str,
    before: Callable[..., None] = lambda *_: None,
    after: Callable[..., None] = lambda *_: None,
) -> None:
    """Have functions called with a method's arguments, before and after it, until `undo` is closed.

    Args:
        undo: what ends it.
        runtime: of the model whose objects are followed: itself, what has it as `runtime`, and its `steps`.
        owner, method: a class, and the name of its method.
        before, after: called with the arguments, without the object.
    """
    original = getattr(owner, method)

    def follow(this: Any, *args: Any, **kwargs: Any) -> Any:
        if runtime not in (this, getattr(this, "runtime", None)) and this is not runtime.steps:
            return original(this, *args, **kwargs)
        before(*args)
        result = original(this, *args, **kwargs)
        after(*args)
        return result

    undo.enter_context(replaced(owner, method, follow))
