"""`Forwarding` connects a wrapper's parameters and buffers to the dictionaries of the wrapped module."""

from __future__ import annotations

from typing import Any

from torch import nn

from fsdp.engine.unit import Unit


class Forwarding(dict[str, Any]):
    """The ``_parameters`` or ``_buffers`` of a wrapper: an empty dict that reads and sets the wrapped module's entries.

    For example, `torch.func.functional_call` can thus replace tensors through the wrapper.
    """

    __slots__ = ("_kind", "_unit")  # an instance dictionary would be larger than the entries

    def __init__(self, unit: Unit, kind: str) -> None:
        super().__init__()
        self._unit, self._kind = unit, kind

    @property
    def _wrapped(self) -> dict[str, Any]:
        entries: dict[str, Any] = self._unit.module.__dict__[self._kind]
        return entries

    def __contains__(self, name: object) -> bool:
        return name in self._wrapped

    def __missing__(self, name: str) -> Any:
        if name in self._wrapped:
            return getattr(self._unit.module, name)
        raise KeyError(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self._wrapped[name] = value

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, ()


def forward_entries(wrapper: nn.Module, unit: Unit) -> None:
    """Replace a wrapper's dictionaries, to read and set the parameters and buffers of the unit's module."""
    for kind in ("_parameters", "_buffers"):
        wrapper.__dict__[kind] = Forwarding(unit, kind)
