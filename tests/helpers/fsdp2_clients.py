"""What tests of code for torch's FSDP2 share: our names in the place of torch's, and a small language model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch
from torch import Tensor, nn

from fsdp.compat import fsdp2


@contextmanager
def installed() -> Iterator[ModuleType]:
    """`torch.distributed.fsdp`, with our names in it."""
    import torch.distributed.fsdp as names

    fsdp2.install()
    try:
        yield names
    finally:
        fsdp2.uninstall()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + torch.tanh(self.linear(self.norm(inputs)))


class Decoder(nn.Module):
    """The usual parts: embedding, blocks, norm and head."""

    def __init__(self, width: int = 6, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 11, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))

    def init_weights(self) -> None:
        for module in self.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
