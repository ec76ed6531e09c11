"""`Forwarding` connects a wrapper's dictionaries of parameters and buffers to those of the wrapped module."""

from __future__ import annotations

from typing import Any

from torch import nn

from fsdp.engine.unit import Unit

_KINDS = ("_parameters", "_buffers")


class Forwarding(dict[str, Any]):
    """The ``_parameters`` or ``_buffers`` of a wrapper, to which names of the wrapped module's own belong as well.

    An assignment to such a name changes that module. No entry is listed twice.
    """

    __slots__ = ("_kind", "_unit")  # an instance dictionary for each would be larger than the entries

    def __init__(self, entries: dict[str, Any], unit: Unit, kind: str) -> None:
        super().__init__(entries)
        self._unit, self._kind = unit, kind

    @property
    def _wrapped(self) -> dict[str, Any]:
        entries: dict[str, Any] = self._unit.module.__dict__[self._kind]
        return entries

    def forwards(self, name: str) -> bool:
        """Return whether a name is the wrapped module's."""
        return not super().__contains__(name) and name in self._wrapped

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self._wrapped

    def __missing__(self, name: str) -> Any:
        if self.forwards(name):
            return getattr(self._unit.module, name)
        raise KeyError(name)

    def __setitem__(self, name: str, value: Any) -> None:
        if self.forwards(name):
            self._wrapped[name] = value
        else:
            super().__setitem__(name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self),)


def forward_entries(wrapper: nn.Module, unit: Unit) -> None:
    """Make assignments to parameters and buffers through a wrapper change the module of its unit."""
    for kind in _KINDS:
        wrapper.__dict__[kind] = Forwarding(wrapper.__dict__[kind], unit, kind)


def is_forwarded(wrapper: nn.Module, name: str) -> bool:
    """Return whether a wrapper forwards assignments to this name."""
    for entries in map(wrapper.__dict__.get, _KINDS):
        if isinstance(entries, Forwarding) and entries.forwards(name):
            return True
    return False
