"""Deferred initialization: parameters and buffers without values, and the detection of their initialization.

Parameters and buffers on the meta device get memory without values when they are wrapped. Computing with them, or
saving them, raises an error with their names and the ways to initialize them. Memory without values is filled with a
mark, a value that no initialization assigns to a whole tensor. All writes are therefore detected, including writes
through ``.data``, which do not change version counters: many models initialize themselves with
``module.weight.data.normal_()``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from fsdp.distributed.communicator import some_of
from fsdp.distributed.consensus import done_by_all
from fsdp.distributed.dtensor import local_part
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.names import join, named_modules
from fsdp.engine.originals import is_ours
from fsdp.engine.unit import Unit, own_modules, unit_of, units_in
from fsdp.engine.user_attributes import attributes_of, give_attributes, give_grad_dtype

_REMEDY = (
    "Initialize them first, on every rank: fsdp.materialize(model), with param_init_fn=... for modules without "
    "reset_parameters(); or load values (load_state_dict, fsdp.load_safetensors)."
)
Place = tuple[nn.Module, str]

# Tensors allocated by `to_empty`, until they are found to be initialized.
_empty: WeakIdKeyDictionary = WeakIdKeyDictionary()

# The units whose parameters and buffers all have values, on this rank and on all ranks.
_complete: WeakSet[Unit] = WeakSet()
_complete_everywhere: WeakSet[Unit] = WeakSet()


def may_lack_values(unit: Unit) -> bool:
    """Return whether values of a unit may be missing on this rank. True until a check has found all values."""
    return unit not in _complete


def have_values_everywhere(units: Iterable[Unit]) -> bool:
    """Return whether all ranks have found all values of these units."""
    return all(unit in _complete_everywhere for unit in units)


def trust_values(units: Iterable[Unit]) -> None:
    """Do not check the values of these units again."""
    for unit in units:
        _complete.add(unit)
        _complete_everywhere.add(unit)


def require_values(module: nn.Module, what: str, recurse: bool = True) -> None:
    """Raise RuntimeError before the operation `what` if a parameter or buffer of a module tree's units has no values.

    Not collective. Checks all units, or only the first unit if `recurse` is False.
    """
    units = [(name, unit) for name, inner in named_modules(module) if (unit := unit_of(inner)) is not None]
    missing: list[str] = []
    for name, unit in units if recurse else units[:1]:
        if may_lack_values(unit):
            found = [join(name, inner) for inner in valueless_in(unit)]
            if not found:
                _complete.add(unit)
            missing += found
    if missing:
        owner = units[0][1].name
        raise RuntimeError(
            f"{owner}: cannot {what}: {len(missing)} of its parameters and buffers have no values yet, because they "
            f"were on the meta device when it was sharded: {some_of(missing)}. {_REMEDY}"
        )


def require_values_everywhere(root: Unit, what: str, recurse: bool = True) -> None:
    """Collective until all ranks have all values. Raise an error on all ranks if `require_values` fails on any rank."""
    units = list(units_in(root)) if recurse else [root]
    if have_values_everywhere(units):
        return
    done_by_all([root.everyone], what, lambda: require_values(root.module, what, recurse))
    _complete_everywhere.update(units)


def valueless_in(unit: Unit) -> Iterator[str]:
    """Yield the names, relative to its module, of a unit's parameters and buffers without values."""
    for handle in unit.owned_handles:
        handle.absorb()  # assigned values count
        yield from (handle.layout.slots[slot].name for slot in sorted(handle.valueless))
    if lacking := uninitialized_beside(unit):
        names = {inner: name for name, inner in named_modules(unit.module)}
        yield from (join(names[inner], name) for inner, name in (each.places[0] for each in lacking))


def mark(tensor: Tensor) -> None:
    """Fill memory without values with the mark for `is_marked`; for a `DTensor`, this rank's part."""
    numbers = _numbers(tensor)
    with torch.no_grad():
        numbers.fill_(_mark_of(numbers.dtype))


def is_marked(tensor: Tensor) -> bool:
    """Return True if no element was written since `mark`."""
    flat = _numbers(tensor).reshape(-1)
    # The first element is usually sufficient, and cheap to read.
    return flat.numel() > 0 and bool(_marks(flat[:1]).all()) and bool(_marks(flat).all())


