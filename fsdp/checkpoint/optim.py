"""A checkpoint's optimizer state: tensors with the parameters' shapes, under ``<name>/<key>``, and other values.

Elementwise state has the same layout as the parameter's shard, so the same ranges are written and read. Numbers
(``step``) and other values are in the manifest, keyed by the parameter's name, and so are the parameter groups.
Multiple optimizers are saved as a single optimizer.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.checkpoint.formats.source import Source, TensorReader
from fsdp.checkpoint.json_values import decoded, encoded
from fsdp.checkpoint.model_tensors import Target, as_stored, ranges_of, read_ranges
from fsdp.checkpoint.safetensors import DTYPES, KINDS, NO_KIND, Entry
from fsdp.checkpoint.untrusted import short
from fsdp.distributed.dtensor import local_part
from fsdp.distributed.gather_extension import values_of
from fsdp.engine.handle import FlatParamHandle
from fsdp.optim_utils.owned import OwnedOptimizer
from fsdp.optim_utils.state import (
    ELEMENTWISE,
    Elements,
    Kind,
    Kinds,
    Number,
    OptimParam,
    Original,
    OwnKinds,
    Value,
    common_kinds,
    flat_state,
    grouped,
    groups_of,
    match_groups,
    nested_state,
    odd_shape,
    options_of,
    own_kinds,
    release,
    shared_kinds,
)


class Optimizers:
    """The optimizers of a model, each with different parameters, combined like the single optimizer of a checkpoint.

    Attributes:
        tensors: the model's tensors, by name.
        groups: the parameters in each parameter group of all optimizers.
    """

    def __init__(self, given: Any, tensors: Mapping[str, Target]) -> None:
        is_list = isinstance(given, (list, tuple))
        self._all: Sequence[Any] = given if is_list else [given]
        if not self._all:
            raise ValueError("the list of optimizers is empty: pass None to exclude the optimizer's state")
        self._by_param: dict[nn.Parameter, Any] = {}
        for number, optimizer in enumerate(self._all):
            if not all(hasattr(optimizer, name) for name in ("param_groups", "state", "load_state_dict")):
                needed = "an optimizer with param_groups, state and load_state_dict is needed, got"
                raise TypeError(
                    f"{f'number {number} in the list of optimizers is not an optimizer:' if is_list else needed} "
                    f"{optimizer!r}"
                )
            _refuse_other_state(optimizer)
            for param in (param for group in groups_of(optimizer) for param in group["params"]):
                if self._by_param.setdefault(param, optimizer) is not optimizer:
                    raise ValueError(
                        f"a parameter of shape {list(param.shape)} is in two of the optimizers, the second one number "
                        f"{number}: a checkpoint contains one state for each parameter"
                    )
        self.tensors = tensors
        found: dict[int, tuple[nn.Parameter, FlatParamHandle | None, list[Original]]] = {}
        stepped: dict[int, OptimParam] = {}
        for name, target in tensors.items():
            param, original = target.param, Original(name, target.shape, target.slot, target.part, target.keys)
            if isinstance(param, nn.Parameter):
                found.setdefault(id(param), (param, target.handle, []))[2].append(original)
            for optimizer in self._all:
                if isinstance(optimizer, OwnedOptimizer):
                    one = optimizer.stepped_in(target.handle, target.slot, param)
                    stepped |= {} if one is None else {id(one.param): replace(one, originals=(original,))}
        known = {key: OptimParam(param, handle, tuple(originals)) for key, (param, handle, originals) in found.items()}
        known |= stepped
        self.groups = grouped(self.param_groups, self.name, lambda param: known.get(id(param)))

    @property
    def params(self) -> list[OptimParam]:
        return list(chain.from_iterable(self.groups))

    @property
    def name(self) -> str:
        return ", ".join(type(optimizer).__name__ for optimizer in self._all)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [dict(group) for optimizer in self._all for group in groups_of(optimizer)]

    def state_of(self, param: nn.Parameter) -> dict[str, Any]:
        """Return the state of a parameter; empty if there is none."""
        optimizer = self._by_param[param]
        found = optimizer.state.get(param) or {}  # indexing would create an entry
        return flat_state(found) if isinstance(optimizer, OwnedOptimizer) else found

    def load(self, states: Mapping[nn.Parameter, dict[str, Any]], options: Sequence[Mapping[str, Any]]) -> None:
        ahead = iter(options)
        for optimizer in self._all:
            held = [group["params"] for group in groups_of(optimizer)]
            numbers = {param: number for number, param in enumerate(param for params in held for param in params)}
            groups = [{**next(ahead), "params": [numbers[param] for param in params]} for params in held]
            own = {number: dict(states[param]) for param, number in numbers.items() if param in states}
            optimizer.load_state_dict({"state": own, "param_groups": groups})
            for param in () if isinstance(optimizer, OwnedOptimizer) else numbers.keys() & states.keys():
                for key, value in states[param].items():
                    if isinstance(value, Tensor) and key != "step":  # torch casts these to the parameter's dtype
                        device = value.device if value.dim() else optimizer.state[param].get(key, value).device
                        optimizer.state[param][key] = value.to(device)


def _refuse_other_state(optimizer: Any) -> None:
    """Raise TypeError for a wrapper of an optimizer whose state dict has a different structure."""
    if not isinstance(optimizer, torch.optim.Optimizer) or hasattr(optimizer, "_optimizer_state_dict_post_hooks"):
        return  # it has called torch's constructor
    keys = optimizer.state_dict().keys()
    if "state" not in keys:
        raise TypeError(
            f"{type(optimizer).__name__}.state_dict() has {', '.join(map(str, keys))} instead of state and "
            "param_groups: a checkpoint would lack a part of its state. Pass the optimizer inside it; or save its "
            "state_dict() with torch.save on each rank, to load on the same number of ranks"
        )


def kind_to_json(kind: Kind, where: str) -> list[Any]:
    """Return the manifest form of a kind: a word, and the dtype or the value; messages contain `where`."""
    if isinstance(kind, Value):
        return ["value", encoded(kind.value, where)]
    if kind.dtype not in KINDS:
        raise ValueError(f"{where} is of {kind.dtype}, {NO_KIND}")
    word = KINDS[kind.dtype]
    if isinstance(kind, Elements):
        return ["elements", word] if kind.shape is None else ["elements", word, list(kind.shape)]
    return ["number", word, encoded(kind.value, where)]


def kinds_to_json(kinds: Kinds, name: str) -> dict[str, list[Any]]:
    """Return the manifest form of a parameter's state; see `kind_to_json`."""
    found = {}
    for key, kind in kinds.items():
        where = f"the optimizer's state '{key}' of {name}"
        try:
            found[key] = kind_to_json(kind, where)
        except TypeError as error:
            raise TypeError(
                f"{error} Or save the model without the optimizer, and optimizer.state_dict() of each rank with "
                "torch.save, which the same number of ranks can load."
            ) from None
    return found


