"""`PackedParameters`: the unsharded form of frozen parameters that are sharded as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from fsdp.distributed.dtensor import MeshPart
from fsdp.engine.autograd import FreedLeaves
from fsdp.engine.counted_data import counted
from fsdp.engine.layout import Layout
from fsdp.engine.placeholder import copy_as, sharded_weight
from fsdp.engine.shard import Shard
from fsdp.engine.unsharded_params import UnshardedParameters
from fsdp.engine.user_attributes import give_attributes
from fsdp.layers.packing import Packing


class PackedParameters(UnshardedParameters):
    """Frozen parameters whose inner tensors are views of one buffer of bytes.

    Args:
        layout: of vectors of bytes.
        parts: None for each.
        full: the buffer, of torch.uint8.
        packings: the form of each parameter; None for vectors of bytes that are what they are.
        others: see `UnshardedParameters`.
    """

    def __init__(
        self,
        layout: Layout,
        parts: Sequence[MeshPart | None],
        full: Tensor,
        *,
        packings: Sequence[Packing | None],
        **others: Any,
    ) -> None:
        self._packings = packings
        self._inside = dict[int, list[Tensor]]()  # the bytes of each leaf and its inner tensors, by its id
        super().__init__(layout, parts, full, **others)
        # Autograd may have saved inner tensors, and some classes give these counters of their own.
        self._freed = FreedLeaves([*self.leaves, *(tensor for inside in self._inside.values() for tensor in inside)])
        self._version_of = self._version_inside
        if self.is_shard:
            self.rest()

    def _new_leaf(self, number: int, tensor: Tensor, requires_grad: bool) -> nn.Parameter:
        packing = self._packings[number]
        if packing is None:
            return super()._new_leaf(number, tensor, requires_grad)
        leaf = counted(packing.unpack(tensor), False)
        self._inside[id(leaf)] = [tensor, *packing.inner_of(leaf)]
        give_attributes(leaf, self._attributes[number])
        copy_as(leaf, self._placeholders.setdefault(packing.name, sharded_weight(packing.name, leaf)))
        return leaf

    def _version_inside(self, leaf: Tensor) -> int:
        return leaf._version + sum(tensor._version for tensor in self._inside.get(id(leaf), ()))

    def new_value(self, number: int) -> nn.Parameter:
        packing, leaf = self._packings[number], self.leaves[number]
        return leaf if packing is None else nn.Parameter(packing.pack_form(leaf), requires_grad=False)

    def moved(self) -> list[int]:
        return []  # the class of a parameter decides what its ``.data`` is


def in_own_form(shard: Shard) -> Shard:
    """Return a shard whose parameters of bytes are unsharded in their own form."""
    packings = shard.flat_param.packings
    return replace(shard, new_unsharded=partial(PackedParameters, packings=packings)) if any(packings) else shard
