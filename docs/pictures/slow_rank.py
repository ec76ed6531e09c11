"""Draw docs/pictures/slow_rank.svg: three ranks, where a single rank computes each layer 20 ms longer.

torchrun --nproc-per-node 3 docs/pictures/slow_rank.py
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import fsdp
from fsdp import fully_shard


class Layer(nn.TransformerEncoderLayer):
    def forward(self, *args, **kwargs):
        if dist.get_rank() == 1:
            time.sleep(0.02)
        return super().forward(*args, **kwargs)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*[Layer(128, 4, 512, batch_first=True) for _ in range(4)], nn.Linear(128, 64))
    for layer in model[:4]:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())

    def train() -> None:
        model(torch.randn(4, 64, 128)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):  # the first ones take longer
        train()
    with fsdp.trace(model) as trace:
        for _ in range(2):
            train()
    if dist.get_rank() == 0:
        print(trace)
        trace.save_picture(Path(__file__).with_suffix(".svg"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
