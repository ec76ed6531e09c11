"""Trained parameters of tensor subclasses, and torch's extension of all-gathers.

The values of such a parameter are plain tensors of its shape and dtype, listed by ``__tensor_flatten__``. The class
may define two methods: ``fsdp_pre_all_gather`` converts a rank's rows to the tensors that are sent (for example, 8-bit
numbers and their scales), and ``fsdp_post_all_gather`` creates the unsharded parameter from the received tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.distributed.dtensor import arrived, is_dtensor, local_part

PLAIN = Tensor, nn.Parameter
BEFORE, AFTER = _METHODS = "fsdp_pre_all_gather", "fsdp_post_all_gather"


def inner_of(tensor: Any) -> list[Tensor]:
    """Return the inner tensors of a subclass if all are plain and have its shape and dtype; otherwise an empty list.

    An additional tensor without dimensions is not a value: torchao uses one for the scale of the next all-gather.
    """
    if type(tensor) in PLAIN or is_dtensor(tensor) or not hasattr(type(tensor), "__tensor_flatten__"):
        return []
    found = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    # torchao's float8 weights contain the parameter from which they were created.
    found = [each.detach() if type(each) is nn.Parameter else each for each in found if each.dim() or not tensor.dim()]
    are_alike = all((type(each), each.shape, each.dtype) == (Tensor, tensor.shape, tensor.dtype) for each in found)
    return found if are_alike else []


def is_of_values(tensor: Any) -> bool:
    """Return whether `inner_of` returns all tensors of a subclass, so that `around` them recreates the tensor."""
    inner = inner_of(tensor)
    return bool(inner) and len(inner) == len(tensor.__tensor_flatten__()[0])


def holds_extended(param: Tensor, *, if_trained: bool = True) -> bool:
    """Return whether the class of a parameter, or of a `DTensor`'s local tensor, defines either of the two methods.

    Args:
        param: a parameter.
        if_trained: if True, include trained parameters of other classes with plain inner tensors.
    """
    local = local_part(param)
    if type(local) in PLAIN:
        return False
    has_method = any(hasattr(type(local), method) for method in _METHODS)
    return has_method or (if_trained and param.requires_grad and bool(inner_of(local)))


def values_of(tensor: Tensor) -> Tensor:
    """Return the values of a subclass as a plain tensor, and any other tensor unchanged.

    Multiple inner tensors are returned as ``[inner, *shape]``, without a copy if they are consecutive in memory.
    """
    if type(tensor) in PLAIN or not (inner := inner_of(arrived(tensor))):  # runs for every gradient
        return tensor
    first, numel = inner[0], inner[0].numel()
    if len(inner) == 1:
        return first
    begins = [first.data_ptr() + number * first.nbytes for number in range(len(inner))]
    if begins == [one.data_ptr() for one in inner] and all(one.is_contiguous() for one in inner):
        return first.as_strided((len(inner), *first.shape), (numel, *first.stride()))
    return torch.stack(inner)


def gradient_values(name: str, gradient: Tensor, shape: torch.Size) -> Tensor:
    """Return a gradient as `values_of` does, of `shape`; a plain gradient is repeated for multiple inner tensors.

    Raises:
        RuntimeError: if the gradient contains more inner tensors than the parameter.
    """
    values = values_of(gradient)
    if values.dim() > len(shape):
        raise RuntimeError(
            f"{name} has a gradient of class {type(gradient).__name__}, whose {values.shape[0]} inner tensors do not "
            "fit into the parameter's gradient: use this class for the parameter as well, or return plain tensors from "
            "its module"
        )
    return values.expand(shape)


def around(like: Tensor, inner: Sequence[Tensor]) -> Tensor:
    """Return a tensor with the class and settings of `like`, using the memory of the tensors in `inner`."""
    made: Any = like.new_zeros(inner[0].shape, dtype=inner[0].dtype, device=inner[0].device)
    for name, each in zip(made.__tensor_flatten__()[0], inner, strict=True):
        setattr(made, name, each)
    return made


def check_extension(name: str, param: Tensor) -> None:
    """Raise TypeError for a parameter whose class, or the class of its local part, cannot be sharded."""
    local: Any = local_part(param)
    kind = type(local).__name__
    found = [method for method in _METHODS if hasattr(type(local), method)]
    if len(found) == 1:
        (other,) = set(_METHODS) - set(found)
        raise TypeError(f"{name} is a {kind}, which has no {other}: define both methods")
    inner = inner_of(local)
    if not is_of_values(local):
        raise TypeError(
            f"{name} is a {kind}: the __tensor_flatten__ of a trained parameter must name plain tensors of its shape "
            "and dtype (fsdp_pre_all_gather may quantise them). Or freeze it before sharding, so that it is sharded as "
            "bytes; or pass it in ignored_params."
        )
    if len(inner) > 1 and local is not param:
        raise TypeError(
            f"{name} is a DTensor around a {kind} of {len(inner)} tensors: the class of local parts for tensor "
            "parallelism must have a single inner tensor. Use such a class, or pass it in ignored_params."
        )
    if len(inner) > 1:
        _check_places(name, local, inner)


def _check_places(name: str, local: Tensor, inner: Sequence[Tensor]) -> None:
    """Raise TypeError if the class rejects inner tensors with different storage offsets, which shards contain."""
    places = inner[0].new_zeros([len(inner), *[1] * local.dim()]).unbind()
    try:
        around(local.detach(), places).detach()
    except Exception as error:
        kind = type(local).__name__
        raise TypeError(
            f"{name} is a {kind}, which cannot be created around parts of one storage: {error!r}. A shard contains its "
            f"{len(inner)} tensors one after another: let the class accept different storage offsets, or pass the "
            "parameter in ignored_params."
        ) from error
