"""Whole parameters in the modules' own places: for summoning, for state dicts, and for loading.

All three are one thing, an `Exposure`: a unit's parameters are put together in tensors with memory of their own and
registered in the modules as ordinary parameters, so that everything of `nn.Module` (names, hooks, `state_dict`,
`_load_from_state_dict`, in-place changes) works on them as if nothing was wrapped. Closing it keeps this rank's part
of the values, or forgets them. They are not the tensors that the unit computes with, so what a user keeps of them
stays valid memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from fsdp.distributed.collectives import during
from fsdp.distributed.dtensor import local_part
from fsdp.engine.agreement import from_everyone, number_among
from fsdp.engine.deferred_init import is_marked, mark
from fsdp.engine.fingerprints import fingerprint
from fsdp.engine.flat_param import ParamInfo, give_attributes
from fsdp.engine.forward_hooks import TrainingState
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.managed_params import is_ours, note_stale
from fsdp.engine.state_requests import Summoning
from fsdp.engine.unit import Unit
from fsdp.state_dict.redistribute import assembled, deal, shapes_of

Values = Mapping[tuple[FlatParamHandle, int], Tensor]  # by the handle, and the parameter's number in it
AnyExposure = TypeVar("AnyExposure", bound="Exposure")


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
        self.handles = self._shown(unit)
        values = [self._values(handle) for handle in self.handles]  # may fail: nothing is changed before
        self._outer_state, unit.state = unit.state, TrainingState.SUMMON_FULL_PARAMS
        unit.buffers.widen()
        self._installed = [
            (handle, slot, param, _Look.at(param, by_value=self._compares_values))
            for handle, tensors in zip(self.handles, values, strict=True)
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
        for handle in self.handles:
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
        pairs = zip(tensors, handle.requires_grad_each, strict=True)
        params = [each if isinstance(each, nn.Parameter) else nn.Parameter(each, need) for each, need in pairs]
        for param, places, attributes in zip(params, handle.places, handle.flat_param.attributes, strict=True):
            note_stale(param, f"a summoned copy of {places[0].fqn}")
            give_attributes(param, attributes)
            for place in places:
                place.module.__dict__.pop(place.name, None)
                place.module._parameters[place.name] = param
        handle.registry.leave()
        handle.is_exposed = True
        handle.whole.refresh_rnns()
        return params

    def _remove(self, handle: FlatParamHandle) -> list[str]:
        """Take the parameters out of the modules, and return the reasons why some could not be kept."""
        problems = []
        handle.is_exposed = False
        for slot, places in enumerate(handle.places):
            try:
                if self._keep_changes:
                    self._keep(handle, slot)
            except ValueError as error:
                problems.append(str(error))
            for place in places:
                place.module._parameters.pop(place.name, None)
        handle.fill_places()
        handle.registry.enter()
        return problems

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


def deal_changes(handles: Sequence[FlatParamHandle], changed: Sequence[Sequence[int]], values: Values) -> None:
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


@contextmanager
def exposed(units: Iterable[Unit], expose: Callable[[Unit], AnyExposure]) -> Iterator[list[AnyExposure]]:
    """Expose some units, one after the other, and close all exposures in the end; after an exception, too."""
    exposures: list[AnyExposure] = []
    try:
        for unit in units:
            exposures.append(expose(unit))
        yield exposures
    finally:
        close_all(exposures)


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


class Summoned(Exposure):
    """Collective over the unit's ranks and their replicas. An exposure in one of many forms.

    Args:
        unit: whose parameters.
        form: what is shown, and where; changes are those of values and gradients.
    """

    @during("summon_full_params()")
    def __init__(self, unit: Unit, form: Summoning) -> None:
        self._is_here = not form.rank0_only or number_among(unit.everyone) == 0
        self._form = form
        shown = self._shown(unit) if form.with_grads else []
        if form.on_host:
            _require_plain(self._shown(unit))
        self._kept: set[tuple[FlatParamHandle, int]] = set()
        self._grads: dict[FlatParamHandle, list[Tensor | None]] = {}
        for handle in shown:
            gradients = handle.full_gradients()
            if self._is_here:
                self._grads[handle] = [self._placed(gradient) for gradient in gradients]
        super().__init__(unit, form.keeps_changes, at_first=form.rank0_only)
        unit.access.summoned = form

    def _values(self, handle: FlatParamHandle) -> list[Tensor]:
        return [tensor if tensor.is_meta else self._placed(tensor) for tensor in super()._values(handle)]

    @property
    def _compares_values(self) -> bool:
        return self._keep_changes and self._form.rank0_only and self._is_here

    def _placed(self, tensor: Any) -> Any:
        return tensor.cpu() if self._form.on_host and tensor is not None else tensor

    def _install(self, handle: FlatParamHandle, tensors: Sequence[Tensor]) -> list[nn.Parameter]:
        if not self._is_here:
            handle.is_exposed = True
            return []
        params = super()._install(handle, tensors)
        for param, grad in zip(params, self._grads.pop(handle, [None] * len(params)), strict=True):
            param.grad = grad
        return params

    def _keep(self, handle: FlatParamHandle, slot: int) -> None:
        super()._keep(handle, slot)
        self._kept.add((handle, slot))

    def _remove(self, handle: FlatParamHandle) -> list[str]:
        if self._is_here:
            return super()._remove(handle)
        handle.is_exposed = False
        return []

    @during("summon_full_params()")
    def close(self) -> None:
        """Shard the values again; see `Exposure.close`. With ``rank0_only``, all raise what the first rank does."""
        self._unit.access.summoned = None
        changed = self._changed() if self._keep_changes else []
        params = {handle: [listed_at(places[0]) for places in handle.places] for handle in self.handles}
        self._kept.clear()
        problems: list[str] = []
        try:
            super().close()
        except RuntimeError as error:
            problems.append(str(error))
        grads = {handle: [getattr(param, "grad", None) for param in listed] for handle, listed in params.items()}
        if self._keep_changes and self._form.rank0_only:
            kept = {(handle, slot): params[handle][slot] for handle, slot in changed if (handle, slot) in self._kept}
            problems = self._share(kept, grads, problems)
        elif self._keep_changes and self._form.with_grads and not problems:
            for handle in self.handles:
                handle.keep_gradients(grads[handle])
        if problems:
            raise RuntimeError(problems[0])

    # --- what the first rank has changed ------------------------------------------------------------------------

    def _share(
        self,
        values: dict[tuple[FlatParamHandle, int], Any],
        grads: dict[FlatParamHandle, list[Any]],
        problems: list[str],
    ) -> list[str]:
        changed = [(self.handles.index(handle), slot) for handle, slot in values]
        have = [[grad is not None for grad in grads[handle]] for handle in self.handles if self._form.with_grads]
        told = from_everyone(self._unit.everyone, json.dumps([changed, have, problems]).encode())
        changed, have, problems = json.loads(told[0])
        deal_changes(self.handles, changed, values)
        for handle, flags in zip(self.handles, have, strict=False):
            own = enumerate(grads[handle])
            handle.keep_gradients([self._sent(handle, slot, grad) if flags[slot] else None for slot, grad in own])
        return problems

    def _sent(self, handle: FlatParamHandle, slot: int, value: Tensor | None) -> Tensor:
        """A whole tensor of the first rank's, on all; of a `DTensor` its local part, on the ranks of that."""
        shape, device, part = handle.layout.slots[slot].shape, handle.home.device, handle.flat_param.parts[slot]
        if value is None or not self._is_here:
            tensor = torch.empty(shape, dtype=handle.flat_param.dtype, device=device)
        else:
            local = value if part is None else part.gradient(value)
            tensor = local.detach().to(device, handle.flat_param.dtype).reshape(shape).contiguous()
        for comm in reversed(self._unit.everyone):
            if comm.world_size > 1 and tensor.numel():
                comm.broadcast(tensor.view(-1).view(torch.uint8)).wait()
        return tensor if part is None else part.dtensor(tensor)


