"""LightningModules and Trainers for the ranks. Import it there only: Lightning takes seconds.

The data are those of `global_batch`: each rank sees its rows of it, so that all world sizes train on the same batches.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.plugins.environments import ClusterEnvironment
from torch import Tensor, nn
from torch.utils.data import DataLoader

import fsdp.lightning
from fsdp import auto_wrap, get_fsdp_instances, wrap

STEPS, ROWS = 4, 12  # rows of a global batch, for 1 to 4 ranks
EPS = 1e-3  # of Adam, for 16 bits as well


class Here(ClusterEnvironment):
    """The ranks of the test: their group is there already."""

    creates_processes_externally = True
    main_address, main_port = "localhost", 0

    @staticmethod
    def detect() -> bool:
        return True

    def world_size(self) -> int:
        return dist.get_world_size()

    def set_world_size(self, size: int) -> None:
        pass

    def global_rank(self) -> int:
        return dist.get_rank()

    def set_global_rank(self, rank: int) -> None:
        pass

    def local_rank(self) -> int:
        return dist.get_rank()

    def node_rank(self) -> int:
        return 0


class Net(nn.Module):
    """Two layers in a container, and a parameter beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 7), nn.Linear(7, 5)])
        self.scale = nn.Parameter(torch.ones(5))
        self.register_buffer("shift", torch.full((5,), 0.1))

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = torch.tanh(layer(inputs))
        return inputs * self.scale + self.shift


class Regression(pl.LightningModule):
    """A task with all four steps."""

    def __init__(self, lr: float = 0.1, seed: int = 0, note: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(seed)
        self.net = Net()
        self.head = nn.Linear(5, 1)
        self.losses: list[float] = []

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.net(inputs))
        return outputs

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (self(batch[0]) - batch[1]).square().mean()

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.log("train", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def test_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.log("test", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: tuple[Tensor, Tensor], index: int) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return self.stepping(self.parameters())

    def stepping(self, params: Iterator[nn.Parameter]) -> Any:
        """An optimizer, and a scheduler that halves its learning rate after each epoch."""
        optimizer = torch.optim.AdamW(params, lr=self.hparams["lr"], eps=EPS)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class OfTheTrainersModel(Regression):
    """Whose optimizer gets the wrapper's parameters, flat ones as well."""

    def configure_optimizers(self) -> Any:
        return self.stepping(self.trainer.model.parameters())


class WithLayers(Regression):
    """Which wraps layers itself."""

    def configure_model(self) -> None:
        layers: Any = self.net.layers
        if type(layers[0]) is nn.Linear:
            layers[0], self.head = wrap(layers[0]), wrap(self.head)


class WithAutoWrap(Regression):
    """Which asks for units by the strategy's policy."""

    def configure_model(self) -> None:
        if not get_fsdp_instances(self):
            self.net = auto_wrap(self.net)


class FineTuned(Regression):
    """Whose optimizer has what is not frozen."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD((param for param in self.parameters() if param.requires_grad), lr=0.1, momentum=0.9)


class Thaw(BaseFinetuning):
    """Freezes the network, and trains it from the second epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net, optimizer, lr=0.05)


def global_batch(step: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Of a step: `ROWS` rows of inputs and targets."""
    inputs = torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(step))
    return inputs.to(dtype), inputs.sum(1, keepdim=True).sin().to(dtype)


def batches(steps: range = range(STEPS), dtype: torch.dtype = torch.float32) -> DataLoader[Any]:
    """This rank's rows of each step's batch."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    own = [[part.chunk(world_size)[rank] for part in global_batch(step, dtype)] for step in steps]
    return DataLoader(own, batch_size=None)  # type: ignore[arg-type]


def trainer(folder: Path | None = None, strategy: Any = None, **options: Any) -> pl.Trainer:
    """On the ranks of the test, with as little as can be besides the strategy."""
    strategy = fsdp.lightning.FullyShardedStrategy() if strategy is None else strategy
    options = {"accelerator": "cpu", "enable_checkpointing": False, "logger": False, "max_epochs": 1} | options
    with quiet():
        return pl.Trainer(
            devices=dist.get_world_size(),
            strategy=strategy,
            plugins=[Here(), *options.pop("plugins", [])],
            default_root_dir=folder,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            num_sanity_val_steps=0,
            **options,
        )


class quiet(warnings.catch_warnings):  # noqa: N801, it is used as its base is
    """Lightning's advice about workers and logging steps is not of interest; ours is."""

    def __enter__(self) -> None:  # type: ignore[override]
        super().__enter__()
        warnings.filterwarnings("ignore", module="lightning")
        warnings.filterwarnings("ignore", category=FutureWarning)


def fitted(module: pl.LightningModule, trainer: pl.Trainer, steps: range = range(STEPS), **options: Any) -> pl.Trainer:
    """A Trainer that has fitted a module."""
    with quiet():
        trainer.fit(module, batches(steps), batches(range(90, 92)), **options)
    return trainer


def state_of(trainer: pl.Trainer) -> dict[str, Tensor]:
    """The whole state, on every rank."""
    model: Any = trainer.strategy.model
    return {name: value.clone() for name, value in model.state_dict(rank0_only=False).items()}


def trained_alone(
    module: Any,
    steps: range = range(STEPS),
    *,
    epochs: int = 1,
    accumulate: int = 1,
    clip: Callable[[Iterator[nn.Parameter]], Any] | None = None,
    autocast: torch.dtype | None = None,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """The state after the same steps in one process, without any Trainer."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=module.hparams["lr"], eps=EPS)
    for epoch in range(epochs):
        for index, step in enumerate(steps):
            with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
                loss = module.loss(global_batch(step, dtype)) / accumulate
            loss.backward()
            if (index + 1) % accumulate == 0:
                if clip is not None:
                    clip(module.parameters())
                optimizer.step()
                optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = module.hparams["lr"] * 0.5 ** (epoch + 1)
    return dict(module.state_dict())
