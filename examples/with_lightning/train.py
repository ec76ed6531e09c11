"""Lightning's Trainer on a sharded model, resumed by any number of ranks.

    python examples/with_lightning/train.py

Lightning starts the ranks. The model learns the sine of a sum.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fsdp.lightning import FullyShardedStrategy

WIDTH = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.layers(inputs)


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 1))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = nn.functional.mse_loss(self.blocks(batch[0]).squeeze(-1), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        loss = nn.functional.mse_loss(self.blocks(batch[0]).squeeze(-1), batch[1])
        self.log("val_loss", loss, sync_dist=True)

    # When the model is sharded.
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def data(count: int, seed: int) -> DataLoader[tuple[Tensor, ...]]:
    inputs = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(inputs, (inputs.sum(1) / 4).sin()), batch_size=16)


def train(
    folder: Path, epochs: int = 4, resume: str | None = None, **options: object
) -> float:
    """Train up to this epoch, from `resume` if given; return the loss on other data."""
    pl.seed_everything(0, verbose=False)
    settings: dict[str, Any] = {
        "strategy": FullyShardedStrategy(
            auto_wrap_policy={Block}, state_dict_type="sharded"
        ),
        "accelerator": "auto",
        "devices": 2,
        "gradient_clip_val": 1.0,
        "accumulate_grad_batches": 2,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": False,
        **options,
    }
    trainer = pl.Trainer(max_epochs=epochs, default_root_dir=folder, **settings)
    trainer.fit(Model(), data(512, seed=1), data(128, seed=2), ckpt_path=resume)
    if "val_loss" not in trainer.callback_metrics:
        trainer.print(
            f"{resume} has all of {trainer.current_epoch} epochs; "
            f"to go on: --epochs {epochs + 4} --resume"
        )
        return math.nan
    loss = trainer.callback_metrics["val_loss"].item()
    trainer.print(
        f"loss on other data after {trainer.current_epoch} epochs: {loss:.4f}"
    )
    return loss


def newest(folder: Path) -> str | None:
    """The checkpoint that was written last, None without any."""
    found = max(folder.rglob("*.ckpt"), key=os.path.getmtime, default=None)
    return None if found is None else str(found)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--epochs", type=int, default=4, help="earlier runs included [%(default)s]"
    )
    parser.add_argument("--ranks", type=int, default=2, help="[%(default)s]")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from the newest checkpoint, if there is one",
    )
    arguments = parser.parse_args()
    folder = Path("runs/lightning")
    train(
        folder,
        arguments.epochs,
        newest(folder) if arguments.resume else None,
        devices=arguments.ranks,
    )


if __name__ == "__main__":
    main()
