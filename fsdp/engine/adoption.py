"""Whose units and parameters are whose, when it is known which unit is the outermost."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from fsdp.engine.managed_params import is_ours
from fsdp.engine.names import clean_name, join
from fsdp.engine.unit import Unit, own_modules, units_in

if TYPE_CHECKING:
    from fsdp.engine.runtime import Runtime


class Contents:
    """Which modules and parameters a unit's own modules hold.

    Every forward in training asks whether these are others now, so the loops run in C. Modules may get other
    dictionaries (`nn.Sequential` does when a part of it is deleted): they are looked up each time.
    """

    def __init__(self, unit: Unit) -> None:
        self._modules = [module.__dict__ for module in own_modules(unit.module)]
        self._held = self._look()

    def _look(self) -> tuple[list[Any], list[str]]:
        children = map(dict.values, filter(None, map(itemgetter("_modules"), self._modules)))
        params = filter(None, map(itemgetter("_parameters"), self._modules))
        return list(chain.from_iterable(children)), list(chain.from_iterable(params))

    def have_changed(self) -> bool:
        """Whether a module or a parameter was put into one of the modules since, or taken out."""
        return self._look() != self._held


def refuse_strangers(root: Unit) -> None:
    """Raise RuntimeError if a parameter was added after wrapping."""
    units = [unit for _, unit in units_in(root)]
    ours = {(place.module, place.name) for unit in units for place in unit.places()}
    # What was put into ignored modules since, is theirs too.
    ignored = {inner for unit in units for module in unit.ignored.modules for inner in module.modules()}
    for path, module in root.module.named_modules():
        for attribute, param in module._parameters.items():
            if param is None or is_ours(param) or module in ignored or (module, attribute) in ours:
                continue
            if any(param in unit.ignored.parameters for unit in units):
                continue
            raise RuntimeError(
                f"{clean_name(join(path, attribute))} became a parameter after wrapping: it is not sharded, and ranks "
                "would train it each for itself. Complete the module before wrapping, wrap what is put into it by "
                "itself, or leave it out of sharding with ignored_parameters or ignored_modules."
            )


def adopt(runtime: Runtime, named_units: Sequence[tuple[str, Unit]]) -> None:
    """Have a root's runtime run all units inside.

    Raises:
        RuntimeError: if one has become a root itself.
    """
    root = runtime.root
    for name, unit in named_units:
        if unit is not root and unit.runtime is not None and unit.runtime.root is unit and unit.runtime.has_run:
            raise RuntimeError(
                f"a second root: unit '{name}' was called on its own before the {type(root.module).__name__} around "
                "it, and became a root itself. Call the outermost unit first, or `_reset_lazy_init()` on the inner one "
                "before the outer one is used."
            )
    for name, unit in named_units:
        if unit.runtime is not None:
            unit.runtime.ensure_idle(f"become part of another {type(root.module).__name__}")
            unit.wishes.keeps_as_root = False  # it may have been the outermost one
        unit.runtime = runtime
        unit.rename(name)
        unit.is_inside_mixed = False
    for _, unit in named_units:
        for _, inner in units_in(unit) if unit.precision.is_mixed else ():
            inner.is_inside_mixed |= inner is not unit
