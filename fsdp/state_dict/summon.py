"""`summon_full_params` in all its forms: with gradients, on the host, on the first rank only, unit by unit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.distributed.collectives import during
from fsdp.engine.agreement import from_everyone, number_among
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.managed_params import is_ours
from fsdp.engine.state_requests import Summoning
from fsdp.engine.unit import TrainingState, Unit
from fsdp.state_dict.exposure import Exposure, close_all, deal_changes, listed_at
from fsdp.state_dict.redistribute import shapes_of


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
        params = {handle: [listed_at(places[0]) for places in handle.places] for handle in self._handles}
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
            for handle in self._handles:
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
        changed = [(self._handles.index(handle), slot) for handle, slot in values]
        have = [[grad is not None for grad in grads[handle]] for handle in self._handles if self._form.with_grads]
        told = from_everyone(self._unit.everyone, json.dumps([changed, have, problems]).encode())
        changed, have, problems = json.loads(told[0])
        deal_changes(self._handles, changed, values)
        for handle, flags in zip(self._handles, have, strict=False):
            own = enumerate(grads[handle])
            handle.keep_gradients([self._sent(handle, slot, grad) if flags[slot] else None for slot, grad in own])
        return problems

    def _sent(self, handle: FlatParamHandle, slot: int, value: Tensor | None) -> Tensor:
        """A whole tensor of the first rank's, on all; of a `DTensor` its local part, on the ranks of that."""
        shape, device, part = handle.layout.slots[slot].shape, handle.storage.device, handle.flat_param.parts[slot]
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
        if any(handle.flat_param.parts) and handle.storage.device.type != "cpu":
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
    exposures: list[Exposure] = []
    try:
        for unit in closed:
            exposures.append(Summoned(unit, form))
        yield
    finally:
        close_all(exposures)


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
    """Not collective. The units' modules hold parameters on the meta device inside; those that are whole stay so."""
    exposures: list[Exposure] = []
    try:
        for unit in units:
            if unit.state is not TrainingState.SUMMON_FULL_PARAMS:
                exposures.append(_Shapes(unit))
        yield
    finally:
        close_all(exposures)


def params_shown(unit: Unit, prefix: str) -> dict[str, nn.Parameter]:
    """The parameters that a summoned unit shows on this rank, by their names with a prefix, tied ones once."""
    places = [places[0] for handle in unit.seen if handle.is_exposed for places in handle.places]
    listed = {prefix + place.fqn: listed_at(place) for place in places}
    return {name: param for name, param in listed.items() if param is not None and not is_ours(param)}
