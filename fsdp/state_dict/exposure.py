"""Whole parameters in the modules' own places: for summoning, for state dicts, and for loading.

All three are one thing, an `Exposure`: a unit's parameters are put together in tensors with memory of their own and
registered in the modules as ordinary parameters, so that everything of `nn.Module` (names, hooks, `state_dict`,
`_load_from_state_dict`, in-place changes) works on them as if nothing was wrapped. Closing it keeps this rank's part
of the values, or forgets them. They are not the tensors that the unit computes with, so what a user keeps of them
stays valid memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor, nn

from fsdp.distributed.dtensor import local_part
from fsdp.engine.blanks import is_marked, mark
from fsdp.engine.fingerprints import fingerprint
from fsdp.engine.flat_param import ParamInfo, give_attributes
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.managed_params import note_stale
from fsdp.engine.unit import TrainingState, Unit
from fsdp.state_dict.redistribute import assembled, deal


class Exposure:
    """Collective over the unit's ranks. One unit's modules with whole, ordinary parameters, until closed.

    Args:
        keep_changes: shard changed values on closing.
        at_first: only the first rank needs the values; on others, parameters are on the meta device.
    """

    def __init__(self, unit: Unit, keep_changes: bool, at_first: bool = False) -> None:
        self._unit = unit
        self._keep_changes = keep_changes
        self._at_first = at_first
        # Not what a unit around this one shows already, which shares it.
        self._handles = self._shown(unit)
        values = [self._values(handle) for handle in self._handles]  # may fail: nothing is changed before
        self._outer_state, unit.state = unit.state, TrainingState.SUMMON_FULL_PARAMS
        unit.buffers.widen()
        self._installed = [
            (handle, slot, param, _Look.at(param, by_value=self._compares_values))
            for handle, tensors in zip(self._handles, values, strict=True)
            for slot, param in enumerate(self._install(handle, tensors))
        ]
        unit.restore_order()

    def close(self) -> None:
        """Shard the values again, changed ones included if they are to be kept.

        Raises:
            RuntimeError: if a parameter was removed, replaced under one of its names only, or has another
                shape. Everything else is kept, and the unit is usable.
        """
        problems: list[str] = []
        for handle, slot in self._changed() if self._keep_changes else ():
            handle.note_written([slot])  # what was only looked at, is as the ranks have wrapped it
        self._installed = []
        for handle in self._handles:
            if self._keep_changes:
                handle.settle()  # peers may still be receiving from the shard
            problems += self._remove(handle)
        self._unit.restore_order()
        if not self._unit.in_full_precision:
            self._unit.buffers.narrow()
        self._unit.state = self._outer_state
        if problems:
            raise RuntimeError(f"{self._unit.name}: these changes could not be kept: " + "; ".join(problems))

    def _install(self, handle: FlatParamHandle, tensors: Sequence[Tensor]) -> list[nn.Parameter]:
        """List parameters with these values in the modules."""
        needs = handle.requires_grad_each
        return install(handle, [nn.Parameter(each, need) for each, need in zip(tensors, needs, strict=True)])

    def _remove(self, handle: FlatParamHandle) -> list[str]:
        return _remove(handle, self._keep if self._keep_changes else None)

    def _changed(self) -> list[tuple[FlatParamHandle, int]]:
        """Which parameters were written, or replaced."""
        return [
            (handle, slot)
            for handle, slot, param, look in self._installed
            if listed_at(handle.places[slot][0]) is not param or not look.is_of(param)
        ]

    @property
    def _compares_values(self) -> bool:
        """Whether only what was changed is kept, so that what is written through ``.data``, uncounted, must be seen."""
        return False

    def _shown(self, unit: Unit) -> list[FlatParamHandle]:
        return [handle for handle in unit.seen if not handle.is_exposed]

    def _values(self, handle: FlatParamHandle) -> list[Tensor]:
        """What to show. Gathered on every rank, since others may have values that are missing here."""
        tensors = assembled(handle, self._at_first)
        for slot in handle.valueless:
            mark(tensors[slot])
        return tensors

    def _keep(self, handle: FlatParamHandle, slot: int) -> None:
        """Keep what a parameter is now; one that had no values, and got none, goes on having none."""
        value = handle.registry.replacement(slot)
        if slot not in handle.valueless or not is_marked(value):
            handle.keep(slot, value)


def install(handle: FlatParamHandle, params: list[nn.Parameter]) -> list[nn.Parameter]:
    """List these parameters in the modules, instead of what stands for them."""
    for param, places, attributes in zip(params, handle.places, handle.flat_param.attributes, strict=True):
        note_stale(param, f"a summoned copy of {places[0].fqn}")
        give_attributes(param, attributes)
        for place in places:
            place.module.__dict__.pop(place.name, None)
            place.module._parameters[place.name] = param
    handle.registry.leave()
    handle.is_exposed = True
    handle.unsharded.refresh_rnns()
    return params


class _Look(NamedTuple):
    """What a parameter was, as far as is needed to see whether it was written."""

    version: int | None  # how often it was written; None if that is not known, in inference mode
    value: int | None  # a fingerprint, if it was asked for

    @classmethod
    def at(cls, param: nn.Parameter, by_value: bool) -> _Look:
        version = None if param.is_inference() else param._version
        local = local_part(param)
        return cls(version, fingerprint(local) if by_value and not local.is_meta else None)

    def is_of(self, param: nn.Parameter) -> bool:
        """Whether the parameter is still the same."""
        is_counted = self.version is not None and not param.is_inference() and param._version == self.version
        return is_counted and (self.value is None or _Look.at(param, by_value=True).value == self.value)


def deal_changes(
    handles: Sequence[FlatParamHandle],
    changed: Sequence[Sequence[int]],
    values: Mapping[tuple[FlatParamHandle, int], Tensor],
) -> None:
    """Collective. All ranks get what was changed on the first one.

    Args:
        handles: of an exposure.
        changed: numbers of a handle, and of a parameter of it.
        values: on the first rank, what it has kept.
    """
    for number, handle in enumerate(handles):
        slots = [slot for which, slot in changed if which == number]
        wholes = {slot: values[handle, slot] for slot in slots if (handle, slot) in values}
        parts = handle.flat_param.parts
        for slot, whole in wholes.items():
            part = parts[slot]
            wholes[slot] = whole if part is None else local_part(part.cut(handle.layout.slots[slot].name, whole))
        if slots:
            deal(handle, slots, wholes)


def listed_at(place: ParamInfo) -> nn.Parameter | None:
    """What a module lists there."""
    return place.module._parameters.get(place.name)


def _remove(handle: FlatParamHandle, keep: Callable[[FlatParamHandle, int], None] | None) -> list[str]:
    problems = []
    handle.is_exposed = False
    for slot, places in enumerate(handle.places):
        try:
            if keep is not None:
                keep(handle, slot)
        except ValueError as error:
            problems.append(str(error))
        for place in places:
            place.module._parameters.pop(place.name, None)
    handle.fill_places()
    handle.registry.enter()
    return problems


@contextmanager
def shown(unit: Unit, at_first: bool = False) -> Iterator[None]:
    """Collective. The unit's modules hold whole parameters inside, to be looked at. Also after an exception they are
    sharded again.

    Args:
        unit: whose modules.
        at_first: as for `Exposure`.
    """
    exposure = Exposure(unit, keep_changes=False, at_first=at_first)
    try:
        yield
    finally:
        exposure.close()


def close_all(exposures: Sequence[Exposure]) -> None:
    """Close every exposure, the last first, and raise the first error afterwards."""
    errors = []
    for exposure in reversed(exposures):
        try:
            exposure.close()
        except RuntimeError as error:
            errors.append(error)
    if errors:
        raise errors[0]
