"""The state of an optimizer in a checkpoint: tensors of the parameters' shapes, under ``<name>/<key>``, and the rest.

What has a value for each element of a parameter lies in an optimizer as the parameter's elements lie in the shard, or
in this rank's piece. So it is written and read by the same ranges. Numbers (``step``) and other values are in the
manifest, by the parameter's name, as are the parameter groups.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fsdp.checkpoint.formats.source import TensorReader
from fsdp.checkpoint.json_values import decoded, encoded, problem_of
from fsdp.checkpoint.model import Stored, parts_of
from fsdp.checkpoint.model_tensors import SlotTensor
from fsdp.checkpoint.safetensors import DTYPES
from fsdp.checkpoint.safetensors_writer import KINDS, Entry, Part
from fsdp.checkpoint.several import kind_of
from fsdp.checkpoint.untrusted import short
from fsdp.distributed.consensus import Ranks, from_everyone
from fsdp.distributed.dtensor import local_part
from fsdp.engine.layout import Interval
from fsdp.engine.managed_params import owner_of
from fsdp.engine.offload import DiskStorage
from fsdp.engine.optimizer_hooks import unsigned_options
from fsdp.optim_utils.stream import is_number

ELEMENTS, NUMBER, VALUE = "elements", "number", "value"
_NAMES = "param_names"  # torch's own, if the optimizer was given names
# By the key of the state: one of the three words, and the dtype or the value.
Kinds = dict[str, list[Any]]


class Member(NamedTuple):
    """An original parameter: its name in the checkpoint, and where its elements are in what the optimizer sees."""

    name: str
    target: Stored
    interval: Interval | None


@dataclass(frozen=True, eq=False)
class Seen:
    """What an optimizer sees: a shard, a piece of one, or a parameter that is not sharded; and what is in it."""

    param: nn.Parameter
    members: list[Member]

    @property
    def has_part(self) -> bool:
        """Whether this rank has elements of it."""
        return any(member.interval is not None for member in self.members)

    @property
    def name(self) -> str:
        """For messages."""
        more = f" (in one flat parameter with {len(self.members) - 1} more)" if len(self.members) > 1 else ""
        return self.members[0].name + more


def seen_by(optimizer: Any, tensors: Mapping[str, Stored]) -> list[list[Seen]]:
    """What is in each parameter group of an optimizer.

    Raises:
        TypeError: for what is no optimizer.
        ValueError: for parameters that are not the model's.
    """
    if not all(hasattr(optimizer, name) for name in ("param_groups", "state", "load_state_dict")):
        raise TypeError(f"an optimizer with param_groups, state and load_state_dict is needed, got {optimizer!r}")
    known: dict[int, Seen] = {}
    for name, target in tensors.items():
        param, interval = _place(target)
        if isinstance(param, nn.Parameter):
            known.setdefault(id(param), Seen(param, [])).members.append(Member(name, target, interval))
    for number, group in enumerate(optimizer.param_groups):
        for place, param in enumerate(group["params"]):
            if id(param) not in known:
                raise ValueError(
                    f"{kind_of(optimizer)}: parameter {place} of group {number}, of shape {list(param.shape)}, "
                    "is not of this model as it is wrapped now. Make the optimizer from model.parameters(), or hand "
                    "over one that was made before wrapping (reshard_optimizer)."
                )
    return [[known[id(param)] for param in group["params"]] for group in optimizer.param_groups]


def _place(target: Stored) -> tuple[Tensor, Interval | None]:
    """What an optimizer sees of a tensor, and where this rank's elements are in it."""
    if not isinstance(target, SlotTensor):
        count = target.shape.numel()
        return target.tensor, Interval(0, 0, count, 0) if count else None
    handle = target.handle
    interval = handle.layout.interval(target.slot, handle.comm.rank)
    if handle.pieces is None:
        return handle.flat_param, interval
    own = None if interval is None else Interval(target.slot, interval.start, interval.stop, 0)
    return handle.pieces.params[target.slot], own


# Saving


def kinds_on_rank(optimizer: Any, groups: Sequence[Sequence[Seen]]) -> list[Any]:
    """What this rank has of the state of each parameter, for the other ranks.

    Raises:
        ValueError: for a tensor that is neither of the parameter's shape nor a number.
        TypeError: for values that no checkpoint can hold.
    """
    found = []
    for seen in (seen for group in groups for seen in group):
        state = optimizer.state.get(seen.param) or {}
        owner = owner_of(seen.param)
        if owner is not None:
            owner.shard_storage.check(f"saving the optimizer's state of {seen.name}", state.values())
        kinds = {key: _kind(seen, key, value) for key, value in state.items()}
        found.append([[member.name for member in seen.members], seen.has_part, kinds])
    return found


