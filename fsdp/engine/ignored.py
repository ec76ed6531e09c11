"""`Ignored`: the modules and parameters that a unit does not shard."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fsdp.engine.flat_param import ParamInfo
from fsdp.engine.originals import taken_by


@dataclass(frozen=True)
class Ignored:
    """`ignored_modules`, including all modules inside them, and `ignored_parameters`, which are not sharded.

    A parameter that an ignored module uses is also ignored in all other places, so ties are preserved.
    """

    modules: frozenset[nn.Module] = frozenset()
    parameters: frozenset[Tensor] = frozenset()

    @classmethod
    def of(
        cls,
        modules: Iterable[nn.Module] | None,
        parameters: Iterable[nn.Parameter] | None,
        argument: str = "ignored_parameters",
    ) -> Ignored:
        """Return the ignored modules and parameters from the arguments of an interface, after checking their types.

        Errors name `argument` for the parameters.
        """
        roots = _checked("ignored_modules", modules, nn.Module)
        inside = frozenset(inner for root in roots for inner in root.modules())
        named = _checked(argument, parameters, nn.Parameter)
        if not (roots or named):
            return _NOTHING
        used = (param for module in inside for param in module._parameters.values() if param is not None)
        return cls(inside, frozenset(named).union(used))

    def __or__(self, other: Ignored) -> Ignored:
        """Return the union of both."""
        return Ignored(self.modules | other.modules, self.parameters | other.parameters)

    def check(self, sharded: Iterable[ParamInfo]) -> None:
        """Raise ValueError if an inner unit, used at `sharded`, contains parameters to ignore."""
        names = [name for name in map(taken_by, self.parameters) if name is not None]
        names += [
            f"{place.fqn} of a {type(place.module).__name__}" for place in sharded if place.module in self.modules
        ]
        if names:
            raise ValueError(
                f"{names[0]} is ignored, but an inner unit has sharded it already: ignore it in the inner unit as "
                "well, or in neither"
            )

    def has(self, module: nn.Module, param: Tensor) -> bool:
        """Return whether a parameter of a module is ignored."""
        return module in self.modules or param in self.parameters


_NOTHING = Ignored()  # shared by all units without ignored modules or parameters


def _checked(argument: str, given: Any, kind: type[Any]) -> list[Any]:
    if isinstance(given, Iterator):
        raise TypeError(f"{argument} is an iterator, which the first wrapper would exhaust: pass a list, list(...)")
    is_one = isinstance(given, kind) or not isinstance(given, Iterable)
    found = [] if given is None else [given] if is_one else list(given)
    for item in found:
        if not isinstance(item, kind):
            raise TypeError(f"{argument} must be an iterable of {kind.__name__}s, found a {type(item).__name__} in it")
    return found