def kinds_from_json(saved: Any, name: str) -> Kinds:
    """Return the state of the parameter `name` from its manifest form; the inverse of `kinds_to_json`."""
    if not isinstance(saved, dict):
        raise ValueError(f"the optimizer's state of {short(name)} is {short(saved)}")
    return {key: _kind_from_json(kind, key, name) for key, kind in saved.items()}


def _kind_from_json(saved: Any, key: str, name: str) -> Kind:
    try:
        match saved:
            case ["elements", str(dtype)]:
                return Elements(DTYPES[dtype])
            case ["elements", str(dtype), [*sizes]] if all(type(size) is int and size >= 0 for size in sizes):
                return Elements(DTYPES[dtype], torch.Size(sizes))
            case ["number", str(dtype), value]:
                number = Number(decoded(value), DTYPES[dtype])
                if number.held.dim() == 0:
                    return number
            case ["value", value]:
                return Value(decoded(value))
    except (ValueError, TypeError, KeyError, RuntimeError, OverflowError):
        pass
    raise ValueError(f"the optimizer's state {short(key)} of {short(name)} is {short(saved)}")


def kinds_to_save(optimizers: Optimizers) -> list[OwnKinds]:
    """Return the kinds of this rank's state of each parameter."""
    states = {one: optimizers.state_of(one.param) for one in optimizers.params if not one.is_bytes}
    own = own_kinds(optimizers.params, states, "saving")
    for each in own:
        kinds_to_json(each.kinds, each.name)
    return own


def common_state(heard: Sequence[list[OwnKinds]]) -> list[Kinds]:
    """Return the kinds of each parameter's state; ValueError if ranks with elements of the parameter differ."""
    shared = shared_kinds(heard)
    problem = next((problem for each in shared for problem in each.problems()), None)
    if problem is not None:
        raise ValueError(problem)
    return [each.kinds for each in shared]


