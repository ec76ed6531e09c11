"""A sharded image classifier: batch norms, an average of the weights, accumulation, a
cosine schedule, evaluation.

    torchrun --nproc-per-node 2 examples/image/train.py

The images are generated: noise with a brighter square in one of four corners, which is
the class.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import fsdp
from fsdp import EMA

CLASSES, SIZE, WIDTH = 4, 16, 32
BATCH, ACCUMULATE = 16, 2  # of each rank; batches for each step


class Block(nn.Module):
    """Two convolutions with batch norms, and a way around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, images: Tensor) -> Tensor:
        return F.relu(images + self.layers(images))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(Block(WIDTH), nn.MaxPool2d(2), Block(WIDTH))
        self.head = nn.Linear(WIDTH * (SIZE // 4) ** 2, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(images)).flatten(1))


def images(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(count, 3, SIZE, SIZE, generator=generator)
    classes = torch.randint(CLASSES, (count,), generator=generator)
    for image, corner in zip(noise, classes.tolist(), strict=True):
        row, column = 8 * (corner // 2), 8 * (corner % 2)
        image[:, row : row + 6, column : column + 6] += 0.5
    return TensorDataset(noise, classes)


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset, device: torch.device) -> float:
    """Collective. The part of the images of all ranks that is classified right."""
    model.eval()
    right = torch.zeros(2, device=device)
    for batch, classes in DataLoader(
        data, BATCH, sampler=DistributedSampler(data, shuffle=False)
    ):
        found = model(batch.to(device)).argmax(1).cpu()
        right += torch.tensor([(found == classes).sum(), len(classes)], device=device)
    dist.all_reduce(right)
    return (right[0] / right[1]).item()


def train(
    device: torch.device, folder: Path, epochs: int = 4, count: int = 512
) -> float:
    """Collective. Train, save the averaged weights, and return their accuracy on other
    images.
    """
    torch.manual_seed(0)  # the same weights on every rank
    model = fsdp.shard(Classifier().to(device), units={Block})
    ema = EMA(model, decay=0.9)

    data, held_out = images(count, seed=1), images(256, seed=2)
    # As many batches for each rank, since they run the model together.
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(
        data, drop_last=True
    )
    batches = DataLoader(data, BATCH, sampler=sampler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    steps = epochs * len(batches) // ACCUMULATE
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    for epoch in range(epochs):
        model.train()
        sampler.set_epoch(epoch)
        for number, (batch, classes) in enumerate(batches, start=1):
            is_last = number % ACCUMULATE == 0
            with (
                nullcontext() if is_last else model.no_sync()
            ):  # gradients travel with the last batch only
                loss = F.cross_entropy(model(batch.to(device)), classes.to(device))
                (loss / ACCUMULATE).backward()
            if is_last:
                model.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                ema.update_parameters(model)
        found = accuracy(ema, held_out, device)
        if dist.get_rank() == 0:
            print(
                f"epoch {epoch}: loss {loss.item():.3f}, accuracy of the average "
                f"{found:.3f}",
                flush=True,
            )
    fsdp.save(folder, ema.module)  # for anybody: folder/model.safetensors
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4, help="[%(default)s]")
    epochs = parser.parse_args().epochs
    train(fsdp.init_distributed(), Path("runs/image"), epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
