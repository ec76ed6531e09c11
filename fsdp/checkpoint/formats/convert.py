"""Convert checkpoints: what can be read (`formats.source.Source`) is written in another format, by pieces."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsdp.checkpoint.checksums import BLOCK_BYTES
from fsdp.checkpoint.formats.source import Source, TensorReader
from fsdp.checkpoint.formats.trees import MODEL_KEYS, OPTIMIZER_KEYS, VALUES
from fsdp.checkpoint.json_values import decoded
from fsdp.checkpoint.optim import ELEMENTS, NUMBER
from fsdp.checkpoint.safetensors import DTYPES

MODEL, OPTIMIZER = MODEL_KEYS[0], OPTIMIZER_KEYS[0]
Advance = Callable[[int], None]


@dataclass(frozen=True, eq=False)
class Item:
    """A tensor that is to be written, perhaps in another dtype.

    Attributes:
        name: that it gets.
        dtype: that it is written in.
        reader: has it.
        key: its name there.
    """

    name: str
    dtype: torch.dtype
    reader: TensorReader
    key: str

    @property
    def shape(self) -> torch.Size:
        return self.reader.tensors[self.key].shape

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def pieces(self) -> Iterator[Tensor]:
        """Its elements in their order, in flat pieces of several MiB. The memory is used again for the next one."""
        # Whole blocks of what is read, so that each is compared with its checksum at once.
        step = BLOCK_BYTES // min(self.dtype.itemsize, self.reader.tensors[self.key].dtype.itemsize)
        count = self.shape.numel()
        buffer = torch.empty(min(step, count), dtype=self.dtype)
        for first in range(0, count, step):
            piece = buffer[: count - first]
            self.reader.read(self.key, piece, first)
            yield piece


@dataclass(frozen=True)
class Content:
    """What is to be written.

    Attributes:
        source: what it comes from.
        model: its tensors; None if they are not wanted.
        optimizer: the tensors of its state, under ``<name>/<key>``; None without one, or if it is not wanted.
    """

    source: Source
    model: list[Item] | None
    optimizer: list[Item] | None

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(item.nbytes for item in (*(self.model or ()), *(self.optimizer or ())))


def content_of(
    source: Source,
    dtype: torch.dtype | None = None,
    only: str | None = None,
    tied: Mapping[str, str] | None = None,
) -> Content:
    """What is to be written of a checkpoint.

    Args:
        source: the checkpoint.
        dtype: of the model's floating-point tensors; None leaves them in their own.
        only: "model" or "optimizer"; None for both.
        tied: other names that tensors of the model get besides, with those that they have.

    Raises:
        ValueError: if the optimizer alone is wanted, and there is none; for tensors that are not there.
    """
    if only == OPTIMIZER and source.optimizer is None:
        raise ValueError(f"{source.path} has no optimizer in it")
    model, optimizer = None, None
    if only != OPTIMIZER:
        names = {name: name for name in source.model.tensors} | dict(tied or {})
        unknown = [name for name in names.values() if name not in source.model.tensors]
        if unknown:
            raise ValueError(f"{source.path} has no tensor {unknown[0]} that could have another name")
        model = [
            Item(name, _dtype_for(source.model.tensors[key].dtype, dtype), source.model, key)
            for name, key in names.items()
        ]
    if only != MODEL and source.optimizer is not None:
        optimizer = [
            Item(name, found.dtype, source.optimizer, name) for name, found in source.optimizer.tensors.items()
        ]
    return Content(source, model, optimizer)


def _dtype_for(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and own.is_floating_point else own


def require_apart(source: Source, target: str) -> None:
    """Raise ValueError if a checkpoint would be written over itself, or into itself."""
    place, other = os.path.realpath(source.path), os.path.realpath(target)
    if other == place or os.path.dirname(place) == other:
        raise ValueError(f"{target} is where the checkpoint is: convert to another place")


# As a tree of dictionaries


def tree_of(
    content: Content, make: Callable[[Item], Tensor], *, by_number: bool = False, is_flat: bool = False
) -> dict[str, Any]:
    """All of it as dictionaries: ``model``, ``optimizer``, and the values under their own names.

    Args:
        content: it.
        make: what stands for a tensor.
        by_number: have the optimizer's parameters go by numbers, as in torch's optimizers, not by names.
        is_flat: have the optimizer's state in one dictionary with keys like ``state.<name>.exp_avg``.
    """
    source = content.source
    tree: dict[str, Any] = {}
    if content.model is not None:
        extra = {name: decoded(value) for name, value in source.extra.items()}
        tree[MODEL] = {item.name: make(item) for item in content.model} | extra
    if content.optimizer is not None:
        full = _optimizer_tree(content, make)
        if by_number:
            full = _numbered(full, list(source.model.tensors))
        tree[OPTIMIZER] = _flattened(full) if is_flat else full
    if content.model is None:
        return tree
    values = decoded(source.values)
    reserved = {*MODEL_KEYS, *OPTIMIZER_KEYS, VALUES}
    if isinstance(values, dict) and values and all(isinstance(key, str) and key not in reserved for key in values):
        tree |= values
    elif values is not None:
        tree[VALUES] = values
    return tree


def _optimizer_tree(content: Content, make: Callable[[Item], Tensor]) -> dict[str, Any]:
    rest = content.source.optimizer_rest
    items = {item.name: item for item in content.optimizer or ()}
    states: dict[str, dict[str, Any]] = {}
    for name, kinds in rest["state"].items():
        for key, kind in kinds.items():
            if kind[0] == ELEMENTS:
                value: Any = make(items[f"{name}/{key}"])
            elif kind[0] == NUMBER:
                value = torch.tensor(decoded(kind[2]), dtype=DTYPES[kind[1]])
            else:
                value = decoded(kind[1])
            states.setdefault(name, {})[key] = value
    groups = [{**decoded(group["options"]), "params": list(group["params"])} for group in rest["groups"]]
    return {"state": states, "param_groups": groups}


def _numbered(full: Mapping[str, Any], order: list[str]) -> dict[str, Any]:
    """The same by numbers. Within a group, parameters are in the model's order, as ``model.parameters()`` has them."""
    place = {name: number for number, name in enumerate(order)}
    numbers: dict[str, int] = {}
    groups = []
    for group in full["param_groups"]:
        names = sorted(group["params"], key=lambda name: place.get(name, len(place)))
        numbers |= {name: number for number, name in enumerate(names, start=len(numbers))}
        groups.append({**group, "params": [numbers[name] for name in names], "param_names": names})
    return {"state": {numbers[name]: state for name, state in full["state"].items()}, "param_groups": groups}


def _flattened(full: Mapping[str, Any]) -> dict[str, Any]:
    found = {f"state.{name}.{key}": value for name, state in full["state"].items() for key, value in state.items()}
    for group in full["param_groups"]:
        options = {key: value for key, value in group.items() if key != "params"}
        found |= {f"param_groups.{name}.{key}": value for name in group["params"] for key, value in options.items()}
    return found