def state_entries(optimizers: Optimizers, kinds: Sequence[Kinds], written: Collection[str]) -> tuple[list[Entry], Any]:
    """Return the tensors of optimizers' states with this rank's parts, and the other values for the manifest.

    A rank writes the state of the parameters with names in `written`, which it also writes.
    """
    entries, states = [], {}
    for one, known in zip(optimizers.params, kinds, strict=True):
        own = {
            key: state for key, state in optimizers.state_of(one.param).items() if isinstance(known.get(key), Elements)
        }
        vectors = {key: as_stored(values_of(local_part(state))).reshape(-1) for key, state in own.items()}
        encoded_kinds = kinds_to_json(known, one.name)
        for original in one.originals:
            states[original.name] = encoded_kinds
            target = optimizers.tensors[original.name]
            place = _place_of(original, one, target) if original.name in written else None
            ranges = [] if place is None else ranges_of(target)
            for key, kind in known.items():
                if isinstance(kind, Elements):
                    part: tuple[Tensor | None, list[tuple[int, int]] | None] = None, None
                    if key in vectors and one.is_owned:
                        # The first replica writes. All ranks own an unsharded parameter, and the rank that writes it
                        # also writes the state.
                        is_first = original.name in written if one.handle is None else one.replicas.rank == 0
                        part = (vectors[key], [(0, vectors[key].numel())]) if is_first else part
                    elif key in vectors and place is not None:
                        part = vectors[key][place], ranges
                    shape = original.shape if kind.shape is None else kind.shape
                    entries.append(Entry(f"{original.name}/{key}", kind.dtype, shape, *part))
    named = [[original.name for one in group for original in one.originals] for group in optimizers.groups]
    return entries, rest_of(optimizers.name, zip(optimizers.param_groups, named, strict=True), states)


def _place_of(original: Original, one: OptimParam, target: Target) -> slice | None:
    """Return this rank's elements of an original in a vector with the layout of the optimizer's parameter, if any."""
    place = None if one.is_owned else one.interval(original, one.comm.rank)
    return None if place is None or target.held is None else slice(place.offset, place.offset + target.held.numel)


def rest_of(
    optimizer: str,
    groups: Iterable[tuple[Mapping[str, Any], Iterable[str]]],
    states: Mapping[str, Any],
    title: str = "",
    has_groups: bool = True,
) -> dict[str, Any]:
    """Return an optimizer's part of the manifest: groups with names of parameters, and states (`kinds_to_json`).

    `has_groups` is False if the groups were derived from the settings of each parameter.
    """
    return {
        "optimizer": optimizer,
        **({} if has_groups else {"has_groups": False}),
        "groups": [
            {"options": encoded(options_of(group), f"{title}param_groups[{number}]"), "params": list(names)}
            for number, (group, names) in enumerate(groups)
        ],
        "state": dict(states),
    }


def kinds_in(source: Source) -> Mapping[str, Kinds]:
    """Return the kinds of each parameter's state in a checkpoint with an optimizer."""
    return source.kinds or {name: kinds_from_json(each, name) for name, each in source.optimizer_rest["state"].items()}


def check_rest(rest: Any, tensors: Container[str]) -> dict[str, Kinds]:
    """Return the kinds of states; ValueError unless `rest` is as from `rest_of`, and `tensors` has all elements."""
    groups, states = (rest.get("groups"), rest.get("state")) if isinstance(rest, dict) else (None, None)
    if not (
        isinstance(groups, list)
        and isinstance(states, dict)
        and isinstance(rest.get("optimizer"), str)
        and isinstance(rest.get("has_groups", True), bool)
    ):
        raise ValueError(f"the rest of the optimizer's state is {short(rest)}")
    for number, group in enumerate(groups):
        names, options = (group.get("params"), group.get("options")) if isinstance(group, dict) else (None, None)
        if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            raise ValueError(f"group {number} of the optimizer has {short(names)} for the names of its parameters")
        if any(name not in states for name in names):
            raise ValueError(f"there is no state for {short(next(name for name in names if name not in states))}")
        if not isinstance(decoded(options), dict):
            raise ValueError(f"group {number} of the optimizer has the options {short(options)}")
    found = {name: kinds_from_json(saved, name) for name, saved in states.items()}
    for name, kinds in found.items():
        for key, kind in kinds.items():
            if isinstance(kind, Elements) and f"{name}/{key}" not in tensors:
                raise ValueError(f"there is no tensor for the optimizer's state {short(key)} of {short(name)}")
    return found


