"""Draws the pictures of docs/concepts.md from a training on four ranks.

PYTHONPATH=. torchrun --nproc-per-node 4 docs/pictures/concepts.py
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from _svg import GRADIENT, PEER, SHARD, STEP, UNSHARDED, WAIT, Drawing
from torch import Tensor, nn

import fsdp
from benchmarks._measure import bytes_sent
from fsdp import FullyShardedDataParallel, ShardingStrategy
from fsdp.engine.unit import unit_of_wrapper

HERE = Path(__file__).parent
WIDTH, LAYERS = 512, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.seen = lambda when: None

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.relu(self.up(self.norm(inputs)))
        self.seen("forward")
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: self.seen("backward"))
        return inputs + self.down(hidden)


def build(**options: object) -> FullyShardedDataParallel:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, WIDTH), *(Block() for _ in range(LAYERS)), nn.Linear(WIDTH, 64))
    return fsdp.shard(model, units={Block}, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(256, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def divided(path: Path) -> None:
    """Draw a unit whose weights have their own indices as values, and each rank's shard of it."""
    layer = nn.Linear(4, 3)
    for parameter, first in ((layer.weight, 0), (layer.bias, 12)):
        parameter.data = torch.arange(first, first + parameter.numel(), dtype=torch.float32).view_as(parameter)
    shards: list[list[float]] = [[]] * dist.get_world_size()
    model = FullyShardedDataParallel(layer)
    dist.all_gather_object(shards, model.params[0].tolist())
    drawing = Drawing(800, 60 + 50 * (1 + len(shards)))
    drawing.legend(90, 12, (UNSHARDED, "weight, 3 x 4"), (GRADIENT, "bias, 3"), (PEER, "padding"), step=160)
    whole = [number for shard in shards for number in shard]
    for row, (name, first, numbers) in enumerate(
        [("unit", 0, whole)] + [(f"rank {rank}", rank * len(one), one) for rank, one in enumerate(shards)]
    ):
        y = 45 + 50 * row
        drawing.text(10, y + 24, name)
        for place, number in enumerate(numbers, first):
            color = PEER if place >= 15 else UNSHARDED if place < 12 else GRADIENT
            drawing.box(90 + 42 * place, y, 42, 38, color)
            words = "-" if place >= 15 else f"{number:.0f}"
            drawing.text(111 + 42 * place, y + 24, words, anchor="middle", color="white")
    drawing.save(path)


