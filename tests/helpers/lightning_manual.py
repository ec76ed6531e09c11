"""A LightningModule with manual optimization: two networks that take turns. Import it on the ranks only."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from tests.helpers import lightning as lit

NORM = 0.01


class Adversaries(pl.LightningModule):
    """A generator and a critic.

    Args:
        clips: "norm" clips each one's gradients by themselves.
        accumulate: of how many batches the generator's gradients are accumulated.
    """

    def __init__(self, clips: str | None, accumulate: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))
        self.critics = nn.ModuleList([nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))])
        self.clips, self.accumulate = clips, accumulate

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        first, second = self.optimizers()  # type: ignore[misc]
        is_last = (index + 1) % self.accumulate == 0
        with first.toggle_model(sync_grad=is_last):
            self.manual_backward(self.generator_loss(batch[0]) / self.accumulate)
        if is_last:
            self._step(first)
        self.toggle_optimizer(second)
        self.manual_backward(self.critic_loss(batch[0]))
        self._step(second)
        self.untoggle_optimizer(second)

    def _step(self, optimizer: Any) -> None:
        if self.clips:
            self.clip_gradients(optimizer, gradient_clip_val=NORM, gradient_clip_algorithm=self.clips)
        optimizer.step()
        optimizer.zero_grad()

    def generator_loss(self, noise: Tensor) -> Tensor:
        return -self.critics[0](self.generator(noise)).mean()

    def critic_loss(self, inputs: Tensor) -> Tensor:
        fake = self.generator(inputs.flip(1)).detach()
        return (self.critics[0](fake) - self.critics[0](inputs)).sin().square().mean()

    def configure_optimizers(self) -> Any:
        return optimizers_of(self)


def optimizers_of(module: Any) -> list[torch.optim.Optimizer]:
    """Of which each is of one network."""
    sgd = torch.optim.SGD(module.generator.parameters(), lr=0.5, momentum=0.9)
    return [sgd, torch.optim.Adam(module.critics.parameters(), lr=0.05)]


def turns_alone(module: Any, epochs: int = 1) -> dict[str, Tensor]:
    """The state after the same steps in one process, without a Trainer."""
    first, second = optimizers_of(module)
    for index in range(lit.STEPS * epochs):
        inputs = lit.global_batch(index % lit.STEPS)[0]
        grads = torch.autograd.grad(
            module.generator_loss(inputs) / module.accumulate, list(module.generator.parameters())
        )
        for param, grad in zip(module.generator.parameters(), grads, strict=True):
            param.grad = grad if param.grad is None else param.grad + grad
        if (index + 1) % module.accumulate == 0:
            _step(module, first, module.generator)
        module.critic_loss(inputs).backward()
        _step(module, second, module.critics)
    return dict(module.state_dict())


def _step(module: Any, optimizer: torch.optim.Optimizer, network: nn.Module) -> None:
    if module.clips:
        nn.utils.clip_grad_norm_(network.parameters(), NORM)
    optimizer.step()
    optimizer.zero_grad()
