"""`LocalShard`: what optimizers see of one original parameter with ``use_orig_params=True``."""

from __future__ import annotations

import copy
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from fsdp.engine.flat_param import Attributes, CountedParameter, FlatParameter, attributes_of, give_attributes


class LocalShard(CountedParameter):
    """This rank's local shard of an original parameter: elements ``offset:offset + numel()`` of it in row-major order.

    1-D, and empty on ranks that have nothing of it. Of a `DTensor` it is a shard of the local part.
    """

    fqn: str  # from the wrapped module
    unsharded_shape: torch.Size  # of the parameter, or of a DTensor's local part
    offset: int
    owner: FlatParameter  # of whose shard it is a view

    @property
    def group(self) -> Hashable:
        """The key that `group_by` gave it."""
        return self.owner.group

    @property
    def _is_sharded(self) -> bool:
        return self.owner._is_sharded

    @property
    def has_unreduced(self) -> bool:
        """True if gradients wait for their reduction, and this one was not zeroed."""
        return self.owner._has_unreduced and self.grad is not None

    @property
    def shard_storage(self) -> Any:
        return self.owner.shard_storage

    @classmethod
    def of(
        cls, owner: FlatParameter, start: int, numel: int, requires_grad: bool, fqn: str, shape: torch.Size, offset: int
    ) -> LocalShard:
        """Elements ``start:start + numel`` of the shard `owner`, whose version counter it shares."""
        local = Tensor._make_subclass(cls, owner.detach()[start : start + numel], requires_grad)
        local.fqn, local.unsharded_shape, local.offset, local.owner = fqn, shape, offset, owner
        return local

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalShard:
        build, (owner, *others), *_ = self.__reduce_ex__(2)
        copied = memo[id(self)] = build(copy.deepcopy(owner, memo), *others)
        give_attributes(copied, attributes_of(self))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        start = int(self.storage_offset() - self.owner.storage_offset())
        args = (start, self.numel(), self.requires_grad, self.fqn, self.unsharded_shape, self.offset)
        return type(self).of, (self.owner, *args), attributes_of(self) or None

    def __setstate__(self, state: Attributes) -> None:
        give_attributes(self, state)