class StatePlan:
    """The parts of a checkpoint that optimizers load, and the `problems` that prevent loading."""

    def __init__(self, given: Any, tensors: Mapping[str, Target], source: Source) -> None:
        if source.optimizer is None:
            raise ValueError(f"{source.path} contains no optimizer: load it without an optimizer")
        rest, known = source.optimizer_rest, kinds_in(source)
        self._files, self._optimizers = source.optimizer, Optimizers(given, tensors)
        params, groups = self._optimizers.params, self._optimizers.groups
        saved_in = {name: number for number, group in enumerate(rest["groups"]) for name in group["params"]}
        names = {
            original: next((name for name in (original.name, *original.aliases) if name in saved_in), "")
            for one in params
            for original in one.originals
        }
        empty = [number for number, group in enumerate(rest["groups"]) if not group["params"]]
        has_groups = rest.get("has_groups", True)
        numbers, self.problems = match_groups(
            groups, lambda each: saved_in.get(names[each]), "that of the checkpoint", has_groups, empty
        )
        # The saved options of each group, encoded; None for a group without parameters.
        self._options = [None if number is None else rest["groups"][number]["options"] for number in numbers]
        # Each with the originals' names in the checkpoint, and the kinds of its state.
        self._states: list[tuple[OptimParam, dict[Original, str], Kinds]] = []
        for one in params:
            if one.is_bytes:
                continue
            saved = {original: names[original] for original in one.originals if names[original]}
            if len(saved) == len(one.originals):
                kinds = {original: known[name] for original, name in saved.items()}
                for original in kinds if one.is_owned else ():
                    try:
                        nested_state(kinds[original])  # as after reading
                    except ValueError as error:
                        raise ValueError(f"{source.path}: {saved[original]}: {error}") from None
                self.problems.extend(_misfits(saved, kinds, self._files, one.is_owned))
                self._states.append((one, saved, kinds[one.originals[0]]))
        self.problems.extend(_other_settings(self._optimizers, rest))
        used = set(names.values())
        left = [name for name in saved_in if name not in used]
        if left:
            self.problems.append(f"the optimizer of the checkpoint has {', '.join(left)}, but this one does not")

    @torch.no_grad()
    def read(self) -> dict[nn.Parameter, dict[str, Any]]:
        """Return this rank's shard of the state, by parameter. State is read into existing tensors of the same kind."""
        found: dict[nn.Parameter, dict[str, Any]] = {}
        for one, names, kinds in self._states:
            held = self._optimizers.state_of(one.param)
            state = {
                key: one.memory(held.get(key), kind.dtype, kind.shape) if isinstance(kind, Elements) else kind.held
                for key, kind in kinds.items()
            }
            own = [key for key, kind in kinds.items() if isinstance(kind, Elements)]
            flat = {key: values_of(local_part(state[key])).view(-1) for key in own}
            for original, name in names.items():
                target = self._optimizers.tensors[original.name]
                place = _place_of(original, one, target)
                ranges = [] if place is None else ranges_of(target)
                for key, vector in flat.items():
                    if one.is_owned and vector.numel():
                        self._files.read(f"{name}/{key}", vector, 0)
                    elif place is not None:
                        read_ranges(self._files, f"{name}/{key}", ranges, vector[place])
            flat.clear()  # `laid_out` may need other memory
            for key in () if one.is_owned else own:
                state[key] = one.laid_out(state[key])
            if state:
                found[one.param] = state
        return found

    def give(self, found: Mapping[nn.Parameter, dict[str, Any]]) -> None:
        saved = zip(self._options, self._optimizers.param_groups, strict=True)
        options = [options_of(own) if options is None else decoded(options) for options, own in saved]
        self._optimizers.load(found, options)
        release(self._optimizers.params)


def _other_settings(optimizers: Optimizers, rest: Any) -> list[str]:
    """Return a problem if the state belongs to a different optimizer: the next step would raise an unclear error.

    Optimizers are distinguished by their settings: subclasses may share settings, and newer versions of torch may add
    settings to a class.
    """
    own, saved = optimizers.name, rest.get("optimizer")
    wanted = {key for group in optimizers.param_groups for key in options_of(group)}
    given = {key for group in rest["groups"] for key in decoded(group["options"])}
    if not saved or own == saved or wanted == given:
        return []
    return [
        f"the optimizer is {own}, with settings {', '.join(sorted(wanted - given)) or 'of its own'}, but that of "
        f"the checkpoint is {saved}, with {', '.join(sorted(given - wanted)) or 'fewer'}"
    ]


def _misfits(
    names: Mapping[Original, str], kinds: Mapping[Original, Kinds], files: TensorReader, is_owned: bool
) -> Iterator[str]:
    try:
        common_kinds(kinds)
    except ValueError as error:
        yield str(error)
        return
    for original, name in names.items():
        for key, kind in kinds[original].items():
            if isinstance(kind, Elements):
                stored = files.tensors.get(f"{name}/{key}")
                wanted = original.shape if kind.shape is None else kind.shape
                if stored is None:
                    yield f"{files.path} has no {name}/{key}"
                elif stored.shape != wanted:
                    yield f"{stored} has shape {list(stored.shape)}, but the model's {list(wanted)}"
                elif kind.shape is not None and not is_owned:
                    yield odd_shape(key, name, kind.shape, f"the parameter {tuple(original.shape)}", ELEMENTWISE)
