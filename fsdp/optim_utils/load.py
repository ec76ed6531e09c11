"""Whole optimizer states, cut for a rank: from a dictionary that it has, or from the first rank, which alone has it."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsdp.distributed.consensus import done_by_all, from_everyone
from fsdp.engine.offload import DiskStorage
from fsdp.engine.optimizer_hooks import without_signature
from fsdp.engine.state_requests import FirstRank
from fsdp.optim_utils.full import Given, Place
from fsdp.optim_utils.params import Listed, Original, Parameters, held_by
from fsdp.optim_utils.stream import Window, is_number, odd_shape, release

_APART = "Wrap with use_orig_params=True, with which optimizers have each parameter by itself."


@dataclass(frozen=True)
class Plan:
    """What an optimizer is to have of one parameter that it sees.

    Attributes:
        elements: by key, the dtype of what is to be cut.
        numbers: by key, what every rank is to have; a list with one for each rank.
        order: all keys.
    """

    elements: dict[str, torch.dtype]
    numbers: dict[str, Any]
    order: list[str]


Plans = dict[Listed, Plan]


def plans_for(params: Parameters, full: Given) -> Plans:
    """What is to be had of each parameter.

    Raises:
        ValueError: for state that cannot be cut, or that parameters in one flat parameter do not have alike.
    """
    with_state = {one for one, _ in full.states}
    return {one: _plan(one, full.states) for one in params.listed if one in with_state}


def _plan(one: Listed, states: Mapping[Place, Mapping[str, Any]]) -> Plan:
    first = one.originals[0]
    for original in one.originals:
        if (one, original) not in states:
            there = next(other for other in one.originals if (one, other) in states)
            raise ValueError(
                f"the optimizer state has something of {there.name} and nothing of {original.name}; the two are in one "
                f"flat parameter. {_APART}"
            )
    kinds = {original: _kinds(one, original, states[one, original]) for original in one.originals}
    telling = next((kinds[original] for original in one.originals if original.shape), {})
    for original in one.originals:
        if not original.shape:  # whether its 0-d state is about it as a whole is told by what lies beside it
            kinds[original] |= {key: None for key in kinds[original] if telling.get(key, "") is None}
    for original in one.originals[1:]:
        if kinds[original] != kinds[first]:
            raise ValueError(
                f"the optimizer state of {first.name} is {_listing(kinds[first])}, and that of {original.name} is "
                f"{_listing(kinds[original])}; the two are in one flat parameter. {_APART}"
            )
        for key in states[one, first]:
            if kinds[first][key] is None and not _same(states[one, first][key], states[one, original][key]):
                values = [_shown(states[one, other][key]) for other in (first, original)]
                raise ValueError(
                    f"the optimizer's state '{key}' of {first.name} is {values[0]}, and of {original.name} "
                    f"{values[1]}; the two are in one flat parameter. {_APART}"
                )
    numbers = {key: states[one, first][key] for key, dtype in kinds[first].items() if dtype is None}
    elements = {key: dtype for key, dtype in kinds[first].items() if dtype is not None}
    return Plan(elements, numbers, list(kinds[first]))


def _kinds(one: Listed, original: Original, state: Mapping[str, Any]) -> dict[str, torch.dtype | None]:
    """By key, the dtype of what has a value for each element; None for what is about the parameter as a whole."""
    found: dict[str, torch.dtype | None] = {}
    for key, value in state.items():
        if not isinstance(value, Tensor) or (value.dim() == 0 and (original.shape or is_number(key))):
            found[key] = None
        elif value.shape == original.shape:
            found[key] = value.dtype
        else:
            raise ValueError(
                odd_shape(
                    Listed(one.param, None, (original,)), key, value.shape, f"the parameter has {tuple(original.shape)}"
                )
            )
    return found


def _listing(kinds: Mapping[str, torch.dtype | None]) -> str:
    return ", ".join(f"'{key}'" + (f" ({dtype})" if dtype else "") for key, dtype in kinds.items()) or "nothing"


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def _shown(value: Any) -> str:
    return str(value.item() if isinstance(value, Tensor) and value.dim() == 0 else value)


# --- cutting --------------------------------------------------------------------------------------------------------


def blank(one: Listed, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """Zeros in the likeness of what an optimizer sees; of what lives on disk, there."""
    if one.handle is not None and isinstance(one.handle.storage, DiskStorage):
        return torch.zeros_like(one.param, dtype=dtype)
    return torch.zeros(one.param.shape, dtype=dtype, device=device or torch.device("cpu"))


@torch.no_grad()
def cut_states(plans: Plans, full: Given, is_consumed: bool = False) -> dict[Listed, dict[str, Any]]:
    """This rank's part of everything, in tensors of its own.

    Args:
        plans: what is wanted.
        full: the whole values.
        is_consumed: take from `full` what has been cut, so that memory is given back as it goes.
    """
    found = {}
    for one, plan in plans.items():
        cut = {key: _cut(one, key, dtype, full, is_consumed) for key, dtype in plan.elements.items()}
        found[one] = _state(one, plan, cut)
        if is_consumed:
            for original in one.originals:
                full.states[one, original].clear()
    return found


def _cut(one: Listed, key: str, dtype: torch.dtype, full: Given, is_consumed: bool) -> Tensor:
    made = blank(one, dtype)
    for original in one.originals:
        state = full.states[one, original]
        kept = one.interval(original, one.comm.rank)
        if kept is not None:
            values = one.cut(original, state[key])
            made.view(-1)[kept.offset : kept.offset + kept.numel].copy_(values[kept.start : kept.stop])
        if is_consumed:
            del state[key]
    return made


def _state(one: Listed, plan: Plan, cut: Mapping[str, Tensor]) -> dict[str, Any]:
    return {key: cut[key] if key in cut else _own(plan.numbers[key], one.comm.rank) for key in plan.order}


def _own(value: Any, rank: int) -> Any:
    """What this rank has of a value that ranks may have different ones of; those that came later have the first's."""
    if isinstance(value, list) and value and all(isinstance(each, Tensor) and each.dim() == 0 for each in value):
        value = value[rank] if rank < len(value) else value[0]
    return value.detach().clone() if isinstance(value, Tensor) else value


