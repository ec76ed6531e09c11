"""Compilers that count, and a model of blocks to compile, for the tests of `torch.compile`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import counters

from fsdp import FullyShardedDataParallel
from tests.helpers.models import Wrap, keep

# In what compilers import.
torchs_own_deprecations = pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")


@dataclass
class Counter:
    """A backend of `torch.compile` that counts the graphs that it is given."""

    inner: str = "aot_eager"
    sizes: list[int] = field(default_factory=list)  # of each graph, the number of its operations

    def __post_init__(self) -> None:
        torch._dynamo.reset()
        counters.clear()

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        self.sizes.append(sum(node.op == "call_function" for node in graph.graph.nodes))
        return lookup_backend(self.inner)(graph, inputs)

    @property
    def breaks(self) -> list[str]:
        return list(counters["graph_break"])


# Models


class Block(nn.Module):
    OPERATIONS = 5

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.widen, self.narrow = nn.LayerNorm(7), nn.Linear(7, hidden), nn.Linear(hidden, 7)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.narrow(F.gelu(self.widen(self.norm(inputs))))


class Stack(nn.Module):
    """Blocks that are units, after a layer of the root; `prepare` is applied to a block before it is wrapped."""

    def __init__(self, wrap: Wrap, prepare: Wrap = keep, hidden: tuple[int, ...] = (13, 13, 13)) -> None:
        super().__init__()
        self.entry = nn.Linear(5, 7)
        self.blocks = nn.ModuleList(wrap(prepare(Block(size))) for size in hidden)
        self.scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.entry(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden * self.scale


def stack(wrap: Wrap, prepare: Wrap = keep, **how: Any) -> nn.Module:
    torch.manual_seed(0)
    return wrap(Stack(wrap, prepare, **how))


def call_compile(module: nn.Module, backend: Any, **how: Any) -> nn.Module:
    module.compile(backend=backend, **how)
    return module


def torch_compile(module: nn.Module, backend: Any, **how: Any) -> nn.Module:
    return torch.compile(module, backend=backend, **how)  # type: ignore[return-value]


def user_module(module: nn.Module) -> Any:
    return module.module.module if isinstance(module, FullyShardedDataParallel) else module
