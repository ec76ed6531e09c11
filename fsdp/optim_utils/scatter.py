"""Sharding of full optimizer states: a dictionary on each rank, rank 0's dictionary, or an optimizer's own state.

An optimizer that was created before the model was wrapped contains original parameters, which are no longer trained.
`reshard_optimizer` replaces each original by the current parameter (`OptimParam`). The state of the original, which is
equal on every rank, is sharded in the same way as the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fsdp.distributed.collectives import during
from fsdp.distributed.communicator import some_of
from fsdp.distributed.consensus import agree_on, done_by_all, sent_by_first, told_by_all
from fsdp.distributed.devices import HOST, is_host
from fsdp.engine.flat_param import FlatParameter
from fsdp.engine.names import paths_in
from fsdp.engine.originals import is_ours, taken_over
from fsdp.engine.unit import Unit, units_in
from fsdp.layers.optimizer_hooks import state_of
from fsdp.layers.optimizer_states import keys_with_elements, sign
from fsdp.layers.state_dict.full import ensure_agreed
from fsdp.layers.state_requests import FirstRank
from fsdp.optim_utils.full import ADDED, Given, given
from fsdp.optim_utils.gather import in_window
from fsdp.optim_utils.params import Parameters, held_by, parameters_of, root_of
from fsdp.optim_utils.state import (
    APART,
    Elements,
    Kinds,
    Number,
    OptimParam,
    Original,
    Value,
    common_kinds,
    is_same,
    kinds_of,
    match_groups,
    options_of,
    params_of,
    release,
)

_LOAD = "load its optimizer state"
Plans = dict[OptimParam, Kinds]  # the planned kinds of state of each parameter of the optimizer


def become_shard(model: nn.Module, full: dict[str, Any]) -> dict[str, Any]:
    """Turn a full optimizer state into this rank's shard of it, in place."""
    params = parameters_of(model, "shard an optimizer state")
    read = given(params, full)
    plans, groups = plans_for(params, read), groups_as_saved(params, read)
    full["state"] = {}  # so that each unsharded tensor is freed when it has been sharded
    states = shard_states(plans, read)
    full |= dictionary_of(groups, states, lambda one: state_of(one.param))
    for key in ADDED:
        full.pop(key, None)
    return full


def shard_full_optim_state_dict(model: nn.Module, full: Mapping[str, Any], optim: Any) -> dict[str, Any]:
    """Return this rank's shard of a full optimizer state, for ``optim.load_state_dict``. Not collective.

    Like `FullyShardedDataParallel.get_shard_from_optim_state_dict`, but `full` is not changed, names and numbers are
    supported, and the result uses the groups and numbers of `optim`.

    Args:
        model: the outermost wrapper.
        full: the state, by names, or by FairScale's numbers.
        optim: an optimizer of the model's parameters that will load the result.

    Raises:
        RuntimeError: inside a forward, backward or `summon_full_params`.
        TypeError: if `full` is not such a dictionary.
        ValueError: for the state of another model, or with different groups; for state that cannot be sharded.
    """
    params = parameters_of(model, "shard an optimizer state", optim)
    read = given(params, full)
    plans, groups = plans_for(params, read), groups_as_now(params, read, optim)
    states = shard_states(plans, read)
    return {**read.beside, **dictionary_of(groups, states, partial(_live, optim))}


