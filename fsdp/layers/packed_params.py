"""Frozen parameters, sharded as bytes. Vectors of bytes replace them while a unit is created.

`PackedForm` creates the vectors. `PackedParameters` are the unsharded parameters, as views of a buffer of bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from fsdp.distributed.dtensor import is_dtensor
from fsdp.engine.counted_data import counted
from fsdp.engine.flat_param import FlatParameter
from fsdp.engine.layout import Layout
from fsdp.engine.originals import note_stale, taken_over
from fsdp.engine.placeholder import copy_as, sharded_weight
from fsdp.engine.shard import Shard
from fsdp.engine.unit import Unit
from fsdp.engine.unsharded_params import UnshardedParameters, are_same
from fsdp.engine.user_attributes import attributes_of, give_attributes
from fsdp.layers.managed_params import Found, MakeFlatParam, Sharder, is_packed
from fsdp.layers.packing import ALIGNED, Packing


class PackedParameters(UnshardedParameters):
    """Frozen parameters whose inner tensors are views of a buffer of bytes; for arguments see `UnshardedParameters`.

    The flat parameter's `packings` define the form of each parameter; without a packing, it is a view of the buffer.
    """

    def __init__(self, flat_param: FlatParameter, layout: Layout, full: Tensor, **others: Any) -> None:
        self._packings = flat_param.packings
        self._inside = dict[int, list[Tensor]]()  # by a leaf's id, its bytes and its inner tensors
        super().__init__(flat_param, layout, full, **others)
        self._watch(self._inside)
        if self.is_shard:
            self.rest()

    def _new_leaf(self, number: int, tensor: Tensor, requires_grad: bool) -> nn.Parameter:
        packing = self._packings[number]
        if packing is None:
            return super()._new_leaf(number, tensor, requires_grad)
        made = packing.unpack(tensor)
        leaf = made if isinstance(made, nn.Parameter) else counted(made, False)
        self._inside[id(leaf)] = [tensor, *packing.inner_of(leaf)]
        give_attributes(leaf, self._attributes[number])
        copy_as(leaf, self._placeholders.setdefault(packing.name, sharded_weight(packing.name, leaf)))
        return leaf

    def is_same(self, number: int, value: Tensor) -> bool:
        packing = self._packings[number]
        if packing is None:
            return super().is_same(number, value)
        _, *own = self._inside[id(self.leaves[number])]
        return packing.takes(value) and all(map(are_same, packing.inner_of(value), own))

    def new_value(self, number: int) -> nn.Parameter:
        packing, leaf = self._packings[number], self.leaves[number]
        return leaf if packing is None else nn.Parameter(packing.pack_form(leaf), requires_grad=False)

    def moved(self) -> list[int]:
        return []  # the class of a parameter defines its ``.data``


def pack_loaded(unit: Unit, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Hook of a load: pack values for parameters sharded as bytes."""
    for name, packing in _join_loaded(unit, module, state_dict, prefix):
        if not is_dtensor(state_dict[name]):
            state_dict[name] = packing.pack(state_dict[name])


