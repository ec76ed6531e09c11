"""`Forwarding` connects a wrapper's dictionaries of parameters and buffers to those of the wrapped module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class Forwarding(dict[str, Any]):
    """The ``_parameters`` or ``_buffers`` of a wrapper, to which names of the wrapped module's own belong as well.

    An assignment to such a name changes that module. No entry is listed twice.
    """

    def __init__(self, entries: dict[str, Any], wrapped: Callable[[], nn.Module], kind: str) -> None:
        super().__init__(entries)
        self._wrapped, self._kind = wrapped, kind

    def forwards(self, name: str) -> bool:
        """Return whether a name is the wrapped module's."""
        return not super().__contains__(name) and name in self._wrapped().__dict__[self._kind]

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self._wrapped().__dict__[self._kind]

    def __missing__(self, name: str) -> Any:
        if self.forwards(name):
            return getattr(self._wrapped(), name)
        raise KeyError(name)

    def __setitem__(self, name: str, value: Any) -> None:
        if self.forwards(name):
            self._wrapped().__dict__[self._kind][name] = value
        else:
            super().__setitem__(name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self),)