@during("load_full_optim_state_dict()")
def load_full_optim_state_dict(model: nn.Module, optim: Any, full: Any, *, rank0_only: bool = False) -> None:
    """Collective. Load a full optimizer state; each rank keeps its shard.

    If there is an error on any rank, all ranks raise an error, and no optimizer is changed. Only an error of the
    optimizer's own ``load_state_dict`` on a rank, for example of a hook, leaves the other ranks' optimizers loaded.

    Args:
        model: the outermost wrapper.
        optim: an optimizer of its parameters.
        full: the state, by names or by FairScale's numbers; not changed.
        rank0_only: If True, use rank 0's state; other ranks pass None and receive their shards. Existing state of the
            optimizer is written in place, so these ranks need memory only for new state. With tensor parallelism, the
            first rank of every data-parallel group passes the state.

    Raises:
        RuntimeError: inside a forward, backward or `summon_full_params`; if another rank fails to load its state.
        TypeError, ValueError: the errors of `shard_full_optim_state_dict`.
    """
    root = root_of(model, optim)
    root.require_idle("load an optimizer state")
    ensure_agreed(root)
    ranks = root.everyone
    agree_on(ranks, "arguments to load an optimizer state", f"rank0_only={bool(rank0_only)}")
    if rank0_only:
        params = done_by_all([ranks], _LOAD, lambda: parameters_of(model, "load an optimizer state", optim))
        source = FirstRank(ranks)
        plans, found = described_by_first(params, source, full)
        groups = done_by_all([ranks], _LOAD, lambda: groups_as_now(params, found, optim))
        states = deal_states(params, plans, found, source, partial(_live, optim))
        shard = {**found.beside, **dictionary_of(groups, states, partial(_live, optim))}
    else:
        shard = done_by_all([ranks], _LOAD, lambda: shard_full_optim_state_dict(model, full, optim))
        agree_on(ranks, "parameter groups in the optimizer state to load", str(shard["param_groups"]))
    done_by_all([ranks], _LOAD, lambda: optim.load_state_dict(shard))  # which calls the user's hooks


def _live(optim: Any, one: OptimParam) -> Mapping[str, Any]:
    return optim.state.get(one.param, {}) if isinstance(optim, torch.optim.Optimizer) else {}


def plans_for(params: Parameters, full: Given) -> Plans:
    """Return the planned kinds of state of each parameter, which must be equal within a flat parameter."""
    with_state = {one for one, _ in full.states}
    has_elements = keys_with_elements((original.shape, state) for (_, original), state in full.states.items())
    return {one: _plan(one, full, has_elements) for one in params.listed if one in with_state and not one.is_bytes}


def _plan(one: OptimParam, full: Given, has_elements: Mapping[str, bool]) -> Kinds:
    states = full.states
    kinds: dict[Original, Kinds] = {}
    for original in one.originals:
        if (one, original) not in states:
            there = next(other for other in one.originals if (one, other) in states)
            raise ValueError(
                f"the optimizer state has {there.name}, but not {original.name}; the two are in one flat parameter. "
                f"{APART}"
            )
        state = states[one, original]
        kinds[original] = kinds_of(
            original.name, state, original.shape, has_elements, remedy=full.remedy, is_owned=one.is_owned
        )
    return common_kinds(kinds)


@torch.no_grad()
def shard_states(plans: Plans, full: Given) -> dict[OptimParam, dict[str, Any]]:
    """Return this rank's shards of all state, in new tensors on the host or on disk; `full` releases its tensors."""
    found = {}
    for one, kinds in plans.items():

        def vector_of(original: Original, key: str, one: OptimParam = one) -> Tensor:
            return one.local_vector(original, full.states[one, original].pop(key))

        found[one] = _state(one, kinds, _shards_of(one, kinds, vector_of, HOST))
    return found


def _shards_of(
    one: OptimParam, kinds: Kinds, vector_of: Callable[[Original, str], Tensor], device: torch.device
) -> dict[str, Tensor]:
    shards = {}
    for key, kind in kinds.items():
        if isinstance(kind, Elements):
            shards[key] = one.zeros(kind.dtype, device, kind.shape)
            for original in one.originals:
                one.shard(original, vector_of(original, key), shards[key], kind.shape)
    return shards


def _state(one: OptimParam, kinds: Kinds, shards: Mapping[str, Tensor]) -> dict[str, Any]:
    rank = one.comm.rank
    return {
        key: one.laid_out(shards[key]) if isinstance(kind, Elements) else _own(kind, rank)
        for key, kind in kinds.items()
    }