def have_types(state: dict[str, Any], live: Mapping[str, Any]) -> None:
    """Have numbers be tensors, or the other way round, as an optimizer has them now: FairScale counts steps by numbers.

    Args:
        state: cut for a parameter; it is changed.
        live: what the optimizer has of it now.
    """
    for key, value in state.items():
        now = live.get(key)
        if isinstance(now, Tensor) and now.dim() == 0 and isinstance(value, (int, float)):
            state[key] = torch.tensor(value, dtype=now.dtype, device=now.device)
        elif isinstance(value, Tensor) and value.dim() == 0 and isinstance(now, (int, float)):
            state[key] = type(now)(value.item())


# --- dictionaries for the optimizer ---------------------------------------------------------------------------------


def groups_as_saved(full: Given) -> list[tuple[dict[str, Any], list[Listed]]]:
    """The parameter groups with what an optimizer sees now.

    Raises:
        ValueError: for groups that divide a flat parameter.
    """
    where: dict[Listed, tuple[int, Original]] = {}
    groups = []
    for number, (options, places) in enumerate(full.groups):
        present = set(places)
        members = list(dict.fromkeys(one for one, _ in places))
        for one in members:
            lacking = [original for original in one.originals if (one, original) not in present]
            if one in where or lacking:
                first = next(original for other, original in places if other is one)
                other = where[one][1] if one in where else lacking[0]
                raise ValueError(
                    f"the optimizer state has {first.name} in parameter group {number} and {other.name} not in it; the "
                    f"two are in one flat parameter. {_APART} Or give group_by, so that each group has flat parameters "
                    "of its own."
                )
            where[one] = number, next(original for other, original in places if other is one)
        groups.append((options, members))
    return groups


