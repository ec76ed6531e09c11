"""A checkpoint may be a tree of dictionaries; this module finds the model, the optimizer and other values in it.

`torch.save` and `torch.distributed.checkpoint` store arbitrary trees. Most trees are dictionaries with ``model`` and
``optimizer``, or the model's state alone. This module contains the rules to find these, and the choices for all
other trees.

Optimizers' states are converted to the form of `fsdp.checkpoint.optim` from three other forms: torch's optimizers,
with parameters by numbers; the same form by names, as in `get_optimizer_state_dict` and FSDP1; and flat states, with
keys like ``state.<name>.exp_avg``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fsdp.checkpoint.formats.source import LazyTensor, Source, TensorReader, is_lazy, is_tensor, whole
from fsdp.checkpoint.formats.torch_file import TorchArchive, materialised, shown, values_of
from fsdp.checkpoint.json_values import encoded
from fsdp.checkpoint.optim import kind_to_json, rest_of
from fsdp.checkpoint.untrusted import short
from fsdp.distributed.communicator import some_of
from fsdp.engine.names import plain_name
from fsdp.layers.optimizer_states import is_number
from fsdp.optim_utils.full import NAMES
from fsdp.optim_utils.state import Elements, Kind, Number, Value, odd_shape, options_of

MODEL_KEYS = ("model", "state_dict", "model_state_dict", "model_state", "module", "net", "network", "weights")
OPTIMIZER_KEYS: tuple[str, ...] = ("optimizer", "optim", "optimizer_state_dict", "optim_state_dict")
OPTIMIZER_KEYS += ("optimizer_state", "optim_state", "optimizer_states", "opt")
VALUES = "values"  # the key of values without names
_EXTRA = "_extra_state"
_DDP = "module."
_STATE, _GROUPS = "state", "param_groups"
Path = tuple[Any, ...]


@dataclass(frozen=True)
class Choices:
    """The user's choices for a checkpoint in which the rules do not find all contents."""

    model_key: str | None = None  # the keys on the path to the model, separated by dots
    optimizer_key: str | None = None
    param_order: Sequence[str] | None = None  # for an optimizer's numbers: names, or FairScale's keys of shards
    only: str | None = None  # "model" or "optimizer", if only that part is needed
    optimizer_files: str | os.PathLike[str] | None = None  # for ranks' files, if optimizer state is in separate files


DEFAULT = Choices()


def source_of_tree(word: str, path: str, tree: Any, choices: Choices, **known: Any) -> Source:
    """Return the source for a tree of mappings and lists with lazy tensors; `known` contains its other fields."""
    notes: list[str] = []
    if not isinstance(tree, Mapping):
        raise ValueError(f"{path} contains a {shown(tree)}, but a checkpoint is a dictionary")
    model_path = _model_place(path, tree, choices, notes)
    if model_path is None and not any(is_lazy(value) for value in tree.values()):
        keys = ", ".join(repr(key) for key, value in tree.items() if isinstance(value, Mapping)) or "no dictionaries"
        raise ValueError(f"{path} has no model under a usual key ({keys}): pass its key (--model-key)")
    optimizer_path = _optimizer_place(path, tree, choices, () if model_path is None else model_path[:-1])
    rest = _without(tree, [model_path, optimizer_path])
    if model_path is not None:
        model_tree = _at(tree, model_path)
    else:
        model_tree = {key: value for key, value in rest.items() if is_lazy(value) or str(key).endswith(_EXTRA)}
        rest = {key: value for key, value in rest.items() if key not in model_tree}
    model, extra = _model(path, model_tree, notes)
    reader = TensorReader(path, model.tensors)
    optimizer, optimizer_rest = None, None
    if optimizer_path is not None and choices.only != "model":
        state = materialised(_at(tree, optimizer_path), keep_state=True)
        named = optimizer_state(path, state, model, choices.param_order, notes)
        optimizer, optimizer_rest = TensorReader(path, named.tensors), named.rest()
    found = values_of(rest, (), notes)
    values = encoded(found[VALUES] if [*found] == [*rest] == [VALUES] else found, VALUES) if found else None
    return Source(word, path, reader, optimizer, optimizer_rest, extra, values, notes=tuple(notes), **known)


