"""`summon_full_params` in all its forms: with gradients, and with whole parameters on the first rank only."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fsdp._agreement import from_everyone, number_among
from fsdp._handle import FlatParamHandle
from fsdp._state_dict import Exposure, close_all, listed_at
from fsdp._unit import Unit


class Summoned(Exposure):
    """Collective over the unit's ranks and their replicas. An exposure that may show gradients, or be on one rank only.

    Args:
        unit: whose parameters.
        keep_changes: shard changed values, and gradients, on closing.
        with_grads: show whole gradients, where there are any.
        rank0_only: show nothing on other ranks than the first; they get what is changed there.
    """

    def __init__(self, unit: Unit, keep_changes: bool, with_grads: bool, rank0_only: bool) -> None:
        self._is_here = not rank0_only or number_among(unit.everyone) == 0
        self._rank0_only, self._with_grads = rank0_only, with_grads
        shown = self._shown(unit) if with_grads else []
        self._kept: set[tuple[FlatParamHandle, int]] = set()
        self._grads = {handle: handle.full_gradients() for handle in shown}
        super().__init__(unit, keep_changes)

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

    def close(self) -> None:
        """Shard the values again; see `Exposure.close`. With `rank0_only`, all ranks raise what the first one does."""
        changed = self._changed() if self._keep_changes else []
        params = {handle: [listed_at(places[0]) for places in handle.places] for handle in self._handles}
        self._kept.clear()
        problems: list[str] = []
        try:
            super().close()
        except RuntimeError as error:
            problems.append(str(error))
        grads = {handle: [getattr(param, "grad", None) for param in listed] for handle, listed in params.items()}
        if self._keep_changes and self._rank0_only:
            kept = {(handle, slot): params[handle][slot] for handle, slot in changed if (handle, slot) in self._kept}
            problems = self._share(kept, grads, problems)
        elif self._keep_changes and self._with_grads and not problems:
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
        have = [[grad is not None for grad in grads[handle]] for handle in self._handles if self._with_grads]
        told = from_everyone(self._unit.everyone, json.dumps([changed, have, problems]).encode())
        changed, have, problems = json.loads(told[0])
        for number, slot in changed:
            handle = self._handles[number]
            received = self._sent(handle, slot, values.get((handle, slot)))
            if not self._is_here:
                handle.store(slot, received)
                handle.note_written([slot])
        for handle, flags in zip(self._handles, have, strict=False):
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


@contextmanager
def summoned(units: Sequence[Unit], keep_changes: bool, with_grads: bool, rank0_only: bool) -> Iterator[None]:
    """Collective. As `exposed`, in the forms of `Summoned`."""
    exposures: list[Exposure] = []
    try:
        for unit in units:
            exposures.append(Summoned(unit, keep_changes, with_grads, rank0_only))
        yield
    finally:
        close_all(exposures)
