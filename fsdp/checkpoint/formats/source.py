"""A checkpoint of any format as one thing to read from: named tensors, read by ranges, and all that is no tensor.

Whatever reads a format makes a `Source` of it; loading, inspecting and converting know nothing else of formats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor


class FoundTensor(Protocol):
    """A tensor that can be read."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def shape(self) -> torch.Size: ...
    @property
    def nbytes(self) -> int: ...


class TensorReader(Protocol):
    """Tensors by name. Nothing of them is in memory before it is read, and nothing after.

    Attributes:
        path: what messages call it.
    """

    path: str

    @property
    def tensors(self) -> Mapping[str, FoundTensor]: ...

    def read(self, name: str, target: Tensor, start: int = 0) -> None:
        """Read elements ``start : start + target.numel()`` in row-major order into `target`, cast to its dtype."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Source:
    """A checkpoint of any format.

    Attributes:
        format: the word for it on the command line.
        path: where it is.
        model: its parameters and buffers, under plain names.
        optimizer: its optimizer's state with a value for each element, under ``<name>/<key>``; None without one.
        optimizer_rest: what else is in the state, as in the manifest of a checkpoint of ours
            (`fsdp.checkpoint.optim.state_entries`); None without one.
        extra: what modules have of extra state, by name, encoded (`fsdp.checkpoint.json_values`).
        values: what else the user saved, encoded; None if nothing.
        world_size: of the ranks that saved it; None if it does not say.
        notes: what is worth telling of it: what was left out, and why.
        generators: for each rank the states of its random number generators, encoded; None without them.
        identity: different for checkpoints that differ in what the rest of this does not show; empty if nobody looked.
        is_in_order: whether `model` has its tensors in the order of the modules, which gives an optimizer its numbers.
        aliases: second names of tied parameters, and for each the one under which `model` has it.
    """

    format: str
    path: str
    model: TensorReader
    optimizer: TensorReader | None = None
    optimizer_rest: Any = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    values: Any = None
    world_size: int | None = None
    notes: tuple[str, ...] = ()
    generators: list[Any] | None = None
    identity: str = ""
    aliases: Mapping[str, str] = field(default_factory=dict)
    is_in_order: bool = True

    def close(self) -> None:
        """Close all files."""
        self.model.close()
        if self.optimizer is not None:
            self.optimizer.close()