def _own(kind: Number | Value, rank: int) -> Any:
    """Return this rank's value of a list of values by rank; additional ranks use rank 0's value."""
    value = kind.held
    if isinstance(value, list) and value and all(isinstance(each, Tensor) and each.dim() == 0 for each in value):
        return value[rank if rank < len(value) else 0].detach().clone()
    return value


def groups_as_saved(params: Parameters, full: Given) -> list[tuple[dict[str, Any], list[OptimParam]]]:
    """Return the saved parameter groups, which must not divide a flat parameter, with the current parameters.

    If a saved group lists parameters in the order of the saved model, which depends on the wrapping, the result uses
    the order of this model. Any other order was chosen by the optimizer, and is kept.
    """
    before: dict[OptimParam, Original] = {}
    groups = []
    for number, (options, places) in enumerate(full.groups):
        present: dict[OptimParam, list[Original]] = {}
        for one, original in places:
            present.setdefault(one, []).append(original)
        for one, (first, *others) in present.items():
            lacking = [original for original in one.originals if original not in (first, *others)]
            if one in before or lacking:
                other = before.get(one) or lacking[0]
                raise ValueError(
                    f"the optimizer state has {first.name} in parameter group {number} and {other.name} not in it; the "
                    f"two are in one flat parameter. {APART} Or pass group_by, so that each group has separate flat "
                    "parameters."
                )
            before[one] = first
        members = [one for one in params.listed if one in present]
        if members != list(present) and full.order is None:
            raise ValueError(
                f"the optimizer state has names, and lists {places[0][1].name} and others in another order than this "
                "model, perhaps the optimizer's: pass the optimizer as well: "
                "fsdp.optim_utils.shard_full_optim_state_dict(model, full, optimizer)"
            )
        own = {*places}
        is_in_order = full.order is not None and places == [place for place in full.order if place in own]
        groups.append((options, members if is_in_order else list(present)))
    return groups


def groups_as_now(params: Parameters, full: Given, optim: Any) -> list[tuple[dict[str, Any], list[OptimParam]]]:
    """Return the optimizer's parameter groups, with the options of the corresponding saved groups."""
    now = optim.state_dict()
    held = held_by(params, optim, now)
    saved_in = {original: number for number, (_, places) in enumerate(full.groups) for _, original in places}
    empty = [number for number, (_, places) in enumerate(full.groups) if not places]
    numbers, problems = match_groups(held, saved_in.get, "the optimizer state", empty=empty)
    known = {one for members in held for one in members}
    strangers = [original.name for one, original in full.states if one not in known]
    if strangers:
        problems.append(f"the optimizer state has {strangers[0]}, but the optimizer does not")
    if problems:
        raise ValueError(f"{problems[0]}. Create the optimizer with the saved parameters and groups.")
    options = [
        options_of(group) if number is None else full.groups[number][0]
        for number, group in zip(numbers, now["param_groups"], strict=True)
    ]
    return list(zip(options, held, strict=True))


def dictionary_of(
    groups: Iterable[tuple[Mapping[str, Any], Sequence[OptimParam]]],
    states: Mapping[OptimParam, dict[str, Any]],
    live: Callable[[OptimParam], Mapping[str, Any]],
) -> dict[str, Any]:
    """Return an optimizer's dictionary for this rank, with parameters numbered as in torch's optimizers.

    A number is a tensor or a plain number, as in the optimizer's current state (`live`), because FairScale stores
    steps as plain numbers.
    """
    groups = list(groups)
    ids = {one: number for number, one in enumerate(one for _, members in groups for one in members)}
    typed = {
        one: {key: _as_type_of(live(one).get(key), value) for key, value in state.items()}
        for one, state in states.items()
    }
    found = {
        "state": {number: typed[one] for one, number in ids.items() if one in typed},
        "param_groups": [{**options, "params": [ids[one] for one in members]} for options, members in groups],
    }
    sign(found, (one.param for one in ids))
    return found


