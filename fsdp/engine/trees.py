"""Functions on tensors in containers that modules receive and return."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Return the same nested lists, tuples, mappings and dataclasses with `function` applied to their tensors.

    Other values are unchanged. Containers without a change are returned themselves, so unsupported types only cause an
    error if a value inside must be replaced. A container that contains itself is not changed there.
    """
    return function(tree) if isinstance(tree, Tensor) else _mapped(function, tree, {})[0]  # nearly always a tensor


# Results by ids of containers that can contain themselves, with references to these, so that ids are not used again.
_Seen = dict[int, tuple[Any, tuple[Any, bool]]]


def _mapped(function: Callable[[Tensor], Any], tree: Any, seen: _Seen) -> tuple[Any, bool]:
    """Return the new tree and whether it is new; a flag, because compilers cannot compare containers by identity."""
    if isinstance(tree, Tensor):
        new = function(tree)
        return new, new is not tree
    if isinstance(tree, tuple):
        return _rebuilt(function, tree, seen)
    if not isinstance(tree, (list, Mapping)) and not is_dataclass(tree):
        return tree, False
    if torch.compiler.is_compiling():
        return _rebuilt(function, tree, seen)
    if id(tree) not in seen:
        seen[id(tree)] = tree, (tree, False)
        seen[id(tree)] = tree, _rebuilt(function, tree, seen)
    return seen[id(tree)][1]


def _rebuilt(function: Callable[[Tensor], Any], tree: Any, seen: _Seen) -> tuple[Any, bool]:
    if isinstance(tree, PackedSequence):  # the sizes stay on the host
        values = _changed(function, seen, {name: getattr(tree, name) for name in tree._fields if name != "batch_sizes"})
        return (tree._replace(**values), True) if values else (tree, False)
    if isinstance(tree, (list, tuple)):
        results = [_mapped(function, item, seen) for item in tree]
        if not any(changed for _, changed in results):
            return tree, False
        items = [item for item, _ in results]
        return (type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)), True
    if isinstance(tree, Mapping):
        values = _changed(function, seen, dict(tree.items()))
        return (_updated(tree, values), True) if values else (tree, False)
    if is_dataclass(tree) and not isinstance(tree, (type, nn.Module)):
        attributes = _attributes_of(tree)
        values = _changed(function, seen, attributes)
        return (_with_attributes(type(tree), attributes | values), True) if values else (tree, False)
    return tree, False


def _changed(function: Callable[[Tensor], Any], seen: _Seen, values: dict[Any, Any]) -> dict[Any, Any]:
    """Return the new values of items that change."""
    results = {key: _mapped(function, value, seen) for key, value in values.items()}
    return {key: value for key, (value, changed) in results.items() if changed}


def _attributes_of(record: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, and the attributes that are not fields, such as a cached property."""
    values = {field.name: getattr(record, field.name) for field in fields(record) if hasattr(record, field.name)}
    return values | getattr(record, "__dict__", {})


def _with_attributes(kind: type[Any], attributes: dict[str, Any]) -> Any:
    # Not `replace`: ``__post_init__`` would compute fields from fields a second time. Not `copy.copy`: it calls a
    # ``__getattr__`` of the class, which may read a field, before the fields are set.
    record = object.__new__(kind)
    for name, value in attributes.items():
        object.__setattr__(record, name, value)  # also if the class is frozen
    return record


def _updated(mapping: Mapping[Any, Any], changed: dict[Any, Any]) -> Mapping[Any, Any]:
    copied = _copy(mapping)
    attributes = getattr(copied, "__dict__", {}) if isinstance(mapping, dict) else {}
    for key, value in changed.items():  # not update(): some outputs of models refuse it
        copied[key] = value
        if attributes.get(key) is mapping[key]:  # the class stores items as attributes, too
            attributes[key] = value
    return copied


def _copy(mapping: Mapping[Any, Any]) -> Any:
    if isinstance(mapping, dict) and type(mapping).copy is dict.copy:
        # This method returns a plain dictionary for any subclass, and a subclass's constructor may have any arguments.
        copied = type(mapping).__new__(type(mapping))
        dict.update(copied, mapping)
        getattr(copied, "__dict__", {}).update(getattr(mapping, "__dict__", {}))
        return copied
    return mapping.copy() if hasattr(mapping, "copy") else dict(mapping)
