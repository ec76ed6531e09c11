"""torch's extension of all-gathers: tensor subclasses that define the form in which they are sent.

A parameter of such a class has two methods. ``fsdp_pre_all_gather`` converts its shard to the plain tensors that are
sent (for example, 8-bit numbers and their scales). ``fsdp_post_all_gather`` creates the unsharded parameter from the
received tensors. The values are in a single plain tensor, an attribute of the parameter, which optimizers update.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fsdp.distributed.dtensor import local_part

_PLAIN = Tensor, nn.Parameter
_METHODS = "fsdp_pre_all_gather", "fsdp_post_all_gather"


def is_extended(tensor: Tensor) -> bool:
    """Return whether a tensor is of a class with either of the two methods."""
    kind = type(tensor)
    return kind not in _PLAIN and any(hasattr(kind, method) for method in _METHODS)


def holds_extended(param: Tensor) -> bool:
    """Return whether a parameter is of such a class, or a `DTensor` around a tensor of such a class."""
    return is_extended(local_part(param))


def values_of(tensor: Tensor) -> Tensor:
    """Return the plain tensor in which a tensor of such a class has its values; another tensor is its own."""
    if type(tensor) in _PLAIN or not is_extended(tensor):  # this is asked for every gradient
        return tensor
    found: Tensor = getattr(tensor, _attribute_of(tensor))
    return found


def around(like: Tensor, values: Tensor) -> Tensor:
    """Return a tensor with the class and settings of `like`, which shares the memory of these values."""
    made = like.new_zeros(values.shape, dtype=values.dtype, device=values.device)
    setattr(made, _attribute_of(made), values)
    return made


def check_extension(name: str, param: Tensor) -> None:
    """Raise TypeError for a parameter of such a class, or its local part, that cannot be sharded."""
    kind: Any = type(param)
    for method in _METHODS:
        if not hasattr(kind, method):
            raise TypeError(f"{name} is a {kind.__name__}, which has no {method}: define it beside its counterpart")
    found = [getattr(param, each) for each in kind.__tensor_flatten__(param)[0]] if _can_flatten(param) else []
    if [(type(each), each.shape, each.dtype) for each in found] != [(Tensor, param.shape, param.dtype)]:
        raise TypeError(
            f"{name} is a {kind.__name__}, whose values are not one plain tensor of its shape and dtype that its "
            "__tensor_flatten__ names: what is trained must be, and fsdp_pre_all_gather may quantise it. Or pass it in "
            "ignored_params."
        )


def _can_flatten(tensor: Tensor) -> bool:
    return hasattr(type(tensor), "__tensor_flatten__")


def _attribute_of(tensor: Any) -> str:
    (name,) = tensor.__tensor_flatten__()[0]
    return str(name)
