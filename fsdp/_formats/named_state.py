"""The state of an optimizer by parameters' names, from dictionaries of other libraries: tensors to read, and the rest.

The rest is as in the manifest of a checkpoint of ours (`fsdp._checkpoint.optim`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fsdp._checkpoint.safetensors_writer import KINDS
from fsdp._formats.stitched import Stitched
from fsdp._formats.torch_files import plain
from fsdp._optim_stream import is_number
from fsdp._plain_values import encoded

_NAMES = "param_names"  # torch's own, if the optimizer was given names


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
        full = Stitched(
            f"{name}/{key}",
            value.shape,
            value.dtype,
            value.pieces,
        )
        self.tensors.append(full)
        self._state.setdefault(name, {})[key] = ["elements", KINDS[value.dtype]]

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
        if isinstance(value, Tensor):
            return ["number", KINDS[value.dtype], encoded(value.item(), where)]
        return ["value", encoded(plain(value), where)]

    def where(self, name: str, key: str) -> str:
        """What messages call it."""
        return f"{self._title}: the optimizer's state '{key}' of {name}"

    def rest(self, groups: Iterable[tuple[Mapping[str, Any], Sequence[str]]]) -> dict[str, Any]:
        """All that is no tensor.

        Args:
            groups: of each parameter group its dictionary, and its parameters' names.
        """
        found = []
        for number, (group, names) in enumerate(groups):
            options = {key: plain(value) for key, value in group.items() if key not in ("params", _NAMES)}
            where = f"{self._title}: param_groups[{number}]"
            found.append({"options": encoded(options, where), "params": list(names)})
            for name in names:
                self.add_parameter(name)
        return {"optimizer": "", "groups": found, "state": self._state}


def is_single(key: str, value: Any, shape: torch.Size) -> bool:
    """Whether a value of the state is about a parameter of that shape as a whole."""
    return not isinstance(value, Tensor) or (value.dim() == 0 and (len(shape) > 0 or is_number(key)))


def is_optimizer_state(value: Any) -> bool:
    """Whether it is a dictionary of an optimizer."""
    return isinstance(value, Mapping) and isinstance(value.get("state"), Mapping) and "param_groups" in value
