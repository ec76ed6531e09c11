"""The three kinds of optimizer state, which gathering, sharding, saving, loading and comparing use.

An optimizer of a sharded model contains `OptimParam`s, each a shard of a single original parameter or of multiple
originals. Each key of a parameter's state has a kind. `Elements` are a tensor with a value for each element of the
parameter, in the parameter's layout. The same intervals therefore define how to shard and gather `Elements`, and where
files contain them. A `Number` is a 0-d tensor for the whole parameter, and a `Value` is not a tensor.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fsdp.distributed.collectives import LONE_RANK, Communicator
from fsdp.distributed.communicator import own_rank
from fsdp.distributed.consensus import Ranks, numbers_of
from fsdp.distributed.dtensor import MeshPart, local_part, set_local_part
from fsdp.distributed.gather_extension import around, inner_of, values_of
from fsdp.engine.handle import FlatParamHandle
from fsdp.engine.layout import Interval
from fsdp.engine.originals import taken_by
from fsdp.layers.optimizer_states import SHARDS_OF, is_number, keys_with_elements

APART = "Wrap with use_orig_params=True, so that optimizers get each parameter separately."


@dataclass(frozen=True, eq=False)
class Original:
    """A parameter of the module before wrapping."""

    name: str  # the name in that module
    shape: torch.Size  # the unsharded shape
    slot: int = 0  # the index in the flat parameter
    part: MeshPart | None = None  # the local part of a `DTensor`
    aliases: Sequence[str] = ()  # alternative names in checkpoints


@dataclass(frozen=True, eq=False)
class OptimParam:
    """A parameter of an optimizer: a shard of one or more parameters, or an unsharded parameter."""

    param: nn.Parameter  # the parameter in the optimizer
    handle: FlatParamHandle | None  # the handle of the flat parameter; None for an unsharded parameter
    originals: tuple[Original, ...]  # the original parameters in `param`
    is_uncollected: bool = False  # True if the state is not gathered
    owner: int | None = None  # the number in `comm` of the rank that owns the whole parameter

    @property
    def is_owned(self) -> bool:
        """Return whether a single rank owns the whole parameter, whose state may then have any shape."""
        return self.owner is not None

    @property
    def comm(self) -> Communicator:
        """Return the communicator of the ranks among which the parameter is sharded."""
        return LONE_RANK if self.handle is None else self.handle.comm

    @property
    def replicas(self) -> Communicator:
        """Return the communicator of the ranks that hold the same shard."""
        return LONE_RANK if self.handle is None else self.handle.replicas

    @property
    def tag(self) -> int:
        """Return the tag of messages about the parameter, which is equal on all ranks that share the parameter."""
        return 0 if self.handle is None else self.handle.tags.gather

    @property
    def is_bytes(self) -> bool:
        """Return whether the parameter is sharded as bytes. If so, it is frozen, and optimizers never use its state."""
        return self.handle is not None and any(self.handle.flat_param.packings)

    @property
    def device(self) -> torch.device:
        """Return the device from which the elements can be sent."""
        return self.param.device if self.handle is None else self.handle.storage.device

    @cached_property
    def name(self) -> str:
        first, *others = (original.name for original in self.originals)
        return f"{first} (in one flat parameter with {len(others)} more)" if others else first

    def interval(self, original: Original, rank: int, shape: torch.Size | None = None) -> Interval | None:
        """Return a rank's elements of an original and their position in a tensor like `param`, or None.

        With a `shape`, return the elements of a tensor of this shape in the state of an owned parameter.
        """
        if self.handle is None:
            return Interval(0, 0, original.shape.numel(), 0) if original.shape.numel() else None
        found = self.handle.layout.interval(original.slot, rank)
        if found is None or self.handle.orig_params is None:
            return found
        return Interval(found.slot, found.start, found.stop, 0)

    def local_shape(self, original: Original, shape: torch.Size | None = None) -> torch.Size:
        """Return the shape of an original in the flat parameter; for a `DTensor`, of its local part."""
        if shape is not None:
            return shape
        return original.shape if self.handle is None else self.handle.layout.slots[original.slot].shape

    def local_vector(self, original: Original, value: Tensor) -> Tensor:
        """Return the flat parameter's part of an unsharded value, as a vector that shares memory if possible.

        Each rank keeps its `interval` of this vector.
        """
        local = (value if original.part is None else original.part.to_local(original.name, value)).detach()
        if self.handle is None or self.is_owned:
            return local.reshape(-1)
        return self.handle.layout.vector_of(original.slot, local)

    def local_value(self, original: Original, vector: Tensor, shape: torch.Size | None = None) -> Tensor:
        """Return the part in its original shape, from the result of `local_vector`."""
        if self.handle is None or self.is_owned:
            return vector.view(self.local_shape(original, shape))
        return self.handle.layout.value_of(original.slot, vector)

    def shard(self, original: Original, vector: Tensor, into: Tensor, shape: torch.Size | None = None) -> None:
        """Copy this rank's elements of a vector (`local_vector`) to their place in a tensor like `param`."""
        kept = self.interval(original, self.comm.rank, shape)
        if kept is not None:
            into.view(-1)[kept.offset : kept.offset + kept.numel].copy_(vector[kept.start : kept.stop])

    def zeros(self, dtype: torch.dtype, device: torch.device | None = None, shape: torch.Size | None = None) -> Tensor:
        """Return memory like `param`: on disk if `param` is on disk, else on `device`, by default `param`'s."""
        made = torch.zeros_like(self.param, dtype=dtype, device=device, memory_format=torch.contiguous_format)
        if len(inner := inner_of(local_part(made))) > 1:  # in consecutive memory, which can be filled as a vector
            set_local_part(made, around(local_part(made), torch.stack(inner).unbind()))
        return made

    def memory(self, held: Any, dtype: torch.dtype, shape: torch.Size | None = None) -> Tensor:
        """Return the current tensor `held` if it has the form of `zeros`' result, otherwise the result of `zeros`."""
        wanted = shape or self.param.shape, dtype, self.param.device
        is_like = isinstance(held, Tensor) and (held.shape, held.dtype, held.device) == wanted and held.is_contiguous()
        local = local_part(held) if is_like else self.param
        is_one = is_like and len(inner_of(local)) < 2
        has_memory = is_one and values_of(local).untyped_storage().nbytes() > 0  # a parked tensor has none
        return held if has_memory else self.zeros(dtype, shape=shape)

    def laid_out(self, filled: Tensor) -> Tensor:
        """Convert contiguous state to the strides of an unsharded `param`, which fused optimizers require."""
        if self.handle is not None or self.param.is_contiguous() or filled.shape != self.param.shape:
            return filled
        return torch.empty_like(self.param, dtype=filled.dtype, device=filled.device).copy_(filled)


