"""A checkpoint may be a tree of dictionaries, in which the model, the optimizer and all else are found here.

`torch.save` and `torch.distributed.checkpoint` keep whatever they are given. Most people give them a dictionary with
``model`` and ``optimizer``, or the model's state alone; here are the rules by which these are found, and the choices
for everybody else.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp.checkpoint.formats.optim import Names, optimizer_state
from fsdp.checkpoint.formats.source import LazyTensor, Source, TensorReader, is_lazy
from fsdp.checkpoint.formats.torch_file import materialised, shown, values_of
from fsdp.checkpoint.json_values import encoded
from fsdp.engine.names import plain_name

MODEL_KEYS = ("model", "state_dict", "model_state_dict", "model_state", "module", "net", "network", "weights")
OPTIMIZER_KEYS: tuple[str, ...] = ("optimizer", "optim", "optimizer_state_dict", "optim_state_dict")
OPTIMIZER_KEYS += ("optimizer_state", "optim_state", "optimizer_states", "opt")
VALUES = "values"  # under which values are that have no names of their own
_EXTRA = "_extra_state"
_DDP = "module."
Path = tuple[Any, ...]
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True)
class Choices:
    """A user may say of a checkpoint what the rules do not find."""

    model_key: str | None = None  # its place in the tree, with dots between the keys
    optimizer_key: str | None = None
    param_order: Sequence[str] | None = None  # for optimizers that go by numbers: names, or FairScale's keys of shards
    only: str | None = None  # "model" or "optimizer", if the other one is not wanted
    optimizer_files: Paths | None = None  # for files of ranks, if those of the optimizer's state are others


DEFAULT = Choices()


def source_of_tree(word: str, path: str, tree: Any, choices: Choices) -> Source:
    """Return the source for a tree of mappings and lists with lazy tensors."""
    notes: list[str] = []
    model_path, optimizer_path = _places(path, tree, choices, notes)
    model_tree, rest = _model_and_rest(tree, model_path, optimizer_path)
    model, extra = _model(path, model_tree, notes)
    reader = TensorReader(path, model.tensors)
    optimizer, optimizer_rest = None, None
    if optimizer_path is not None and choices.only != "model":
        state = materialised(_at(tree, optimizer_path), keep_state=True)
        named = optimizer_state(path, state, model, choices.param_order, notes)
        optimizer, optimizer_rest = TensorReader(path, named.tensors), named.rest()
    found = values_of(rest, (), notes)
    values = encoded(found[VALUES] if [*found] == [*rest] == [VALUES] else found, VALUES) if found else None
    return Source(word, path, reader, optimizer, optimizer_rest, extra, values, notes=tuple(notes))


def _places(path: str, tree: Any, choices: Choices, notes: list[str]) -> tuple[Path | None, Path | None]:
    """Return the places of model and optimizer: None for a model whose tensors are not in a mapping of their own."""
    if not isinstance(tree, Mapping):
        raise ValueError(f"{path} holds a {shown(tree)}, and a checkpoint is a dictionary")
    model_path = _model_place(path, tree, choices, notes)
    if model_path is None and not any(is_lazy(value) for value in tree.values()):
        keys = ", ".join(repr(key) for key, value in tree.items() if isinstance(value, Mapping)) or "no dictionaries"
        raise ValueError(f"{path} has no model under a usual name ({keys}): say which it is (--model-key)")
    base = () if model_path is None else model_path[:-1]
    return model_path, _optimizer_place(path, tree, choices, base)


def _model_place(path: str, tree: Any, choices: Choices, notes: list[str]) -> Path | None:
    if choices.model_key is not None:
        return _chosen(path, tree, choices.model_key, "--model-key")
    base = _base(tree)
    below = _at(tree, base)
    known = [key for key in MODEL_KEYS if isinstance(below.get(key), Mapping) and _has_tensors(below[key])]
    if not known:
        return None
    found = (*base, known[0])
    if len(known) > 1 or found != (MODEL_KEYS[0],):
        others = f", and not {', '.join(map(repr, known[1:]))}" if len(known) > 1 else ""
        notes.append(f"the model is what is under {'.'.join(map(str, found))!r}{others}")
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
    """Return the mapping in which model and optimizer are: the outermost one, or the only one within it (``app``)."""
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
    """Return the place that a user has named, in which keys may have dots of their own."""
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


def _model_and_rest(tree: Any, model_path: Path | None, optimizer_path: Path | None) -> tuple[Any, Any]:
    if model_path is not None:
        return _at(tree, model_path), _without(tree, [model_path, optimizer_path])
    rest = _without(tree, [optimizer_path])
    model = {key: value for key, value in rest.items() if is_lazy(value) or str(key).endswith(_EXTRA)}
    return model, {key: value for key, value in rest.items() if key not in model}


def _without(tree: Any, paths: Sequence[Path | None]) -> Any:
    """Return the same without what is at some places, and without what is empty then."""
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


def _has_tensors(tree: Any) -> bool:
    return any(is_lazy(value) for _, value in _leaves(tree))


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
        notes.append(f"left out of the model, since it is no tensor: {', '.join(left_out)}")
    if not tensors:
        raise ValueError(f"{path} has no tensors in what should be the model: say which it is (--model-key)")
    return Names(tensors, cleaned), extra


def _cleaner(names: Mapping[str, Any], notes: list[str]) -> Callable[[str], str]:
    """Return what takes out of a name what wrappers put before and into it."""
    prefix = _DDP if all(name.startswith(_DDP) for name in names) else ""

    def cleaned(name: str) -> str:
        return plain_name(name.removeprefix(prefix))

    changed = [name for name in names if cleaned(name) != name]
    if changed:
        notes.append(f"what wrappers add to names was left out ({changed[0]} is {cleaned(changed[0])})")
    if len({cleaned(name) for name in names}) < len(names):
        raise ValueError("two tensors have the same name without what wrappers add to it: " + ", ".join(changed[:4]))
    return cleaned
