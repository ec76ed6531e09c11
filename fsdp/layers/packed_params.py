"""Frozen parameters that are sharded as bytes: vectors of bytes stand in for them while a unit is made.

`StandIns` create these vectors. `PackedParameters` are the unsharded parameters in their own form, around one buffer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from fsdp.engine.counted_data import counted
from fsdp.engine.flat_param import FlatParameter
from fsdp.engine.layout import Layout
from fsdp.engine.originals import note_stale, taken_over
from fsdp.engine.placeholder import copy_as, sharded_weight
from fsdp.engine.shard import Shard
from fsdp.engine.unit import Unit
from fsdp.engine.unsharded_params import UnshardedParameters
from fsdp.engine.user_attributes import attributes_of, give_attributes
from fsdp.layers.managed_params import Places
from fsdp.layers.packing import ALIGNED, Packing


class PackedParameters(UnshardedParameters):
    """Frozen parameters whose inner tensors are views of one buffer of bytes; for arguments see `UnshardedParameters`.

    The flat parameter knows the form of each; those without a form are vectors of bytes.
    """

    def __init__(self, flat_param: FlatParameter, layout: Layout, full: Tensor, **others: Any) -> None:
        self._packings = flat_param.packings
        self._inside = dict[int, list[Tensor]]()  # the bytes of each leaf and its inner tensors, by its id
        super().__init__(flat_param, layout, full, **others)
        self._watch(self._inside)
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

    def new_value(self, number: int) -> nn.Parameter:
        packing, leaf = self._packings[number], self.leaves[number]
        return leaf if packing is None else nn.Parameter(packing.pack_form(leaf), requires_grad=False)

    def moved(self) -> list[int]:
        return []  # the class of a parameter decides what its ``.data`` is


class StandIns:
    """Vectors of bytes in the place of parameters that a unit is about to shard.

    Args:
        found: the parameters, with the places where they are used.
        packed: the parameters of `found` that are sharded as bytes.

    Attributes:
        found: the same, with a stand-in for each parameter that is sharded as bytes.
        packings: the form of each, by its stand-in.
    """

    def __init__(self, found: Mapping[nn.Parameter, Places], packed: Sequence[nn.Parameter]) -> None:
        self.found: dict[nn.Parameter, Places] = {}
        self.packings: dict[nn.Parameter, Packing] = {}
        self._originals: list[tuple[nn.Parameter, nn.Parameter]] = []
        ids = set(map(id, packed))
        for param, places in found.items():
            self.found[self._stand_in(places[0].fqn, param) if id(param) in ids else param] = places

    def _stand_in(self, name: str, param: nn.Parameter) -> nn.Parameter:
        packing = Packing(name, param)
        made = nn.Parameter(packing.pack_form(param), requires_grad=False)
        own = vars(packing.unpack(made.detach()))  # inner tensors among them
        give_attributes(made, {key: value for key, value in attributes_of(param).items() if key not in own})
        self.packings[made] = packing
        self._originals.append((param, made))
        return made

    def follow(self, found: Mapping[nn.Parameter, Places]) -> None:
        """Use the parameters of the same places and order that have taken the place of `found`."""
        now = dict(zip(self.found, found, strict=True))
        self.found = dict(found)
        self.packings = {now[param]: packing for param, packing in self.packings.items()}
        self._originals = [(param, now[stand_in]) for param, stand_in in self._originals]

    def check(self, unit: Unit) -> None:
        """Raise ValueError for parameters that a unit with mixed precision would have to cast."""
        for stand_in, packing in self.packings.items():
            packing.check_compute_dtype(unit.precision_at(self.found[stand_in]).compute)

    def block_of(self, params: Sequence[nn.Parameter], how: Mapping[str, Any]) -> int:
        """Return the number of elements that a flat parameter never divides: the user's, unless these are bytes.

        A range of a flat shard has whole elements of any dtype, so that files contain integers as integers. Rows of
        bytes are parts of classes, which files contain as bytes.

        Args:
            params: the parameters.
            how: arguments of `FlatParameter.shard_of`.

        Raises:
            ValueError: for rows of torch.uint8 beside bytes that are no whole blocks.
        """
        block: int = how["block"]
        if not any(param in self.packings for param in params):
            return block
        for param, dim in zip(params, how.get("dims", ()), strict=False):
            if param not in self.packings:
                named = (self.found[param][0].fqn, param.shape)
                how["layout_type"].of([named], how["world_size"], dims=[dim], block=block)
        return 1 if "dims" in how else ALIGNED

    def described(self, flat_param: FlatParameter, params: Sequence[nn.Parameter]) -> FlatParameter:
        """Return a flat parameter of these parameters, which knows their forms from now on."""
        flat_param.packings = tuple(map(self.packings.get, params))
        return flat_param

    def settled(self, shards: Sequence[Shard]) -> list[Shard]:
        """Return shards that unshard parameters of bytes in their own form, and record what became of these."""
        for param, stand_in in self._originals:
            if (taken := taken_over(stand_in)) is not None:
                note_stale(param, *taken[1:])
        return [
            replace(shard, new_unsharded=PackedParameters) if any(shard.flat_param.packings) else shard
            for shard in shards
        ]