def _model_place(path: str, tree: Any, choices: Choices, notes: list[str]) -> Path | None:
    """Return the path of the model; None if its tensors are not in a separate mapping."""
    if choices.model_key is not None:
        return _chosen(path, tree, choices.model_key, "--model-key")
    base = _base(tree)
    below = _at(tree, base)
    inner = {key: below[key] for key in MODEL_KEYS if isinstance(below.get(key), Mapping)}
    known = [key for key, value in inner.items() if any(is_lazy(leaf) for _, leaf in _leaves(value))]
    if not known:
        return None
    found = (*base, known[0])
    if len(known) > 1 or found != (MODEL_KEYS[0],):
        others = f", and not {', '.join(map(repr, known[1:]))}" if len(known) > 1 else ""
        notes.append(f"the model is under {'.'.join(map(str, found))!r}{others}")
    return found


def _optimizer_place(path: str, tree: Any, choices: Choices, base: Path) -> Path | None:
    if choices.optimizer_key is not None:
        return _chosen(path, tree, choices.optimizer_key, "--optimizer-key")
    below = _at(tree, base)
    found = next((key for key in OPTIMIZER_KEYS if _is_optimizer(below.get(key))), None)
    if found is None:
        return None
    return (*base, found, 0) if isinstance(below[found], list) else (*base, found)


def _base(tree: Mapping[Any, Any]) -> Path:
    """Return the path of the mapping with model and optimizer: empty, or the only such inner mapping (``app``)."""
    if any(is_lazy(value) for value in tree.values()) or any(key in tree for key in MODEL_KEYS):
        return ()
    inner = [
        key
        for key, value in tree.items()
        if isinstance(value, Mapping) and any(isinstance(value.get(name), Mapping) for name in MODEL_KEYS)
    ]
    return (inner[0],) if len(inner) == 1 else ()


def _is_optimizer(value: Any) -> bool:
    if isinstance(value, list) and len(value) == 1:
        return _is_optimizer(value[0])
    if not isinstance(value, Mapping):
        return False
    return "param_groups" in value or any(str(key).startswith(("param_groups.", "state.")) for key in value)


def _chosen(path: str, tree: Any, key: str, option: str) -> Path:
    """Return the path that the user has specified; keys may contain dots."""
    for own, inner in tree.items():
        if key == str(own):
            return (own,)
        if key.startswith(f"{own}.") and isinstance(inner, Mapping):
            return (own, *_chosen(path, inner, key[len(str(own)) + 1 :], option))
    raise ValueError(f"{path} has no {key!r} ({option}): there are {', '.join(map(repr, tree)) or 'no keys'}")


def _at(tree: Any, path: Path) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _without(tree: Any, paths: Sequence[Path | None]) -> Any:
    """Return the tree without some paths, and without containers that are then empty."""
    gone = [path for path in paths if path]
    if not gone or not isinstance(tree, Mapping):
        return tree
    found = {}
    for key, value in tree.items():
        below = [path[1:] for path in gone if path[0] == key]
        if not below:
            found[key] = value
        elif all(below) and (left := _without(value, below)) and not isinstance(value, list):
            found[key] = left
    return found


def _leaves(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    if isinstance(tree, Mapping) and not (path and str(path[-1]).endswith(_EXTRA)):
        for key, value in tree.items():
            yield from _leaves(value, (*path, key))
    else:
        yield path, tree


def _model(path: str, tree: Any, notes: list[str]) -> tuple[Names, dict[str, Any]]:
    """Return the model's tensors by plain names, and its extra state."""
    leaves = {".".join(map(str, place)): value for place, value in _leaves(tree)}
    cleaned = _cleaner(leaves, notes)
    tensors: dict[str, LazyTensor] = {}
    extra = {}
    left_out = []
    for name, value in leaves.items():
        if name.endswith(_EXTRA):
            try:
                extra[cleaned(name)] = encoded(materialised(value), name)
            except TypeError as error:
                notes.append(f"left out: {error}")
        elif is_lazy(value):
            tensors[cleaned(name)] = value
        else:
            left_out.append(f"{name} ({shown(value)})")
    if left_out:
        notes.append(f"ignored in the model, because these are not tensors: {', '.join(left_out)}")
    if not tensors:
        raise ValueError(f"{path} has no tensors under the key of the model: pass the model's key (--model-key)")
    return Names(tensors, cleaned), extra


def _cleaner(names: Mapping[str, Any], notes: list[str]) -> Callable[[str], str]:
    """Return a function that removes the prefixes and parts of wrappers from a name."""
    prefix = _DDP if all(name.startswith(_DDP) for name in names) else ""

    def cleaned(name: str) -> str:
        return plain_name(name.removeprefix(prefix))

    changed = [name for name in names if cleaned(name) != name]
    if changed:
        notes.append(f"parts of names that wrappers add were removed ({changed[0]} is {cleaned(changed[0])})")
    if len({cleaned(name) for name in names}) < len(names):
        raise ValueError("two tensors have the same name without the parts that wrappers add: " + some_of(changed))
    return cleaned


class SavedOptimizer(NamedTuple):
    """A dictionary of an optimizer in a file, and the key of the dictionary."""

    key: str
    file: TorchArchive
    content: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.file} ({self.key})"


