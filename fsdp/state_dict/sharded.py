"""Sharded state dicts: the state of a model with this rank's parts in the place of whole parameters.

As for whole parameters (`state_dict.exposure`), the parts are registered in the modules for as long as the state is
taken or loaded, so that names, order and hooks are those of `nn.Module`. Nothing is gathered, and no memory is used.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.distributed.dtensor import is_dtensor, local_part
from fsdp.engine.agreement import agree_on, agree_on_outcome, number_among
from fsdp.engine.blanks import Blank, blanks_in
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.managed_params import is_ours
from fsdp.engine.precision import BATCH_NORMS
from fsdp.engine.unit import Unit, own_modules
from fsdp.state_dict.exposure import Exposure, close_all, listed_at
from fsdp.state_dict.full import ensure_agreed, ensure_same_values
from fsdp.state_dict.tensor_part import Held, Part, Target, TensorPart

_VALUELESS = (
    "it has no values yet, because it was on the meta device when it was wrapped. Give it values first "
    "(fsdp.materialize, or a load)."
)


class _Parts(Exposure):
    """One unit's modules with this rank's parts as their parameters, until closed. No rank needs another for it.

    Args:
        unit: whose parameters.
        rank: this rank's number, for messages.
        kind: of what is shown.
        unfit: why none of it must be saved; empty if it may be.
    """

    def __init__(self, unit: Unit, rank: int, kind: type[TensorPart], unfit: str = "") -> None:
        self._rank, self._kind, self._unfit = rank, kind, unfit
        super().__init__(unit, keep_changes=False)
        unit.access.shows_parts = True
        self._blanks: list[Blank] = []
        if kind is TensorPart and unit.awaits_values:
            self._show_blanks()

    def close(self) -> None:
        for blank in self._blanks:
            blank.take_back()
        self._unit.access.shows_parts = False
        super().close()

    @property
    def unit(self) -> Unit:
        return self._unit

    @property
    def parts(self) -> Iterator[TensorPart]:
        """What stands for the parameters."""
        params: Iterator[Any] = (listed_at(places[0]) for handle in self._handles for places in handle.places)
        return (param for param in params if isinstance(param, TensorPart))

    def _values(self, handle: FlatParamHandle) -> list[Tensor]:
        handle.storage.check(handle.name)
        handle.absorb()
        handle.refuse_lent("save or load its shards")
        handle.follow_shard()
        shard = handle.flat_param.vector
        flats = handle.layout.parts(shard, handle.comm.rank)
        return [
            self._kind.around(self._part(handle, slot), self._held(handle, slot, flat))
            for slot, flat in enumerate(flats)
        ]

    def _part(self, handle: FlatParamHandle, slot: int) -> Part:
        kept, mesh = handle.layout.slots[slot], handle.flat_param.parts[slot]
        interval = handle.layout.interval(slot, handle.comm.rank)
        start, stop = (interval.start, interval.stop) if interval is not None else (0, 0)
        shape = kept.shape if mesh is None else mesh.shape
        offsets = (0,) * len(shape) if mesh is None else mesh.offsets
        is_alone = not handle.is_sharded and (mesh is None or not mesh.sharded_dims)
        return Part(shape, kept.shape, offsets, start, stop, kept.name, self._rank, is_alone)

    def _held(self, handle: FlatParamHandle, slot: int, flat: Tensor) -> Held:
        is_blank = slot in handle.valueless
        return Held(
            flat, lent_by=id(handle.flat_param), is_blank=is_blank, unfit=_VALUELESS if is_blank else self._unfit
        )

    def _show_blanks(self) -> None:
        """Buffers and ignored parameters without values: memory that can be loaded, and is not saved by mistake."""
        for blank in blanks_in(own_modules(self._unit.module)):
            if is_dtensor(blank.value):
                continue  # of which DCP takes care
            blank.give_memory(self._unit.device)
            given = blank.value
            if given is not None:
                part = Part.of_whole(given.shape, blank.places[0][1], self._rank)
                shown = TensorPart.around(part, Held(given.detach().reshape(-1), is_blank=True, unfit=_VALUELESS))
                blank.put(nn.Parameter(shown, given.requires_grad) if isinstance(given, nn.Parameter) else shown)
                self._blanks.append(blank)

    def received(self) -> Iterator[tuple[FlatParamHandle, int, Tensor]]:
        """What was loaded."""
        for handle in self._handles:
            for slot, places in enumerate(handle.places):
                param: Any = listed_at(places[0])
                if isinstance(param, Target) and param.received is not None:
                    yield handle, slot, param.received


@contextmanager
def _parts_of(units: Sequence[Unit], rank: int, kind: type[TensorPart], unfit: str = "") -> Iterator[list[_Parts]]:
    shown: list[_Parts] = []
    try:
        for unit in units:
            shown.append(_Parts(unit, rank, kind, unfit))
        yield shown
    finally:
        close_all(shown)


# Taking


def sharded_state(root: Unit, units: Sequence[Unit], take: Callable[[], Any]) -> Any:
    """Collective the first time. The state that `take` finds in modules which show this rank's parts.

    Tensors that are not sharded are copied, since a load writes to what it is given.
    """
    ensure_agreed(root)
    unfit = ""
    try:
        ensure_same_values(root)
    except RuntimeError as error:
        unfit = str(error)  # it may be taken to load into it, which puts that right
    with _parts_of(units, number_among(root.everyone), TensorPart, unfit) as shown:
        state = take()
        _note_apart(state, [part for each in shown if _is_apart(each.unit, root) for part in each.parts])
    copies: dict[Any, Tensor] = {}  # tied tensors stay tied
    for key, value in state.items():
        if isinstance(value, Tensor) and not isinstance(value, TensorPart):
            place = (local_part(value).data_ptr(), value.shape, value.stride(), value.dtype)
            if place not in copies or value.numel() == 0:
                copies[place] = value.detach().clone()
            state[key] = copies[place]
    return state


def _is_apart(unit: Unit, root: Unit) -> bool:
    """Whether other ranks of the root have other parameters under the names of this unit's."""
    ours, everyones = (math.prod(comm.world_size for comm in each.everyone) for each in (unit, root))
    # Batch norms that each rank trains for itself are saved as buffers are: those of some rank.
    is_own_norm = isinstance(unit.module, BATCH_NORMS) and unit.comm.world_size == 1
    return ours < everyones and not is_own_norm