def groups_as_now(params: Parameters, full: Given, optim: Any) -> list[tuple[dict[str, Any], list[Listed]]]:
    """The optimizer's own parameter groups, each with the options of the saved one that has its parameters.

    Raises:
        ValueError: for a group of which the saved ones have only a part, or which several of them have.
    """
    dictionary = without_signature(optim.state_dict())
    held = held_by(params, optim, [len(group["params"]) for group in dictionary["param_groups"]])
    saved = {place: number for number, (_, places) in enumerate(full.groups) for place in places}
    groups = []
    for number, members in enumerate(held):
        found: dict[int, str] = {}
        for one in members:
            for original in one.originals:
                if (one, original) not in saved:
                    raise ValueError(
                        f"the optimizer has {original.name} in its parameter group {number}, and the optimizer state "
                        "has it in none. Make the optimizer with the same parameters as the one that was saved."
                    )
                found.setdefault(saved[one, original], original.name)
        if len(found) > 1:
            (one_group, one_name), (other_group, other_name) = list(found.items())[:2]
            raise ValueError(
                f"the optimizer has {one_name} and {other_name} in one parameter group ({number}), and the optimizer "
                f"state has them in groups {one_group} and {other_group}. Make the optimizer with the same groups."
            )
        options = full.groups[next(iter(found))][0] if found else {}
        groups.append((options, members))
    known = {one for members in held for one in members}
    strangers = [original.name for one, original in full.states if one not in known]
    if strangers:
        raise ValueError(
            f"the optimizer state has something of {strangers[0]}, and the optimizer has not. Make it with the "
            "same parameters."
        )
    return groups


def dictionary_of(
    groups: Iterable[tuple[Mapping[str, Any], Sequence[Listed]]], states: Mapping[Listed, dict[str, Any]]
) -> dict[str, Any]:
    """An optimizer's own dictionary for this rank: parameters are numbered as torch's optimizers do."""
    groups = list(groups)
    ids = {one: number for number, one in enumerate(one for _, members in groups for one in members)}
    return {
        "state": {number: states[one] for one, number in ids.items() if one in states},
        "param_groups": [{**options, "params": [ids[one] for one in members]} for options, members in groups],
    }


# --- from the first rank --------------------------------------------------------------------------------------------

Described = tuple[list[tuple[int, Plan]], list[tuple[dict[str, Any], list[int]]], dict[str, Any]]


def described_by_first(
    params: Parameters, source: FirstRank, read: Callable[[], tuple[Plans, Given]]
) -> tuple[Plans, Given]:
    """Collective. What the first rank has read, on other ranks without any tensor.

    Args:
        params: of the model.
        source: the first rank.
        read: called there.

    Raises:
        Exception: what `read` raises; on the other ranks a RuntimeError with it.
    """

    def job() -> tuple[bytes, Plans, Given]:
        if not source.is_here:
            return b"", {}, Given({}, [], {})
        plans, full = read()
        described: Described = (
            [(one.originals[0].number, plan) for one, plan in plans.items()],
            [(options, [original.number for _, original in places]) for options, places in full.groups],
            full.beside,
        )
        return pickle.dumps(described), plans, full

    payload, plans, full = done_by_all([source.ranks], "load its optimizer state", job)
    heard: Described = pickle.loads(from_everyone(source.ranks, payload)[0])
    if source.is_here:
        return plans, full
    found = {params.by_number[number][0]: plan for number, plan in heard[0]}
    states = {(one, original): dict[str, Any]() for one in found for original in one.originals}
    groups = [(options, [params.by_number[number] for number in numbers]) for options, numbers in heard[1]]
    return found, Given(states, groups, heard[2])


