"""Attributes that users set on parameters are copied to all tensors that replace these parameters."""

from __future__ import annotations

from typing import Any

from torch import Tensor

Attributes = dict[str, Any]


def attributes_of(param: Tensor) -> Attributes:
    """Return the attributes set by users on a parameter, without attributes of its class."""
    found = vars(param)
    if not found:
        return {}
    own = {name for kind in type(param).__mro__ for name in vars(kind).get("__annotations__", ())}
    return {name: value for name, value in found.items() if name not in own and not name.startswith(_NOT_SET)}


_NOT_SET = "__", "_dynamo"  # by users


def give_attributes(param: Tensor, attributes: Attributes) -> None:
    """Set the attributes of the original parameter that users had set, unless this parameter has them already."""
    for name, value in attributes.items():
        if not hasattr(param, name):
            param.__dict__[name] = value


def give_grad_dtype(param: Tensor, source: Tensor) -> None:
    """Set the dtype of gradients that a user has set for those of `source`."""
    if source.grad_dtype != source.dtype:  # otherwise the setting would outlast a cast of the parameter
        param.grad_dtype = source.grad_dtype