def join_loaded(unit: Unit, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Complete the values of parameters sharded as bytes, if their class saves parts under separate keys.

    Summoned parameters are loaded as in the unsharded model.
    """
    if not any(is_packed(param, in_rows=True) for param in module._parameters.values() if param is not None):
        for _joined in _join_loaded(unit, module, state_dict, prefix):
            pass


def _join_loaded(
    unit: Unit, module: nn.Module, state_dict: dict[str, Any], prefix: str
) -> Iterator[tuple[str, Packing]]:
    for handle in unit.visible_handles:
        for places, packing in zip(handle.places, handle.flat_param.packings, strict=True):
            for name in [prefix + place.name for place in places if place.module is module] if packing else ():
                if isinstance(value := state_dict.get(name), Tensor):
                    state_dict[name] = packing.joined(value, state_dict, name)
                    yield name, packing


class PackedForm:
    """The form of a unit with parameters sharded as bytes, using vectors of bytes in their place.

    Args:
        form: the form of the unit.
        packed: the parameters sharded as bytes.
    """

    def __init__(self, form: Sharder, packed: Iterable[nn.Parameter]) -> None:
        self._form, self._packed = form, list(packed)
        self._found: Found = {}  # with the stand-ins
        self._packings: dict[nn.Parameter, Packing] = {}  # by the stand-in
        self._originals: list[tuple[nn.Parameter, nn.Parameter]] = []

    def prepare(self, found: Found, tied: Found, module: nn.Module) -> Found:
        """Return the parameters, with a stand-in for each parameter sharded as bytes."""
        ids = set(map(id, self._packed))
        for param, places in found.items():
            self._found[self._stand_in(places[0].fqn, param) if id(param) in ids else param] = places
        return self._form.prepare(self._found, tied, module)

    def _stand_in(self, name: str, param: nn.Parameter) -> nn.Parameter:
        packing = Packing(name, param)
        made = nn.Parameter(packing.pack_form(param), requires_grad=False)
        own = vars(packing.unpack(made.detach()))  # including inner tensors
        give_attributes(made, {key: value for key, value in attributes_of(param).items() if key not in own})
        self._packings[made] = packing
        self._originals.append((param, made))
        return made

    def shard(self, found: Found, unit: Unit, make: MakeFlatParam) -> list[Shard]:
        """Shard the parameters. Stand-ins are unsharded in the original form of their parameters.

        Raises:
            ValueError: for parameters that a unit with mixed precision would have to cast.
        """
        self._follow(found)
        for stand_in, packing in self._packings.items():
            packing.check_compute_dtype(unit.precision_at(found[stand_in]).compute)
        shards = self._form.shard(found, unit, partial(self._make, unit, make))
        for param, stand_in in self._originals:
            if (taken := taken_over(stand_in)) is not None:
                note_stale(param, *taken[1:])
        for stand_in, packing in self._packings.items():
            for place in found[stand_in]:
                packing.detach_from(place.module)
        return [
            replace(shard, new_unsharded=PackedParameters) if any(shard.flat_param.packings) else shard
            for shard in shards
        ]

    def _follow(self, found: Found) -> None:
        """Use the parameters that replace the parameters of `prepare`, in the same order."""
        now = dict(zip(self._found, found, strict=True))
        self._found = found
        self._packings = {now[param]: packing for param, packing in self._packings.items()}
        self._originals = [(param, now[stand_in]) for param, stand_in in self._originals]

    def _make(self, unit: Unit, make: MakeFlatParam, params: Sequence[nn.Parameter], **how: Any) -> FlatParameter:
        made = make(params, block=self._block_of(params, unit, how), **how)
        made.packings = tuple(map(self._packings.get, params))
        return made

    def _block_of(self, params: Sequence[nn.Parameter], unit: Unit, how: Mapping[str, Any]) -> int:
        """Return the number of elements that a flat parameter never divides: the user's, unless these are bytes.

        A range of a flat shard contains whole elements of any dtype, so that files contain integers as integers. Rows
        of bytes are parts of classes, which files contain as bytes.

        Args:
            params: the parameters.
            unit: the unit of the parameters.
            how: arguments of `FlatParameter.shard_of`.

        Raises:
            ValueError: for rows of torch.uint8 parameters, grouped with bytes, that are not whole blocks.
        """
        block = unit.placements.block_numel
        if not any(param in self._packings for param in params):
            return block
        world_size = how.get("world_size", unit.comm.world_size)
        for param, dim in zip(params, how.get("dims", ()), strict=False):
            if param not in self._packings:
                how["layout_type"].of([(self._found[param][0].fqn, param.shape)], world_size, dims=[dim], block=block)
        return 1 if "dims" in how else ALIGNED