def optimizers_in(file: TorchArchive) -> list[SavedOptimizer]:
    """Return the dictionaries of optimizers in a file: the whole file, or the values of its keys."""
    content = file.content
    inside = {"optimizer": content} if is_optimizer_state(content) else content if isinstance(content, Mapping) else {}
    return [SavedOptimizer(key, file, value) for key, value in inside.items() if is_optimizer_state(value)]


def is_optimizer_state(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get(_STATE), Mapping) and _GROUPS in value


def is_single(key: str, value: Any, shape: torch.Size) -> bool:
    """Return whether a value of the state is a single value for a parameter of this shape, and not elementwise."""
    return not is_tensor(value) or is_number(key, value.shape, shape)


class NamedState:
    """Collects an optimizer's state by the parameters' names; messages contain `title`."""

    def __init__(self, title: str) -> None:
        self._title = title
        self.tensors: dict[str, LazyTensor] = {}  # under ``<name>/<key>``
        self.groups: list[tuple[Mapping[str, Any], list[str]]] = []  # options and parameters' names
        self.has_groups = True  # False if groups were derived from settings of parameters
        self._state: dict[str, dict[str, Any]] = {}

    def add_parameter(self, name: str) -> None:
        """Register a parameter of the optimizer, with or without state."""
        self._state.setdefault(name, {})

    def add_elements(self, name: str, key: str, value: LazyTensor, shape: torch.Size | None = None) -> None:
        """Add elementwise state, or state of a different `shape`, which only owned parameters have."""
        self.tensors[f"{name}/{key}"] = value
        self._add([name], key, Elements(value.dtype, shape))

    def add_single(self, names: Sequence[str], key: str, values: Sequence[Any]) -> None:
        """Add a single value as state of these parameters; ValueError unless the `values` of all ranks are equal."""
        first, *others = (
            Number(whole(value).item(), value.dtype) if is_tensor(value) else Value(materialised(value))
            for value in values
        )
        self._add(names, key, first)
        for rank, kind in enumerate(others, start=1):
            if self._json(names[0], key, kind) != self._state[names[0]][key]:
                raise ValueError(
                    f"{self.where(names[0], key)} is {first.value} on the first rank and {kind.value} on rank {rank}: "
                    "they were saved at different steps"
                )

    def add(self, name: str, key: str, value: Any, shape: torch.Size) -> None:
        if is_single(key, value, shape):
            self.add_single([name], key, [value])
        else:
            self.add_elements(name, key, value, None if value.shape == shape else value.shape)

    def _add(self, names: Sequence[str], key: str, kind: Kind) -> None:
        if not isinstance(key, str):  # JSON would convert or reject the key
            raise ValueError(f"{self._title}: the optimizer's state of {names[0]} has the key {short(key)}, no string")
        for name in names:
            self._state.setdefault(name, {})[key] = self._json(name, key, kind)

    def _json(self, name: str, key: str, kind: Kind) -> list[Any]:
        return kind_to_json(kind, self.where(name, key))

    def where(self, name: str, key: str) -> str:
        return f"{self._title}: the optimizer's state '{key}' of {name}"

    def odd_shape(self, name: str, key: str, found: Sequence[int], shape: Sequence[int]) -> str:
        remedy = "Convert without it (--only model)."
        return f"{self._title}: {odd_shape(key, name, found, f'the parameter {tuple(shape)}', remedy)}"

    def rest(self) -> dict[str, Any]:
        """Return the data other than tensors; raise TypeError for settings that a checkpoint cannot contain."""
        named = [(materialised(options_of(group)), list(dict.fromkeys(names))) for group, names in self.groups]
        for name in (name for _, names in named for name in names):
            self.add_parameter(name)
        return rest_of("", named, self._state, f"{self._title}: ", self.has_groups)


