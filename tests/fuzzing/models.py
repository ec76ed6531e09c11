"""The random models of the fuzzer. All blocks take and return ``[rows, 2, width]``, and hand the flags on."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from fsdp import checkpoint_wrapper

if TYPE_CHECKING:
    from tests.fuzzing.case import Case

ROWS = 2  # of each rank's batch
Flags = Sequence[bool]  # for each `Optional`, by its number, whether it runs


class Leaf(nn.Module):
    """An ordinary layer or a few of them."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor, flags: Flags) -> Tensor:
        return x + torch.tanh(self.layers(x))


class Bare(nn.Module):
    """A layer whose output is a view of what it has computed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor, flags: Flags) -> Tensor:
        return self.layer(x)


class Scale(nn.Module):
    """A parameter with one element."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full(shape, 0.9))

    def forward(self, x: Tensor, flags: Flags) -> Tensor:
        return x * self.scale


class Convolution(nn.Module):
    """A parameter with three dimensions, and a bias."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, channels, 3)  # holds the parameters; the simulated device computes no convolutions

    def forward(self, x: Tensor, flags: Flags) -> Tensor:
        windows = nn.functional.pad(x, (1, 1)).unfold(-1, 3, 1)
        return x + nn.functional.linear(windows, self.conv.weight[:, 0], self.conv.bias).mean(-1).tanh()


class Lookup(nn.Module):
    """An embedding, of which a batch uses some rows."""

    def __init__(self, width: int, rows: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width)

    def forward(self, x: Tensor, flags: Flags) -> Tensor:
        return x + 0.1 * self.table(torch.arange(x.shape[1], device=x.device) % self.table.num_embeddings)


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor, flags: Flags) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Optional(nn.Module):
    """A layer that always runs and one that runs if its flag says so: perhaps on some ranks only."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__()
        self.number = number
        self.always, self.sometimes = nn.Linear(width, width), nn.Linear(width, width)
        self.never = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, flags: Flags) -> Tensor:
        x = torch.tanh(self.always(x)) + 0.1
        return x + self.sometimes(x).tanh() if flags[self.number] else x


class Penalty(nn.Module):
    """A layer that adds a penalty of the parameters that it lists, and computes a second time with scaled ones."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor, flags: Flags) -> Tensor:
        penalty = sum(param.square().mean() for param in self.parameters())
        halved = {name: 0.5 * param for name, param in self.layer.named_parameters()}
        return x + torch.tanh(self.layer(x)) + functional_call(self.layer, halved, (x,)).tanh() + 0.1 * penalty


class Counter(nn.Module):
    """A buffer that is alike on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(2))

    def forward(self, x: Tensor, flags: Flags) -> Tensor:
        if torch.is_grad_enabled() and self.training:
            self.calls += 1
        return x


class Chain(nn.Module):
    """One block after the other."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, flags: Flags) -> Tensor:
        for block in self.blocks:
            x = block(x, flags)
        return x


class Around(nn.Module):
    """A block with a parameter of its own, called in one of several ways."""

    def __init__(self, inner: nn.Module, width: int, way: str) -> None:
        super().__init__()
        self.inner, self.way = inner, way
        self.shift = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor, flags: Flags) -> Tensor:
        return getattr(self, f"_{self.way}")(x, flags) + self.shift

    def _residual(self, x: Tensor, flags: Flags) -> Tensor:
        return x + self.inner(x, flags)

    def _twice(self, x: Tensor, flags: Flags) -> Tensor:
        return self.inner(self.inner(x, flags).tanh(), flags)

    def _recomputed(self, x: Tensor, flags: Flags) -> Tensor:
        return checkpoint(self.inner, x, flags, use_reentrant=False)

    def _in_place(self, x: Tensor, flags: Flags) -> Tensor:
        y = self.inner(x, flags)
        y += 1
        return y

    def _by_keyword(self, x: Tensor, flags: Flags) -> Tensor:
        return self.inner(x=x, flags=flags)

    def _frozen_input(self, x: Tensor, flags: Flags) -> Tensor:
        return x + self.inner(x.detach(), flags)

    def _energy(self, x: Tensor, flags: Flags) -> Tensor:
        """The gradient of what the block computes, as a value; the block is not trained by it."""
        if not torch.is_grad_enabled():
            return self.inner(x, flags)
        point = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.inner(point, flags).square().sum(), point)
        return self.inner(x, flags) + 0.1 * slope


BLOCKS = (Leaf, Bare, Scale, Convolution, Lookup, Tied, Optional, Penalty, Chain, Around)
WAYS = ("residual", "twice", "recomputed", "in_place", "by_keyword", "frozen_input", "energy")


class Model(nn.Module):
    """A chain with parameters of its own before and after it, for inputs ``[rows, 2, 3]``.

    A large output has a small gradient, so that no training diverges: rounding errors would grow with it.
    """

    optional = 0  # how many flags it takes

    def __init__(self, chain: nn.Module, width: int) -> None:
        super().__init__()
        self.entry, self.chain, self.exit = nn.Linear(3, width), chain, nn.Linear(width, 1, bias=False)

    def forward(self, x: Tensor, flags: Flags) -> Tensor:
        return self.exit(self.chain(torch.tanh(self.entry(x)) + 0.1, flags)).asinh()


def recomputes(model: nn.Module) -> bool:
    """Whether backward computes a part of the forward again."""
    return any(getattr(one, "way", "") == "recomputed" or "forward" in vars(one) for one in model.modules())


def plain_model(case: Case) -> Model:
    """The unsharded model of a case, with the same values on every call."""
    rng = random.Random(f"model {case.seed}")
    torch.manual_seed(case.seed)
    width, optional = rng.choice((3, 5, 7)), itertools.count()

    def leaf() -> nn.Module:
        made: nn.Module = rng.choice(
            (
                lambda: Leaf(nn.Linear(width, width)),
                lambda: Leaf(nn.Sequential(nn.Linear(width, 4), nn.GELU(), nn.Linear(4, width, bias=False))),
                lambda: Leaf(nn.LayerNorm(width)),
                lambda: Bare(width),
                lambda: Scale((1,) if case.door == "fully_shard" else rng.choice(((), (1,)))),
                lambda: Convolution(rng.choice((1, 3))),
                lambda: Lookup(width, rng.choice((2, 5))),
                lambda: Tied(width),
                lambda: Optional(width, next(optional)),
                lambda: Penalty(width),
            )
        )()
        return made if rng.random() < 0.8 else Chain([Counter(), made])

    def tree(depth: int) -> nn.Module:
        kind = rng.random()
        if depth == 0 or kind < 0.4:
            return leaf()
        if kind < 0.7:
            return Chain([tree(depth - 1) for _ in range(rng.randint(1, 3))])
        return Around(tree(depth - 1), width, rng.choice(WAYS))

    model = Model(Chain([tree(2) for _ in range(rng.randint(1, 4))]), width)
    model.optional = next(optional)
    chosen = random.Random(f"recomputed {case.seed}")
    for module in model.chain.modules():
        if isinstance(module, BLOCKS) and chosen.random() < case.recomputed:
            checkpoint_wrapper(module)
    for module in model.modules():
        if case.mixed and isinstance(module, Scale):
            module.float()
    for name, param in model.named_parameters():
        if case.frozen and name != "exit.weight" and rng.random() < 0.3:
            param.requires_grad_(False)
    return model