def _numbers(tensor: Tensor) -> Tensor:
    local = local_part(tensor).detach()
    return local.view(torch.uint8) if local.dtype is torch.bool else local  # the mark is a byte other than 0 and 1


def _mark_of(dtype: torch.dtype) -> float:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return torch.iinfo(dtype).max - 88  # masks, zero points and sentinels have the smallest or the largest number


def _marks(flat: Tensor) -> Tensor:
    mark = _mark_of(flat.dtype)
    return flat == mark if mark == mark else torch.isnan(flat.float() if flat.dtype.itemsize == 1 else flat)


def note_empty(tensor: Tensor) -> Tensor:
    """Mark and record a tensor as uninitialized memory, and return it."""
    mark(tensor)
    _empty[tensor] = True
    return tensor


def _waits(tensor: Tensor) -> bool:
    if tensor.is_meta or (tensor in _empty and is_marked(tensor)):
        return True
    _empty.pop(tensor, None)
    return False


class Uninitialized:
    """A parameter or buffer without values, during initialization, with all places where modules list it.

    If `tensor` is given, the places list this tensor, which is on the meta device or uninitialized. Otherwise the
    object represents a unit's parameter, number `slot` of a handle, which the places list in marked memory.
    """

    def __init__(
        self, places: list[Place], tensor: Tensor | None, handle: FlatParamHandle | None = None, slot: int = 0
    ) -> None:
        self.places, self.handle, self.slot = places, handle, slot
        self.shape = torch.Size() if tensor is None else tensor.shape
        self._before = tensor

    @property
    def value(self) -> Tensor | None:
        """The tensor in the first place."""
        module, name = self.places[0]
        return module._parameters.get(name, module._buffers.get(name))

    @torch.inference_mode(False)  # otherwise the tensor could not be used in training
    def give_memory(self, device: torch.device) -> None:
        """Register marked memory in all places; for a unit's parameter, this was done before."""
        if self._before is not None:
            made = torch.empty_like(self._before, device=device, requires_grad=False)
            is_parameter = isinstance(self._before, nn.Parameter)
            made = nn.Parameter(made, self._before.requires_grad) if is_parameter else made
            give_grad_dtype(made, self._before)
            give_attributes(made, attributes_of(self._before))
            mark(made)
            self.put(made)
        if self.value is not None:
            self.shape = self.value.shape

    def put(self, value: Tensor) -> None:
        """Register `value` in all places."""
        for module, name in self.places:
            entries = module._parameters if name in module._parameters else module._buffers
            if entries.get(name) is not value:
                setattr(module, name, value)  # also updates the lists of recurrent modules

    @property
    def is_filled(self) -> bool:
        """True if the tensor was written since its memory was marked."""
        value = self.value
        # Not the version: batch norms copy `num_batches_tracked` onto itself if a state dict does not contain it.
        return value is not None and not value.is_meta and not is_marked(value)

    def take_back(self) -> None:
        """Undo `give_memory`."""
        if self._before is not None:
            self.put(self._before)


def uninitialized_in(modules: Iterable[nn.Module]) -> list[Uninitialized]:
    """Return the tensors without values in the dictionaries of these modules, each once."""
    found: dict[int, Uninitialized] = {}
    for module in modules:
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and not is_ours(tensor) and _waits(tensor):
                found.setdefault(id(tensor), Uninitialized([], tensor)).places.append((module, name))
    return list(found.values())


def uninitialized_beside(unit: Unit) -> list[Uninitialized]:
    """Return the tensors without values that a unit's modules list, except for the unit's parameters."""
    if not may_lack_values(unit):
        return []
    places = {(place.module, place.name) for one in unit.visible_handles for used in one.places for place in used}
    return [each for each in uninitialized_in(own_modules(unit.module)) if places.isdisjoint(each.places)]


@contextmanager
def memory_to_load_into(units: Iterable[Unit]) -> Iterator[list[Uninitialized]]:
    """Allocate memory for listed tensors without values inside the context; keep initialized memory."""
    found = []
    try:
        for unit in units:
            for each in uninitialized_beside(unit):
                found.append(each)
                each.give_memory(unit.device)
        yield found
    finally:
        for each in found:
            if each.value is not None and each.is_filled:
                each.put(each.value)
            else:
                each.take_back()