class Names(NamedTuple):
    """The plain names of a model's tensors; `cleaned` converts a name in a file to a plain name."""

    tensors: Mapping[str, LazyTensor]
    cleaned: Callable[[str], str]


def optimizer_state(
    path: str, found: Mapping[str, Any], model: Names, param_order: Sequence[str] | None, notes: list[str]
) -> NamedState:
    """Convert an optimizer's state with lazy tensors, by numbers, by names or flat, to a state by names."""
    has_groups = _GROUPS in found
    if not has_groups:
        found = _unflattened(found, model)
        notes.append("parameters of the optimizer with equal settings count as one group")
    groups = list(found[_GROUPS])
    names = names_by_key(path, found, param_order, model.cleaned)
    texts = {str(key): key for key in names}  # numbers may have been converted to strings
    saved = found.get(_STATE, {}).items()
    states = {names[key if key in names else texts.get(str(key), key)]: state for key, state in saved}
    held = list(dict.fromkeys(names[key] for group in groups for key in group["params"]))
    unknown = [name for name in held if name not in model.tensors]
    if unknown:
        raise ValueError(
            f"{path}: the optimizer has {unknown[0]}, but the model does not. Convert without it (--only model)."
        )
    in_groups = set(held)
    strangers = [name for name in states if name not in in_groups]
    if strangers:
        raise ValueError(f"{path}: the optimizer has state of {some_of(strangers)}, which none of its groups contains")
    state = NamedState(path)
    state.has_groups = has_groups
    state.groups = [(group, [names[key] for key in group["params"]]) for group in groups]
    for name in held:
        state.add_parameter(name)
        for key, value in states.get(name, {}).items():
            state.add(name, key, value, model.tensors[name].shape)
    return state


def names_by_key(
    title: str, found: Mapping[str, Any], order: Sequence[str] | None, cleaned: Callable[[str], str]
) -> dict[Any, str]:
    groups = found[_GROUPS]
    keys = [key for group in groups for key in group["params"]]
    if all(isinstance(key, str) for key in keys):
        return {key: cleaned(key) for key in [*keys, *found.get(_STATE, {})]}
    if all("param_names" in group for group in groups):
        named = [pair for group in groups for pair in zip(group["params"], group["param_names"], strict=True)]
        return {key: cleaned(name) for key, name in named}
    if NAMES in found:
        return {key: cleaned(name) for key, name in found[NAMES].items()}
    if "param_id_map" in found:
        raise ValueError(
            f"{title}: the optimizer identifies parameters by FairScale's numbers. Convert it to names first, with the "
            "model: fsdp.optim_utils.rekey_optim_state_dict(full, model, 'names')"
        )
    if order is None:
        raise ValueError(
            f"{title}: in the optimizer's state, parameters have numbers, but their names are unknown. Write the names "
            "of model.named_parameters() to a file, one in each line, in the order of the optimizer, and pass the file "
            "as --param-order; or convert without the optimizer (--only model). With FSDP1, save "
            "FSDP.full_optim_state_dict(model, optimizer), which contains names."
        )
    if len(order) != len(keys):
        raise ValueError(f"{title}: the optimizer has {len(keys)} parameters, but {len(order)} names were given")
    return {key: cleaned(name) for key, name in zip(sorted(keys), order, strict=True)}


def _unflattened(found: Mapping[str, Any], model: Names) -> dict[str, Any]:
    """Convert a flat state to states by names, and groups of parameters with equal settings."""
    states: dict[str, dict[str, Any]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for key, value in found.items():
        what, _, rest = key.partition(".")
        if what in (_STATE, _GROUPS):
            name, state_key = _split(rest, model)
            (states if what == _STATE else settings).setdefault(name, {})[state_key] = value
    groups: dict[str, dict[str, Any]] = {}
    order = {name: number for number, name in enumerate(model.tensors)}
    for name in sorted(settings, key=lambda each: order.get(each, len(order))):
        options = settings[name]
        text = json.dumps(encoded(options, name), sort_keys=True)
        groups.setdefault(text, {**options, "params": []})["params"].append(name)
    return {_STATE: states, _GROUPS: list(groups.values())}


def _split(text: str, model: Names) -> tuple[str, str]:
    """Return the name of a parameter and the remaining text, which may both contain dots."""
    parts = text.split(".")
    for count in range(len(parts) - 1, 0, -1):
        name = model.cleaned(".".join(parts[:count]))
        if name in model.tensors:
            return name, ".".join(parts[count:])
    return ".".join(parts[:-1]), parts[-1]
