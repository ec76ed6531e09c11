"""The few places where we reach into autograd, and those of its names that are private.

``torch._C._current_graph_task_id`` and ``Variable._execution_engine.queue_callback`` have no public counterpart;
torch's own DistributedDataParallel and FSDP use them. Tried on torch 2.11 to 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable


def in_backward() -> bool:
    """Whether autograd is running a backward on this thread now: a forward that starts here is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Run `callback` when the backward that is running now (the innermost, if nested) has finished."""
    Variable._execution_engine.queue_callback(callback)


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """The same nest of lists, tuples, mappings and dataclasses with `function` applied to its tensors.

    What a nest holds besides is left as it is; containers in which nothing changed are returned themselves, so that
    types that cannot be rebuilt are only a problem where something inside must be replaced.
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
        return tree if not changed else _updated(tree, changed)
    if is_dataclass(tree) and not isinstance(tree, type):
        old_values = {field.name: getattr(tree, field.name) for field in fields(tree)}
        values = {name: map_tensors(function, value) for name, value in old_values.items()}
        changed = {name: value for name, value in values.items() if value is not old_values[name]}
        return tree if not changed else replace(tree, **changed)
    return tree


def _updated(mapping: Mapping[Any, Any], changed: dict[Any, Any]) -> Mapping[Any, Any]:
    copied = mapping.copy() if hasattr(mapping, "copy") else dict(mapping)
    copied.update(changed)
    return copied


def differentiable_tensors(tree: Any) -> list[Tensor]:
    """The tensors that require a gradient in a nest, attributes of objects of any other type included."""
    if isinstance(tree, Tensor):
        return [tree] if tree.requires_grad else []
    found: list[Tensor] = []
    seen: set[int] = set()
    ahead = [tree]
    while ahead:
        item = ahead.pop()
        if isinstance(item, Tensor):
            if item.requires_grad and id(item) not in seen:
                found.append(item)
        elif isinstance(item, (list, tuple)):
            ahead.extend(reversed(item))
            continue  # not marked as seen: a tuple made on the fly may die, and its id be used again
        elif isinstance(item, Mapping):
            ahead.extend(reversed(list(item.values())))
        elif id(item) in seen or isinstance(item, (type, torch.nn.Module)):
            continue
        else:
            # Distributions, model outputs, users' own classes: what they carry goes into the loss as well.
            ahead.extend(getattr(item, "__dict__", {}).values())
        seen.add(id(item))
    return found


class _BackwardPassed(torch.autograd.Function):
    """The identity; calls back when the gradients of all that it passed on are computed."""

    @staticmethod
    def forward(ctx: Any, callback: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.callback = callback
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.callback()
        return (None, *grads)


def call_when_passed(callback: Callable[[], None], tree: Any) -> Any:
    """The same nest; `callback` runs in backward once the gradients of all its tensors are known.

    Nothing is added, and it never runs, where no tensor of the nest requires a gradient.
    """
    tensors = differentiable_tensors(tree) if torch.is_grad_enabled() else []
    if not tensors:
        return tree
    passed = dict(zip(map(id, tensors), _BackwardPassed.apply(callback, *tensors), strict=True))
    return map_tensors(lambda tensor: passed.get(id(tensor), tensor), tree)
