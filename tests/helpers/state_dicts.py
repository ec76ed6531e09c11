"""A model with every kind of state, and the memory that state dictionaries take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.models import Wrap, keep, seeded
from tests.helpers.parity import sgd_with_momentum


class Zoo(nn.Module):
    """Ties, buffers of both kinds, batch norm, frozen parts, two dtypes, 0-d and empty parameters, extra state."""

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.register_buffer("seen", torch.tensor(3))
        self.scale = nn.Parameter(torch.tensor(1.25))
        self.tokens = nn.Embedding(11, 5)
        core = wrap(nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5)))
        self.trunk = wrap(nn.Sequential(nn.Linear(5, 7, bias=False), nn.BatchNorm1d(7), core))
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.fine = nn.Parameter(torch.linspace(0, 1, 5, dtype=torch.float64))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.tokens.weight

    def get_extra_state(self) -> dict[str, str]:
        return {"kind": "zoo"}

    def set_extra_state(self, state: dict[str, str]) -> None:
        assert state == {"kind": "zoo"}

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.trunk(self.tokens(tokens)) * self.scale
        return self.head(self.frozen(hidden) + self.fine.float())


def zoo(wrap: Wrap = keep, seed: int = 0) -> Any:
    return seeded(Zoo, wrap, seed)


def tokens() -> Tensor:
    return (torch.arange(4) + dist.get_rank()) % 11


def train(model: nn.Module) -> None:
    """Collective for a sharded model. Some steps, so that buffers and weights are no longer those of the start."""
    optimizer = sgd_with_momentum([param for param in model.parameters() if param.requires_grad])
    for _ in range(2):
        optimizer.zero_grad()
        model(tokens()).square().mean().backward()
        optimizer.step()


LAYERS, LAYER_BYTES = 8, 64 * 64 * 4


class LiveBytes(TorchDispatchMode):
    """The most bytes alive at a time in storages that operations under it have made."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[StorageWeakRef, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {StorageWeakRef(arg.untyped_storage()) for arg in args if isinstance(arg, Tensor)}
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (list, tuple)) else [made]:
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                storage = StorageWeakRef(tensor.untyped_storage())
                if storage not in given:
                    self._storages[storage] = tensor.untyped_storage().nbytes()
        self._storages = {storage: size for storage, size in self._storages.items() if not storage.expired()}
        self.peak = max(self.peak, sum(self._storages.values()))
        return made


@contextmanager
def at_most(nbytes: int) -> Iterator[None]:
    with LiveBytes() as live:
        yield
    assert live.peak > 0 or nbytes == 0, "nothing was seen"
    assert live.peak <= nbytes + 4096, f"{live.peak} bytes were alive, {nbytes} are allowed"