def _kind(seen: Seen, key: str, value: Any) -> list[Any]:
    where = f"the optimizer's state '{key}' of {seen.name}"
    if not isinstance(value, Tensor):
        return [VALUE, encoded(value, where)]
    if value.dtype not in KINDS:
        raise ValueError(f"{where} is of {value.dtype}, which safetensors files cannot hold")
    if value.dim() == 0 and (seen.param.dim() > 0 or is_number(key)):
        return [NUMBER, KINDS[value.dtype], encoded(value.item(), where)]
    if value.shape == seen.param.shape:
        return [ELEMENTS, KINDS[value.dtype]]
    raise ValueError(
        f"{where} has shape {list(value.shape)}, and this rank's part of it {list(seen.param.shape)}: what is neither "
        "of the parameter's shape nor a number cannot be saved for other numbers of ranks. Use an optimizer that works "
        "element by element (Adam, AdamW, SGD, ...), or leave these parameters whole with ignored_parameters."
    )


def kinds_of_all(found: list[Any], ranks: Ranks) -> list[Kinds]:
    """Collective. What there is of the state of each parameter on the ranks that hold something of it.

    Raises:
        ValueError: on every rank, if they have different states.
    """
    heard = [json.loads(each) for each in from_everyone(ranks, json.dumps(found).encode())]
    for rank, other in enumerate(heard):
        if [names for names, _, _ in other] != [names for names, _, _ in heard[0]]:
            raise ValueError(
                f"the optimizer of rank {rank} has other parameters than that of rank 0, or in another order: make the "
                "same optimizer on every rank"
            )
    merged: list[Kinds] = []
    for number, (names, _, _) in enumerate(heard[0]):
        holders = [rank for rank, other in enumerate(heard) if other[number][1]]
        kinds = [heard[rank][number][2] for rank in holders]
        for rank, other in zip(holders, kinds, strict=True):
            if other != kinds[0]:
                raise ValueError(
                    f"the optimizer's state of {names[0]} is {_shown(kinds[0])} on rank {holders[0]} and "
                    f"{_shown(other)} on rank {rank}. Every rank must have stepped the same parameters with "
                    "the same optimizer."
                )
        merged.append(kinds[0] if kinds else next((other[number][2] for other in heard if other[number][2]), {}))
    return merged


def _shown(kinds: Kinds) -> str:
    return ", ".join(f"{key} ({' '.join(map(str, kind))})" for key, kind in sorted(kinds.items())) or "nothing"


def state_entries(
    optimizer: Any, groups: Sequence[Sequence[Seen]], kinds: Sequence[Kinds], ranks: Ranks
) -> tuple[list[Entry], Any]:
    """The tensors of an optimizer's state, with this rank's parts, and the rest of it for the manifest."""
    entries, states = [], {}
    every = [seen for group in groups for seen in group]
    for seen, known in zip(every, kinds, strict=True):
        own = optimizer.state.get(seen.param) or {}
        for member in seen.members:
            states[member.name] = known
            for key, kind in known.items():
                if kind[0] == ELEMENTS:
                    parts = _parts(member, own.get(key), ranks)
                    entries.append(Entry(f"{member.name}/{key}", DTYPES[kind[1]], member.target.shape, parts))
    options = [_options(group) for group in optimizer.param_groups]
    rest = {
        "optimizer": kind_of(optimizer),
        "groups": [
            {"options": encoded(each, f"param_groups[{number}]"), "params": _names(group)}
            for number, (each, group) in enumerate(zip(options, groups, strict=True))
        ],
        "state": states,
    }
    return entries, rest


def _parts(member: Member, value: Tensor | None, ranks: Ranks) -> list[Part]:
    if value is None:
        return []
    return parts_of(member.target, local_part(value).detach().reshape(-1), member.interval, ranks)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in unsigned_options(group).items() if key not in ("params", _NAMES)}


def _names(group: Sequence[Seen]) -> list[str]:
    return [member.name for seen in group for member in seen.members]


# Loading


