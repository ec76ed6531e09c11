"""Draw docs/pictures/slow_rank.svg: three ranks, where a single rank computes each layer 20 ms longer.

torchrun --nproc-per-node 3 docs/pictures/slow_rank.py
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from _svg import GRADIENT, STEP, UNSHARDED, WAIT, Drawing
from torch import nn

import fsdp
from fsdp import fully_shard
from fsdp.layers.report import Record


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
        draw(trace.records, Path(__file__).with_suffix(".svg"))
    dist.destroy_process_group()


def draw(records: Sequence[Record], path: Path) -> None:
    """Draw a line for each rank; what lies within other work is drawn over it."""
    spans = [span for record in records for span in record.spans]
    start = min(span.begin for span in spans)
    scale = 1120 / (max(span.end for span in spans) - start)
    drawing = Drawing(1200, 80 + 44 * len(records))
    drawing.legend(
        70, 12, (UNSHARDED, "forward"), (GRADIENT, "backward"), (WAIT, "wait"), (STEP, "optimizer step"), step=150
    )
    colors = {"forward": UNSHARDED, "backward": GRADIENT, "wait": WAIT, "optimizer step": STEP}
    for row, record in enumerate(records):
        drawing.text(4, 72 + 44 * row, f"rank {record.rank}")
        for kind, name, begin, end in sorted(record.spans, key=lambda span: (span.begin, -span.end)):
            title = f"{kind}: {name}, {(end - begin) / 1e6:.1f} ms"
            drawing.box(70 + (begin - start) * scale, 50 + 44 * row, (end - begin) * scale, 36, colors[kind], title)
    drawing.save(path)


if __name__ == "__main__":
    main()
