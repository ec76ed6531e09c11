"""What tests of sharded state dicts share: a model with every kind of tensor, and ways to write and read folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from tests.helpers.equality import assert_same_state
from tests.helpers.models import Wrap, keep, seeded

HEADER = 2048  # bytes: each piece is in a zip file of its own

# What torch says where a checkpoint is read by one process.
alone_warning = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Everything(nn.Module):
    """Tied, frozen and empty parameters, numbers, several dtypes and dimensions, buffers, fewer elements than ranks.

    It computes nothing.
    """

    table: Tensor

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 3)
        self.conv = nn.Conv3d(2, 3, (2, 3, 1))
        self.wide = nn.Parameter(torch.randn(3, 5, dtype=torch.float64))
        self.short = nn.Parameter(torch.randn(2, dtype=torch.bfloat16))
        self.frozen = nn.Parameter(torch.randn(5, 2), requires_grad=False)
        self.scale = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.empty(4, 0))
        self.register_buffer("table", torch.randn(4, 3).t())
        self.inner = wrap(nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1, bias=False)))
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.tokens.weight
        with torch.no_grad():
            for buffer in self.buffers():
                buffer.add_(torch.randint(1, 9, buffer.shape))


def everything(wrap: Wrap = keep, seed: int = 0) -> Any:
    """`Everything` in two units; the same values on every call."""
    return seeded(Everything, wrap, seed)


def save_sharded(model: Any, folder: Path) -> None:
    """Collective."""
    dcp.save(model.sharded_state_dict(), checkpoint_id=folder)


def load_sharded(model: Any, folder: Path) -> Any:
    """Collective."""
    state = model.sharded_state_dict()
    dcp.load(state, checkpoint_id=folder)
    return model.load_sharded_state_dict(state)


def assert_whole_state(model: nn.Module, make: Callable[..., nn.Module], seed: int) -> None:
    """Collective. The model's whole state is that of the plain model of a seed."""
    assert_same_state(model.state_dict(), make(seed=seed).state_dict())


def state_in(folder: Path, make: Callable[..., nn.Module]) -> dict[str, Tensor]:
    """The state in a folder as a plain model in one process reads it, where every key must be there."""
    model = make(seed=99)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    model.load_state_dict(state)
    return model.state_dict()


def stored_bytes(folder: Path) -> int:
    """Of all files with values."""
    return sum(file.stat().st_size for file in folder.iterdir() if file.suffix == ".distcp")


def assert_written_once(folder: Path, state: dict[str, Tensor]) -> None:
    """Every element of the state is written once, and the files are not larger but for their headers."""
    metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    stored = {name: [torch.Size(chunk.sizes).numel() for chunk in found.chunks] for name, found in metadata.items()}  # type: ignore[union-attr]
    assert {name: sum(sizes) for name, sizes in stored.items()} == {name: v.numel() for name, v in state.items()}
    items = sum(len(sizes) for sizes in stored.values())
    assert 0 < stored_bytes(folder) - sum(value.nbytes for value in state.values()) < HEADER * items
