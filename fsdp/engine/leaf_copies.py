"""Copies of the leaves that modules show: whoever copies a model gets no second copy of the weights with them."""

from __future__ import annotations

import copy
import weakref
from functools import partial
from typing import Any

from torch import Tensor, nn

from fsdp.distributed.dtensor import local_part
from fsdp.engine.placeholder import Placeholder, is_model_under_way
from fsdp.engine.user_attributes import attributes_of, give_attributes


def copy_as(leaf: nn.Parameter, placeholder: Placeholder) -> None:
    """Have a leaf be copied and pickled with a model as its placeholder, since shards are; alone, with its values."""
    itself = weakref.ref(leaf)
    leaf.__dict__["__deepcopy__"] = partial(_copy_leaf, itself, placeholder)
    leaf.__dict__["__reduce_ex__"] = partial(_reduce_leaf, itself, placeholder)


def _copy_leaf(leaf: weakref.ref[nn.Parameter], placeholder: Placeholder, memo: dict[int, Any]) -> Tensor:
    return copy.deepcopy(placeholder, memo) if is_model_under_way() else _apart(leaf, placeholder)


def _reduce_leaf(leaf: weakref.ref[nn.Parameter], placeholder: Placeholder, protocol: Any) -> Any:
    return (placeholder if is_model_under_way() else _apart(leaf, placeholder)).__reduce_ex__(protocol)


def _apart(leaf: weakref.ref[nn.Parameter], placeholder: Placeholder) -> Tensor:
    """Return a copy of a leaf with its values, if it has any: a module may hold one that is not shown any more."""
    found = leaf()
    local = None if found is None else local_part(found)
    if found is None or local is None or type(local) not in (Tensor, nn.Parameter):
        return placeholder  # of another class there is no telling
    if local.numel() and not local.untyped_storage().nbytes():
        return placeholder
    apart = nn.Parameter(found.detach().clone(), found.requires_grad)
    give_attributes(apart, attributes_of(found))
    return apart
