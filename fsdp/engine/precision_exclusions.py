"""Modules that compute in full precision inside of a unit that does not (`MixedPrecision.full_precision_modules`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fsdp.engine.precision import Precision, cast_floats
from fsdp.engine.trees import map_tensors


def kept_modules(modules: Iterable[nn.Module], precision: Precision) -> dict[nn.Module, list[nn.Module]]:
    """Of a unit's modules, outer before inner, those that it keeps, each with all that is inside of it.

    Modules of which nothing would be cast are not kept: a unit that computes in float32 leaves it to autocast what
    their inputs are.
    """
    kept: dict[nn.Module, list[nn.Module]] = {}
    seen: set[nn.Module] = set()
    for module in modules:
        if isinstance(module, precision.kept) and module not in seen and _would_be_cast(module, precision):
            kept[module] = list(module.modules())
            seen.update(kept[module])
    return kept


def _would_be_cast(module: nn.Module, precision: Precision) -> bool:
    params = [param.dtype for param in module.parameters() if param.is_floating_point()]
    buffers = [buffer.dtype for buffer in module.buffers() if buffer.is_floating_point()]
    return (
        not (params or buffers)
        or any({precision.compute_dtype(own), precision.reduce_dtype(own)} != {own} for own in params)
        or any(precision.buffers not in (None, own) for own in buffers)
    )


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
