"""`Wrapper`: a module that forwards assignments and registrations to the wrapped module."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class Wrapper(nn.Module):
    """A module that assigns, deletes and registers names in the wrapped module, except for names of the wrapper.

    The wrapped module's forward can thus read them, and its state dict contains them. A private name (`_name`) is only
    assigned in the wrapped module if registered there.
    """

    def _wrapped(self) -> nn.Module | None:
        """Return the wrapped module; None before the wrapper is complete."""
        raise NotImplementedError

    def _module_of(self, name: str, value: Any = None) -> nn.Module | None:
        """Return the wrapped module if a name must be assigned or deleted there, else None."""
        inside = self._wrapped()
        if inside is None or name in self.__dict__ or hasattr(type(self), name) or _has(self, name):
            return None
        return inside if isinstance(value, (nn.Module, nn.Parameter)) or _knows(inside, name) else None

    def _registers(self, name: str) -> nn.Module | None:
        """Return the wrapped module if a name must be registered there; None for the wrapper's own children.

        For example, `nn.SyncBatchNorm.convert_sync_batchnorm` registers each child of a module again.
        """
        return None if _has(self, name) else self._wrapped()

    def __setattr__(self, name: str, value: Any) -> None:
        inside = self._module_of(name, value)
        if inside is None:
            super().__setattr__(name, value)
        else:
            setattr(inside, name, value)

    def __delattr__(self, name: str) -> None:
        inside = self._module_of(name)
        if inside is None:
            super().__delattr__(name)
        else:
            delattr(inside, name)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Register a buffer of the wrapped module."""
        inside = self._registers(name)
        register = super().register_buffer if inside is None else inside.register_buffer
        register(name, tensor, persistent)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter of the wrapped module."""
        inside = self._registers(name)
        register = super().register_parameter if inside is None else inside.register_parameter
        register(name, param)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Register a child of the wrapped module."""
        inside = self._registers(name)
        register = super().add_module if inside is None else inside.add_module
        register(name, module)


def _has(module: nn.Module, name: str) -> bool:
    """Return whether a name is registered in this module."""
    kinds = ("_modules", "_parameters", "_buffers")
    return any(dict.__contains__(module.__dict__.get(kind, {}), name) for kind in kinds)


def _knows(module: nn.Module | None, name: str) -> bool:
    """Return whether a module, or a module that it wraps, defines a name."""
    while isinstance(module, Wrapper):
        if _has(module, name) or (name in module.__dict__ and not name.startswith("_")):
            return True
        module = module._wrapped()
    if module is None or name.startswith("_"):
        return module is not None and _has(module, name)
    return hasattr(type(module), name) or name in module.__dict__ or _has(module, name)