def state_problems(rest: Any, tensors: Container[str]) -> Iterator[str]:
    """What is not as `state_entries` makes it in the rest of a state.

    Args:
        rest: it.
        tensors: the names of those that there are.
    """
    groups, states = (rest.get("groups"), rest.get("state")) if isinstance(rest, dict) else (None, None)
    if not (isinstance(groups, list) and isinstance(states, dict) and isinstance(rest.get("optimizer"), str)):
        yield f"the rest of the optimizer's state is {short(rest)}"
        return
    for number, group in enumerate(groups):
        names, options = (group.get("params"), group.get("options")) if isinstance(group, dict) else (None, None)
        if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            yield f"group {number} of the optimizer has {short(names)} for the names of its parameters"
        elif any(name not in states for name in names):
            yield f"there is no state of {short(next(name for name in names if name not in states))}"
        if problem_of(options) is not None or not isinstance(decoded(options), dict):
            yield f"group {number} of the optimizer has the options {short(options)}"
    for name, kinds in states.items():
        for key, kind in kinds.items() if isinstance(kinds, dict) else [("", kinds)]:
            if not _is_kind(kind):
                yield f"the optimizer's state {short(key)} of {short(name)} is {short(kind)}"
            elif kind[0] == ELEMENTS and f"{name}/{key}" not in tensors:
                yield f"there is no tensor for the optimizer's state {short(key)} of {short(name)}"


def _is_kind(kind: Any) -> bool:
    """Whether it is what `_kind` makes."""
    if not (isinstance(kind, list) and kind):
        return False
    what, *rest = kind
    if what == VALUE:
        return len(rest) == 1 and problem_of(rest[0]) is None
    if what not in (ELEMENTS, NUMBER) or not rest or not isinstance(rest[0], str) or rest[0] not in DTYPES:
        return False
    return len(rest) == 1 if what == ELEMENTS else len(rest) == 2 and _is_number(rest[1], DTYPES[rest[0]])


def _is_number(value: Any, dtype: torch.dtype) -> bool:
    try:
        torch.tensor(decoded(value), dtype=dtype).item()
    except (ValueError, TypeError, RuntimeError, OverflowError):
        return False
    return True


@dataclass(frozen=True, eq=False)
class StatePlan:
    """What an optimizer is to get.

    Attributes:
        states: for each parameter that it sees and has state for, the names that its members have in the checkpoint,
            and what there is of them.
        options: for each group those that were saved, encoded; None for a group without parameters.
        groups: what is in each.
        problems: why it cannot get it.
    """

    states: list[tuple[Seen, list[str], Kinds]]
    options: list[Any]
    groups: list[list[Seen]]
    problems: list[str]


def plan_state(optimizer: Any, tensors: Mapping[str, Stored], files: TensorReader, rest: Any) -> StatePlan:
    """What an optimizer is to get of a checkpoint, and what does not fit.

    Raises:
        TypeError, ValueError: as `seen_by`.
    """
    saved_in = {name: number for number, group in enumerate(rest["groups"]) for name in group["params"]}
    plan = StatePlan([], [], seen_by(optimizer, tensors), [])
    used = set()
    for number, group in enumerate(plan.groups):
        named = [(seen, [_saved_name(member, saved_in) for member in seen.members]) for seen in group]
        numbers: dict[int, str] = {}
        for seen, names in named:
            for member, name in zip(seen.members, names, strict=True):
                if name is None:
                    plan.problems.append(f"the optimizer has {member.name}, and that of the checkpoint has not")
                else:
                    numbers.setdefault(saved_in[name], name)
                    used.add(name)
            known = [name for name in names if name is not None]
            if len(known) == len(names):
                plan.problems.extend(_state_problems(seen, known, files, rest))
                plan.states.append((seen, known, rest["state"][known[0]]))
        if len(numbers) > 1:
            (first, one), (second, other), *_ = numbers.items()
            plan.problems.append(
                f"the optimizer has {one} and {other} in one parameter group ({number}), and that of the checkpoint "
                f"has them in groups {first} and {second}: make it with the same groups"
            )
        plan.options.append(rest["groups"][next(iter(numbers))]["options"] if numbers else None)
    plan.problems.extend(_kind_problems(optimizer, rest))
    left = [name for name in saved_in if name not in used]
    if left:
        plan.problems.append(f"the optimizer of the checkpoint has {', '.join(left)}, and this one has not")
    return plan


def _kind_problems(optimizer: Any, rest: Any) -> list[str]:
    """Another optimizer's settings in the groups would be missed at the next step, in words that nobody understands.

    By the settings, since subclasses may share them, and with torch's versions the same class may get more.
    """
    kind, saved = kind_of(optimizer), rest.get("optimizer")
    wanted, given = ({key for group in groups for key in group} for groups in _settings(optimizer, rest))
    if not saved or kind == saved or wanted == given:
        return []
    return [
        f"the optimizer is {kind}, with settings {', '.join(sorted(wanted - given)) or 'of its own'}, and that of the "
        f"checkpoint is {saved}, with {', '.join(sorted(given - wanted)) or 'fewer'}"
    ]