def _require_plain(handles: Sequence[FlatParamHandle]) -> None:
    for handle in handles:
        if any(handle.flat_param.parts) and handle.home.device.type != "cpu":
            raise NotImplementedError(
                f"summon_full_params(offload_to_cpu=True): {handle.name} has DTensors, which are on the device of "
                "their mesh. Summon without it, and move what you need (full_tensor().cpu())."
            )


@contextmanager
def summoned(units: Sequence[Unit], form: Summoning) -> Iterator[None]:
    """Collective. The units' modules hold whole parameters inside, those that do already included.

    Raises:
        RuntimeError: if a unit is summoned already, and not in this form.
    """
    closed = []
    for unit in units:
        if unit.state is TrainingState.SUMMON_FULL_PARAMS:
            form.require_shown_by(unit.access.summoned, unit)
        else:
            closed.append(unit)
    with exposed(closed, lambda unit: Summoned(unit, form)):
        yield


class _Shapes(Exposure):
    """Not collective. A unit's modules with whole parameters that have no values."""

    def __init__(self, unit: Unit) -> None:
        super().__init__(unit, keep_changes=False)
        # As on ranks that have none: nothing that needs values works inside.
        unit.access.summoned = Summoning(keeps_changes=False, with_grads=False, rank0_only=True, on_host=False)

    def _values(self, handle: FlatParamHandle) -> list[Tensor]:
        handle.absorb()
        parts = handle.flat_param.parts
        return [part.dtensor(each) if part else each for each, part in zip(shapes_of(handle), parts, strict=True)]

    def close(self) -> None:
        self._unit.access.summoned = None
        super().close()


@contextmanager
def shapes_summoned(units: Sequence[Unit]) -> Iterator[None]:
    """Not collective. The units' modules hold parameters on the meta device inside; summoned ones stay so."""
    with exposed([unit for unit in units if unit.state is not TrainingState.SUMMON_FULL_PARAMS], _Shapes):
        yield


def params_shown(unit: Unit, prefix: str) -> dict[str, nn.Parameter]:
    """The parameters that a summoned unit shows on this rank, by their names with a prefix, tied ones once."""
    places = [places[0] for handle in unit.seen if handle.is_exposed for places in handle.places]
    listed = {prefix + place.fqn: listed_at(place) for place in places}
    return {name: param for name, param in listed.items() if param is not None and not is_ours(param)}
