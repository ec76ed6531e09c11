"""Tensors inside of whatever nest of containers modules take and return."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """The same nest of lists, tuples, mappings and dataclasses with `function` applied to its tensors.

    What a nest holds besides is left as it is; containers in which nothing changed are returned themselves, so
    that types that cannot be rebuilt are only a problem where something inside must be replaced.
    """
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, (list, tuple)):
        items = [map_tensors(function, item) for item in tree]
        if all(new is old for new, old in zip(items, tree, strict=True)):
            return tree
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if isinstance(tree, Mapping):
        values = {key: map_tensors(function, value) for key, value in tree.items()}
        changed = {key: value for key, value in values.items() if value is not tree[key]}
        return _updated(tree, changed) if changed else tree
    if is_dataclass(tree) and not isinstance(tree, type):
        old_values = {field.name: getattr(tree, field.name) for field in fields(tree) if field.init}
        values = {name: map_tensors(function, value) for name, value in old_values.items()}
        changed = {name: value for name, value in values.items() if value is not old_values[name]}
        return replace(tree, **changed) if changed else tree
    return tree


def _updated(mapping: Mapping[Any, Any], changed: dict[Any, Any]) -> Mapping[Any, Any]:
    copied = mapping.copy() if hasattr(mapping, "copy") else dict(mapping)
    for key, value in changed.items():  # not update(): some outputs of models refuse it
        copied[key] = value
    return copied
