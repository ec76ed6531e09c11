"""An error with a remedy for methods of a module under `fully_shard` that read weights while they are sharded.

These modules list `DTensor`s outside forward and backward. torch does not support computing with a `DTensor` and a
plain tensor, and its error names neither. With a wrapper, placeholders raise the error (`fsdp.engine.placeholder`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from types import FunctionType, TracebackType
from typing import Any

from torch import Tensor, nn

from fsdp.engine.phase import Phase
from fsdp.engine.unit import Unit, unit_of

_MIXED = "got mixed torch.Tensor and DTensor"


def explain_methods(kind: type[Any]) -> type[Any]:
    """Override public methods of a sharded module's class, so that they add a remedy to torch's error.

    Only ``generate`` and the methods of classes that define or inherit a forward are overridden. Other methods of a
    library's base class, such as ``transformers.PreTrainedModel``, do not compute, and may inspect their callers.
    """
    front, original = kind.__bases__
    without = nn.Module.forward
    computing = [base for base in original.__mro__ if getattr(base, "forward", without) is not without]
    for name in {"generate", *(name for base in computing for name in vars(base))}:
        found = next((vars(base)[name] for base in original.__mro__ if name in vars(base)), None)
        is_own = not name.startswith("_") and not hasattr(nn.Module, name) and not hasattr(front, name)
        if is_own and isinstance(found, FunctionType):
            setattr(kind, name, _explained(kind, name))
    return kind


def _explained(kind: type[Any], name: str) -> Callable[..., Any]:
    @wraps(getattr(kind, name))
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return getattr(super(kind, self), name)(*args, **kwargs)
        except RuntimeError as error:
            unit = unit_of(self)
            if unit is None or _MIXED not in str(error) or not (weights := _sharded_weights(unit)):
                raise
            fqn = _used(weights, error.__traceback__) or " or ".join(weights.values())
            raise RuntimeError(
                f"{fqn} is sharded: {name}() of {unit.name} reads it outside of the module's forward and backward. "
                f"Register the method once, on every rank: fsdp.register_fsdp_forward_method(module, {name!r}). Then "
                "it gathers the weights as forward does."
            ) from error

    return method


def _sharded_weights(unit: Unit) -> dict[int, str]:
    """Return the names of a unit's parameters that modules list as `DTensor`s, by the parameters' ids."""
    sharded = (handle for handle in unit.visible_handles if handle.phase is not Phase.UNSHARDED)
    return {
        id(param): info.fqn
        for handle in sharded
        if handle.orig_params is not None
        for param, info in zip(handle.orig_params.params, handle.param_infos, strict=True)
    }


def _used(weights: dict[int, str], traceback: TracebackType | None) -> str | None:
    """Return the name of the weight used by the innermost function of a traceback, if any."""
    found = None
    while traceback is not None:
        at_hand = [weights[id(param)] for param in _params(traceback.tb_frame.f_locals) if id(param) in weights]
        found, traceback = at_hand[0] if at_hand else found, traceback.tb_next
    return found


def _params(values: dict[str, Any]) -> Iterator[Tensor]:
    for value in values.values():
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, nn.Module):
            yield from (param for param in value._parameters.values() if param is not None)
