"""Methods besides `forward` that compute with a unit's parameters: `register_fsdp_forward_method`."""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import nn

from fsdp.engine.unit import TrainingState, Unit, unit_of, unit_of_wrapper


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let another method of a wrapped module do what calling the module does: gather, compute, free, and train.

    For ``model.encode(x)`` or ``model.decode(z)`` of modules that compute outside of `forward`. A ``generate()`` that
    only calls the module needs nothing. Called from the module's own forward it is an ordinary method. The name and the
    idea are those of torch's function for `fully_shard`. Not collective, but call it on every rank; the method itself
    is collective, as forward is.

    Args:
        module: a `FullyShardedDataParallel`, or the module that it wraps.
        method_name: of one of the wrapped module's methods.

    Raises:
        ValueError: if `module` is not wrapped, or has no such method.
    """
    unit = unit_of(module) or unit_of_wrapper(module)
    if unit is None:
        raise ValueError(
            f"register_fsdp_forward_method: this {type(module).__name__} is not wrapped. Give it a "
            "FullyShardedDataParallel, or the module that one wraps."
        )
    if not callable(getattr(type(unit.module), method_name, None)):
        raise ValueError(f"{type(unit.module).__name__} has no method {method_name!r} to register")
    unit.module.__dict__[method_name] = ForwardMethod(unit, method_name)


class ForwardMethod:
    """What a unit's module has in the place of a method."""

    def __init__(self, unit: Unit, name: str) -> None:
        self._unit, self._name = unit, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        unit = self._unit
        method = MethodType(getattr(type(unit.module), self._name), unit.module)
        if unit.state is TrainingState.FORWARD:
            return method(*args, **kwargs)
        return unit.forward.around(method, args, kwargs)
