"""The sharded model of a case and its unsharded twin, which are compared."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FlatParameter
from fsdp.distributed.dtensor import full_tensor
from tests.fuzzing.case import OPTIMIZERS, Case
from tests.fuzzing.models import ROWS, Flags


@dataclass
class Pair:
    """The sharded model and its unsharded twin, with an optimizer each."""

    case: Case
    sharded: Any
    plain: nn.Module
    rng: random.Random
    step: int = 0
    fills_unused: bool = False  # parameters that no rank has used get zeros
    changes: list[Callable[[nn.ModuleList, nn.Module], Any]] = field(default_factory=list)  # of the chain's blocks
    optimizers: tuple[torch.optim.Optimizer, torch.optim.Optimizer] = field(init=False)

    def __post_init__(self) -> None:
        self.renew_optimizers()

    def renew_optimizers(self) -> None:
        make = OPTIMIZERS[self.case.optimizer]
        self.reshard()
        self.optimizers = make(list(self.sharded.parameters())), make(list(self.plain.parameters()))

    def reshard(self) -> None:
        """Have `parameters()` list shards: under `fully_shard` it lists what was kept unsharded, as torch's does."""
        for module in self.sharded.modules():
            if not self.is_wrapper and hasattr(module, "reshard"):
                module.reshard()

    # Data

    def batch(self, rank: int, turn: int) -> tuple[Tensor, Flags]:
        generator = torch.Generator().manual_seed(self.case.seed * 1000003 + self.step * 1009 + turn * 101 + rank)
        inputs = torch.randn(ROWS, 2, 3, generator=generator).to(self.case.device)
        of = rank if self.case.flags == "apart" else 0
        rng = random.Random(f"flags {self.case.seed} {self.step} {turn} {of}")
        return inputs, [self.case.flags == "always" or rng.random() < 0.5 for _ in range(self.plain.optional)]

    # What the two front doors do in different ways

    @property
    def is_wrapper(self) -> bool:
        return self.case.door == "wrapper"

    @property
    def lists_originals(self) -> bool:
        """Whether the sharded model lists a parameter for each of the twin's."""
        return not self.is_wrapper or self.case.options.get("use_orig_params", False)

    @property
    def inner(self) -> Any:
        """The sharded model without its outermost wrapper."""
        return self.sharded.module.module if self.is_wrapper else self.sharded

    @property
    def is_trained(self) -> bool:
        """Whether backward can run: some parameter is trained."""
        return any(param.requires_grad for param in self.plain.parameters())

    def no_sync(self) -> AbstractContextManager[Any]:
        return self.sharded.no_sync() if self.is_wrapper else _without_sync(self.sharded)

    def clip(self, max_norm: float) -> Tensor:
        if self.is_wrapper:
            return self.sharded.clip_grad_norm_(max_norm)
        return full_tensor(nn.utils.clip_grad_norm_(self.sharded.parameters(), max_norm))

    def fill_unused(self, fills: bool) -> None:
        self.fills_unused = fills
        if not self.is_wrapper:
            self.sharded.set_reduce_scatter_unused_params(fills)

    def state(self) -> dict[str, Tensor]:
        return {name: full_tensor(value).detach().clone() for name, value in self.sharded.state_dict().items()}

    # Comparison

    def compare(self, what: str) -> None:
        state, expected = self.state(), self.plain.state_dict()
        if state.keys() != expected.keys():
            raise AssertionError(f"{what}: different names {sorted(state.keys() ^ expected.keys())}")
        for name, value in expected.items():
            self.same(f"{what}: {name}", state[name], value)

    def same(self, what: str, found: Tensor, expected: Tensor) -> None:
        if found.shape != expected.shape:
            raise AssertionError(f"{what}: shape {tuple(found.shape)} instead of {tuple(expected.shape)}")
        size = float(expected.abs().max()) if expected.numel() else 0.0
        error = float((found.cpu().double() - expected.cpu().double()).abs().max()) if expected.numel() else 0.0
        if not error <= self.case.tolerance * max(size, 0.1):  # written so that NaN fails
            raise AssertionError(f"{what}: off by {error:.2e}, the largest element is {size:.2e}")

    # Computation

    def twins(self, turn: int) -> Iterator[Tensor]:
        """The unsharded model's loss of each rank's batch; only this rank's counts as a call of its own."""
        for rank in range(self.case.world_size):
            self.plain.train(rank == dist.get_rank())
            yield self.plain(*self.batch(rank, turn)).square().mean()
        self.plain.train()

    def backward(self, turn: int, share: float, chosen: Chosen | None = None) -> None:
        """Losses of one batch of each rank, and their gradients; of the chosen parameters only, if there are any."""
        inputs, flags = self.batch(dist.get_rank(), turn)
        loss = self.sharded(inputs, flags).square().mean()
        if self.is_trained:
            (loss * share).backward(inputs=None if chosen is None else chosen.sharded)
        for rank, twin in enumerate(self.twins(turn)):
            if self.is_trained:
                (twin * share / self.case.world_size).backward(inputs=None if chosen is None else chosen.plain)
            if rank == dist.get_rank():
                self.same("loss", loss.detach(), twin.detach())

    def complete_gradients(self) -> None:
        """Zeros in the twin for gradients that the sharded model has, because others in a flat parameter have one."""
        fill_missing(self.sharded, self.plain)
        for param in self.plain.parameters() if self.fills_unused else ():
            if param.requires_grad and param.grad is None:
                param.grad = torch.zeros_like(param)

    def end_step(self, clip: float | None = None) -> None:
        self.complete_gradients()
        if clip is not None:
            norm = nn.utils.clip_grad_norm_(self.plain.parameters(), clip)
            self.same("gradient norm", self.clip(clip).detach(), norm)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1


@dataclass
class Chosen:
    """Parameters as the sharded model lists them, and the same ones of its twin."""

    sharded: list[nn.Parameter] = field(default_factory=list)
    plain: list[nn.Parameter] = field(default_factory=list)


@contextmanager
def _without_sync(model: Any) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def fill_missing(sharded: Any, plain: nn.Module) -> None:
    """Zeros in the twin for parameters without a gradient that lie in a flat parameter with others that have one."""
    for _, together in pairs_of(sharded, plain):
        if any(param.grad is not None for param in together):
            for param in together:
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad


def pairs_of(sharded: Any, plain: nn.Module) -> Iterator[tuple[nn.Parameter, list[nn.Parameter]]]:
    """What the sharded model lists, with the parameters of the twin that are in it."""
    params = dict(plain.named_parameters(remove_duplicate=False))
    for raw, listed in sharded.named_parameters():
        *path, name = (part for part in raw.split(".") if part not in WRAPPERS)
        names = listed.metadata()[0] if isinstance(listed, FlatParameter) and name.startswith("flat_param") else [name]
        yield listed, [params[".".join([*path, each])] for each in names]


WRAPPERS = {"_fsdp_wrapped_module", "_fpw_module"}