def _settings(optimizer: Any, rest: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    own = [_options(group) for group in optimizer.param_groups]
    return own, [decoded(group["options"]) for group in rest["groups"]]


def _saved_name(member: Member, saved_in: Mapping[str, int]) -> str | None:
    names = (member.name, *member.target.names, *member.target.aliases)
    return next((name for name in names if name in saved_in), None)


def _state_problems(seen: Seen, names: Sequence[str], files: TensorReader, rest: Any) -> Iterator[str]:
    kinds = rest["state"][names[0]]
    for member, name in zip(seen.members, names, strict=True):
        other = rest["state"][name]
        if other != kinds:
            yield (
                f"the optimizer's state of {names[0]} is {_shown(kinds)}, and that of {name} {_shown(other)}: the two "
                "are in one flat parameter. Wrap with use_orig_params=True, with which each has a state of its own"
            )
            continue
        for key, kind in other.items():
            stored = files.tensors.get(f"{name}/{key}") if kind[0] == ELEMENTS else None
            if stored is None and kind[0] == ELEMENTS:
                yield f"{files.path} has no {name}/{key}"
            elif stored is not None and stored.shape != member.target.shape:
                yield f"{stored} has shape {list(stored.shape)}, and the model's {list(member.target.shape)}"


@torch.no_grad()
def read_state(optimizer: Any, plan: StatePlan, files: TensorReader) -> dict[nn.Parameter, dict[str, Any]]:
    """This rank's part of the state, by parameter. What the optimizer has of the same kind already is written over.

    Raises:
        ValueError, OSError: if it cannot be read.
    """
    found: dict[nn.Parameter, dict[str, Any]] = {}
    for seen, names, kinds in plan.states:
        state: dict[str, Any] = {}
        for key, kind in kinds.items():
            if kind[0] == ELEMENTS:
                state[key] = _memory(optimizer, seen.param, key, DTYPES[kind[1]])
                _read_elements(seen, names, key, state[key], files)
            elif kind[0] == NUMBER:
                state[key] = torch.tensor(decoded(kind[2]), dtype=DTYPES[kind[1]])
            else:
                state[key] = decoded(kind[1])
        if state:
            found[seen.param] = state
    return found


def _memory(optimizer: Any, param: nn.Parameter, key: str, dtype: torch.dtype) -> Tensor:
    held = (optimizer.state.get(param) or {}).get(key)
    is_like = isinstance(held, Tensor) and (held.shape, held.dtype, held.device) == (param.shape, dtype, param.device)
    # In the likeness of the parameter: what is of one on disk lies there as well.
    return held if is_like and isinstance(held, Tensor) else torch.zeros_like(param, dtype=dtype)


def _read_elements(seen: Seen, names: Sequence[str], key: str, into: Tensor, files: TensorReader) -> None:
    into = local_part(into)
    flat = into.view(-1) if into.is_contiguous() else into.new_empty(into.numel())
    for member, name in zip(seen.members, names, strict=True):
        if member.interval is not None:
            place = member.interval
            files.read(f"{name}/{key}", flat[place.offset : place.offset + place.numel], place.start)
    if not into.is_contiguous():
        into.copy_(flat.view(into.shape))


def give_state(optimizer: Any, plan: StatePlan, found: Mapping[nn.Parameter, dict[str, Any]]) -> None:
    """Have the optimizer go on with what was read."""
    numbers = {seen.param: number for number, seen in enumerate(seen for group in plan.groups for seen in group)}
    groups = []
    for options, own, group in zip(plan.options, optimizer.param_groups, plan.groups, strict=True):
        saved = _options(own) if options is None else decoded(options)
        groups.append({**saved, "params": [numbers[seen.param] for seen in group]})
    optimizer.load_state_dict(
        {"state": {numbers[param]: dict(state) for param, state in found.items()}, "param_groups": groups}
    )
    for param, state in found.items():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == param.shape and value.dim() > 0:
                optimizer.state[param][key] = value  # torch casts it to the parameter's dtype


def release_state(groups: Sequence[Sequence[Seen]]) -> None:
    """What was read of state on disk is not wanted soon."""
    owners = (owner_of(seen.param) for group in groups for seen in group)
    homes = (owner.shard_storage for owner in owners if owner is not None)
    for files in {home.files for home in homes if isinstance(home, DiskStorage)}:
        files.release()
