"""What tests of `OwnedOptimizer` share: a model, its forms, optimizers, and a twin that is fed the same gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp
from fsdp import FullyShardedDataParallel, OwnedOptimizer, fully_shard
from fsdp.distributed.dtensor import full_tensor
from tests.helpers.models import Wrap, keep, seeded

Make = Callable[..., torch.optim.Optimizer]


class Talk(nn.Module):
    """An embedding that is tied to the head, matrices that no number of ranks divides, norms, biases, a scalar."""

    def __init__(self, wrap: Wrap, width: int) -> None:
        super().__init__()
        self.entry = nn.Embedding(13, width)
        self.blocks = nn.ModuleList(
            wrap(nn.Sequential(nn.Linear(width, width + 4), nn.GELU(), nn.Linear(width + 4, width))) for _ in "ab"
        )
        self.norm = nn.LayerNorm(width)
        self.scale = nn.Parameter(torch.tensor(0.75))
        self.mix = nn.Linear(width, width, bias=False)
        self.unused = nn.Linear(3, 4)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.head = nn.Linear(width, 13, bias=False)
        self.head.weight = self.entry.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.entry(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(self.norm(self.frozen(self.mix(hidden))) * self.scale)


def talk(wrap: Wrap = keep, seed: int = 0, width: int = 6) -> Any:
    """The same weights on every call."""
    return seeded(partial(Talk, width=width), wrap, seed)


def is_matrix(name: str, shape: torch.Size) -> bool:
    return len(shape) == 2 and "entry" not in name and "unused" not in name


def is_matrix_key(name: str, param: nn.Parameter) -> bool:
    """For `group_by`."""
    return is_matrix(name, param.shape)


def under_fully_shard(module: nn.Module, **options: Any) -> nn.Module:
    fully_shard(module, **options)
    return module


FORMS: dict[str, Wrap] = {
    "flat": partial(FullyShardedDataParallel, group_by=is_matrix_key),
    "orig_params": partial(FullyShardedDataParallel, use_orig_params=True),
    "fully_shard": under_fully_shard,
}


def batch(step: int, rank: int) -> Tensor:
    return torch.randint(0, 13, (4, 5), generator=torch.Generator().manual_seed(100 * step + rank))


def backward(model: nn.Module, step: int) -> None:
    """On this rank's tokens."""
    tokens = batch(step, dist.get_rank())
    scores = model(tokens)
    nn.functional.cross_entropy(scores.flatten(0, 1), tokens.roll(1).flatten()).backward()


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    """Collective. The reduced, unsharded gradients by the names of the unsharded model."""
    if not isinstance(model, FullyShardedDataParallel):
        named = model.named_parameters()
        return {n: None if p.grad is None else full_tensor(p.grad).clone() for n, p in named}
    with model.summon_full_params(volatile=True, with_grads=True):
        return {plain_name(n): None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def values_of(model: nn.Module) -> dict[str, Tensor]:
    """Collective. The unsharded parameters by the names of the unsharded model."""
    if not isinstance(model, FullyShardedDataParallel):
        return {name: full_tensor(param.detach()).clone() for name, param in model.named_parameters()}
    with model.summon_full_params(volatile=True, with_grads=True):
        return {plain_name(name): param.detach().clone() for name, param in model.named_parameters()}


def plain_name(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "").replace("module.", "")


class Twin:
    """An unsharded model and optimizers of the same classes, fed the gradients that the sharded one has reduced."""

    def __init__(self, groups: list[dict[str, Any]], seed: int = 0, width: int = 6) -> None:
        self.model = talk(seed=seed, width=width)
        named = dict(self.model.named_parameters())
        taken: set[str] = set()
        for group in groups:
            if "params" in group:
                taken |= {name for name, param in named.items() if group["params"](name, param.shape)}
        self.optimizers = []
        for group in groups:
            rule = group.get("params")
            own = [p for n, p in named.items() if (rule(n, p.shape) if rule else n not in taken)]
            options = {k: v for k, v in group.items() if k not in ("params", "optimizer", "sharded", "cost")}
            self.optimizers.append(group["optimizer"](own, **options))

    def step(self, gradients: Mapping[str, Tensor | None]) -> None:
        for name, param in self.model.named_parameters():
            param.grad = gradients[name]
        for optimizer in self.optimizers:
            optimizer.step()

    def named_state(self) -> dict[str, Any]:
        """The state of each parameter by its name, in the order of the model."""
        held: dict[Any, Any] = {}
        for optimizer in self.optimizers:
            held |= optimizer.state
        return {name: held[param] for name, param in self.model.named_parameters() if held.get(param)}

    def assert_has(self, values: Mapping[str, Tensor], what: str = "") -> None:
        for name, param in self.model.named_parameters():
            apart = (values[name] - param.detach()).abs().max()
            assert torch.equal(values[name], param.detach()), f"{what} {name} is {apart:.1e} apart"


def train_both(
    model: nn.Module, optimizer: OwnedOptimizer, twin: Twin, steps: range, clear: bool = True, what: str = ""
) -> None:
    """Collective. The model on every rank's batches, the twin with what was reduced; both must have the same bits."""
    for step in steps:
        optimizer.zero_grad()
        backward(model, step)
        gradients = gradients_of(model)
        optimizer.step()
        twin.step(gradients)
        twin.assert_has(values_of(model), f"{what} step {step}:")


def owned(model: nn.Module, groups: list[dict[str, Any]]) -> OwnedOptimizer:
    return fsdp.OwnedOptimizer(model, groups)


def muon_and_adamw() -> list[dict[str, Any]]:
    return [
        {"params": is_matrix, "optimizer": torch.optim.Muon, "lr": 0.02},
        {"optimizer": torch.optim.AdamW, "sharded": True, "lr": 3e-3},
    ]
