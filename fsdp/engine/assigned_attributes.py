"""`AssignedAttributes` updates modules whose classes override ``__setattr__`` when parameters are replaced."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fsdp.engine.placeholder import Placeholder


class AssignedAttributes:
    """The attributes of a module whose class overrides `__setattr__`, for example to update a cache.

    `nn.RNNBase` updates a list of its weights in this way. Each tensor that replaces a parameter is assigned to the
    attribute, so that the class can update its cache; the parameters that the module lists do not change.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def get(self, name: str) -> Any:
        return self._module.__dict__.get(name)

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        attributes = self._module.__dict__
        listed = attributes["_parameters"]
        attributes["_parameters"] = {other: param for other, param in listed.items() if other != name}
        try:
            setattr(self._module, name, tensor)
        except RuntimeError:
            if not isinstance(tensor, Placeholder):  # the class may compute with each assigned tensor
                raise
        finally:
            attributes["_parameters"] = listed
        attributes[name] = tensor


def attributes_seen_by(module: nn.Module) -> dict[str, Any] | AssignedAttributes:
    """Return the mapping of a module's attributes, which takes precedence over its listed parameters."""
    if type(module).__setattr__ is nn.Module.__setattr__:
        return module.__dict__
    if isinstance(module, nn.RNNBase):
        # This method would move weights to cuDNN's memory; the leaves are contiguous in the buffer already.
        module.__dict__["flatten_parameters"] = _leave_as_they_are
    return AssignedAttributes(module)


def _leave_as_they_are() -> None:
    pass
