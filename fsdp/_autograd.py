"""The few places where we reach into autograd, and those of its names that are private.

``torch._C._current_graph_task_id`` and ``Variable._execution_engine.queue_callback`` have no public counterpart;
torch's own DistributedDataParallel and FSDP use them. Tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable


def in_backward() -> bool:
    """Whether autograd is running a backward on this thread now: a forward that starts here computes again."""
    return torch._C._current_graph_task_id() != -1


class BackwardPass:
    """One run of autograd, from the first hook to its end; begins when it is made, inside of a hook.

    `at_end` is called when the run (the innermost, if backwards are nested) has finished. A run that raised is
    never finished: autograd then drops the callback, and that is how `is_alive` knows.
    """

    def __init__(self, at_end: Callable[[], None]) -> None:
        def callback() -> None:
            at_end()

        self._callback = weakref.ref(callback)
        Variable._execution_engine.queue_callback(callback)

    @property
    def is_alive(self) -> bool:
        return self._callback() is not None


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
    copied.update(changed)
    return copied


def differentiable_tensors(tree: Any) -> list[Tensor]:
    """The tensors of a nest that require a gradient, those in attributes of any objects included."""
    if isinstance(tree, Tensor):
        return [tree] if tree.requires_grad else []
    found: dict[int, Tensor] = {}
    seen: dict[int, Any] = {}  # keeps what it has seen, because the id of something that died is used again
    ahead = [tree]
    while ahead:
        item = ahead.pop()
        if isinstance(item, Tensor):
            if item.requires_grad:
                found[id(item)] = item
        elif id(item) not in seen:
            seen[id(item)] = item
            ahead.extend(reversed(list(_parts(item))))
    return list(found.values())


def _parts(item: Any) -> Iterable[Any]:
    if isinstance(item, (str, bytes, int, float, complex, type(None), type, torch.nn.Module)):
        return ()
    if isinstance(item, (list, tuple, deque, set, frozenset)):
        return item
    if isinstance(item, Mapping):
        return item.values()
    # Distributions, model outputs, users' own classes: what they carry goes into the loss as well.
    slots = [name for cls in type(item).__mro__ for name in getattr(cls, "__slots__", ()) if isinstance(name, str)]
    return [*getattr(item, "__dict__", {}).values(), *(getattr(item, name, None) for name in slots)]