def _as_type_of(now: Any, value: Any) -> Any:
    if isinstance(now, Tensor) and now.dim() == 0 and isinstance(value, (int, float)):
        return torch.tensor(value, dtype=now.dtype, device=now.device)
    if isinstance(value, Tensor) and value.dim() == 0 and isinstance(now, (int, float)):
        return type(now)(value.item())
    return value


Described = tuple[list[tuple[int, Kinds]], list[tuple[dict[str, Any], list[int]]], dict[str, Any]]


def described_by_first(params: Parameters, source: FirstRank, full: Any) -> tuple[Plans, Given]:
    """Collective. Return the plans for rank 0's `full`, and its content, without the tensors on other ranks."""

    def job() -> tuple[tuple[Plans, Given] | None, Any]:
        if not source.is_here:
            return None, None
        read = given(params, full)
        plans = plans_for(params, read)
        described: Described = (
            [(params.numbers[one.originals[0]], kinds) for one, kinds in plans.items()],
            [(options, [params.numbers[original] for _, original in places]) for options, places in read.groups],
            read.beside,
        )
        return (plans, read), described

    own, told = told_by_all(source.ranks, _LOAD, job)
    if own is not None:
        return own
    heard: Described = told[0]
    found = {params.by_number[number][0]: plan for number, plan in heard[0]}
    states = {(one, original): dict[str, Any]() for one in found for original in one.originals}
    groups = [(options, [params.by_number[number] for number in numbers]) for options, numbers in heard[1]]
    return found, Given(states, groups, heard[2])


@torch.no_grad()
def deal_states(
    params: Parameters,
    plans: Plans,
    full: Given,
    source: FirstRank,
    present: Callable[[OptimParam], Mapping[str, Any]],
) -> dict[OptimParam, dict[str, Any]]:
    """Collective. Return this rank's shard of rank 0's `full`; rank 0 sends each shard to its rank.

    The tensors of the optimizer's current state (`present`) are reused if they fit.
    """
    shards: dict[OptimParam, dict[str, Tensor]] = {one: {} for one in plans}

    def jobs() -> Iterator[tuple[int, Callable[[], Callable[[], None]]]]:
        for one, kinds in plans.items():
            for key, kind in kinds.items():
                if isinstance(kind, Elements):
                    made = shards[one][key] = one.memory(present(one).get(key), kind.dtype, kind.shape)
                    values = [full.states[one, original].get(key) for original in one.originals]
                    if (one.comm, one.replicas) == tuple(source.ranks):
                        nbytes = one.param.numel() * one.comm.world_size * kind.dtype.itemsize
                        yield nbytes, partial(_deal, one, made, values, kind.shape)
                    else:  # a separate group, which is connected to rank 0 only through other groups
                        _share(one, made, values, source, kind.shape)

    for _ in in_window(jobs()):
        pass
    for comm in source.ranks:
        comm.settle()
    release(params.listed)
    return {one: _state(one, kinds, shards[one]) for one, kinds in plans.items()}


def _deal(
    one: OptimParam, made: Tensor, values: Sequence[Tensor | None], shape: torch.Size | None
) -> Callable[[], None]:
    """Start sending each rank the elements of its shard; return a function that waits for this rank's shard."""
    comm = one.comm
    arriving = made if made.device == one.device else torch.empty_like(made, device=one.device)
    flat = arriving.view(-1)
    incoming: dict[int, list[Tensor]] = {}
    outgoing: dict[int, list[Tensor]] = {}
    own: list[tuple[Original, Tensor]] = []
    for original, value in zip(one.originals, values, strict=True):
        if value is not None:
            vector = one.local_vector(original, value)
            own.append((original, vector))
            for rank in range(comm.world_size):
                there = one.interval(original, rank, shape)
                if there is not None and rank != comm.rank:
                    outgoing.setdefault(rank, []).append(vector[there.start : there.stop].to(one.device))
        elif one.replicas.rank == 0 and (mine := one.interval(original, comm.rank, shape)) is not None:
            incoming.setdefault(0, []).append(flat[mine.offset : mine.offset + mine.numel])
    pending = comm.exchange(incoming, outgoing, f"optimizer state of {one.name}", ("dealt", one.tag))
    for original, vector in own:  # while messages are in flight
        one.shard(original, vector, arriving, shape)

    def finish() -> None:
        pending.wait()
        if one.replicas.world_size > 1 and flat.numel():
            one.replicas.broadcast(flat.view(torch.uint8)).wait()
        if outgoing and not is_host(one.device):
            comm.settle()  # release the device copies for sending
        if arriving is not made:
            made.copy_(arriving)

    return finish