@dataclass(frozen=True, eq=False)
class SteppedParam(OptimParam):
    """The part of an original that an `OwnedOptimizer` steps: this rank's elements, or all elements on its owner.

    Ownership is therefore an ordinary layout: a single rank has all elements of an owned parameter, and other ranks
    have none. On these ranks `param` is on the meta device.
    """

    @property
    def is_here(self) -> bool:
        """Return whether this rank steps elements of the original."""
        return self.owner is None or self.owner == self.comm.rank

    def interval(self, original: Original, rank: int, shape: torch.Size | None = None) -> Interval | None:
        if self.owner is None:
            found = super().interval(original, rank)
            return found and Interval(found.slot, found.start, found.stop, 0)
        numel = self.local_shape(original, shape).numel()
        return Interval(original.slot, 0, numel, 0) if rank == self.owner and numel else None

    def zeros(self, dtype: torch.dtype, device: torch.device | None = None, shape: torch.Size | None = None) -> Tensor:
        if not self.is_here:
            return torch.empty(0, dtype=dtype, device="cpu")
        if shape is not None:
            return torch.zeros(shape, dtype=dtype, device=device or self.param.device)
        return super().zeros(dtype, device)


def params_of(
    handle: FlatParamHandle, paths: Mapping[nn.Module, Sequence[str]], is_uncollected: bool = False
) -> list[OptimParam]:
    """Return a handle's parameters as optimizers list them, for the modules in `paths` (see `paths_in`)."""
    firsts = [next((place for place in places if place.module in paths), None) for places in handle.places]
    kept = zip(firsts, handle.layout.slots, handle.flat_param.parts, strict=True)
    originals = tuple(
        Original(paths[first.module][0] + first.name, one.shape if part is None else part.shape, slot, part)
        for slot, (first, one, part) in enumerate(kept)
        if first is not None
    )
    if handle.orig_params is None:
        return [OptimParam(handle.flat_param, handle, originals, is_uncollected)] if originals else []
    params = handle.orig_params.params
    return [OptimParam(params[original.slot], handle, (original,), is_uncollected) for original in originals]


