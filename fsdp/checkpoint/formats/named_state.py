"""The state of an optimizer by parameters' names, from dictionaries of other libraries: tensors to read, and the rest.

The rest is as in the manifest of a checkpoint of ours (`fsdp.checkpoint.optim`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fsdp.checkpoint.formats.source import Stitched, is_tensor, whole
from fsdp.checkpoint.formats.torch_file import TorchArchive
from fsdp.checkpoint.formats.values import materialised, values_of
from fsdp.checkpoint.json_values import encoded
from fsdp.checkpoint.optim import ELEMENTS, NUMBER, VALUE
from fsdp.checkpoint.safetensors import KINDS
from fsdp.optim_utils.stream import is_number

_NAMES = "param_names"  # torch's own, if the optimizer was given names


@dataclass(frozen=True)
class SavedOptimizer:
    """A dictionary of an optimizer.

    Attributes:
        key: under which it was.
        file: in which.
        content: it.
    """

    key: str
    file: TorchArchive
    content: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.file} ({self.key})"


@dataclass(frozen=True)
class FoundState:
    """The state of an optimizer.

    Attributes:
        key: under which it was.
        tensors: under ``<name>/<key>``.
        rest: what is no tensor.
        others: what more there was in its dictionary (``loss_scale``).
    """

    key: str
    tensors: list[Stitched]
    rest: Any
    others: dict[Any, Any]


def optimizers_in(file: TorchArchive) -> list[SavedOptimizer]:
    """The dictionaries of optimizers in a file: all of it, or what is under its keys."""
    content = file.content
    inside = {"optimizer": content} if is_optimizer_state(content) else content if isinstance(content, Mapping) else {}
    return [SavedOptimizer(key, file, value) for key, value in inside.items() if is_optimizer_state(value)]


def left_out(saved: Iterable[SavedOptimizer]) -> str:
    """What is told of several optimizers in one file."""
    return f"{', '.join(each.key for each in saved)} are left out: a checkpoint has the state of one optimizer"


class NamedState:
    """What was found so far.

    Args:
        title: what messages call the optimizer's dictionary: its file.

    Attributes:
        tensors: under ``<name>/<key>``.
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self.tensors: list[Stitched] = []
        self._state: dict[str, dict[str, Any]] = {}

    def add_parameter(self, name: str) -> None:
        """It is among the optimizer's; with or without state."""
        self._state.setdefault(name, {})

    def add_elements(self, name: str, key: str, value: Stitched) -> None:
        """State with a value for each element.

        Raises:
            ValueError: for dtypes that no checkpoint holds.
        """
        if value.dtype not in KINDS:
            raise ValueError(f"{self.where(name, key)} is of {value.dtype}, which safetensors files cannot hold")
        self.tensors.append(replace(value, name=f"{name}/{key}"))
        self._state.setdefault(name, {})[key] = [ELEMENTS, KINDS[value.dtype]]

    def add_single(self, names: Sequence[str], key: str, values: Sequence[Any]) -> None:
        """State with one value for the whole of these parameters, which all ranks have alike.

        Raises:
            ValueError: if they have not.
            TypeError: for values that no checkpoint holds.
        """
        kinds = [self._kind(names[0], key, value) for value in values]
        for number, kind in enumerate(kinds):
            if kind != kinds[0]:
                raise ValueError(
                    f"{self.where(names[0], key)} is {kinds[0][-1]} on the first rank and {kind[-1]} on rank {number}: "
                    "it is of different steps"
                )
        for name in names:
            self._state.setdefault(name, {})[key] = kinds[0]

    def _kind(self, name: str, key: str, value: Any) -> list[Any]:
        where = self.where(name, key)
        if is_tensor(value):
            return [NUMBER, KINDS[value.dtype], encoded(whole(value).item(), where)]
        return [VALUE, encoded(materialised(value), where)]

    def where(self, name: str, key: str) -> str:
        """What messages call it."""
        return f"{self._title}: the optimizer's state '{key}' of {name}"

    def found(
        self,
        saved: SavedOptimizer,
        groups: Iterable[tuple[Mapping[str, Any], Sequence[str]]],
        known: Sequence[str] = (),
    ) -> FoundState:
        """All of it.

        Args:
            saved: the first rank's dictionary.
            groups: of each parameter group its dictionary, and its parameters' names.
            known: what else is no value of a user's in the dictionary.

        Raises:
            TypeError: for settings that no checkpoint holds.
        """
        rest = self._rest(groups)
        others = values_of(saved.content, ("state", "param_groups", *known), [])
        return FoundState(saved.key, self.tensors, rest, others)

    def _rest(self, groups: Iterable[tuple[Mapping[str, Any], Sequence[str]]]) -> dict[str, Any]:
        found = []
        for number, (group, names) in enumerate(groups):
            options = materialised({key: value for key, value in group.items() if key not in ("params", _NAMES)})
            where = f"{self._title}: param_groups[{number}]"
            found.append({"options": encoded(options, where), "params": list(names)})
            for name in names:
                self.add_parameter(name)
        return {"optimizer": "", "groups": found, "state": self._state}


def is_single(key: str, value: Any, shape: torch.Size) -> bool:
    """Whether a value of the state is about a parameter of that shape as a whole."""
    return not is_tensor(value) or (not value.shape and (len(shape) > 0 or is_number(key)))


def is_optimizer_state(value: Any) -> bool:
    """Whether it is a dictionary of an optimizer."""
    return isinstance(value, Mapping) and isinstance(value.get("state"), Mapping) and "param_groups" in value
