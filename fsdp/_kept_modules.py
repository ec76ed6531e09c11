"""Modules that compute in full precision inside of a unit that does not (`MixedPrecision.full_precision_modules`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fsdp._precision import cast_floats
from fsdp._trees import map_tensors


def kept_modules(modules: Iterable[nn.Module], kinds: tuple[type[nn.Module], ...]) -> dict[nn.Module, list[nn.Module]]:
    """Of `modules`, outer before inner, those that are of the classes `kinds`, each with all that is inside of it."""
    kept: dict[nn.Module, list[nn.Module]] = {}
    seen: set[nn.Module] = set()
    for module in modules:
        if isinstance(module, kinds) and module not in seen:
            kept[module] = list(module.modules())
            seen.update(kept[module])
    return kept


def compute_in_own_dtype(module: nn.Module) -> list[RemovableHandle]:
    """Have a module compute in its own dtype whatever comes in, and return what it does in the dtype that came in.

    Returns:
        What undoes this.
    """
    casts = _Casts(module)
    return [
        module.register_forward_pre_hook(casts.widen, with_kwargs=True),
        module.register_forward_hook(casts.narrow),
    ]


class _Casts:
    def __init__(self, module: nn.Module) -> None:
        tensors = (
            (inner, name)
            for inner in module.modules()
            for name, tensor in (*inner._parameters.items(), *inner._buffers.items())
            if tensor is not None and tensor.is_floating_point()
        )
        self._first = next(tensors, None)
        self._came_in: list[torch.dtype | None] = []  # of the calls that are running; a module may call itself

    def widen(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        dtypes: set[torch.dtype] = set()
        map_tensors(lambda tensor: dtypes.add(tensor.dtype) or tensor, (args, kwargs))  # type: ignore[func-returns-value]
        floating = [dtype for dtype in dtypes if dtype.is_floating_point]
        self._came_in.append(floating[0] if len(floating) == 1 else None)
        return cast_floats((args, kwargs), getattr(*self._first).dtype if self._first else torch.float32)

    def narrow(self, module: nn.Module, args: Any, output: Any) -> Any:
        dtype = self._came_in.pop()
        return output if dtype is None else cast_floats(output, dtype)