def groups_of(optimizer: Any) -> Sequence[Mapping[str, Any]]:
    """Return the parameter groups of an optimizer; for an `OwnedOptimizer`, with the stepped parameters."""
    found: Sequence[Mapping[str, Any]] = getattr(optimizer, "stepped_groups", optimizer.param_groups)
    return found


def grouped(groups: Iterable[Any], title: str, known: Callable[[Any], OptimParam | None]) -> list[list[OptimParam]]:
    """Return the parameters in each group of an optimizer, whose name in messages is `title`.

    `known` returns the model's `OptimParam` of a parameter; the optimizer must not have other parameters.
    """
    found: list[list[OptimParam]] = []
    for number, group in enumerate(groups):
        found.append([])
        for place, param in enumerate(group["params"]):
            one = known(param)
            if one is None:
                name = taken_by(param)
                raise ValueError(
                    f"{title}: parameter {place} of group {number}, of shape {tuple(param.shape)}, is not of this "
                    + (
                        "model. Make its layer a submodule of the model before wrapping; or pass the outermost module "
                        "that contains it; or remove the parameter from this optimizer."
                        if name is None
                        else (
                            f"model as it is wrapped now: it was {name} before. Create the optimizer from parameters() "
                            "of the outermost wrapped module; or pass an optimizer from before wrapping to "
                            "reshard_optimizer."
                        )
                    )
                )
            found[-1].append(one)
    return found


def match_groups(
    groups: Sequence[Sequence[OptimParam]],
    saved_in: Callable[[Original], int | None],
    saved: str,
    has_groups: bool = True,
    empty: Container[int] = (),
) -> tuple[list[int | None], list[str]]:
    """Return the number of the saved group for each parameter group of an optimizer, and all mismatches.

    Groups must be equal and in the same order, because learning-rate schedulers refer to them by number. `saved_in`
    returns the number of the saved group with an original parameter, or None. `saved` is the name of the saved state
    in messages. If the saved state has settings per parameter instead of groups (`has_groups` is False), any groups
    are permitted. A group without parameters matches the saved group of the same number, if `empty` contains it.
    """
    found: list[int | None] = []
    problems = []
    places: list[tuple[int, int, str]] = []  # a group of the optimizer, a saved group, and a parameter in both
    for number, group in enumerate(groups):
        first: dict[int, str] = {}
        for original in (original for one in group for original in one.originals):
            there = saved_in(original)
            if there is None:
                problems.append(
                    f"the optimizer has {original.name} in its parameter group {number}, but {saved} does not"
                )
            else:
                first.setdefault(there, original.name)
        found.append(number if not group and number in empty else next(iter(first), None))
        places += [(number, there, name) for there, name in first.items()]
    for (ours, theirs, name), (others, their_others, other) in pairwise(places):  # in the order of `groups`
        is_same = (ours < others) == (theirs < their_others) and (ours == others) == (theirs == their_others)
        if not is_same and (has_groups or ours == others):
            problems.append(
                f"the optimizer has {name} and {other} in parameter groups {ours} and {others}, but {saved} has them "
                f"in groups {theirs} and {their_others}: create it with the same groups in the same order, because "
                "learning-rate schedulers use their numbers"
            )
            break
    return found, problems


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group, without the keys that list its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names", SHARDS_OF)}


