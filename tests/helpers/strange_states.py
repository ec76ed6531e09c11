"""State dicts that nobody expects, for a model and its optimizer in a world of one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel, optim_utils
from tests.helpers.damaged_files import Draw, bounded, replaced, strange_values

# What is said of a state dict that does not fit, by torch or by us.
REFUSED = (RuntimeError, ValueError, TypeError)


@dataclass(frozen=True)
class Loads:
    """A model with ways to load it: for each a state, and the function that takes one like it."""

    model: FullyShardedDataParallel
    optimizer: torch.optim.Optimizer
    ways: dict[str, tuple[Any, Callable[[Any], Any]]]

    def values(self) -> list[Tensor]:
        """Return what a load that raises must leave as it is."""
        state = (
            each for of_one in self.optimizer.state.values() for each in of_one.values() if isinstance(each, Tensor)
        )
        return [each.detach().clone() for each in (*self.model.parameters(), *self.model.buffers(), *state)]


@contextmanager
def state_dicts() -> Iterator[Loads]:
    """Make a model that is sharded over this process alone, and all its states."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        inner = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), FullyShardedDataParallel(nn.Linear(4, 2)))
        model = FullyShardedDataParallel(inner)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(torch.randn(5, 3)).sum().backward()
        optimizer.step()
        full = optim_utils.full_optim_state_dict(model, optimizer)
        yield Loads(
            model,
            optimizer,
            {
                "state dict": (model.state_dict(), model.load_state_dict),
                "local": (model.local_state_dict(), model.load_local_state_dict),
                "sharded": (model.sharded_state_dict(), model.load_sharded_state_dict),
                "optimizer": (full, lambda state: optim_utils.load_full_optim_state_dict(model, optimizer, state)),
            },
        )
    finally:
        dist.destroy_process_group()


def strange_things() -> st.SearchStrategy[Any]:
    """What nobody expects in the place of a tensor."""
    shapes = st.sampled_from([(), (0,), (1,), (3,), (4, 3), (3, 4), (2, 4), (4,), (28,), (10,)])
    dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
    devices = st.sampled_from(["cpu", "cpu", "meta"])
    tensors = st.builds(torch.zeros, shapes, dtype=dtypes, device=devices)
    sparse = st.just(torch.eye(4).to_sparse())
    return strange_values() | tensors | sparse | st.just(object()) | st.just(torch.tensor(1e39).expand(1 << 40))


def load_something(loads: Loads, draw: Draw) -> None:
    """Load a state of some kind in which something is strange; AssertionError if that does harm.

    If it is refused, model and optimizer are as they were.
    """
    kind = draw(st.sampled_from(sorted(loads.ways)))
    state, load = loads.ways[kind]
    strange = replaced(state, draw, strange_things())
    if draw(st.integers(0, 4)) == 0:
        strange = replaced(strange, draw, strange_things())
    before = loads.values()
    refused: Exception | None = None
    try:
        with bounded():
            load(strange)
    except REFUSED as error:
        refused = error
    if refused is None:
        load(copy.copy(state))
        return
    after = loads.values()
    is_same = len(before) == len(after) and all(map(_equal, before, after))
    assert is_same, f"{kind}: refused with {type(refused).__name__}: {refused}, and has changed something"
    assert len(str(refused)) < 20_000


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.nan_to_num(), other.nan_to_num())