def _note_apart(state: Any, parts: Sequence[TensorPart]) -> None:
    for key, value in state.items():
        if isinstance(value, TensorPart) and any(value.is_alias_of(part) for part in parts):
            value.refuse_key(key)


# Loading


def load_sharded_state(root: Unit, units: Sequence[Unit], load: Callable[[], Any]) -> Any:
    """Collective. What `load` loads into modules as if they had whole parameters is kept, if all ranks could load it.

    Otherwise parameters, and whatever else the modules of the units list, are as they were before.

    Returns:
        What `load` returns.
    """
    ensure_agreed(root)
    everyone = root.everyone
    with _parts_of(units, number_among(everyone), Target) as shown, _kept_if_it_fails(units):
        error = result = None
        try:
            result = load()
        except Exception as found:  # noqa: BLE001 (whatever a hook raises, the other ranks must hear of it)
            error = found
        agree_on_outcome([everyone], "load its part of a sharded state", error)
        received = [one for each in shown for one in each.received()]
        numbers = sorted((handle.number, slot) for handle, slot, _ in received)  # which are alike on all ranks
        digest = hashlib.sha256(repr(numbers).encode()).hexdigest()
        shown_as = f"those of {len(numbers)} parameters ({digest[:8]})"
        agree_on(everyone, "keys in the sharded state that they load", digest, shown_as)
    for handle in dict.fromkeys(handle for handle, _, _ in received):
        handle.settle()
    for handle, slot, value in received:
        _keep(handle, slot, value)
    return result


def _keep(handle: FlatParamHandle, slot: int, value: Tensor) -> None:
    handle.storage.check(handle.name)
    if isinstance(value, TensorPart) and value.is_lent_by(handle.flat_param):
        return  # nothing was loaded, on no rank, so values that ranks were wrapped with are still to be compared
    if isinstance(value, TensorPart):
        handle.fill(slot, partial(_copy, value.local))
    else:
        handle.store(slot, value)
        handle.note_written([slot])
    handle.storage.release()


def _copy(flat: Tensor, shard: Tensor, start: int) -> None:
    shard.copy_(flat)


@contextmanager
def _kept_if_it_fails(units: Sequence[Unit]) -> Iterator[None]:
    """Undo what was written to buffers and parameters that are not sharded if the block raises an error.

    What has no values gets memory, which it keeps if values come.
    """
    modules = [module for unit in units for module in own_modules(unit.module)]
    blanks = [(blank, unit) for unit in units if unit.awaits_values for blank in blanks_in(own_modules(unit.module))]
    listed = (tensor for module in modules for tensor in (*module._parameters.values(), *module._buffers.values()))
    live = [tensor for tensor in listed if tensor is not None and not tensor.is_meta and not _is_shown(tensor)]
    before = [(tensor, tensor.detach().clone()) for tensor in dict.fromkeys(live)]
    for blank, unit in blanks:
        blank.give_memory(unit.device)
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for tensor, value in before:
                tensor.copy_(value)
        for blank, _ in blanks:
            blank.take_back()
        raise
    for blank, _ in blanks:
        blank.keep_if_filled()


def _is_shown(tensor: Tensor) -> bool:
    return isinstance(tensor, TensorPart) or is_ours(tensor)
