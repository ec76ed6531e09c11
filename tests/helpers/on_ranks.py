"""`@on_ranks(2)`: a test whose body runs on ranks, and not in the process of the session."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import pytest

Test = Callable[..., None]


def on_ranks(
    *world_sizes: int | str | Callable[..., int], pool: str = "ranks", **options: Any
) -> Callable[[Test], Test]:
    """Run the decorated test on every rank of a world of this size at once, with the arguments that pytest gives it.

    - `on_ranks(2)`: two ranks.
    - `on_ranks(2, 3)`: a parameter `world_size` of the test, which the test may take as an argument as well.
    - `on_ranks("size")`: as many ranks as the parameter `size` says, which the test may take as an argument as well.
    - `on_ranks(lambda shape: prod(shape))`: the number that a function returns for arguments of the test.

    `pool` is the fixture that gives the ranks, and `options` are its options (`timeout`, `grace`, `backend`). The test
    is a function at the top of a module, since ranks find it by name. Fixtures and parameters travel by pickle.
    """
    if not world_sizes:
        raise ValueError("on_ranks needs a world size, several of them, or the name of a parameter: on_ranks(2)")

    def decorate(test: Test) -> Test:
        parameters = inspect.signature(test).parameters
        if pool in parameters:
            raise TypeError(f"{test.__qualname__} takes the fixture {pool!r}, which no rank has. Remove the argument.")
        first = world_sizes[0]
        name = first if isinstance(first, str) else "world_size" if len(world_sizes) > 1 else None

        @wraps(test)
        def launch(*args: Any, **arguments: Any) -> None:
            __tracebackhide__ = True
            start, world_size = arguments.pop(pool), first
            if name:
                world_size = arguments[name] if name in parameters else arguments.pop(name)
            elif callable(first):
                world_size = first(*(arguments[each] for each in inspect.signature(first).parameters))
            start(world_size, **options).run(test, *args, **arguments)

        more = [pool, *([name] if name and name not in parameters else [])]
        added = [inspect.Parameter(each, inspect.Parameter.KEYWORD_ONLY) for each in more]
        launch.__signature__ = inspect.Signature([*parameters.values(), *added])  # type: ignore[attr-defined]
        launch.body = test  # type: ignore[attr-defined]
        test.__qualname__ += ".body"  # where pickle finds it on ranks
        if len(world_sizes) > 1:
            return pytest.mark.parametrize("world_size", world_sizes)(launch)
        return launch

    return decorate


on_accelerators = partial(on_ranks, pool="accelerator_ranks")
on_lit_ranks = partial(on_ranks, pool="lit_ranks")