def release(params: Iterable[OptimParam]) -> None:
    """Remove parameters and state on disk from this process's memory, because they are not needed soon."""
    storages = {one.handle.storage for one in params if one.handle is not None}
    for storage in storages:
        storage.release()
    for files in {storage.files for storage in storages if storage.files is not None}:
        files.release()


# The suffix of a key whose state was a list, a tuple, or a mapping.
_STEP_INTO = re.compile(r"\[(\d+)\]|\((\d+)\)|\{([^{}]*)\}")
_NESTED = re.compile(rf"(.*?)((?:{_STEP_INTO.pattern})+)", re.DOTALL)


def flat_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter's state with a separate key for each tensor, such as ``GG[0]`` for a tensor in a list."""
    return {key: leaf for name, value in state.items() for key, leaf in _leaves(name, value)}


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    steps: list[tuple[str, Any]] = []
    if type(value) is list:
        steps = [(f"[{number}]", each) for number, each in enumerate(value)]
    elif type(value) is tuple:
        steps = [(f"({number})", each) for number, each in enumerate(value)]
    elif type(value) is dict and all(isinstance(name, (str, int)) for name in value):
        steps = [(f"{{{name!r}}}", each) for name, each in value.items()]
    if not any(isinstance(each, (Tensor, list, tuple, dict)) for _, each in steps):
        yield key, value
        return
    for step, each in steps:
        yield from _leaves(key + step, each)


