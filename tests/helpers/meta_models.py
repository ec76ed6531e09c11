"""Models that are built without values, on the meta device, for tests of how they get some."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import fsdp
from fsdp import FullyShardedDataParallel
from tests.helpers.models import NestedMlp, TinyTransformer, Wrap, keep
from tests.helpers.module_kinds import FLAT, FORMS, ORIGINAL, UNFLATTENED  # noqa: F401 - tests of these models import them


def sharded(**options: Any) -> Wrap:
    """The wrap under test. On the CPU, because with gloo a GPU would be taken for where to compute."""
    return partial(FullyShardedDataParallel, compute_device="cpu", **options)


def on_meta(make: Callable[[Wrap], nn.Module], wrap: Wrap = keep) -> nn.Module:
    """A model without values, with `wrap` around its units and around the whole."""
    with torch.device("meta"):
        return wrap(make(wrap))


class Norms(nn.Module):
    """A linear layer and a batch norm, which has buffers."""

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.entry = wrap(nn.Linear(5, 6))
        self.norm = nn.BatchNorm1d(6)
        self.exit = nn.Linear(6, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.exit(self.norm(self.entry(inputs)).tanh())


class Zoo(nn.Module):
    """One of each kind of module that initialises itself in a way of its own."""

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 6, padding_idx=2)
        self.attention = wrap(nn.MultiheadAttention(6, 2))
        self.memory = wrap(nn.Sequential(nn.LSTM(6, 5), nn.GroupNorm(1, 5)))
        self.images = nn.Sequential(nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.PReLU())
        self.twins = nn.ModuleList(wrap(nn.Linear(3, 3)) for _ in range(2))
        self.head = nn.Linear(6, 11, bias=True)
        self.head.weight = self.tokens.weight


class Rotary(nn.Module):
    """A linear layer with a table that is not saved, and that nothing but `rotary_init` fills."""

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.layer = wrap(nn.Linear(5, 1))
        self.register_buffer("inv_freq", torch.arange(5).float(), persistent=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs * self.get_buffer("inv_freq"))


def mlp(wrap: Wrap = keep) -> nn.Module:
    return NestedMlp(wrap)


def transformer(wrap: Wrap = keep) -> nn.Module:
    return TinyTransformer(wrap, tied=True, recompute="no", reentrant=False)


def initialise(module: nn.Module) -> None:
    """A `param_init_fn` for all of these models."""
    if isinstance(module, NestedMlp):
        nn.init.constant_(module.scale, 1.25)
    elif isinstance(module, Rotary):
        module.inv_freq = torch.arange(5).float() + 1
        module.steps.zero_()  # type: ignore[operator]
    else:
        module.reset_parameters()  # type: ignore[operator]


def started(make: Callable[[Wrap], nn.Module], wrap: Wrap = keep, seed: int | None = 0) -> nn.Module:
    """A model from the meta device with the values that `seed` gives it, wrapped or plain."""
    model = on_meta(make, wrap)
    fsdp.materialize(model, param_init_fn=initialise if make in (mlp, Rotary) else None, seed=seed)
    return model


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """The state and the buffers that are not in it."""
    return {name: value.clone() for name, value in model.state_dict().items()}
