"""A GPT with low-rank adapters on a frozen base, and the computed cost of training them on a rank.

LoRA as in Hu et al. 2021 (arXiv:2106.09685): a frozen linear layer's output gets ``up(down(x)) * alpha / rank`` added.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks._contestants import CONTESTANTS, Kind
from benchmarks._training import Setup
from examples.gpt.model import GPT, GPTConfig


class Adapter(nn.Module):
    """A trained adapter of a linear layer; it computes in its own dtype and returns the dtype of its input."""

    def __init__(self, base: nn.Linear, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.down = nn.Linear(base.in_features, rank, bias=False, dtype=dtype)
        self.up = nn.Linear(rank, base.out_features, bias=False, dtype=dtype)
        # LoRA begins with `up` at zero. Here both have gradients from the first step, which is to be compared.
        nn.init.normal_(self.up.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x.to(self.down.weight.dtype))).to(x.dtype)


class AdaptedLinear(nn.Module):
    """A frozen linear layer with an adapter; `alpha` is twice the rank, as is customary."""

    def __init__(self, base: nn.Linear, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = base
        self.adapter = Adapter(base, rank, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2 * self.adapter(x)


def add_adapters(model: GPT, rank: int, dtype: torch.dtype) -> GPT:
    """Freeze the model and give every linear layer of its blocks an adapter."""
    model.requires_grad_(False)
    for block in model.blocks:
        for parent in list(block.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(parent, name, AdaptedLinear(child, rank, dtype))
    return model


@dataclass(frozen=True)
class UnitBytes:
    """The parameters of a unit: the number of trained elements, and the bytes of all elements."""

    trained_numel: int
    nbytes: int


@dataclass(frozen=True)
class LoraSetup(Setup):
    """See `Setup`.

    Args:
        rank: of the adapters.
        base_dtype, adapter_dtype: of the parameters, which are computed with as they are.
    """

    rank: int = 8
    base_dtype: torch.dtype = torch.bfloat16
    adapter_dtype: torch.dtype = torch.float32

    def model(self, config: GPTConfig) -> GPT:
        return add_adapters(GPT(config).to(self.base_dtype), self.rank, self.adapter_dtype)

    def units(self) -> list[UnitBytes]:
        """The blocks in order, and the root last."""
        with torch.device("meta"):
            model = self.model(self.config)
        inner = [list(block.parameters()) for block in model.blocks]
        blocks = {param for params in inner for param in params}
        root = [param for param in model.parameters() if param not in blocks]
        return [_count(params) for params in (*inner, root)]


def _count(params: list[nn.Parameter]) -> UnitBytes:
    return UnitBytes(
        trained_numel=sum(param.numel() for param in params if param.requires_grad),
        nbytes=sum(param.numel() * param.element_size() for param in params),
    )


@dataclass(frozen=True)
class Costs:
    """Bytes of a rank if only trained elements have gradients, optimizer state, and a reduction.

    Args:
        gradients: an equal part of every unit's trained elements, rounded up.
        optimizer_state: AdamW's two averages of these elements, without the step counts of 4 bytes for each tensor.
        sent: bytes sent in a step.
    """

    gradients: int
    optimizer_state: int
    sent: float


def costs(setup: LoraSetup, name: str, world_size: int) -> Costs:
    """Return the costs of a sharded contestant, with the gathers and reductions of its strategy and of gloo.

    Every block is gathered for forward and again for backward, and the root once, because it is kept in between.
    `ours` also keeps the last block, with which backward begins. A rank sends ``(W-1)/W`` of the gathered or reduced
    bytes. Peers reduce by gloo's reduce-scatter, which is an all-reduce and sends twice as many bytes.
    """
    *blocks, root = setup.units()
    is_ours = CONTESTANTS[name].kind is Kind.OURS
    element = setup.adapter_dtype.itemsize
    share = sum(math.ceil(unit.trained_numel / world_size) for unit in (*blocks, root)) * element
    gathered = 2 * sum(block.nbytes for block in blocks) + root.nbytes - (blocks[-1].nbytes if is_ours else 0)
    reduced = share * world_size * (1 if is_ours or setup.device != "cpu" else 2)
    return Costs(share, 2 * share, (gathered + reduced) * (world_size - 1) / world_size)
