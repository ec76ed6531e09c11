"""Twins whose sharded model has original parameters, with their models and optimizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fsdp.engine.orig_params import LocalShard
from tests.helpers.equality import assert_close, assert_close_state
from tests.helpers.models import Wrap, keep
from tests.helpers.parity import fully_sharded
from tests.helpers.twins import Toolbox, Twins, batch, score

MakeOptimizers = Callable[[nn.Module], list[torch.optim.Optimizer]]
CallModel = Callable[[nn.Module, Tensor, int], Tensor]  # with a rank's inputs, and the rank
original = partial(fully_sharded, use_orig_params=True)


def call(model: nn.Module, inputs: Tensor, rank: int) -> Tensor:
    return model(inputs)


def part_of(whole: Tensor, piece: nn.Parameter) -> Tensor:
    """What a rank with this piece holds of a whole tensor."""
    assert isinstance(piece, LocalShard)
    return whole.reshape(-1)[piece.offset : piece.offset + piece.numel()]


class OrigTwins(Twins):
    """A model that is sharded with original parameters and the same model plain, each with optimizers of one making."""

    def __init__(self, make: Callable[[Wrap], nn.Module], make_optimizers: MakeOptimizers, **options: Any) -> None:
        torch.set_default_dtype(torch.float64)
        models = make(original(**options)), make(keep)
        super().__init__(*models, [make_optimizers(model) for model in models])
        self.pieces, self.wholes = (dict(model.named_parameters()) for model in models)

    def loss(self, model: nn.Module, rank: int) -> Tensor:
        return score(self.forward(model, batch(self.number, rank), rank))

    def backward(self, number: int | None = None, forward: CallModel = call, *, sync: bool = True) -> None:
        """Collective. Gradients of the mean over ranks are added in both."""
        self.forward = forward
        super().backward(number, sync=sync)

    def on_both(self, change: Callable[[dict[str, nn.Parameter]], Any]) -> None:
        """Do the same to the pieces and to the plain parameters."""
        change(self.pieces)
        change(self.wholes)

    def optimize(self, which: slice = slice(None)) -> None:
        for optimizers in self.optimizers:
            for optimizer in optimizers[which]:
                optimizer.step()

    def zero(self, which: slice = slice(None)) -> None:
        for optimizers in self.optimizers:
            for optimizer in optimizers[which]:
                optimizer.zero_grad()

    def step(self, number: int | None = None, forward: CallModel = call) -> None:
        self.zero()
        self.backward(number, forward)
        self.optimize()

    def assert_close_weights(self) -> None:
        """Collective. Whole weights agree, and each piece is its part of them."""
        expected = self.plain.state_dict()
        assert_close_state(self.sharded.state_dict(), expected)
        for name, piece in self.pieces.items():
            assert_close(piece.detach(), part_of(expected[name], piece), f"piece of {name}")

    def assert_close_gradients(self) -> None:
        missing = [{name for name, p in params.items() if p.grad is None} for params in (self.pieces, self.wholes)]
        assert missing[0] == missing[1]
        for name, piece in self.pieces.items():
            expected = self.wholes[name].grad
            if expected is not None and piece.grad is not None:
                assert_close(piece.grad, part_of(expected, piece), f"gradient of {name}")


def one_sgd(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)]


def one_adamw(model: nn.Module, **how: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.3, **how)]


def decay_matrices_only(model: nn.Module, **how: Any) -> list[torch.optim.Optimizer]:
    """No weight decay on biases, norms and scales, which are told by their names."""
    spared = [param for name, param in model.named_parameters() if not is_matrix(name)]
    decayed = [param for name, param in model.named_parameters() if is_matrix(name)]
    assert spared
    assert decayed
    groups = [{"params": decayed, "weight_decay": 0.3}, {"params": spared, "weight_decay": 0.0}]
    return [torch.optim.AdamW(groups, lr=1e-2, **how)]


def is_matrix(name: str) -> bool:
    return name.endswith("weight") and "norm" not in name


def two_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Both have parameters in every unit."""
    params = list(model.parameters())
    return [
        torch.optim.SGD(params[::2], lr=0.1, momentum=0.9, weight_decay=0.1),
        torch.optim.AdamW(params[1::2], lr=1e-2, weight_decay=0.3),
    ]


def use_a(model: nn.Module, inputs: Tensor, rank: int) -> Tensor:
    return model(inputs, "a")


def one_toolbox(wrap: Wrap) -> nn.Module:
    """One unit."""
    torch.manual_seed(0)
    return wrap(Toolbox(keep))


class Branches(nn.Module):
    """Two units, each with a branch that only some ranks take."""

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.units = nn.ModuleList(wrap(Toolbox(keep)) for _ in range(2))

    def forward(self, inputs: Tensor, orders: Sequence[str]) -> Tensor:
        for unit, order in zip(self.units, orders, strict=True):
            inputs = unit(inputs, order)
        return inputs


def branches(wrap: Wrap) -> nn.Module:
    torch.manual_seed(0)
    return wrap(Branches(wrap))


def first_rank_uses_all_of_the_last_unit(model: nn.Module, inputs: Tensor, rank: int) -> Tensor:
    return model(inputs, ("abc", "abc") if rank == 0 else ("abc", "a"))


def a_rate_for_each(model: nn.Module) -> list[torch.optim.Optimizer]:
    groups = [{"params": [p], "lr": 0.02 * (1 + n % 5)} for n, (_, p) in enumerate(model.named_parameters())]
    return [torch.optim.SGD(groups, momentum=0.9, weight_decay=0.1)]


def half_frozen(wrap: Wrap) -> nn.Module:
    """Frozen parameters between trained ones, in one unit and in one module."""
    torch.manual_seed(0)
    model = Toolbox(keep)
    for name, param in model.named_parameters():
        param.requires_grad_(not (name.startswith("tools.b") or name in ("entry.weight", "tools.a.0.bias")))
    return wrap(model)
