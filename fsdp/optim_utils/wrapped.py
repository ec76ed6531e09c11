"""The state of optimizers of a wrapped model: gathered, sharded, and loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fsdp.engine.agreement import done_by_all
from fsdp.engine.optimizer_hooks import state_of
from fsdp.engine.state_requests import FirstRank
from fsdp.engine.unit import Unit, unit_of_wrapper
from fsdp.optim_utils.full import ADDED, Given, given
from fsdp.optim_utils.load import (
    Plans,
    cut_states,
    deal_states,
    described_by_first,
    dictionary_of,
    groups_as_now,
    groups_as_saved,
    have_types,
    plans_for,
)
from fsdp.optim_utils.params import OwnState, Parameters, own_state, require_shards
from fsdp.optim_utils.state import OptimParam
from fsdp.optim_utils.stream import OptimStream
from fsdp.state_dict.full import ensure_agreed

_LOAD = "load its optimizer state"


def root_of(model: Any) -> Unit:
    """Return the unit of an outermost wrapper.

    Raises:
        TypeError: for anything else.
    """
    root = unit_of_wrapper(model)
    if root is None:
        raise TypeError(f"the outermost FullyShardedDataParallel is needed, got a {type(model).__name__}")
    return root


def is_uncollected(unit: Unit, root: Unit) -> bool:
    """Return whether a unit's optimizer state is left out of the gathered one.

    It is if that was asked for, or if the first rank has all of it: of a unit of one rank in a sharded model.
    """
    is_alone = unit.comm.world_size == 1 < root.comm.world_size and unit is not root
    return is_alone or unit.settings["no_broadcast_optim_state"]


def parameters_of(model: nn.Module, what: str) -> Parameters:
    """Return what an optimizer of the model may see.

    Raises:
        RuntimeError: inside a forward, backward or `summon_full_params`.
    """
    root = root_of(model)
    root.require_idle(what)
    require_shards(root, what)
    return Parameters(model, root, lambda unit: is_uncollected(unit, root))


def optim_stream(model: nn.Module, optim: Any, recipient: int | None) -> OptimStream:
    """Collective. Return the unsharded state of an optimizer, tensor by tensor."""
    root, what = root_of(model), "gather an optimizer state"
    root.require_idle(what)
    ensure_agreed(root)
    ranks = root.everyone
    size = ranks[0].world_size * ranks[1].world_size
    if recipient is not None and not 0 <= recipient < size:
        raise ValueError(f"recipient_rank must be None or one of the {size} ranks, got {recipient}")

    def job() -> tuple[Parameters, OwnState]:
        params = parameters_of(model, what)
        return params, own_state(params, optim)

    params, own = done_by_all([ranks], "gather its optimizer state", job)
    return OptimStream(params, own, recipient)


def become_shard(model: nn.Module, full: dict[str, Any]) -> dict[str, Any]:
    """Turn a full optimizer state into this rank's part of it, in place."""
    params = parameters_of(model, "shard an optimizer state")
    read = given(params, full)
    plans, groups = plans_for(params, read), groups_as_saved(read)
    states = cut_states(plans, read, is_consumed=True)
    for one, state in states.items():
        have_types(state, state_of(one.param))
    full |= dictionary_of(groups, states)
    for key in ADDED:
        full.pop(key, None)
    return full


def shard_for(model: nn.Module, full: Mapping[str, Any], optim: Any) -> dict[str, Any]:
    """Return this rank's part of a full optimizer state as this optimizer has it; `full` is left alone."""
    params = parameters_of(model, "shard an optimizer state")
    read = given(params, full)
    plans, groups = plans_for(params, read), groups_as_now(params, read, optim)
    states = cut_states(plans, read)
    for one, state in states.items():
        have_types(state, _live(optim, one))
    return {**read.beside, **dictionary_of(groups, states)}


def load_full(model: nn.Module, optim: Any, full: Any, rank0_only: bool) -> None:
    """Collective. Load a full optimizer state, which only the first rank has with `rank0_only`."""
    root = root_of(model)
    root.require_idle("load an optimizer state")
    ensure_agreed(root)
    ranks = root.everyone
    if rank0_only:
        params = done_by_all([ranks], _LOAD, lambda: parameters_of(model, "load an optimizer state"))
        shard = _from_first(params, optim, full, FirstRank(ranks))
    else:
        shard = done_by_all([ranks], _LOAD, lambda: shard_for(model, full, optim))
    optim.load_state_dict(shard)


def _from_first(params: Parameters, optim: Any, full: Any, source: FirstRank) -> dict[str, Any]:
    def read() -> tuple[Plans, Given]:
        found = given(params, full)
        return plans_for(params, found), found

    plans, found = described_by_first(params, source, read)
    groups = done_by_all([source.ranks], _LOAD, lambda: groups_as_now(params, found, optim))
    states = deal_states(params, plans, found, source, lambda one, key: _live(optim, one).get(key))
    for one, state in states.items():
        have_types(state, _live(optim, one))
    return {**found.beside, **dictionary_of(groups, states)}


def _live(optim: Any, one: OptimParam) -> Mapping[str, Any]:
    """Return what an optimizer has of a parameter now."""
    return optim.state.get(one.param, {}) if isinstance(optim, torch.optim.Optimizer) else {}