def nested_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Invert `flat_state`; raise ValueError for keys that `flat_state` cannot have created."""
    leaves = []
    for key, value in state.items():
        match = _NESTED.fullmatch(key)
        path = [(dict, key)] if match is None else [(dict, match[1]), *_steps_in(key, match[2])]
        leaves.append((path, key, value))
    return _nested(leaves) if leaves else {}


def _nested(leaves: Sequence[tuple[Sequence[tuple[type, Any]], str, Any]]) -> Any:
    """Return the container of some leaves, each with its path inside; a single leaf without a path is returned."""
    _, key, value = leaves[-1]
    kind, *others = {path[0][0] if path else None for path, _, _ in leaves}
    if others or (kind is None and len(leaves) > 1):
        raise ValueError(f"a key {key[:100]!r} of an optimizer's state contradicts another key")
    if kind is None:
        return value
    parts: dict[Any, list[Any]] = {}
    for ((_, place), *inside), key, value in leaves:
        parts.setdefault(place, []).append((inside, key, value))
    built = {place: _nested(each) for place, each in parts.items()}
    return built if kind is dict else kind(built[place] for place in sorted(built))


def _steps_in(key: str, text: str) -> Iterator[tuple[type, Any]]:
    """Yield the indices at the end of a key, each with the type of its container."""
    for index, place, name in _STEP_INTO.findall(text):
        if index or place:
            yield (list, int(index)) if index else (tuple, int(place))
            continue
        try:
            read = ast.literal_eval(name)
        except (SyntaxError, ValueError, MemoryError, RecursionError, TypeError):
            read = None
        if type(read) not in (str, int):
            raise ValueError(f"a key {key[:100]!r} of an optimizer's state has braces without a name or number")
        yield dict, read


class Elements(NamedTuple):
    """A tensor with a value for each element of the parameter, or of another `shape` for an owned parameter."""

    dtype: torch.dtype
    shape: torch.Size | None = None

    def __str__(self) -> str:
        return f"elements of {self.dtype}" + ("" if self.shape is None else f" in the shape {tuple(self.shape)}")


class Number(NamedTuple):
    """A 0-d tensor for the whole parameter."""

    value: Any
    dtype: torch.dtype

    @property
    def held(self) -> Tensor:
        return torch.tensor(self.value, dtype=self.dtype, device="cpu")

    def __str__(self) -> str:
        return f"{self.value} of {self.dtype}"


class Value(NamedTuple):
    """State that is not a tensor."""

    value: Any

    @property
    def held(self) -> Any:
        return self.value

    def __str__(self) -> str:
        return f"{self.value!r:.40}"


Kind = Elements | Number | Value
Kinds = dict[str, Kind]  # by key of the state


ELEMENTWISE = (
    "Use fsdp.OwnedOptimizer, or an elementwise optimizer (Adam, AdamW, SGD, ...). Or leave these parameters unsharded "
    "with ignored_parameters, step them with a separate optimizer, and save its state_dict() with torch.save."
)


def odd_shape(key: str, name: str, found: Sequence[int], wanted: str, remedy: str) -> str:
    """Return the error message for a tensor of an unsupported kind."""
    return (
        f"the optimizer's state '{key}' of {name} has shape {tuple(found)}, and {wanted}: only tensors of the "
        f"parameter's shape and numbers can be sharded or combined. {remedy}"
    )


def kinds_of(
    name: str,
    state: Mapping[str, Any],
    shape: torch.Size,
    has_elements: Mapping[str, bool],
    whose: str = "the parameter",
    remedy: str = ELEMENTWISE,
    is_owned: bool = False,
) -> Kinds:
    """Return the kinds of the state of a parameter, or of a shard, with this shape; owned state may have any shape.

    `whose` describes the tensor of this shape in error messages, which end with `remedy`. `has_elements` is the
    argument of `is_number`.
    """
    kinds: Kinds = {}
    for key, value in state.items():
        if not isinstance(value, Tensor):
            kinds[key] = Value(value)
        elif is_number(key, value.shape, shape, has_elements):
            kinds[key] = Number(value.item(), value.dtype)
        elif value.shape == shape:
            kinds[key] = Elements(value.dtype)
        elif is_owned:
            kinds[key] = Elements(value.dtype, value.shape)
        else:
            raise ValueError(odd_shape(key, name, value.shape, f"{whose} {tuple(shape)}", remedy))
    return kinds


def is_same(one: Any, other: Any) -> bool:
    """Return whether two states, or two kinds, have the same type and are equal; NaNs are equal."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if one == other or (one != one and other != other):
        return True
    has_parts = hasattr(one, "__dict__") and not callable(one)  # objects of two ranks are equal if their attributes are
    return has_parts and is_same(vars(one), vars(other))


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the texts of the entries in which two states differ, for messages; None if the states are equal."""
    keys = sorted(key for key in {**one, **other} if not is_same(one.get(key), other.get(key)))
    if not keys:
        return None
    first, second = (
        ", ".join(f"'{key}' ({each[key]})" if key in each else f"no '{key}'" for key in keys) for each in (one, other)
    )
    return first, second


def common_kinds(kinds: Mapping[Original, Kinds]) -> Kinds:
    """Return the kinds of state of the parameters in a flat parameter, which must be equal."""
    first, *others = kinds
    for other in others:
        if (found := differences(kinds[first], kinds[other])) is not None:
            raise ValueError(
                f"the optimizer's state of {first.name} has {found[0]}, and that of {other.name} {found[1]}; the two "
                f"are in one flat parameter. {APART}"
            )
    return kinds[first]


class OwnKinds(NamedTuple):
    """The kinds of a rank's state of a parameter, and whether the rank has elements of the parameter."""

    name: str
    is_on: bool
    kinds: Kinds


def own_kinds(
    params: Sequence[OptimParam], states: Mapping[OptimParam, Mapping[str, Any]], doing: str
) -> list[OwnKinds]:
    """Return the kinds of this rank's state of some parameters, and check that it can be read (messages: `doing`)."""
    found = []
    has_elements = keys_with_elements((one.param.shape, states.get(one) or {}) for one in params)
    for one in params:
        state = states.get(one) or {}
        for key, value in state.items() if isinstance(one, SteppedParam) else ():
            if isinstance(value, Tensor) and type(value.detach()) is not Tensor:
                raise NotImplementedError(
                    f"the optimizer's state '{key}' of {one.name} is a {type(value).__name__}, a subclass of Tensor, "
                    "which cannot be saved in files or full states. Save optimizer.state_dict() on every rank, and "
                    "load it with the same number of ranks."
                )
        whose = "this rank's shard of it"
        kinds = kinds_of(one.name, state, one.param.shape, has_elements, whose, is_owned=one.is_owned)
        if one.handle is not None:
            one.handle.storage.check_readable(f"{doing} the optimizer's state of {one.name}", state.values())
        is_on = any(one.interval(original, one.comm.rank) is not None for original in one.originals)
        found.append(OwnKinds(one.name, is_on, kinds))
    return found


