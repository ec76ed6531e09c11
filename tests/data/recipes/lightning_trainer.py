import argparse

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fsdp.lightning import FullyShardedStrategy


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.layers = nn.LayerNorm(width), nn.Sequential(nn.Linear(width, 4 * width), nn.GELU())
        self.out = nn.Linear(4 * width, width)

    def forward(self, inputs):
        return inputs + self.out(self.layers(self.norm(inputs)))


class Model(pl.LightningModule):
    def __init__(self, width=32, depth=3, lr=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)), nn.Linear(width, 1))

    def forward(self, inputs):
        return self.blocks(inputs).squeeze(-1)

    def training_step(self, batch, index):
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", nn.functional.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):  # called when the model is sharded
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


def main(devices, epochs, folder, resume):
    torch.manual_seed(0)
    inputs = torch.randn(256, 32)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1).sin()), batch_size=16)
    saving = ModelCheckpoint(folder, monitor="val_loss", save_last=True)
    trainer = pl.Trainer(
        accelerator="auto",
        devices=devices,
        strategy=FullyShardedStrategy(auto_wrap_policy={Block}, state_dict_type="sharded"),
        precision="bf16-mixed",
        gradient_clip_val=1.0,
        accumulate_grad_batches=2,
        max_epochs=epochs,
        callbacks=[saving],
        default_root_dir=folder,
    )
    trainer.fit(Model(), loader, loader, ckpt_path=resume)
    trainer.print(f"val_loss {trainer.callback_metrics['val_loss']:.4f} after epoch {trainer.current_epoch}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--folder", default="runs/lightning")
    parser.add_argument("--resume")
    arguments = parser.parse_args()
    main(arguments.devices, arguments.epochs, arguments.folder, arguments.resume)
