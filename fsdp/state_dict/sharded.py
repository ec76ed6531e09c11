"""Sharded state dicts: the state of a model with this rank's parts in the place of parameters.

As unsharded parameters are (`state_dict.summon`), the parts are registered in the modules for as long as the state is
taken or loaded, so that names, order and hooks are those of `nn.Module`. Nothing is gathered, and no memory is used.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.distributed.consensus import agree_on, done_by_all, number_among
from fsdp.distributed.dtensor import is_dtensor, local_part
from fsdp.engine.deferred_init import Uninitialized, memory_to_load_into, uninitialized_in
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.precision import BATCH_NORMS
from fsdp.engine.state_requests import ShardedState
from fsdp.engine.unit import Unit, own_modules, serving
from fsdp.state_dict.full import ensure_agreed, ensure_same_values
from fsdp.state_dict.load_targets import Held, LoadTarget, Part, TensorPart, part_of, recorded, recording, store
from fsdp.state_dict.summon import Exposure, beside_ours, for_each, hidden_handles

_VALUELESS = (
    "it has no values yet, because it was on the meta device when it was wrapped. Give it values first "
    "(fsdp.materialize, or a load)."
)


@contextmanager
def _parts(unit: Unit, rank: int, unfit: str) -> Iterator[list[TensorPart]]:
    """Show a unit's modules this rank's parts as their parameters inside. No rank needs another for it.

    None must be saved if there is a reason (`unfit`); `rank` is this rank's number for messages.
    """
    parts = {handle: _parts_of(handle, rank, unfit) for handle in hidden_handles(unit)}
    with closing(Exposure(unit, parts)):
        blanks = _show_blanks(unit, rank) if unit.awaits_values else []
        try:
            with serving([unit], ShardedState()):
                yield [part for each in parts.values() for part in each]
        finally:
            for blank in blanks:
                blank.take_back()


def _parts_of(handle: FlatParamHandle, rank: int, unfit: str) -> list[TensorPart]:
    _require_shards(handle)
    flats = handle.layout.local_shards(handle.flat_param.vector, handle.comm.rank)
    found = []
    for slot, flat in enumerate(flats):
        is_blank = slot in handle.valueless
        held = Held(flat, id(handle.flat_param), is_blank, _VALUELESS if is_blank else unfit)
        found.append(TensorPart.around(part_of(handle, slot, rank), held))
    return found


def _show_blanks(unit: Unit, rank: int) -> list[Uninitialized]:
    """Give buffers and ignored parameters without values memory that can be loaded, and cannot be saved."""
    found = []
    for blank in uninitialized_in(own_modules(unit.module)):
        if is_dtensor(blank.value):
            continue  # of which DCP takes care
        blank.give_memory(unit.device)
        given = blank.value
        if given is not None:
            part = Part.of_whole(given.shape, blank.places[0][1], rank)
            shown = TensorPart.around(part, Held(given.detach().reshape(-1), is_blank=True, unfit=_VALUELESS))
            blank.put(nn.Parameter(shown, given.requires_grad) if isinstance(given, nn.Parameter) else shown)
            found.append(blank)
    return found


def _require_shards(handle: FlatParamHandle) -> None:
    handle.storage.check(handle.name)
    handle.absorb()
    handle.refuse_lent("save or load its shards")
    handle.follow_shard()


# Taking


def sharded_state(root: Unit, units: Sequence[Unit], take: Callable[[], Any]) -> Any:
    """Collective the first time. Return the state that `take` finds in modules which show this rank's parts.

    Tensors that are not sharded are copied, since a load writes to what it is given.
    """
    ensure_agreed(root)
    unfit = ""
    try:
        ensure_same_values(root)
    except RuntimeError as error:
        unfit = str(error)  # it may be taken to load into it, which puts that right
    rank = number_among(root.everyone)
    with for_each(units, lambda unit: _parts(unit, rank, unfit)) as shown:
        state = take()
        apart = [part for parts, unit in zip(shown, units, strict=True) if _is_apart(unit, root) for part in parts]
    copies: dict[Any, Tensor] = {}  # tied tensors stay tied
    for key, value in state.items():
        if isinstance(value, TensorPart):
            if any(value.is_alias_of(part) for part in apart):
                value.refuse_key(key)
        elif isinstance(value, Tensor):
            place = (local_part(value).data_ptr(), value.shape, value.stride(), value.dtype)
            if place not in copies or value.numel() == 0:
                copies[place] = value.detach().clone()
            state[key] = copies[place]
    return state


def _is_apart(unit: Unit, root: Unit) -> bool:
    """Return True if other ranks of the root have other parameters under the names of this unit's."""
    ours, everyones = (math.prod(comm.world_size for comm in each.everyone) for each in (unit, root))
    # Batch norms that each rank trains for itself are saved as buffers are: those of some rank.
    is_own_norm = isinstance(unit.module, BATCH_NORMS) and unit.comm.world_size == 1
    return ours < everyones and not is_own_norm


# Loading


def load_sharded_state(root: Unit, units: Sequence[Unit], load: Callable[[], Any]) -> Any:
    """Collective. Keep what `load` loads into modules as if they were not sharded, if all ranks could load it.

    Otherwise parameters, and whatever else the modules of the units list, are as they were before.
    """
    ensure_agreed(root)
    everyone, rank = root.everyone, number_among(root.everyone)
    for handle in dict.fromkeys(handle for unit in units for handle in unit.visible_handles):
        _require_shards(handle)

    def check(handle: FlatParamHandle, slot: int, value: Tensor) -> None:
        part_of(handle, slot, rank).check(value, handle.flat_param.dtype)

    with for_each(units, lambda unit: closing(recording(unit, check))) as recordings, _kept_if_it_fails(units):
        result = done_by_all([everyone], "load its part of a sharded state", load)
        values = {key: value for each in recordings for key, value in recorded(each).items()}
        numbers = sorted((handle.number, slot) for handle, slot in values)  # which are alike on all ranks
        digest = hashlib.sha256(repr(numbers).encode()).hexdigest()
        shown_as = f"those of {len(numbers)} parameters ({digest[:8]})"
        agree_on(everyone, "keys in the sharded state that they load", digest, shown_as)
    store(values)
    return result


@contextmanager
def _kept_if_it_fails(units: Sequence[Unit]) -> Iterator[None]:
    """Undo what was written to buffers and parameters that are not sharded if the block raises an error.

    What has no values gets memory, which it keeps if values come.
    """
    modules = (module for unit in units for module in own_modules(unit.module))
    listed = dict.fromkeys(tensor for module in modules for *_, tensor in beside_ours(module))
    live = [tensor for tensor in listed if not isinstance(tensor, LoadTarget) and not tensor.is_meta]
    before = [(tensor, tensor.detach().clone()) for tensor in live]
    with memory_to_load_into(units) as given:
        try:
            yield
        except BaseException:
            with torch.no_grad():
                for tensor, value in before:
                    tensor.copy_(value)
            for each in given:
                each.take_back()
            raise