@dataclass(frozen=True, eq=False)
class SharedKinds:
    """The kinds of all ranks' state of a parameter."""

    name: str
    by_rank: list[Kinds]
    holders: list[int]  # the ranks that have elements of the parameter; other ranks may have no state

    @property
    def kinds(self) -> Kinds:
        """Return the kinds of the first rank that has state, including its numbers and values."""
        return next((self.by_rank[rank] for rank in self.holders or range(len(self.by_rank)) if self.by_rank[rank]), {})

    def numbers(self, key: str) -> list[Number]:
        """Return each rank's `Number` under a key; the first rank's number for a rank without the key."""
        first = self.kinds[key]
        found = (kinds.get(key, first) for kinds in self.by_rank)
        return [kind if isinstance(kind, Number) else first for kind in found]  # type: ignore[misc]

    def problems(self, keeps_numbers: bool = False) -> Iterator[str]:
        """Yield an error message for each rank whose state differs from the first holder's.

        A format that `keeps_numbers` stores a list with each rank's 0-d tensor, except for ``step``.
        """
        compared = [_without_numbers(kinds) if keeps_numbers else kinds for kinds in self.by_rank]
        for first, rank in ((self.holders[0], rank) for rank in self.holders[1:]):
            if (found := differences(compared[first], compared[rank])) is not None:
                yield (
                    f"the optimizer's state of {self.name} has {found[0]} on rank {first} and {found[1]} on rank "
                    f"{rank}. Every rank must have stepped the same parameters with the same optimizer."
                )


def _without_numbers(kinds: Kinds) -> dict[str, Any]:
    return {key: kind.dtype if isinstance(kind, Number) and key != "step" else kind for key, kind in kinds.items()}


def shared_kinds(heard: Sequence[list[OwnKinds]]) -> list[SharedKinds]:
    """Combine the kinds of all ranks, by parameter."""
    names = [[own.name for own in each] for each in heard]
    for rank, others in enumerate(names):
        if others != names[0]:
            raise ValueError(
                f"the optimizers of ranks 0 and {rank} have different parameters, or another order: create the same "
                "optimizer on every rank"
            )
    return [
        SharedKinds(name, [own.kinds for own in each], [rank for rank, own in enumerate(each) if own.is_on])
        for name, each in zip(names[0], zip(*heard, strict=True), strict=True)
    ]


def options_as_text(groups: Iterable[Mapping[str, Any]], beside: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Return the options of parameter groups, and the other entries of an optimizer's dictionary (`beside`).

    A full state has a single value for each.
    """
    return {
        f"{key} of parameter group {number}": _shown(value)
        for number, group in enumerate(groups)
        for key, value in {**options_of(group), "number of parameters": len(group["params"])}.items()
    } | {repr(key): _shown(value) for key, value in (beside or {}).items()}


def require_same_options(ranks: Ranks, heard: Sequence[Mapping[str, str]]) -> None:
    """Raise RuntimeError unless all ranks have the same options (`options_as_text`). Collective only if they differ."""
    for number, other in enumerate(heard):
        for key in {**heard[0], **other}:
            one, another = heard[0].get(key, "none"), other.get(key, "none")
            if one != another:
                numbers = numbers_of(ranks)  # collective: all ranks find the same difference
                raise RuntimeError(
                    f"rank {own_rank()}: the ranks have different options in their optimizers: {key} is {one} "
                    f"on rank {numbers[0]} and {another} on rank {numbers[number]}. Every rank must have the same."
                )


def _shown(value: Any) -> str:
    """Return the text with which ranks compare an option: the value, or the class of an object without such a text."""
    if isinstance(value, Tensor):
        return str(value.item()) if value.numel() == 1 else f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_shown, value))})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {_shown(each)}' for key, each in value.items())}}}"
    is_plain = value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype))
    return repr(value) if is_plain else f"a {type(value).__name__}"
