"""The report of a training run with the memory of its tensors; written by train, read
by verify.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import Tensor, nn, optim

from examples.gpt.model import GPTConfig


@dataclass(frozen=True)
class HeldBytes:
    """Bytes that a process holds between backward and the next optimizer step."""

    parameters: int
    gradients: int
    optimizer_state: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer_state


def measure_held_bytes(model: nn.Module, optimizer: optim.Optimizer) -> HeldBytes:
    """Count the bytes of live tensors; call it after `step()` and before "
    "`zero_grad()`."""
    parameters = list(model.parameters())
    states = (value for state in optimizer.state.values() for value in state.values())
    return HeldBytes(
        parameters=_storage_bytes(parameters),
        gradients=_storage_bytes(p.grad for p in parameters if p.grad is not None),
        optimizer_state=_storage_bytes(
            value for value in states if isinstance(value, Tensor)
        ),
    )


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    # Storages, each once: a small view keeps the whole of a large buffer alive, and two
    # views share one. Of a DTensor (known by its method, so that nobody pays for
    # importing it) what this rank has.
    local = (t.to_local() if hasattr(t, "to_local") else t for t in tensors)
    storages = {
        storage.data_ptr(): storage for storage in (t.untyped_storage() for t in local)
    }
    return sum(storage.nbytes() for storage in storages.values())


@dataclass(frozen=True)
class Report:
    """The report of a training run, stored as `OUT/report.json`.

    Args:
        config: sizes of the model.
        unit_numels: elements of the parameters of each unit, counted before wrapping.
        held_bytes: of each rank. first_loss, last_loss: validation loss of the sharded
        model before and after training.
        digest: of the text; data and max_bytes say how to read it again. batch,
        max_batches: how the validation windows are put together. steps, seconds: of
        this run, without earlier runs that it has resumed.
    """

    config: GPTConfig
    unit_numels: list[int]
    held_bytes: list[HeldBytes]
    first_loss: float
    last_loss: float
    data: str | None
    max_bytes: int
    digest: str
    batch: int
    max_batches: int
    device: str
    steps: int
    seconds: float
    tokens_per_second: float
    learning_rate: float
    seed: int
    torch: str

    def write(self, path: Path) -> None:
        write_whole(path, json.dumps(asdict(self), indent=2).encode())

    @classmethod
    def read(cls, path: Path) -> Report:
        fields = json.loads(path.read_text(encoding="utf-8"))
        fields["config"] = GPTConfig(**fields["config"])
        fields["held_bytes"] = [HeldBytes(**held) for held in fields["held_bytes"]]
        return cls(**fields)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that is there completely or not at all, even if the process is
    stopped.
    """
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_bytes(content)
    os.replace(unfinished, path)
