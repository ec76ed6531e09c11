"""Models with awkward shapes for distributed tests.

Each is built from a seed of its own, so that every call on every rank gives the same weights, and takes the
wrap that is put around its units. Their sizes divide by no world size, some are smaller than one, and one
parameter is 0-d.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Wrap = Callable[[nn.Module], nn.Module]
Recompute = Literal["no", "outside", "inside"]


def keep(module: nn.Module) -> nn.Module:
    """The wrap of a model that is not wrapped."""
    return module


class Net(nn.Module):
    """A module of the given modules, parameters, buffers and settings, whose forward calls a function with itself.

    `Net(lambda net, x: net.exit(torch.tanh(net.entry(x))), entry=nn.Linear(5, 7), exit=nn.Linear(7, 1))`
    """

    def __init__(self, compute: Callable[..., Any], **members: Any) -> None:
        super().__init__()
        self.compute = compute
        for name, member in members.items():
            setattr(self, name, member)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.compute(self, *args, **kwargs)


class NestedMlp(nn.Module):
    """A perceptron of four units that divide by nothing.

    Own parameters of the root: 47 elements in five tensors, one of them 0-d. `trunk`: 77, without a bias, and
    inside it a unit of 37. `gate`: 3, fewer than four ranks need.
    """

    def __init__(self, wrap: Wrap, scale: Sequence[float] | float = 1.25, gates: int = 1) -> None:
        super().__init__()
        core = wrap(nn.Sequential(nn.Linear(11, 3), nn.PReLU()))
        self.scale = nn.Parameter(torch.tensor(scale))
        self.entry = nn.Linear(5, 7)
        self.trunk = wrap(nn.Sequential(nn.Linear(7, 11, bias=False), nn.Tanh(), core))
        self.gate = wrap(nn.Linear(3, gates, bias=False))
        self.exit = nn.Linear(3, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.trunk(torch.tanh(self.entry(inputs)))
        return self.exit(hidden * torch.sigmoid(self.gate(hidden)).sum(-1, keepdim=True) * self.scale)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        # Without a bias: the gradient of a key's bias is zero but for rounding, which Adam would blow up to a
        # full step, so that two equally right runs would differ by their learning rate.
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, inputs: Tensor) -> Tensor:
        batch, time, width = inputs.shape
        parts = self.qkv(inputs).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    """One layer, which may recompute its own inside in backward."""

    def __init__(self, width: int, heads: int, hidden: int, recompute: Recompute, reentrant: bool) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(width), Attention(width, heads))
        widen, narrow = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), widen, nn.GELU(), narrow)
        self.recompute, self.reentrant = recompute, reentrant

    def forward(self, inputs: Tensor) -> Tensor:
        if self.recompute == "inside":
            return checkpoint(self._layers, inputs, use_reentrant=self.reentrant)
        return self._layers(inputs)

    def _layers(self, inputs: Tensor) -> Tensor:
        inputs = inputs + self.attention(inputs)
        return inputs + self.mlp(inputs)


class TinyTransformer(nn.Module):
    """A two-layer language model; each block is a unit, embeddings and head belong to the root."""

    VOCABULARY, WIDTH, HEADS, HIDDEN, CONTEXT, LAYERS = 29, 9, 3, 19, 7, 2

    def __init__(self, wrap: Wrap, *, tied: bool, recompute: Recompute, reentrant: bool) -> None:
        super().__init__()
        self.recompute, self.reentrant = recompute, reentrant
        self.tokens = nn.Embedding(self.VOCABULARY, self.WIDTH)
        self.positions = nn.Embedding(self.CONTEXT, self.WIDTH)
        block = partial(Block, self.WIDTH, self.HEADS, self.HIDDEN, recompute, reentrant)
        self.blocks = nn.ModuleList(wrap(block()) for _ in range(self.LAYERS))
        self.norm = nn.LayerNorm(self.WIDTH)
        self.head = nn.Linear(self.WIDTH, self.VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            if self.recompute == "outside":
                hidden = checkpoint(block, hidden, use_reentrant=self.reentrant)
            else:
                hidden = block(hidden)
        return self.head(self.norm(hidden))


def seeded(make: Callable[[Wrap], nn.Module], wrap: Wrap = keep, seed: int = 0) -> Any:
    """A model with `wrap` around its units and around the whole; the same weights on every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return wrap(make(wrap))


def nested_mlp(wrap: Wrap = keep, *, nested: bool = True, seed: int = 0) -> nn.Module:
    """`NestedMlp` with `wrap` around each unit, or around the whole only."""
    return seeded(lambda inner: NestedMlp(inner if nested else keep), wrap, seed)


def tiny_transformer(
    wrap: Wrap = keep,
    *,
    nested: bool = True,
    tied: bool = False,
    recompute: Recompute = "no",
    reentrant: bool = False,
    seed: int = 0,
) -> nn.Module:
    """`TinyTransformer` with `wrap` around each block and the whole, or around the whole only.

    `recompute` checkpoints activations `"outside"` the blocks' wrappers or `"inside"` them. Train it with
    `task=TOKENS`.
    """
    layers = partial(TinyTransformer, tied=tied, recompute=recompute, reentrant=reentrant)
    return seeded(lambda inner: layers(inner if nested else keep), wrap, seed)


def scaled_layers() -> nn.Module:
    """Two layers that become units, and a root with a parameter of its own. Most numbers of ranks divide no rows."""
    layers = {"first": nn.Linear(5, 7), "second": nn.Linear(7, 5)}
    return Net(_scaled, **layers, scale=nn.Parameter(torch.ones(3)))


def _scaled(net: Any, inputs: Tensor) -> Tensor:  # no lambda, so that it can be pickled
    return net.second(torch.tanh(net.first(inputs))) * net.scale.sum()
