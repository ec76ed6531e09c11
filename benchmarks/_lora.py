"""A GPT with low-rank adapters on a frozen base, and what training them should cost a rank by arithmetic.

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
    """What is trained beside one linear layer; computes in its own dtype and answers in that of its input."""

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
    """The parameters of one unit: elements that are trained, and bytes of all."""

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
    """Bytes of one rank, in which only what is trained has gradients, optimizer state, and a reduction.

    Args:
        gradients: of every unit's trained elements an equal part, rounded up.
        optimizer_state: AdamW's two averages of the same. (It also counts steps, 4 bytes for each tensor.)
        sent: in a step.
    """

    gradients: int
    optimizer_state: int
    sent: float


def costs(setup: LoraSetup, name: str, world_size: int) -> Costs:
    """What a sharded contestant needs. Gathers and reductions are counted as its strategy and gloo make them.

    Every block is gathered for forward and again for backward, the root once, since it is kept in between. Ours keeps
    the last block as well, with which backward begins. Of what is gathered or reduced a rank sends ``(W-1)/W``. Peers
    reduce by gloo's reduce-scatter, which is an all-reduce and sends that twice.
    """
    *blocks, root = setup.units()
    is_ours = CONTESTANTS[name].kind is Kind.OURS
    element = setup.adapter_dtype.itemsize
    share = sum(math.ceil(unit.trained_numel / world_size) for unit in (*blocks, root)) * element
    gathered = 2 * sum(block.nbytes for block in blocks) + root.nbytes - (blocks[-1].nbytes if is_ours else 0)
    reduced = share * world_size * (1 if is_ours or setup.device != "cpu" else 2)
    return Costs(share, 2 * share, (gathered + reduced) * (world_size - 1) / world_size)