def _share(
    one: OptimParam, made: Tensor, values: Sequence[Tensor | None], source: FirstRank, shape: torch.Size | None
) -> None:
    """Send unsharded tensors to all ranks, which keep their shards."""
    for original, value in zip(one.originals, values, strict=True):
        vector = torch.empty(one.local_shape(original, shape).numel(), dtype=made.dtype, device=one.device)
        if value is not None:
            vector.copy_(one.local_vector(original, value))
        one.shard(original, sent_by_first(source.ranks, vector), made, shape)


_ANEW = "Create the optimizer after wrapping, from the wrapped model's parameters()."


@torch.no_grad()
def reshard_optimizer(root: Unit, optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> None:
    """Replace original parameters in an optimizer, and shard their state; an error leaves the optimizer unchanged.

    Units below `root` manage these parameters. `names` are the new parameters' names, for optimizers that store names.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"reshard_optimizer takes a torch.optim.Optimizer, got a {type(optimizer).__name__}")
    try:
        found = _held_originals(root, optimizer)
        kinds = _checked_kinds(optimizer, found)
    except ValueError as error:
        raise ValueError(f"this {type(optimizer).__name__} cannot be resharded: {error}") from None
    # Memory for the shards may be insufficient, so they are allocated before any change.
    states = {one: _sharded(optimizer, one, held, kinds[one]) for one, held in found.items()}
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for one, state in states.items():
        for held in found[one].values():
            optimizer.state.pop(held.param, None)
            replaced[held.param] = one.param
        if state:
            optimizer.state[one.param] = state
    for group in optimizer.param_groups:
        now = [replaced.get(param, param) for param in group["params"]]
        if "param_names" in group:
            pairs = zip(group["params"], now, group["param_names"], strict=True)
            named = {param: names.get(param, name) if param is not before else name for before, param, name in pairs}
            group["param_names"] = list(named.values())
        group["params"][:] = dict.fromkeys(now)  # in place, because some optimizers refer to this list elsewhere


class Held(NamedTuple):
    """An original parameter in an optimizer, with its group and state."""

    param: nn.Parameter
    group: int
    state: Mapping[str, Any]


HeldIn = dict[OptimParam, dict[Original, Held]]


def _held_originals(root: Unit, optimizer: torch.optim.Optimizer) -> HeldIn:
    """Return the originals in an optimizer by current parameter; the optimizer must not contain both."""
    places: dict[tuple[FlatParameter, int], tuple[OptimParam, Original]] = {}
    paths = paths_in(root.module)
    for unit in units_in(root):
        for handle in unit.handles:
            for one in params_of(handle, paths):
                places |= {(handle.flat_param, original.slot): (one, original) for original in one.originals}
    present = {param: None for group in optimizer.param_groups for param in group["params"]}
    _refuse_strangers(present, {flat_param for flat_param, _ in places})
    found: HeldIn = {}
    for number, group in enumerate(optimizer.param_groups):
        for param in dict.fromkeys(group["params"]):
            taken = taken_over(param)
            if taken is not None and taken.flat_param is not None:
                one, original = places[taken.flat_param(), taken.slot]  # type: ignore[index]
                found.setdefault(one, {})[original] = Held(param, number, optimizer.state.get(param, {}))
    for one, held in found.items():
        if one.param in present:
            raise ValueError(f"it holds {next(iter(held)).name} both as it was before wrapping and as it is now")
    return found


def _refuse_strangers(held: Iterable[Any], ours: set[FlatParameter]) -> None:
    summoned, strangers = [], []
    for param in held:
        taken = taken_over(param)
        if taken is not None and taken.flat_param is None:
            summoned.append(taken.description)
        elif taken is not None and taken.flat_param() not in ours:  # type: ignore[misc, operator]
            strangers.append(taken.description)
        elif is_ours(param) and param.owner._is_managed and param.owner not in ours:
            strangers.append(f"the shard with {param.owner._names[0]}")
    names = summoned or strangers
    listed = some_of(names)
    if summoned:
        raise ValueError(
            f"it was created inside summon_full_params() and has copies that are not trained: {listed}. {_ANEW}"
        )
    if strangers:
        raise ValueError(
            f"it holds parameters of another wrapped model, or of units around this one: {listed}. Call "
            "reshard_optimizer of the outermost FullyShardedDataParallel that they are all in; models that are wrapped "
            "separately need separate optimizers."
        )


def _checked_kinds(optimizer: torch.optim.Optimizer, found: HeldIn) -> dict[OptimParam, Kinds]:
    """Return the kinds of state of each new parameter, which must be equal for originals in a flat parameter."""
    states = optimizer.state.items()
    has_elements = keys_with_elements((param.shape, state) for param, state in states if isinstance(param, Tensor))
    kinds: dict[OptimParam, Kinds] = {}
    for one, held in found.items():
        _check_groups(optimizer, one, held)
        of_each = {}
        for original, (_, _, state) in () if one.is_bytes else held.items():
            for key, value in state.items():
                if type(value) is not Tensor and not (value is None or isinstance(value, (int, float, complex))):
                    raise ValueError(
                        f"the optimizer's state '{key}' of {original.name} is a {type(value).__name__}: only "
                        f"plain tensors and numbers can be sharded. {_ANEW}"
                    )
            of_each[original] = kinds_of(original.name, state, one.local_shape(original), has_elements, remedy=_ANEW)
        kinds[one] = common_kinds(of_each) if of_each else {}
    return kinds


def _check_groups(optimizer: torch.optim.Optimizer, one: OptimParam, held: Mapping[Original, Held]) -> None:
    first, group = next((original.name, each.group) for original, each in held.items())
    for original in one.originals:
        if original not in held:
            raise ValueError(f"it has {first}, but not {original.name}; the two are in one flat parameter. {APART}")
    for original, each in held.items():
        if each.group != group:
            options, others = (options_of(optimizer.param_groups[number]) for number in (group, each.group))
            different = [name for name in options if not is_same(options[name], others.get(name))]
            shown = ", ".join(f"{name} {options[name]} and {others.get(name)}" for name in different)
            raise ValueError(
                f"{first} is in its parameter group {group} and {original.name} in group {each.group}, with "
                f"{shown or 'the same options'}; the two are in one flat parameter. {APART}"
            )


def _sharded(
    optimizer: torch.optim.Optimizer, one: OptimParam, held: Mapping[Original, Held], kinds: Kinds
) -> dict[str, Any]:
    """Return this rank's shard of the originals' state, stored on the same device or disk as the parameter."""
    first = next(iter(held.values()))
    options = optimizer.param_groups[first.group]
    shards = _shards_of(one, kinds, lambda original, key: held[original].state[key].reshape(-1), one.param.device)
    return {key: shards[key] if key in shards else _kept(first.state[key], one.param.device, options) for key in kinds}


def _kept(value: Any, device: torch.device, options: Mapping[str, Any]) -> Any:
    if not isinstance(value, Tensor):
        return value
    # Step counts are on the host, except if the whole step runs on the device and requires them there.
    follows = options.get("fused") or options.get("capturable") or not value.is_cpu
    return value.to(device) if follows else value