def phases(path: Path) -> None:
    """Draw the tensors of each unit in memory on this rank, in the middle of each layer's computation."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)  # in which the order of units is learned
    wrappers = list(fsdp.get_fsdp_instances(model))
    names = ["the rest", *(f"layer {number}" for number in range(LAYERS))]
    moments: list[tuple[str, list[str]]] = []

    def look(moment: str) -> None:
        held = []
        for wrapper in wrappers:
            (handle,) = unit_of_wrapper(wrapper).handles
            parts = SHARD
            if handle.unsharded.full.untyped_storage().nbytes():
                parts = UNSHARDED
            if not handle.gradients.is_empty:
                parts = GRADIENT
            held.append(parts)
        moments.append((moment, held))

    for number, wrapper in enumerate(wrappers[1:]):
        wrapper.module.module.seen = lambda when, number=number: look(f"{when}, layer {number}")
    look("between steps")
    train(model, optimizer)
    look("between steps")
    drawing = Drawing(900, 70 + 44 * len(moments))
    entries = (SHARD, "shard"), (UNSHARDED, "and unsharded parameters"), (GRADIENT, "and unsharded gradients")
    drawing.legend(150, 10, *entries, step=230)
    for column, name in enumerate(names):
        drawing.text(220 + 140 * column, 50, name, anchor="middle")
    for row, (moment, held) in enumerate(moments):
        drawing.text(10, 84 + 44 * row, moment)
        for column, color in enumerate(held):
            drawing.box(152 + 140 * column, 60 + 44 * row, 136, 38, color)
    if dist.get_rank() == 0:
        drawing.save(path)


def step_in_time(path: Path) -> None:
    """Draw a step of rank 0 from a trace: its computations, its waits, and the bytes that it holds."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        train(model, optimizer)
    with fsdp.trace(model) as trace:
        train(model, optimizer)
    record = trace.records[0]
    start = min(span.begin for span in record.spans)
    scale = 1000 / (max(span.end for span in record.spans) - start)
    drawing = Drawing(1120, 290)
    drawing.legend(100, 10, (UNSHARDED, "forward"), (GRADIENT, "backward"), (STEP, "AdamW"), (WAIT, "wait"), step=130)
    colors = {"forward": UNSHARDED, "backward": GRADIENT, "optimizer step": STEP, "wait": WAIT}
    drawing.text(5, 65, "computes")
    drawing.text(5, 115, "waits")
    for kind, name, begin, end in sorted(record.spans, key=lambda span: span.begin):
        if name.startswith("root"):
            continue  # which lasts as long as all
        y, color = 90 if kind == "wait" else 40, colors[kind]
        x, width = 100 + (begin - start) * scale, (end - begin) * scale
        drawing.box(x, y, width, 40, color, f"{kind}: {name}, {(end - begin) / 1e6:.1f} ms")
        if name.isdigit():
            layer = f"layer {int(name) - 1}" if width > 60 else f"{int(name) - 1}"
            drawing.text(x + width / 2, y + 25, layer, anchor="middle", color="white")
    most = max(nbytes for _, nbytes in record.memory)
    points = [(100 + (when - start) * scale, 250 - 100 * nbytes / most) for when, nbytes in record.memory]
    steps = [points[0]]
    for x, y in points[1:]:
        steps += [(x, steps[-1][1]), (x, y)]
    drawing.line(steps, "currentColor")
    drawing.text(5, 155, f"{most / 2**20:.0f} MiB")
    drawing.text(5, 250, "0")
    drawing.text(5, 205, "bytes held")
    drawing.text(100, 280, "0 ms")
    drawing.text(1100, 280, f"{1000 / scale / 1e6:.0f} ms", anchor="end")
    if dist.get_rank() == 0:
        drawing.save(path)


def strategies(path: Path) -> None:
    """Draw the bytes that each strategy holds between steps and at most, and the bytes that a rank sends in a step."""
    rows = []
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD"):
        options: dict[str, object] = {"sharding_strategy": ShardingStrategy[strategy]}
        if strategy == "HYBRID_SHARD":  # two machines of two ranks
            options["process_group"] = torch.distributed.device_mesh.init_device_mesh(
                "cpu", (2, 2), mesh_dim_names=("replicate", "shard")
            )
        model = build(**options)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            train(model, optimizer)
        dist.barrier()
        before = bytes_sent() or 0
        train(model, optimizer)
        sent = (bytes_sent() or 0) - before
        with fsdp.trace(model) as trace:
            train(model, optimizer)
        memory = [nbytes for _, nbytes in trace.records[0].memory]
        rows.append((strategy, memory[0], max(memory), sent))
    whole = rows[-1][1]  # bytes of all parameters
    drawing = Drawing(900, 70 + 100 * len(rows))
    drawing.legend(160, 10, (SHARD, "held between steps"), (UNSHARDED, "held at most"), (GRADIENT, "sent in a step"))
    for row, (strategy, between, most, sent) in enumerate(rows):
        y = 45 + 100 * row
        drawing.text(10, y + 45, strategy)
        for bar, (nbytes, color) in enumerate([(between, SHARD), (most, UNSHARDED), (sent, GRADIENT)]):
            drawing.box(160, y + 27 * bar, 230 * nbytes / whole, 24, color)
            drawing.text(166 + 230 * nbytes / whole, y + 27 * bar + 17, f"{nbytes / whole:.2f} P")
    drawing.text(160, 62 + 100 * len(rows), "P: the bytes of all parameters")
    if dist.get_rank() == 0:
        drawing.save(path)
        print(*rows, sep="\n")


def main() -> None:
    torch.set_num_threads(1)
    os.environ["FSDP_SHARED_MEMORY"] = "0"  # bytes are counted in sockets
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        print("drawing")
    phases(HERE / "phases.svg")
    step_in_time(HERE / "step.svg")
    strategies(HERE / "strategies.svg")
    divided(HERE / "divided.svg")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