@torch.no_grad()
def deal_states(
    params: Parameters, plans: Plans, full: Given, source: FirstRank, present: Callable[[Listed, str], Any]
) -> dict[Listed, dict[str, Any]]:
    """Collective. This rank's part of what the first rank has, which sends each part to the rank that keeps it.

    Args:
        params: of the model.
        plans: what is wanted.
        full: on the first rank the whole values.
        source: the first rank.
        present: what the optimizer has now under a key of the state; it is written to if it fits.
    """
    cut: dict[Listed, dict[str, Tensor]] = {one: {} for one in plans}
    window = Window()
    for one, plan in plans.items():
        for key, dtype in plan.elements.items():
            nbytes = one.param.numel() * one.comm.world_size * dtype.itemsize
            while not window.has_room(nbytes):
                window.first()
            made = present(one, key)
            if not _fits(one, made, dtype):
                made = blank(one, dtype, one.param.device)
            cut[one][key] = made
            values = [full.states[one, original].get(key) for original in one.originals]
            if (one.comm, one.replicas) == tuple(source.ranks):
                window.add(_deal(one, made, values, source), nbytes)
            else:  # it has ranks of its own, which only together with others reach the first one
                _share(one, made, values, source)
    while window:
        window.first()
    for comm in source.ranks:
        comm.settle()
    release(params)
    return {one: _state(one, plan, cut[one]) for one, plan in plans.items()}


def _fits(one: Listed, made: Any, dtype: torch.dtype) -> bool:
    """Whether a tensor is like those that `blank` makes."""
    wanted = one.param.shape, dtype, one.param.device
    return isinstance(made, Tensor) and (made.shape, made.dtype, made.device) == wanted and made.is_contiguous()


def _deal(one: Listed, made: Tensor, values: Sequence[Tensor | None], source: FirstRank) -> Callable[[], Any]:
    """Begin to send to each rank the elements that it keeps."""
    comm = one.comm
    arriving = made if made.device == one.device else torch.empty_like(made, device=one.device)
    flat = arriving.view(-1)
    incoming: dict[int, list[Tensor]] = {}
    outgoing: dict[int, list[Tensor]] = {}
    kept: list[tuple[Tensor, Tensor]] = []
    for original, value in zip(one.originals, values, strict=True):
        mine = one.interval(original, comm.rank)
        if value is not None:
            whole = one.cut(original, value)
            for rank in range(comm.world_size):
                there = one.interval(original, rank)
                if there is not None and rank != comm.rank:
                    part = whole[there.start : there.stop].to(one.device)
                    outgoing.setdefault(rank, []).append(part)
            if mine is not None:
                kept.append((flat[mine.offset : mine.offset + mine.numel], whole[mine.start : mine.stop]))
        elif mine is not None and one.replicas.rank == 0:
            incoming.setdefault(0, []).append(flat[mine.offset : mine.offset + mine.numel])
    pending = None
    if (incoming or outgoing) and one.handle is not None:
        pending = comm.exchange(incoming, outgoing, f"optimizer state of {one.name}", ("dealt", one.handle.tag))
    for place, part in kept:  # while the others are on their way
        place.copy_(part)

    def finish() -> None:
        if pending is not None:
            pending.wait()
        if one.replicas.world_size > 1 and flat.numel():
            one.replicas.broadcast(flat.view(torch.uint8)).wait()
        if outgoing and one.device.type != "cpu":
            comm.settle()  # what was brought to the device only to be sent can go
        if arriving is not made:
            made.copy_(arriving)

    return finish


def _share(one: Listed, made: Tensor, values: Sequence[Tensor | None], source: FirstRank) -> None:
    """Send whole tensors to everybody, who keeps a part."""
    for original, value in zip(one.originals, values, strict=True):
        whole = torch.empty(one.kept_shape(original), dtype=made.dtype, device=one.device).view(-1)
        if value is not None:
            whole.copy_(one.cut(original, value))
        for comm in reversed(list(source.ranks)):
            if comm.world_size > 1 and whole.numel():
                comm.broadcast(whole.view(torch.uint8)).wait()
        mine = one.interval(original, one.comm.rank)
        if mine is not None:
            made.view(-1)[mine.offset : mine.offset + mine.numel].copy_(whole[mine.start : mine.stop])
