"""The GPT of this project, which the training job, the benchmarks and some tests use.

The model is byte-level, so any text is data and no tokenizer is required. There is no
dropout, so two runs with the same seed are equal, and so are a sharded and an unsharded
model. The file imports torch only, so that it can load consolidated weights in a
process without `fsdp`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """The configuration of a `GPT`.

    Args:
        num_layers: number of blocks.
        num_heads: attention heads; must divide `width`.
        width: size of the residual stream.
        context: the longest sequence that the learned positions cover.
        vocab: number of tokens; 256 for bytes.

    Raises:
        ValueError: a size is below one, or `num_heads` does not divide `width`.
    """

    num_layers: int
    num_heads: int
    width: int
    context: int = 256
    vocab: int = 256

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_heads", "width", "context", "vocab"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"GPTConfig.{name} must be at least 1, got {getattr(self, name)}."
                )
        if self.width % self.num_heads:
            raise ValueError(
                f"GPTConfig.width {self.width} is not a multiple of num_heads "
                f"{self.num_heads}: "
                "every head needs the same number of channels."
            )


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which a position attends to itself and preceding
    positions.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        qkv = self.qkv(x).view(batch, time, 3, self.num_heads, width // self.num_heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(
            0
        )  # each [batch, heads, time, channels]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, time, width))


class MLP(nn.Module):
    """Two linear layers with a GELU between, four times as wide inside."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """A pre-norm layer: the natural unit for sharding, because all blocks are equal and
    run sequentially.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = CausalSelfAttention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """A decoder over bytes: `[batch, time]` int64 tokens in, `[batch, time, vocab]`
    logits out.

    Args:
        config: the sizes; kept as `self.config`.

    Raises:
        ValueError: (forward) the sequence is longer than `config.context`.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.final_norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        init_weights(self, config)

    def forward(self, tokens: Tensor) -> Tensor:
        time = tokens.shape[1]
        if time > self.config.context:
            raise ValueError(
                f"A sequence of {time} tokens is longer than the context "
                f"{self.config.context}."
            )
        positions = torch.arange(time, device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.final_norm(x))


def init_weights(part: nn.Module, config: GPTConfig) -> None:
    """Initialize the weights of a GPT or of a part of it."""
    # What is added to the residual stream is scaled down by the number of additions, so
    # that the variance at the last block does not depend on the depth.
    residual_std = 0.02 / (2 * config.num_layers) ** 0.5
    for name, module in part.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            std = residual_std if name.endswith((".out", ".down")) else 0.02
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, nn.LayerNorm):
            module.reset_parameters()


def count_units(model: GPT) -> list[int]:
    """Elements of each unit if blocks are units: the root's first, then the blocks'."""
    blocks = [sum(p.numel() for p in block.parameters()) for block in model.blocks]
    return [sum(p.numel() for p in model.parameters()) - sum(blocks), *blocks]


def next_byte_loss(model: nn.Module, windows: Tensor) -> Tensor:
    """Mean cross-entropy, in nats, of each byte of `windows` `[batch, time + 1]` after
    those before it.
    """
    logits = (
        model(windows[:, :-1]).float()
    )  # whatever was computed in: 16 bits hold no more than two digits of a loss
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


SIZES: dict[str, GPTConfig] = {
    # For tests, 44,925 parameters: neither 2, 3 nor 4 divides those of a block, or
    # those outside the blocks, so that every world size beyond one has to pad.
    "tiny": GPTConfig(num_layers=4, num_heads=5, width=25, context=31),
    "small": GPTConfig(num_layers=4, num_heads=4, width=128, context=128),
    "17M": GPTConfig(num_layers=8, num_heads=8, width=416),
    "46M": GPTConfig(num_layers=8, num_heads=8, width=688),
    # For disk offload: many layers, each small compared to the whole model.
    "85M": GPTConfig(num_layers=27, num_heads=8, width=512),
    "300M": GPTConfig(num_layers=24, num_heads=16, width=1024),
}
